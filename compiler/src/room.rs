//! What a compile will need of the machine, checked before it begins.

use crate::error::{Error, Result};
use crate::graph::Graph;
use std::path::Path;

/// Held whatever the checkpoint: tables, streams, tokenizer, threads.
const BASE: u64 = 200 << 20;

/// Bytes of memory that the compile holds at most, mapped source pages included: tensors pass one by
/// one, each as source, as codes and as the block being written.
#[must_use]
pub fn memory(graph: &Graph) -> u64 {
    let largest = graph
        .tensors
        .iter()
        .map(|t| u64::from(t.stack) * u64::from(t.n) * u64::from(t.k) * 2)
        .max();
    BASE + 3 * largest.unwrap_or(0)
}

/// Refuses a compile that would hold more than `most` bytes.
///
/// # Errors
/// [`Error::Fit`] with both figures.
pub fn check_memory(graph: &Graph, most: Option<u64>) -> Result<()> {
    let need = memory(graph);
    match most {
        Some(most) if most < need => Err(Error::Fit(format!(
            "compiling needs about {} MiB of memory, --max-ram allows {}; raise it",
            need >> 20,
            most >> 20
        ))),
        _ => Ok(()),
    }
}

/// Refuses a pack that its disk has no room for; where the system does not say, the write will.
///
/// # Errors
/// [`Error::Fit`] with both figures.
pub fn check_disk(output: &Path, need: u64) -> Result<()> {
    match free(output) {
        Some(free) if free < need => Err(Error::Fit(format!(
            "{}: the pack has {need} bytes, its disk {free} free; choose another place",
            output.display()
        ))),
        _ => Ok(()),
    }
}

#[cfg(unix)]
fn free(output: &Path) -> Option<u64> {
    let folder = match output.parent() {
        Some(folder) if folder != Path::new("") => folder,
        _ => Path::new("."),
    };
    let stat = rustix::fs::statvfs(folder).ok()?;
    Some(stat.f_bavail * stat.f_frsize)
}

#[cfg(not(unix))]
fn free(_output: &Path) -> Option<u64> {
    None
}
