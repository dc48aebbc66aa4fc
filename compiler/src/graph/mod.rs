//! A model family as a list of ops: one file per family.

mod llama;

use crate::checkpoint::Checkpoint;
use crate::checkpoint::config::Config;
use crate::error::{Error, Result};
use ork_formats::model::Model;
use std::collections::HashSet;

/// What a tensor is for; decides its engines and forms.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// A projection: int8 on the NPU in prefill, 4-bit on the CPU in decode.
    Matrix,
    /// Embedding or head: int8 rows on the CPU.
    Embedding,
    /// Norm weight or bias: f32.
    Vector,
}

/// One tensor that the ops name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorDecl {
    /// Name in the checkpoint.
    pub name: String,
    /// Rows; 1 for vectors.
    pub n: u32,
    /// Columns.
    pub k: u32,
    /// Purpose.
    pub role: Role,
}

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

/// Builds the graph of a checkpoint and checks that its tensors are exactly the ones expected.
///
/// # Errors
/// [`Error::Input`] for an unknown family, a missing, misshapen or unexpected tensor.
pub fn build(checkpoint: &Checkpoint) -> Result<Graph> {
    let family = Config::new(&checkpoint.config, "config.json")
        .text("model_type")?
        .unwrap_or("");
    let graph = match family {
        "llama" | "mistral" => llama::build(checkpoint, family)?,
        other => {
            return Err(Error::Input(format!(
                "config.json: model_type \"{other}\" is not supported; supported are llama, mistral"
            )));
        }
    };
    for decl in &graph.tensors {
        let shape = checkpoint.tensor(&decl.name)?.shape;
        let want = match decl.role {
            Role::Vector => vec![decl.k as usize],
            Role::Matrix | Role::Embedding => vec![decl.n as usize, decl.k as usize],
        };
        if shape != want {
            return Err(Error::Input(format!(
                "tensor {}: shape {shape:?}, config.json says {want:?}; the two are of different models",
                decl.name
            )));
        }
    }
    let declared: HashSet<&str> = graph.tensors.iter().map(|t| t.name.as_str()).collect();
    let tied = graph.tensors[graph.model.head as usize].name != "lm_head.weight";
    for name in checkpoint.names() {
        let known = declared.contains(name)
            || name.ends_with(".rotary_emb.inv_freq")
            || (tied && name.starts_with("lm_head."));
        if !known {
            return Err(Error::Input(format!(
                "tensor {name} is unexpected in a {family} model of this config.json; remove it or use the right config"
            )));
        }
    }
    Ok(graph)
}
