//! Perplexity of a pack over a text, by prefill, by decode, and across the seam between them.

use crate::error::{Error, Result};
use crate::session::Session;

/// Which weights score the targets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// Every id goes through prefill.
    Prefill,
    /// Every id goes through decode (the first of a window through prefill).
    Decode,
    /// The first half of a window is prefilled, the rest decoded: what a user gets.
    Seam,
}

/// What to score.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Plan {
    /// Ids of a window; windows do not overlap, the tail is dropped.
    pub window: usize,
    /// First target of a window that counts: 1 is all, window / 2 + 1 is llama.cpp's half form.
    pub first: usize,
    /// Most windows.
    pub windows: usize,
    /// Which weights.
    pub mode: Mode,
}

/// The score.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Score {
    /// exp of the mean negative log likelihood.
    pub perplexity: f64,
    /// Targets scored.
    pub targets: usize,
    /// Windows scored.
    pub windows: usize,
}

/// Scores `ids`. `begin` replaces a window's first id where a model wants one (BOS).
///
/// # Errors
/// [`Error::Usage`] for a window that is empty or longer than the context, or a text shorter than one.
pub fn score(
    session: &mut Session,
    ids: &[u32],
    begin: Option<u32>,
    plan: Plan,
    mut progress: impl FnMut(Score),
) -> Result<Score> {
    if plan.window < 2 || (session.context() as usize) < plan.window {
        return Err(Error::Usage(format!(
            "window of {} tokens: must be 2 to {}",
            plan.window,
            session.context()
        )));
    }
    if ids.len() < plan.window {
        return Err(Error::Usage(format!(
            "the text has {} tokens, one window needs {}",
            ids.len(),
            plan.window
        )));
    }
    let vocab = session.manifest().model.vocab as usize;
    let (mut sum, mut targets, mut windows) = (0.0, 0, 0);
    let so_far = |sum: f64, targets: usize, windows: usize| Score {
        perplexity: (sum / targets.max(1) as f64).exp(),
        targets,
        windows,
    };
    for window in ids.chunks_exact(plan.window).take(plan.windows) {
        let mut window = window.to_vec();
        if let Some(id) = begin {
            window[0] = id;
        }
        session.reset();
        let prefilled = match plan.mode {
            Mode::Prefill => plan.window - 1,
            Mode::Decode => 1,
            Mode::Seam => plan.window / 2,
        };
        // Row i predicts id i + 1.
        let mut rows = session.logits_all(&window[..prefilled])?;
        for id in &window[prefilled..plan.window - 1] {
            rows.extend(session.decode(*id)?);
        }
        for (row, target) in rows
            .chunks_exact(vocab)
            .zip(&window[1..])
            .skip(plan.first - 1)
        {
            sum += surprise(row, *target);
            targets += 1;
        }
        windows += 1;
        progress(so_far(sum, targets, windows));
    }
    Ok(so_far(sum, targets, windows))
}

/// Negative log likelihood of `target` under a row of logits.
fn surprise(row: &[f32], target: u32) -> f64 {
    let top = f64::from(row.iter().copied().fold(f32::MIN, f32::max));
    let sum: f64 = row.iter().map(|x| (f64::from(*x) - top).exp()).sum();
    top + sum.ln() - f64::from(row[target as usize])
}
