//! Sampling options: what is given, else what the checkpoint says, else the usual.

use clap::{Args, ValueEnum};
use ork_formats::model::Generation;
use ork_loader::error::{Error, Result};
use ork_loader::sampler::{Sampler, Settings};

#[derive(Args)]
pub(crate) struct Sampling {
    /// Temperature, 0 is greedy [default: the checkpoint's, else 0.8]
    #[arg(long)]
    temp: Option<f32>,
    /// Sample among the k likeliest, 0 is all [default: the checkpoint's, else 40]
    #[arg(long)]
    top_k: Option<usize>,
    /// Sample among the likeliest that sum to p [default: the checkpoint's, else 0.95]
    #[arg(long)]
    top_p: Option<f32>,
    /// Sample among those at least this share of the likeliest [default: the checkpoint's, else 0]
    #[arg(long)]
    min_p: Option<f32>,
    /// Divide the logits of ids seen lately, 1 is off [default: the checkpoint's, else 1]
    #[arg(long)]
    repeat_penalty: Option<f32>,
    /// Subtract from the logits of ids seen lately
    #[arg(long, default_value_t = 0.0, allow_negative_numbers = true)]
    presence_penalty: f32,
    /// How many ids back the penalties reach
    #[arg(long, default_value_t = 64)]
    repeat_last_n: usize,
    /// Add to the logit of one id: ID=BIAS, repeatable
    #[arg(long, value_name = "ID=BIAS", value_parser = bias, allow_hyphen_values = true)]
    logit_bias: Vec<(u32, f32)>,
    /// Random seed
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// Text that ends the answer, repeatable
    #[arg(long, value_name = "TEXT")]
    pub(crate) stop: Vec<String>,
    /// What to do with a prompt longer than the context
    #[arg(long, value_enum, default_value = "error")]
    pub(crate) on_overflow: OnOverflow,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum OnOverflow {
    /// Refuse it, with both counts
    Error,
    /// Drop the oldest tokens
    TruncateLeft,
    /// Drop the oldest turns, keep the system message
    KeepSystem,
}

fn bias(text: &str) -> std::result::Result<(u32, f32), String> {
    let (id, bias) = text.split_once('=').ok_or("expected ID=BIAS")?;
    let id = id.parse().map_err(|e| format!("{id}: {e}"))?;
    let value: f32 = bias.parse().map_err(|e| format!("{bias}: {e}"))?;
    match value.is_finite() {
        true => Ok((id, value)),
        false => Err(format!("{bias} is not finite")),
    }
}

impl Sampling {
    /// The sampler, with the checkpoint's defaults where nothing is given.
    pub(crate) fn sampler(&self, defaults: &Generation) -> Result<Sampler> {
        let greedy = defaults.sample == Some(false);
        let temperature = self.temp.unwrap_or(if greedy {
            0.0
        } else {
            defaults.temperature.unwrap_or(0.8)
        });
        let settings = Settings {
            temperature,
            top_k: self
                .top_k
                .unwrap_or(defaults.top_k.map_or(40, |k| k as usize)),
            top_p: self.top_p.or(defaults.top_p).unwrap_or(0.95),
            min_p: self.min_p.or(defaults.min_p).unwrap_or(0.0),
            repeat_penalty: self
                .repeat_penalty
                .or(defaults.repetition_penalty)
                .unwrap_or(1.0),
            presence_penalty: self.presence_penalty,
            repeat_last_n: self.repeat_last_n,
            bias: self.logit_bias.clone(),
            seed: self.seed,
        };
        let share = 0.0..=1.0;
        for (name, value, holds, range) in [
            (
                "--temp",
                temperature,
                0.0 <= temperature && temperature.is_finite(),
                "0 or more",
            ),
            (
                "--top-p",
                settings.top_p,
                share.contains(&settings.top_p),
                "within 0..1",
            ),
            (
                "--min-p",
                settings.min_p,
                share.contains(&settings.min_p),
                "within 0..1",
            ),
            (
                "--repeat-penalty",
                settings.repeat_penalty,
                0.0 < settings.repeat_penalty && settings.repeat_penalty.is_finite(),
                "above 0",
            ),
            (
                "--presence-penalty",
                settings.presence_penalty,
                settings.presence_penalty.is_finite(),
                "finite",
            ),
        ] {
            if !holds {
                return Err(Error::Usage(format!("{name} {value}: must be {range}")));
            }
        }
        Ok(Sampler::new(settings))
    }
}
