//! Rotary tables from a config: default, linear, llama3, yarn, dynamic, longrope, partial.
//!
//! Frequencies are computed in f64 through `libm`, so that every host computes the same bits.

use crate::checkpoint::config::Config;
use crate::error::{Error, Result};
use ork_formats::model::Rope;
use std::f64::consts::TAU;

/// The table of a whole head (or of its first lanes, where `partial_rotary_factor` says so).
pub(super) fn build(config: Config<'_>, head_dim: u32) -> Result<Rope> {
    partial(config, head_dim, 1.0)
}

/// As [`build`], with the `partial_rotary_factor` of configs that do not name one.
pub(super) fn partial(config: Config<'_>, head_dim: u32, factor: f64) -> Result<Rope> {
    // Newer configs move theta and the scaling into rope_parameters.
    let parameters = config.object("rope_parameters")?;
    let theta = theta(config, parameters)?;
    let scaling = config.object("rope_scaling")?.or(parameters);
    let mut table = plain(theta, lanes(config, parameters, head_dim, factor)?);
    if let Some(scaling) = scaling {
        scale(&mut table, theta, config, scaling)?;
    }
    table.finish(config.flag("rope_traditional", false)?)
}

/// As [`build`], for a family whose numbers stand in `rope_parameters` alone: (theta, factor) are those of
/// its class, whatever else the config holds.
pub(super) fn nested(config: Config<'_>, head_dim: u32, class: (f64, f64)) -> Result<Rope> {
    let parameters = config.object("rope_parameters")?;
    let or = |key, default| parameters.map_or(Ok(default), |p| p.positive_or(key, default));
    let theta = or("rope_theta", class.0)?;
    let factor = or("partial_rotary_factor", class.1)?;
    let mut table = plain(theta, part(head_dim, factor)?);
    if let Some(scaling) = parameters {
        scale(&mut table, theta, config, scaling)?;
    }
    table.finish(false)
}

/// The table of a whole head, whatever scaling the config names.
pub(super) fn without_scaling(config: Config<'_>, head_dim: u32) -> Result<Rope> {
    unscaled(theta(config, config.object("rope_parameters")?)?, head_dim)
}

fn theta(config: Config<'_>, parameters: Option<Config<'_>>) -> Result<f64> {
    match parameters {
        Some(nested) if !config.has("rope_theta") => nested.positive("rope_theta"),
        _ => config.positive("rope_theta"),
    }
}

/// The table of one base frequency without any scaling.
pub(super) fn unscaled(theta: f64, head_dim: u32) -> Result<Rope> {
    plain(theta, head_dim).finish(false)
}

/// Rotated lanes; `default` is the part of the head where no place names one.
fn lanes(
    config: Config<'_>,
    parameters: Option<Config<'_>>,
    head_dim: u32,
    default: f64,
) -> Result<u32> {
    for place in [Some(config), parameters].into_iter().flatten() {
        if place.has("partial_rotary_factor") {
            return part(head_dim, place.positive("partial_rotary_factor")?);
        }
    }
    part(head_dim, default)
}

/// An even part of the head.
fn part(head_dim: u32, factor: f64) -> Result<u32> {
    let dims = (f64::from(head_dim) * factor) as u32;
    if 1.0 < factor || dims < 2 || !dims.is_multiple_of(2) {
        return Err(Error::Input(format!(
            "config.json: partial_rotary_factor {factor} of head_dim {head_dim} rotates {dims} lanes; an even number up to {head_dim} is needed"
        )));
    }
    Ok(dims)
}

struct Table {
    /// Angle per position of each lane pair.
    frequencies: Vec<f64>,
    magnitude: f64,
}

fn plain(theta: f64, dims: u32) -> Table {
    Table {
        frequencies: (0..dims / 2)
            .map(|i| libm::pow(theta, -f64::from(2 * i) / f64::from(dims)))
            .collect(),
        magnitude: 1.0,
    }
}

impl Table {
    fn divide(&mut self, factor: f64) {
        self.frequencies.iter_mut().for_each(|f| *f /= factor);
    }

    fn finish(self, interleaved: bool) -> Result<Rope> {
        let finite = |v: &f64| v.is_finite() && 0.0 < *v;
        if !self.frequencies.iter().chain([&self.magnitude]).all(finite) {
            return Err(Error::Input(
                "config.json: the rope numbers give angles that are not finite; correct rope_theta and rope_scaling".into(),
            ));
        }
        Ok(Rope {
            inv_freq: self.frequencies.into_iter().map(|f| f as f32).collect(),
            magnitude: self.magnitude as f32,
            interleaved,
        })
    }
}

/// Applies the context extension that `scaling` names.
fn scale(table: &mut Table, theta: f64, config: Config<'_>, scaling: Config<'_>) -> Result<()> {
    let kind = match scaling.text("rope_type")? {
        Some(kind) => kind,
        None => scaling.text("type")?.unwrap_or("default"),
    };
    match kind {
        // mrope differs from default only for image positions.
        "default" | "mrope" => Ok(()),
        // The base grows only past max_position_embeddings, which is where a pack's context ends.
        "dynamic" => scaling.positive("factor").map(drop),
        "linear" => {
            table.divide(scaling.positive("factor")?);
            Ok(())
        }
        "llama3" => llama3(table, scaling),
        "yarn" => yarn(table, theta, config, scaling),
        "longrope" | "su" => longrope(table, config, scaling),
        other => Err(Error::Input(format!(
            "config.json: rope scaling \"{other}\" is not supported; supported are default, linear, llama3, yarn, dynamic, longrope"
        ))),
    }
}

fn llama3(table: &mut Table, scaling: Config<'_>) -> Result<()> {
    let factor = scaling.positive("factor")?;
    let low = scaling.positive("low_freq_factor")?;
    let high = scaling.positive("high_freq_factor")?;
    let old = scaling.positive("original_max_position_embeddings")?;
    if high <= low {
        return Err(Error::Input(format!(
            "config.json: high_freq_factor {high} must exceed low_freq_factor {low}; correct one"
        )));
    }
    for f in &mut table.frequencies {
        let wavelength = TAU / *f;
        if old / low < wavelength {
            *f /= factor;
        } else if old / high < wavelength {
            let m = (old / wavelength - low) / (high - low);
            *f = *f / factor * (1.0 - m) + *f * m;
        }
    }
    Ok(())
}

fn yarn(table: &mut Table, theta: f64, config: Config<'_>, scaling: Config<'_>) -> Result<()> {
    let factor = scaling.positive("factor")?;
    let or = |key: &str, default: f64| match scaling.has(key) {
        true => scaling.number(key),
        false => Ok(default),
    };
    let old = match scaling.has("original_max_position_embeddings") {
        true => scaling.positive("original_max_position_embeddings")?,
        false => config.positive("max_position_embeddings")? / factor,
    };
    let dims = 2.0 * table.frequencies.len() as f64;
    let turn = |r: f64| dims * libm::log(old / (r * TAU)) / (2.0 * libm::log(theta));
    let low = turn(or("beta_fast", 32.0)?).floor().max(0.0);
    let mut high = turn(or("beta_slow", 1.0)?).ceil().min(dims - 1.0);
    if high <= low {
        high = low + 0.001;
    }
    for (i, f) in table.frequencies.iter_mut().enumerate() {
        let kept = 1.0 - ((i as f64 - low) / (high - low)).clamp(0.0, 1.0);
        *f = kept * *f + (1.0 - kept) * *f / factor;
    }
    let magnitude = |mscale: f64| match factor <= 1.0 {
        true => 1.0,
        false => 0.1 * mscale * libm::log(factor) + 1.0,
    };
    table.magnitude = magnitude(or("mscale", 1.0)?) / magnitude(or("mscale_all_dim", 0.0)?);
    Ok(())
}

/// As mlx-lm: always the long factors (Hugging Face uses the short ones below the original length).
fn longrope(table: &mut Table, config: Config<'_>, scaling: Config<'_>) -> Result<()> {
    let factors = scaling.numbers("long_factor")?;
    if factors.len() != table.frequencies.len() {
        return Err(Error::Input(format!(
            "config.json: long_factor has {} entries, {} lane pairs are rotated; correct one",
            factors.len(),
            table.frequencies.len()
        )));
    }
    for (f, factor) in table.frequencies.iter_mut().zip(factors) {
        *f /= factor;
    }
    let most = config.positive("max_position_embeddings")?;
    let old = match config.has("original_max_position_embeddings") {
        true => config.positive("original_max_position_embeddings")?,
        false => scaling.positive("original_max_position_embeddings")?,
    };
    table.magnitude = match most <= old {
        true => 1.0,
        false => libm::sqrt(1.0 + libm::log(most / old) / libm::log(old)),
    };
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn table(config: serde_json::Value) -> Result<Rope> {
        build(Config::new(&config, "config.json"), 8)
    }

    #[test]
    fn partial_heads_rotate_an_even_part() {
        let rope = table(json!({"rope_theta": 1e4, "partial_rotary_factor": 0.5})).unwrap();
        assert_eq!(rope.inv_freq, [1.0, 0.01]);
        for factor in [0.4, 2.0, 0.1] {
            assert!(table(json!({"rope_theta": 1e4, "partial_rotary_factor": factor})).is_err());
        }
    }

    #[test]
    fn yarn_keeps_fast_lanes_and_stretches_slow_ones() {
        let rope = table(json!({
            "rope_theta": 1e4, "max_position_embeddings": 131_072,
            "rope_scaling": {"rope_type": "yarn", "factor": 4.0,
                "original_max_position_embeddings": 32_768}
        }))
        .unwrap();
        assert_eq!(rope.inv_freq[0], 1.0);
        assert!((rope.magnitude - (0.1 * 4f32.ln() + 1.0)).abs() < 1e-6);
        let last = 1e4f64.powf(-0.75);
        assert!(f64::from(rope.inv_freq[3]) <= last && last / 4.0 <= f64::from(rope.inv_freq[3]));
    }

    #[test]
    fn dynamic_is_default_inside_the_context() {
        let plain = table(json!({"rope_theta": 1e4})).unwrap();
        let dynamic =
            json!({"rope_theta": 1e4, "rope_scaling": {"type": "dynamic", "factor": 2.0}});
        assert_eq!(table(dynamic).unwrap(), plain);
    }
}
