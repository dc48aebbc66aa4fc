//! `ork logits`

use super::Open;
use clap::Args;
use ork_loader::error::{Error, Result};
use safetensors::tensor::{Dtype, TensorView};
use std::fs::OpenOptions;
use std::io::Write;
use std::path::{Path, PathBuf};

#[derive(Args)]
pub(crate) struct LogitsArgs {
    #[command(flatten)]
    open: Open,
    /// Token ids: 1,2,3
    #[arg(long, value_delimiter = ',', required = true)]
    ids: Vec<u32>,
    /// Output .safetensors; tensor `logits`, f32 [tokens, vocab]
    #[arg(short, long)]
    output: PathBuf,
}

pub(crate) fn run(args: &LogitsArgs) -> Result<()> {
    let mut session = args.open.session()?;
    let logits = session.logits_all(&args.ids)?;
    let bytes: Vec<u8> = logits.iter().flat_map(|v| v.to_le_bytes()).collect();
    let shape = vec![args.ids.len(), session.manifest().model.vocab as usize];
    let view = TensorView::new(Dtype::F32, shape, &bytes)
        .map_err(|e| Error::Failed(format!("logits: {e}")))?;
    let file = safetensors::serialize([("logits", view)], None)
        .map_err(|e| Error::Failed(format!("logits: {e}")))?;
    write_new(&args.output, &file)
}

/// Creates a file; an existing one is never overwritten.
fn write_new(path: &Path, bytes: &[u8]) -> Result<()> {
    let mut file = OpenOptions::new()
        .write(true)
        .create_new(true)
        .open(path)
        .map_err(|source| match source.kind() {
            std::io::ErrorKind::AlreadyExists => {
                Error::Usage(format!("{} exists; choose another name", path.display()))
            }
            _ => Error::Io {
                path: path.to_path_buf(),
                source,
            },
        })?;
    file.write_all(bytes).map_err(|source| {
        // Only the file made above; the first error is the one worth reporting.
        let _ = std::fs::remove_file(path);
        Error::Io {
            path: path.to_path_buf(),
            source,
        }
    })
}
