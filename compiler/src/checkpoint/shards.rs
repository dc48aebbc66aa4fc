//! Safetensors files: which ones belong to the model, and their tensors.

use super::{Raw, read_json};
use crate::error::{Error, Result};
use memmap2::Mmap;
use ork_formats::model::FloatType;
use safetensors::tensor::{Dtype, Metadata, SafeTensors};
use std::fs::File;
use std::path::{Path, PathBuf};

/// One mapped file.
pub(super) struct Shard {
    path: PathBuf,
    map: Mmap,
    metadata: Metadata,
    data: usize,
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
            "{}: no model*.safetensors",
            dir.display()
        )));
    }
    complete(dir, &files)?;
    Ok(files)
}

/// `-00001-of-00003` sets must have every member.
fn complete(dir: &Path, files: &[PathBuf]) -> Result<()> {
    for file in files {
        let name = file
            .file_stem()
            .unwrap_or_default()
            .to_string_lossy()
            .into_owned();
        let Some((_, total)) = name.rsplit_once("-of-") else {
            continue;
        };
        for i in 1..=total.parse::<usize>().unwrap_or(0) {
            let want = dir.join(format!("model-{i:05}-of-{total}.safetensors"));
            if !want.is_file() {
                return Err(Error::Input(format!(
                    "{}: shard is missing, {} of {total} are here; finish the download",
                    want.display(),
                    files.len()
                )));
            }
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
                "{len} bytes, too short for a safetensors file"
            )));
        }
        // SAFETY: mapped read-only; a checkpoint that another process truncates meanwhile is outside
        // what any reader of mapped files can survive.
        let map = unsafe { Mmap::map(&file) }.map_err(|e| bad(e.to_string()))?;
        if map.starts_with(b"version https://git-lfs") {
            return Err(bad(
                "a Git-LFS pointer, not the weights; run `git lfs pull`".into(),
            ));
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

    pub(super) fn tensor(&self, name: &str) -> Result<Raw<'_>> {
        let info = self.metadata.info(name).ok_or_else(|| {
            Error::Input(format!("{}: tensor {name} is missing", self.path.display()))
        })?;
        let ty = match info.dtype {
            Dtype::F32 => FloatType::F32,
            Dtype::F16 => FloatType::F16,
            Dtype::BF16 => FloatType::Bf16,
            other => {
                return Err(Error::Input(format!(
                    "{}: tensor {name} is {other:?}; supported are F32, F16 and BF16",
                    self.path.display()
                )));
            }
        };
        let (from, to) = info.data_offsets;
        Ok(Raw {
            shape: info.shape.clone(),
            ty,
            bytes: &self.map[self.data + from..self.data + to],
        })
    }

    pub(super) fn source(&self) -> (String, [u8; 32]) {
        let name = self.path.file_name().unwrap_or_default();
        (
            name.to_string_lossy().into_owned(),
            *blake3::hash(&self.map).as_bytes(),
        )
    }
}

/// The crate's own message, with the lengths when the file was cut.
fn describe(map: &[u8], error: &safetensors::SafeTensorError) -> String {
    let header = u64::from_le_bytes(map[..8].try_into().expect("8 bytes"));
    format!(
        "{error} (header of {header} bytes, file of {}); download it again",
        map.len()
    )
}
