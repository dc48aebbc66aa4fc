//! The pack file, mapped read-only.

use crate::error::{Error, Result};
use memmap2::Mmap;
use ork_formats::pack::{PackError, Reader};
use std::fs::File;
use std::path::Path;

/// A mapped and proven pack.
pub struct Pack {
    map: Mmap,
    reader: Reader,
}

impl Pack {
    /// Maps `path` and proves its structure.
    ///
    /// # Errors
    /// [`Error::Io`], [`Error::Input`] for a damaged file, [`Error::Mismatch`] for a foreign one.
    pub fn open(path: &Path) -> Result<Self> {
        let io = |source| Error::Io {
            path: path.to_path_buf(),
            source,
        };
        let file = File::open(path).map_err(|e| match e.kind() {
            std::io::ErrorKind::NotFound => {
                Error::Input(format!("{}: no such file", path.display()))
            }
            _ => io(e),
        })?;
        if file.metadata().map_err(io)?.len() == 0 {
            return Err(explain(path, &PackError::Empty));
        }
        // SAFETY: the mapping is read-only and private to this process; the compiler replaces packs by
        // rename and never truncates one in place, so mapped pages stay valid while the file is open.
        let map = unsafe { Mmap::map(&file) }.map_err(io)?;
        let reader = Reader::parse(&map).map_err(|e| explain(path, &e))?;
        Ok(Self { map, reader })
    }

    /// The whole file.
    #[must_use]
    pub fn bytes(&self) -> &[u8] {
        &self.map
    }

    /// The proven reader.
    #[must_use]
    pub fn reader(&self) -> &Reader {
        &self.reader
    }

    /// Tells the system that the NPU slice was copied out and its pages are not needed any more, so that
    /// it is not in memory twice. Advice only.
    pub(crate) fn forget_npu_weights(&self) {
        #[cfg(unix)]
        {
            let section = self.reader.npu_weights(&self.map);
            let start = section.as_ptr() as usize - self.map.as_ptr() as usize;
            // SAFETY: the mapping is of a file and read-only: dropped pages come back from the file.
            let _ = unsafe {
                self.map.unchecked_advise_range(
                    memmap2::UncheckedAdvice::DontNeed,
                    start,
                    section.len(),
                )
            };
        }
    }

    /// The host-weights section.
    #[must_use]
    pub fn host(&self) -> &[u8] {
        self.reader.host(&self.map)
    }
}

fn explain(path: &Path, error: &PackError) -> Error {
    let text = format!("{}: {error}", path.display());
    match error.is_mismatch() {
        true => Error::Mismatch(text),
        false => Error::Input(text),
    }
}
