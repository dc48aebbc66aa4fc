//! The pack file, mapped read-only and proven.

use crate::error::{Error, Result};
use memmap2::Mmap;
use ork_formats::model::Span;
use ork_formats::pack::{PackError, Reader};
use std::fs::File;
use std::path::Path;

/// A mapped pack with its proven reader. Bulk weights are used in place.
#[derive(Debug)]
pub struct Pack {
    map: Mmap,
    reader: Reader,
}

impl Pack {
    /// Maps `path` and proves everything but the bulk weights' hashes.
    ///
    /// # Errors
    /// [`Error::Io`] when the file cannot be opened or mapped, [`Error::Mismatch`] when it is for
    /// another SoC or version, [`Error::Input`] when it is damaged.
    pub fn open(path: &Path) -> Result<Self> {
        let io = |source| Error::Io {
            path: path.to_path_buf(),
            source,
        };
        let file = File::open(path).map_err(io)?;
        if file.metadata().map_err(io)?.len() == 0 {
            return Err(refusal(path, &PackError::Empty));
        }
        // SAFETY: the mapping is private and read-only, and lives as long as every slice taken from
        // it. The remaining hazard, another process truncating or rewriting the file meanwhile, is
        // the documented contract of `ork`: packs are replaced by rename, never edited in place.
        let map = unsafe { Mmap::map(&file) }.map_err(io)?;
        let reader = Reader::parse(&map).map_err(|e| refusal(path, &e))?;
        Ok(Self { map, reader })
    }

    /// The proven reader.
    #[must_use]
    pub fn reader(&self) -> &Reader {
        &self.reader
    }

    /// The whole file.
    #[must_use]
    pub fn bytes(&self) -> &[u8] {
        &self.map
    }

    /// Bytes of a span of the host section.
    #[must_use]
    pub fn host(&self, span: Span) -> &[u8] {
        let start = span.offset as usize;
        &self.reader.host(&self.map)[start..start + span.bytes as usize]
    }

    /// A span of the host section, decoded as little-endian f32.
    #[must_use]
    pub fn floats(&self, span: Span) -> Vec<f32> {
        let (words, _) = self.host(span).as_chunks::<4>();
        words.iter().map(|b| f32::from_le_bytes(*b)).collect()
    }
}

fn refusal(path: &Path, error: &PackError) -> Error {
    let text = format!("{}: {error}", path.display());
    if error.is_mismatch() {
        Error::Mismatch(text)
    } else {
        Error::Input(text)
    }
}

/// The same bytes as signed codes.
#[must_use]
pub fn signed(bytes: &[u8]) -> &[i8] {
    // SAFETY: u8 and i8 have the same size, alignment and no invalid bit patterns; the result
    // borrows `bytes`, so it cannot outlive or alias a mutation of it.
    unsafe { std::slice::from_raw_parts(bytes.as_ptr().cast::<i8>(), bytes.len()) }
}
