//! Recomputes a pack's slices from its checkpoint and compares.

use crate::checkpoint::Checkpoint;
use crate::compile::{Options, compile};
use crate::error::{Error, Result};
use crate::graph;
use crate::place::{Decode, Experts, Scheme};
use ork_formats::model::Provenance;
use ork_formats::pack::{Kind, Reader};
use std::path::Path;

/// Compiles `checkpoint` again with the options stored in the pack `bytes` and compares every
/// section.
///
/// # Errors
/// [`Error::Verify`] naming the first tensor whose source differs, else the first section that does;
/// [`Error::Input`] for a bad checkpoint, [`Error::Io`].
pub fn check(reader: &Reader, bytes: &[u8], checkpoint: &Path) -> Result<()> {
    let manifest = reader.manifest();
    let source = Checkpoint::open(checkpoint)?;
    let graph = graph::build(&source)?;
    for tensor in &manifest.tensors {
        let Some(decl) = graph.tensors.iter().find(|t| t.name == tensor.name) else {
            return Err(Error::Verify(format!(
                "tensor {} is not in {}",
                tensor.name,
                checkpoint.display()
            )));
        };
        if decl.rows(&source)?.hash() != tensor.source {
            return Err(Error::Verify(format!(
                "tensor {} was compiled from other bytes than {} holds",
                tensor.name,
                checkpoint.display()
            )));
        }
    }
    let scratch = tempfile::tempdir().map_err(|source| Error::Io {
        path: std::env::temp_dir(),
        source,
    })?;
    let path = scratch.path().join("again.orkpack");
    let mut options = Options::new(checkpoint.to_path_buf(), path.clone());
    restore(&mut options, &manifest.provenance)?;
    compile(&options)?;
    let again = std::fs::read(&path).map_err(|source| Error::Io { path, source })?;
    let other = Reader::parse(&again).map_err(|e| Error::Verify(e.to_string()))?;
    for (kind, (a, b)) in Kind::ALL
        .into_iter()
        .zip(reader.sections().iter().zip(other.sections()))
    {
        if a.hash != b.hash {
            return Err(Error::Verify(format!(
                "section {} differs from what orkc {} computes (the pack was made by orkc {}): {} and {} bytes",
                kind.name(),
                env!("CARGO_PKG_VERSION"),
                manifest.provenance.compiler,
                a.stored,
                b.stored
            )));
        }
    }
    match again.as_slice() == bytes {
        true => Ok(()),
        false => Err(Error::Verify("the header differs".into())),
    }
}

/// Sets every stored option that changes the bytes.
fn restore(options: &mut Options, provenance: &Provenance) -> Result<()> {
    let bad = |name: &str, value: &str| {
        Error::Verify(format!(
            "option {name} = {value} is unknown to orkc {}; the pack was made by orkc {}",
            env!("CARGO_PKG_VERSION"),
            provenance.compiler
        ))
    };
    for (name, value) in &provenance.options {
        let number = || value.parse().map(Some).map_err(|_| bad(name, value));
        match name.as_str() {
            "soc" => options.soc.clone_from(value),
            "chunk" => options.chunk = number()?,
            "cores" => options.cores = number()?,
            "lossless" if value == "true" => options.scheme = Scheme::Lossless,
            "lossless" => {}
            "decode" => match value.as_str() {
                "int4" => options.scheme = Scheme::Quantised(Decode::Int4),
                "int8" => options.scheme = Scheme::Quantised(Decode::Int8),
                _ => {}
            },
            "expert-prefill" if value == Experts::Decode.name() => {
                options.experts = Experts::Decode;
            }
            "expert-prefill" => {}
            _ => return Err(bad(name, value)),
        }
    }
    options.allow_unvalidated = true;
    Ok(())
}
