//! A model family as a list of ops: one file per family.

mod decoder;
mod gemma3;
mod granite;
mod llama;
mod phi3;
mod qwen2;
mod qwen3;
mod rope;
mod smollm3;

use crate::checkpoint::config::Config;
use crate::checkpoint::{Checkpoint, Tensor, owner};
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
    /// Norm weight that multiplies as `1 + w`: stored with the 1 added, in f32.
    OnePlus,
}

/// Rows of a larger tensor, for projections that a checkpoint stores fused.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Part {
    /// Name in the checkpoint.
    pub of: String,
    /// Rows of the whole.
    pub rows: u32,
    /// First row of the part.
    pub first: u32,
}

/// One tensor that the ops name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorDecl {
    /// Name in the checkpoint, or of its own where it is a part.
    pub name: String,
    /// Where its rows are when they are not a tensor of their own.
    pub part: Option<Part>,
    /// Rows; 1 for vectors.
    pub n: u32,
    /// Columns.
    pub k: u32,
    /// Purpose.
    pub role: Role,
}

impl TensorDecl {
    /// The tensor of the checkpoint that holds the bytes.
    #[must_use]
    pub fn source(&self) -> &str {
        self.part.as_ref().map_or(&self.name, |part| &part.of)
    }

    /// The rows in the checkpoint, decoded on demand.
    ///
    /// # Errors
    /// [`Error::Input`] when the tensor is missing or cannot be read.
    pub fn tensor<'a>(&self, checkpoint: &'a Checkpoint) -> Result<Tensor<'a>> {
        let whole = checkpoint.tensor(self.source(), self.k as usize)?;
        match &self.part {
            None => Ok(whole),
            Some(part) => whole.part(part.first as usize..(part.first + self.n) as usize),
        }
    }

    /// The values that the ops use, `[n, k]`.
    ///
    /// # Errors
    /// As [`TensorDecl::tensor`], and [`Error::Input`] for values that are not finite.
    pub fn read_f32(&self, checkpoint: &Checkpoint) -> Result<Vec<f32>> {
        let tensor = self.tensor(checkpoint)?;
        tensor.check_finite()?;
        let mut values = tensor.values();
        if self.role == Role::OnePlus {
            values.iter_mut().for_each(|v| *v += 1.0);
        }
        Ok(values)
    }
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
];

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
    let mut tensors = Vec::new();
    for decl in &graph.tensors {
        let tensor = checkpoint.tensor(decl.source(), decl.k as usize)?;
        let shape = &tensor.shape;
        let rows = decl.part.as_ref().map_or(decl.n, |part| part.rows);
        let want = match decl.role {
            Role::Vector | Role::OnePlus => vec![decl.k as usize],
            Role::Matrix | Role::Embedding => vec![rows as usize, decl.k as usize],
        };
        if *shape != want {
            return Err(Error::Input(format!(
                "{}: tensor {}: shape {shape:?}, config.json says {want:?}; the two are of different models",
                tensor.file,
                decl.source()
            )));
        }
        tensors.push(tensor);
    }
    checkpoint.compare_declared(tensors.iter());
    let declared: HashSet<&str> = graph.tensors.iter().map(TensorDecl::source).collect();
    let tied = graph.tensors[graph.model.head as usize].name != "lm_head.weight";
    let mut skipped = Vec::new();
    for name in checkpoint.names() {
        if declared.contains(name) || owner(name, |weight| declared.contains(weight)).is_some() {
            continue;
        }
        // Old conversions carry these tables; the graph computes its own.
        if name.ends_with(".rotary_emb.inv_freq") {
            continue;
        }
        let known = name.starts_with("mtp.") || (tied && name.starts_with("lm_head."));
        if !known {
            return Err(Error::Input(format!(
                "tensor {name} is unexpected in a {family} model of this config.json; remove it or use the right config"
            )));
        }
        skipped.push(name);
    }
    if let [first, ..] = skipped[..] {
        checkpoint.warn(format!(
            "{} tensors take no part in this model and are left out, {first} is the first",
            skipped.len()
        ));
    }
    Ok(graph)
}
