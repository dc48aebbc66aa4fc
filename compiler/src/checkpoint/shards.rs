//! Safetensors files: which ones belong to the model, and their tensors.

use super::{LFS_POINTER, lfs_pointer, read_json};
use crate::error::{Error, Result};
use memmap2::Mmap;
use safetensors::SafeTensorError;
use safetensors::tensor::{Dtype, Metadata, SafeTensors};
use std::fs::File;
use std::path::{Path, PathBuf};

/// Bytes hashed between two releases of pages.
const PIECE: usize = 16 << 20;

/// One mapped file.
pub(super) struct Shard {
    path: PathBuf,
    map: Mmap,
    metadata: Metadata,
    data: usize,
}

/// A tensor of a file: little-endian bytes at any address.
#[derive(Clone, Copy)]
pub(super) struct Stored<'a> {
    pub(super) shape: &'a [usize],
    pub(super) dtype: Dtype,
    pub(super) bytes: &'a [u8],
}

/// The model's files: those the index names when all exist, else every `model*.safetensors`, which
/// must be a complete set.
pub(super) fn list(dir: &Path) -> Result<Vec<PathBuf>> {
    let index = dir.join("model.safetensors.index.json");
    if index.is_file() {
        let json = read_json(&index)?;
        let mut files: Vec<PathBuf> = json["weight_map"]
            .as_object()
            .into_iter()
            .flat_map(|map| map.values())
            .filter_map(|v| v.as_str())
            .map(|name| dir.join(name))
            .collect();
        files.sort();
        files.dedup();
        if !files.is_empty() && files.iter().all(|f| f.is_file()) {
            return Ok(files);
        }
    }
    let entries = std::fs::read_dir(dir).map_err(|source| Error::Io {
        path: dir.to_path_buf(),
        source,
    })?;
    let mut files: Vec<PathBuf> = entries
        .filter_map(|e| e.ok().map(|e| e.path()))
        .filter(|p| {
            let name = p.file_name().unwrap_or_default().to_string_lossy();
            name.starts_with("model") && name.ends_with(".safetensors")
        })
        .collect();
    files.sort();
    if files.is_empty() {
        return Err(Error::Input(format!(
            "{}: no model*.safetensors; finish the download, or give the folder that has them",
            dir.display()
        )));
    }
    complete(dir, &files)?;
    Ok(files)
}

/// `model-00001-of-00003` sets must have every member.
fn complete(dir: &Path, files: &[PathBuf]) -> Result<()> {
    for file in files {
        let stem = file.file_stem().unwrap_or_default().to_string_lossy();
        let Some((_, total)) = stem.rsplit_once("-of-") else {
            continue;
        };
        let member = |i: usize| dir.join(format!("model-{i:05}-of-{total}.safetensors"));
        let count = total.parse::<usize>().unwrap_or(0);
        if let Some(want) = (1..=count).map(member).find(|want| !want.is_file()) {
            let end = format!("-of-{total}.safetensors");
            let here = files
                .iter()
                .filter(|f| f.to_string_lossy().ends_with(&end))
                .count();
            return Err(Error::Input(format!(
                "{}: shard is missing, {here} of {count} are here; finish the download",
                want.display()
            )));
        }
    }
    Ok(())
}

impl Shard {
    pub(super) fn open(path: &Path) -> Result<Self> {
        let bad = |text: String| Error::Input(format!("{}: {text}", path.display()));
        let file = File::open(path).map_err(|e| bad(e.to_string()))?;
        let len = file.metadata().map_err(|e| bad(e.to_string()))?.len();
        if len < 8 {
            return Err(bad(format!(
                "{len} bytes, a safetensors file has at least 8; download it again"
            )));
        }
        // SAFETY: mapped read-only; a checkpoint that another process truncates meanwhile is outside
        // what any reader of mapped files can survive.
        let map = unsafe { Mmap::map(&file) }.map_err(|e| bad(e.to_string()))?;
        if map.starts_with(LFS_POINTER) {
            return Err(lfs_pointer(path));
        }
        let (header, metadata) =
            SafeTensors::read_metadata(&map).map_err(|e| bad(describe(&map, &e)))?;
        Ok(Self {
            path: path.to_path_buf(),
            data: header + 8,
            map,
            metadata,
        })
    }

    pub(super) fn names(&self) -> Vec<String> {
        self.metadata.tensors().into_keys().collect()
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// The tensor as stored; names come from [`Shard::names`].
    pub(super) fn stored(&self, name: &str) -> Option<Stored<'_>> {
        let info = self.metadata.info(name)?;
        let (from, to) = info.data_offsets;
        Some(Stored {
            shape: &info.shape,
            dtype: info.dtype,
            bytes: &self.map[self.data + from..self.data + to],
        })
    }

    /// Name and hash of the file, read a piece at a time so that it is never in memory as a whole.
    pub(super) fn source(&self) -> (String, [u8; 32]) {
        let mut hasher = blake3::Hasher::new();
        for (i, piece) in self.map.chunks(PIECE).enumerate() {
            hasher.update(piece);
            self.forget(i * PIECE, piece.len());
        }
        let name = self.path.file_name().unwrap_or_default();
        (
            name.to_string_lossy().into_owned(),
            *hasher.finalize().as_bytes(),
        )
    }

    /// The pages of a tensor are not needed for now.
    pub(super) fn release(&self, name: &str) {
        if let Some(info) = self.metadata.info(name) {
            let (from, to) = info.data_offsets;
            self.forget(self.data + from, to - from);
        }
    }

    /// Advice only: dropped pages come back from the file.
    fn forget(&self, from: usize, len: usize) {
        #[cfg(unix)]
        {
            // SAFETY: the mapping is of a file and read-only, so that nothing is lost with its pages.
            let _ = unsafe {
                self.map
                    .unchecked_advise_range(memmap2::UncheckedAdvice::DontNeed, from, len)
            };
        }
        #[cfg(not(unix))]
        let _ = (from, len);
    }
}

/// The crate's own message, or both lengths when the header and the file disagree about them.
fn describe(map: &[u8], error: &SafeTensorError) -> String {
    match expected_length(map) {
        Some(want) if want != map.len() as u64 => format!(
            "{} bytes, its header says {want}; download it again",
            map.len()
        ),
        _ => format!("{error}; download it again"),
    }
}

/// Bytes that the file should have; only of the header when that itself was cut.
fn expected_length(map: &[u8]) -> Option<u64> {
    let header = u64::from_le_bytes(map.get(..8)?.try_into().ok()?);
    let data = header.checked_add(8)?;
    let Some(text) = map.get(8..usize::try_from(data).ok()?) else {
        // A JSON header starts with a brace: otherwise this never was a safetensors file.
        return (map.get(8) == Some(&b'{')).then_some(data);
    };
    let json: serde_json::Value = serde_json::from_slice(text).ok()?;
    let ends = json.as_object()?.values();
    let end = ends
        .filter_map(|t| t["data_offsets"][1].as_u64())
        .max()
        .unwrap_or(0);
    data.checked_add(end)
}
