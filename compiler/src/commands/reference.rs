//! `orkc reference`

use super::io;
use clap::Args;
use ork_compiler::checkpoint::{Checkpoint, hub};
use ork_compiler::error::{Error, Result};
use ork_compiler::{graph, reference, text};
use std::fs::{File, OpenOptions};
use std::io::Write;
use std::path::{Path, PathBuf};

#[derive(Args)]
pub(crate) struct ReferenceArgs {
    /// Checkpoint directory
    checkpoint: PathBuf,
    /// Text to tokenize
    #[arg(long, required_unless_present = "ids", conflicts_with = "ids")]
    prompt: Option<String>,
    /// Token ids
    #[arg(long, value_delimiter = ',')]
    ids: Option<Vec<u32>>,
    /// safetensors file to write: `logits`, f32 [tokens, vocab]
    #[arg(short, long)]
    output: PathBuf,
}

pub(crate) fn run(args: &ReferenceArgs) -> Result<()> {
    // Claimed before the long computation, so that an existing file costs nothing.
    let mut file = create_new(&args.output)?;
    let written = reference_logits(args).and_then(|bytes| {
        file.write_all(&bytes).map_err(io(&args.output))?;
        file.sync_all().map_err(io(&args.output))
    });
    if written.is_err() {
        // Only the file made above; the first error is the one worth reporting.
        let _ = std::fs::remove_file(&args.output);
    }
    written
}

fn create_new(path: &Path) -> Result<File> {
    OpenOptions::new()
        .write(true)
        .create_new(true)
        .open(path)
        .map_err(|e| match e.kind() {
            std::io::ErrorKind::AlreadyExists => Error::Usage(format!(
                "{} exists and is never overwritten; choose another name",
                path.display()
            )),
            _ => io(path)(e),
        })
}

/// The safetensors file of the logits.
fn reference_logits(args: &ReferenceArgs) -> Result<Vec<u8>> {
    let dir = hub::resolve(&args.checkpoint)?;
    let checkpoint = Checkpoint::open(&dir)?;
    let graph = graph::build(&checkpoint)?;
    let ids = match (&args.ids, &args.prompt) {
        (Some(ids), _) => ids.clone(),
        (None, prompt) => {
            let prompt = prompt.as_deref().unwrap_or_default();
            tokenize(&dir, &checkpoint, prompt)?
        }
    };
    if let Some(id) = ids.iter().find(|id| graph.model.vocab <= **id) {
        return Err(Error::Usage(format!(
            "token id {id} is outside the vocabulary of {}",
            graph.model.vocab
        )));
    }
    if ids.is_empty() {
        return Err(Error::Usage("the prompt has no tokens".to_string()));
    }
    let logits = reference::Reference::new(&checkpoint, &graph)?.forward(&ids)?;
    let bytes: Vec<u8> = logits.iter().flat_map(|v| v.to_le_bytes()).collect();
    let shape = vec![ids.len(), graph.model.vocab as usize];
    let view = safetensors::tensor::TensorView::new(safetensors::Dtype::F32, shape, &bytes)
        .map_err(|e| Error::Verify(format!("logits: {e}")))?;
    safetensors::serialize([("logits", view)], None)
        .map_err(|e| Error::Verify(format!("logits: {e}")))
}

/// Ids of `prompt`, exactly as a pack of this checkpoint would see them.
fn tokenize(dir: &Path, checkpoint: &Checkpoint, prompt: &str) -> Result<Vec<u32>> {
    let (definition, rules) = text::freeze(dir, &checkpoint.config)?;
    let tokenizer = kitoken::Kitoken::from_slice(&definition)
        .map_err(|e| Error::Input(format!("tokenizer: {e}")))?;
    let body = tokenizer
        .encode(prompt, true)
        .map_err(|e| Error::Input(format!("prompt: {e}")))?;
    Ok([rules.prefix, body, rules.suffix].concat())
}
