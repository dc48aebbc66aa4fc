//! Known answers for the pack, computed the plainest way: a triple loop over the very bytes written.

use crate::error::{Error, Result};
use kitoken::Kitoken;
use ork_formats::golden::{Answer, ROWS, activation};
use ork_formats::layout::weight_index;
use ork_formats::model::{Block, NpuForm, NpuPlan, Text};

/// Enough shapes to cover every kind of projection of a model.
const MOST: usize = 8;

/// Words, digits, spaces, accents, a script without spaces, an emoji.
const TEXTS: [&str; 3] = [
    "The quick brown fox jumps over 12345 lazy dogs.",
    "  naïve café\n\n\ttabs",
    "日本語 😀!",
];

/// Collects one answer per program shape.
#[derive(Default)]
pub struct Answers {
    shapes: Vec<(u32, u32)>,
    blocks: Vec<Answer>,
}

impl Answers {
    /// Adds an answer for the first program over `block` (whose tile bytes are `bytes`), if its shape is
    /// new.
    pub fn consider(
        &mut self,
        plan: Option<&NpuPlan>,
        form: &NpuForm,
        block: &Block,
        bytes: &[u8],
    ) {
        let shape = (form.slice_k, block.cols);
        let Some(plan) = plan.filter(|_| self.blocks.len() < MOST && !self.shapes.contains(&shape))
        else {
            return;
        };
        let program = form
            .chains
            .iter()
            .filter(|chain| chain.core == block.core && chain.half == 0)
            .flat_map(|chain| chain.first..chain.first + chain.count)
            .find(|id| {
                let p = &plan.programs[*id as usize];
                p.w == block.at && p.row0 == 0
            });
        if let Some(program) = program {
            self.shapes.push(shape);
            self.blocks.push(Answer {
                program,
                hash: answer(bytes, form.slice_k as usize, block.cols as usize),
            });
        }
    }

    /// The answers, by program.
    #[must_use]
    pub fn into_blocks(mut self) -> Vec<Answer> {
        self.blocks.sort_by_key(|answer| answer.program);
        self.blocks
    }
}

/// Hash of the int32 block `[ROWS][n]` of the pattern times native tiles `[n][k]`.
fn answer(tiles: &[u8], k: usize, n: usize) -> [u8; 32] {
    let mut hasher = blake3::Hasher::new();
    for row in 0..ROWS {
        for column in 0..n {
            let sum: i32 = (0..k)
                .map(|i| {
                    let weight = tiles[weight_index(column, i, k / 32)] as i8;
                    i32::from(activation(row * k + i)) * i32::from(weight)
                })
                .sum();
            hasher.update(&sum.to_le_bytes());
        }
    }
    *hasher.finalize().as_bytes()
}

/// The ids of a few texts, as the frozen tokenizer gives them.
///
/// # Errors
/// [`Error::Input`] when the definition does not load or refuses a text.
pub fn texts(definition: &[u8], rules: &Text) -> Result<Vec<(String, Vec<u32>)>> {
    let bad = |e: String| Error::Input(format!("tokenizer.json: {e}"));
    let tokenizer = Kitoken::from_slice(definition).map_err(|e| bad(e.to_string()))?;
    TEXTS
        .into_iter()
        .map(|text| {
            let ids = tokenizer
                .encode(text, true)
                .map_err(|e| bad(e.to_string()))?;
            let ids = [&rules.prefix[..], &ids, &rules.suffix].concat();
            Ok((text.to_string(), ids))
        })
        .collect()
}
