//! The generation loop.

use crate::error::{Error, Result};
use crate::sampler::Sampler;
use crate::session::Session;
use crate::tokenizer::{Tokenizer, Utf8Stream};
use serde::Serialize;
use std::time::{Duration, Instant};

/// Why generation ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Stop {
    /// A stop id of the checkpoint.
    StopId,
    /// One of the request's stop strings.
    StopString,
    /// The requested number of tokens.
    Length,
    /// The context is full.
    Context,
    /// The receiver of the text declined more.
    Receiver,
}

/// What to generate.
#[derive(Clone, Copy, Debug)]
pub struct Request<'a> {
    /// The whole sequence so far; what the session holds of it already is not computed again.
    pub prompt: &'a [u32],
    /// Most ids to generate.
    pub n: usize,
    /// Texts that end the generation; they are not part of it.
    pub stops: &'a [String],
}

/// What a generation produced.
#[derive(Clone, Debug)]
pub struct Outcome {
    /// Generated ids, a stop id not included.
    pub ids: Vec<u32>,
    /// Generated text, a stop string not included.
    pub text: String,
    /// Why it ended.
    pub stop: Stop,
    /// Prompt ids that had to be computed.
    pub computed: usize,
    /// Time of the prompt.
    pub prefill: Duration,
    /// Decode steps; the first generated id comes from the prompt's logits.
    pub steps: usize,
    /// Time of those steps.
    pub decode: Duration,
}

/// Prefills the prompt, then samples, passing text to `piece` as it becomes complete; `piece` returns
/// false to stop.
///
/// # Errors
/// As [`Session::resume`], and what `piece` returns.
pub fn generate(
    session: &mut Session,
    tokenizer: &Tokenizer,
    request: Request<'_>,
    sampler: &mut Sampler,
    mut piece: impl FnMut(&str) -> Result<bool>,
) -> Result<Outcome> {
    let start = Instant::now();
    let (mut logits, computed) = session.resume(request.prompt)?;
    let prefill = start.elapsed();
    let stop_ids = session.manifest().text.stop.clone();
    let mut history = request.prompt.to_vec();
    let mut stream = Utf8Stream::default();
    let mut matcher = StopStrings::new(request.stops);
    let mut text = String::new();
    let mut emit = |part: &str| {
        text.push_str(part);
        match part.is_empty() {
            true => Ok(true),
            false => piece(part),
        }
    };
    let start = Instant::now();
    let mut steps = 0;
    let stop = loop {
        if history.len() - request.prompt.len() == request.n {
            break Stop::Length;
        }
        let id = sampler.sample(&logits, &history);
        if stop_ids.contains(&id) {
            break Stop::StopId;
        }
        history.push(id);
        let (part, hit) = matcher.push(&stream.push(&tokenizer.id_bytes(id)));
        if !emit(&part)? {
            break Stop::Receiver;
        }
        if hit {
            break Stop::StopString;
        }
        if history.len() - request.prompt.len() == request.n {
            break Stop::Length;
        }
        if session.position() == session.context() {
            break Stop::Context;
        }
        logits = session.decode(id)?;
        steps += 1;
    };
    if !matches!(stop, Stop::StopString | Stop::Receiver) {
        let (part, _) = matcher.push(&stream.finish());
        emit(&(part + &matcher.finish()))?;
    }
    Ok(Outcome {
        ids: history.split_off(request.prompt.len()),
        text,
        stop,
        computed,
        prefill,
        steps,
        decode: start.elapsed(),
    })
}

/// Finds stop strings in streamed text, holding back what may become one.
struct StopStrings<'a> {
    stops: &'a [String],
    held: String,
}

impl<'a> StopStrings<'a> {
    fn new(stops: &'a [String]) -> Self {
        Self {
            stops,
            held: String::new(),
        }
    }

    /// (text that is certain, whether a stop string ended it).
    fn push(&mut self, text: &str) -> (String, bool) {
        self.held.push_str(text);
        let stops = self.stops.iter().filter(|s| !s.is_empty());
        if let Some(at) = stops
            .clone()
            .filter_map(|s| self.held.find(s.as_str()))
            .min()
        {
            let certain = self.held[..at].to_string();
            self.held.clear();
            return (certain, true);
        }
        // The longest tail that begins a stop string.
        let keep = (0..=self.held.len())
            .filter(|at| self.held.is_char_boundary(*at))
            .find(|at| stops.clone().any(|s| s.starts_with(&self.held[*at..])))
            .unwrap_or(self.held.len());
        let tail = self.held.split_off(keep);
        (std::mem::replace(&mut self.held, tail), false)
    }

    /// What was held back for nothing.
    fn finish(&mut self) -> String {
        std::mem::take(&mut self.held)
    }
}

/// What to do with a prompt that is longer than the context.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Overflow {
    /// Refuse it with both counts.
    Error,
    /// Drop the oldest ids, the first `keep` excepted.
    TruncateLeft {
        /// Ids at the start that stay (BOS, system message).
        keep: usize,
    },
}

/// Makes `prompt` fit a context of `context` positions, leaving room for up to `n` (but no more than a
/// quarter of the context) generated ids when something has to go.
///
/// # Errors
/// [`Error::Fit`] with both counts where the policy says so, or what must stay does not fit.
pub fn fit(prompt: &[u32], context: usize, n: usize, overflow: Overflow) -> Result<Vec<u32>> {
    if prompt.len() <= context {
        return Ok(prompt.to_vec());
    }
    let room = context - n.min(context / 4);
    match overflow {
        Overflow::TruncateLeft { keep } if keep < room => {
            let tail = prompt.len() - (room - keep);
            Ok([&prompt[..keep], &prompt[tail..]].concat())
        }
        _ => Err(Error::Fit(format!(
            "the prompt has {} tokens, the context {context}; shorten it, or pass --on-overflow truncate-left",
            prompt.len()
        ))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stop_strings_are_found_over_pieces_and_held_back() {
        let stops = ["END".to_string(), "\n\n".to_string()];
        let mut m = StopStrings::new(&stops);
        assert_eq!(m.push("abcE"), ("abc".into(), false));
        assert_eq!(m.push("N"), (String::new(), false));
        assert_eq!(m.push("x\n"), ("ENx".into(), false));
        assert_eq!(m.finish(), "\n");
        let mut m = StopStrings::new(&stops);
        assert_eq!(m.push("oneENDtwo"), ("one".into(), true));
        let mut none = StopStrings::new(&[]);
        assert_eq!(none.push("é"), ("é".into(), false));
    }

    #[test]
    fn long_prompts_fit_or_are_refused_with_both_counts() {
        let prompt: Vec<u32> = (0..20).collect();
        assert_eq!(fit(&prompt, 20, 5, Overflow::Error).unwrap(), prompt);
        let error = fit(&prompt, 16, 5, Overflow::Error)
            .unwrap_err()
            .to_string();
        assert!(error.contains("20") && error.contains("16"), "{error}");
        let cut = fit(&prompt, 16, 5, Overflow::TruncateLeft { keep: 2 }).unwrap();
        assert_eq!(cut.len(), 12);
        assert_eq!((&cut[..2], cut[11]), (&[0, 1][..], 19));
        assert!(fit(&prompt, 16, 5, Overflow::TruncateLeft { keep: 12 }).is_err());
    }
}
