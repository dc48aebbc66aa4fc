//! A model family as a list of ops: one file per family.

mod decl;
mod decoder;
mod experts;
mod gemma3;
mod granite;
mod hybrid;
mod llama;
mod phi3;
mod qwen2;
mod qwen3;
mod qwen3_5;
mod qwen3_5_moe;
mod qwen3_moe;
mod qwen3_next;
mod rope;
mod smollm3;

pub use decl::{Piece, Role, Rows, TensorDecl};

use crate::checkpoint::Checkpoint;
use crate::checkpoint::config::Config;
use crate::checkpoint::owner;
use crate::error::{Error, Result};
use ork_formats::model::{Model, Op};
use std::collections::HashSet;

/// The model before anything is placed or quantised. Ops index `tensors`.
#[derive(Clone, Debug)]
pub struct Graph {
    /// `model_type` of the config.
    pub family: String,
    /// Dimensions, slots and ops; the KV type is decided later.
    pub model: Model,
    /// Every tensor.
    pub tensors: Vec<TensorDecl>,
}

type Build = fn(&Checkpoint, Config<'_>, &str) -> Result<Graph>;

/// `model_type` and what builds its graph. A new family is a file and a row.
const FAMILIES: &[(&str, Build)] = &[
    ("llama", llama::build),
    ("mistral", llama::build),
    ("qwen2", qwen2::build),
    ("qwen3", qwen3::build),
    ("smollm3", smollm3::build),
    ("granite", granite::build),
    ("phi3", phi3::build),
    ("gemma3_text", gemma3::build),
    ("qwen3_moe", qwen3_moe::build),
    ("qwen3_next", qwen3_next::build),
    ("qwen3_5", qwen3_5::build),
    ("qwen3_5_text", qwen3_5::build),
    ("qwen3_5_moe", qwen3_5_moe::build),
    ("qwen3_5_moe_text", qwen3_5_moe::build),
];

/// Tensors of other parts of a multimodal or multi-token model; the language model runs without them.
const SKIPPED: &[&str] = &[
    "vision_tower.",
    "language_model.vision_tower.",
    "model.vision_tower.",
    "visual.",
    "model.visual.",
    "mtp.",
    "model.mtp.",
    "language_model.mtp.",
];

/// What a tied model needs no more.
const HEAD: &str = "lm_head.";

/// Builds the graph of a checkpoint and checks that its tensors are exactly the ones expected.
///
/// # Errors
/// [`Error::Input`] for an unknown family, a missing, misshapen or unexpected tensor.
pub fn build(checkpoint: &Checkpoint) -> Result<Graph> {
    let family = Config::new(&checkpoint.config, "config.json")
        .text("model_type")?
        .unwrap_or("");
    let Some((_, family_build)) = FAMILIES.iter().find(|(name, _)| *name == family) else {
        let known: Vec<&str> = FAMILIES.iter().map(|(name, _)| *name).collect();
        return Err(Error::Input(format!(
            "config.json: model_type \"{family}\" is not supported; supported are {}",
            known.join(", ")
        )));
    };
    let config = Config::new(&checkpoint.config, "config.json");
    let graph = family_build(checkpoint, config, family)?;
    let rows: Vec<Rows<'_>> = graph
        .tensors
        .iter()
        .map(|decl| decl.rows(checkpoint))
        .collect::<Result<_>>()?;
    checkpoint.compare_declared(rows.iter().flat_map(Rows::tensors));
    drop(rows);
    let pieces = graph.tensors.iter().flat_map(|decl| &decl.pieces);
    let declared: HashSet<&str> = pieces.map(|piece| piece.of.as_str()).collect();
    let tied = graph
        .model
        .ops
        .iter()
        .any(|op| matches!(op, Op::Embed { table, .. } if *table == graph.model.head));
    let mut skipped = vec![0; SKIPPED.len()];
    let mut heads = 0;
    for name in checkpoint.names() {
        let head = name.strip_prefix("language_model.").unwrap_or(name);
        let known = declared.contains(name)
            || owner(name, |weight| declared.contains(weight)).is_some()
            || name.ends_with(".rotary_emb.inv_freq")
            || (tied && head.starts_with(HEAD));
        if tied && head.starts_with(HEAD) && !declared.contains(name) {
            heads += 1;
        }
        let other = SKIPPED.iter().position(|prefix| name.starts_with(prefix));
        match other {
            Some(index) if !known => skipped[index] += 1,
            None if !known => {
                return Err(Error::Input(format!(
                    "tensor {name} is unexpected in a {family} model of this config.json; remove it or use the right config"
                )));
            }
            _ => {}
        }
    }
    let counts = SKIPPED.iter().zip(skipped).chain([(&HEAD, heads)]);
    for (prefix, count) in counts.filter(|(_, count)| *count != 0) {
        checkpoint.warn(format!(
            "{count} {prefix}* tensors take no part in the text model and are left out"
        ));
    }
    Ok(graph)
}
