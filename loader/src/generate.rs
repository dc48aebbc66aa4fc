//! The generation loop.

use crate::error::Result;
use crate::sampler::Sampler;
use crate::session::Session;
use crate::tokenizer::{Tokenizer, Utf8Stream};
use std::time::{Duration, Instant};

/// Why generation ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stop {
    /// A stop id of the checkpoint.
    StopId,
    /// The requested number of tokens.
    Length,
    /// The context is full.
    Context,
    /// The receiver of the text declined more.
    Receiver,
}

/// What a generation produced.
#[derive(Clone, Debug)]
pub struct Outcome {
    /// Generated ids, a stop id not included.
    pub ids: Vec<u32>,
    /// Why it ended.
    pub stop: Stop,
    /// Time of the prompt.
    pub prefill: Duration,
    /// Time of the generated tokens.
    pub decode: Duration,
}

/// Prefills `prompt`, then samples up to `n` ids, passing text to `piece` as it becomes complete; `piece`
/// returns false to stop.
///
/// # Errors
/// As [`Session::prefill`], and what `piece` returns.
pub fn generate(
    session: &mut Session,
    tokenizer: &Tokenizer,
    prompt: &[u32],
    n: usize,
    sampler: &mut Sampler,
    mut piece: impl FnMut(&str) -> Result<bool>,
) -> Result<Outcome> {
    let start = Instant::now();
    let mut logits = session.prefill(prompt)?;
    let prefill = start.elapsed();
    let stops = session.manifest().text.stop.clone();
    let mut stream = Utf8Stream::default();
    let mut ids = Vec::new();
    let start = Instant::now();
    let stop = loop {
        if ids.len() == n {
            break Stop::Length;
        }
        let id = sampler.sample(&logits);
        if stops.contains(&id) {
            break Stop::StopId;
        }
        ids.push(id);
        let text = stream.push(&tokenizer.id_bytes(id));
        if !text.is_empty() && !piece(&text)? {
            break Stop::Receiver;
        }
        // Asked for and delivered is the end by length, even where the context ends too.
        if ids.len() < n {
            if session.position() == session.context() {
                break Stop::Context;
            }
            logits = session.decode(id)?;
        }
    };
    let rest = stream.finish();
    if stop != Stop::Receiver && !rest.is_empty() {
        piece(&rest)?;
    }
    Ok(Outcome {
        ids,
        stop,
        prefill,
        decode: start.elapsed(),
    })
}
