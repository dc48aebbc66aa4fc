//! Known answers inside the pack, so that a board can check itself without the checkpoint.

use serde::{Deserialize, Serialize};

/// Rows of activations that carry the pattern; the rest of a block's rows are zero.
pub const ROWS: usize = 4;

/// Everything `ork selftest` compares with.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Golden {
    /// Text and the ids the tokenizer gives it, prefix and suffix included.
    pub texts: Vec<(String, Vec<u32>)>,
    /// Answers of command programs.
    pub blocks: Vec<Answer>,
}

/// What one program computes from [`activation`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Answer {
    /// Index of the program.
    pub program: u32,
    /// BLAKE3 of the first [`ROWS`] rows of its int32 block, little endian.
    pub hash: [u8; 32],
}

/// Byte `i` of the pattern `[ROWS][k]`: every code of a symmetric quantiser occurs.
#[must_use]
pub fn activation(i: usize) -> i8 {
    ((i * 7919 % 255) as i32 - 127) as i8
}
