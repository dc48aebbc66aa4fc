//! Reads an MLX checkpoint: `config.json` and safetensors shards, mapped, never cast.

pub(crate) mod config;
mod shards;

use crate::error::{Error, Result};
use ork_formats::model::FloatType;
use serde_json::Value;
use shards::Shard;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// A tensor as the file stores it.
pub struct Raw<'a> {
    /// Dimensions, outermost first.
    pub shape: Vec<usize>,
    /// Element type.
    pub ty: FloatType,
    /// Little-endian bytes at any alignment: MLX does not pad its headers.
    pub bytes: &'a [u8],
}

/// An open checkpoint.
pub struct Checkpoint {
    /// `config.json`.
    pub config: Value,
    config_hash: [u8; 32],
    dir: PathBuf,
    shards: Vec<Shard>,
    /// Tensor name -> shard.
    index: BTreeMap<String, usize>,
}

impl Checkpoint {
    /// Opens the directory and indexes every tensor.
    ///
    /// # Errors
    /// [`Error::Input`] naming the missing or damaged file.
    pub fn open(dir: &Path) -> Result<Self> {
        if !dir.is_dir() {
            return Err(Error::Input(format!(
                "{}: no such directory; give the checkpoint's folder",
                dir.display()
            )));
        }
        let path = dir.join("config.json");
        let bytes = read(&path)?;
        let config = parse(&path, &bytes)?;
        if !config.is_object() {
            return Err(Error::Input(format!(
                "{}: not a JSON object; download it again",
                path.display()
            )));
        }
        let config_hash = *blake3::hash(&bytes).as_bytes();
        let mut index = BTreeMap::new();
        let mut shards = Vec::new();
        for path in shards::list(dir)? {
            let shard = Shard::open(&path)?;
            for name in shard.names() {
                if index.insert(name.clone(), shards.len()).is_some() {
                    return Err(Error::Input(format!(
                        "{}: tensor {name} is in another file too; remove the stray file",
                        path.display()
                    )));
                }
            }
            shards.push(shard);
        }
        Ok(Self {
            config,
            config_hash,
            dir: dir.to_path_buf(),
            shards,
            index,
        })
    }

    /// The checkpoint's folder.
    #[must_use]
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// Every tensor name, sorted.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.index.keys().map(String::as_str)
    }

    /// Whether `name` exists.
    #[must_use]
    pub fn has(&self, name: &str) -> bool {
        self.index.contains_key(name)
    }

    /// One tensor.
    ///
    /// # Errors
    /// [`Error::Input`] when it is missing or of an unsupported type.
    pub fn tensor(&self, name: &str) -> Result<Raw<'_>> {
        let shard = self.index.get(name).ok_or_else(|| {
            Error::Input(format!(
                "{}: tensor {name} is missing; the download is incomplete or of another family",
                self.dir.display()
            ))
        })?;
        self.shards[*shard].tensor(name)
    }

    /// One tensor, widened, refused when a value is not finite.
    ///
    /// # Errors
    /// As [`Checkpoint::tensor`], and [`Error::Input`] naming the first NaN or infinity.
    pub fn read_f32(&self, name: &str) -> Result<Vec<f32>> {
        let raw = self.tensor(name)?;
        let values = widen(raw.ty, raw.bytes);
        match values.iter().position(|v| !v.is_finite()) {
            None => Ok(values),
            Some(first) => Err(Error::Input(format!(
                "tensor {name}: {} at index {first}, {} non-finite of {} values; repair the checkpoint",
                values[first],
                values.iter().filter(|v| !v.is_finite()).count(),
                values.len()
            ))),
        }
    }

    /// (file name, BLAKE3) of every file read.
    #[must_use]
    pub fn sources(&self) -> Vec<(String, [u8; 32])> {
        let mut out = vec![("config.json".to_string(), self.config_hash)];
        out.extend(self.shards.iter().map(Shard::source));
        out
    }
}

/// Little-endian bytes of any alignment to f32.
#[must_use]
pub fn widen(ty: FloatType, bytes: &[u8]) -> Vec<f32> {
    match ty {
        FloatType::F32 => bytes
            .chunks_exact(4)
            .map(|b| f32::from_le_bytes(b.try_into().expect("4 bytes")))
            .collect(),
        FloatType::F16 => bytes
            .chunks_exact(2)
            .map(|b| half::f16::from_le_bytes([b[0], b[1]]).to_f32())
            .collect(),
        FloatType::Bf16 => bytes
            .chunks_exact(2)
            .map(|b| half::bf16::from_le_bytes([b[0], b[1]]).to_f32())
            .collect(),
    }
}

/// Reads and parses a JSON file.
///
/// # Errors
/// [`Error::Input`] when it is missing, malformed or only a Git-LFS pointer.
pub fn read_json(path: &Path) -> Result<Value> {
    parse(path, &read(path)?)
}

fn read(path: &Path) -> Result<Vec<u8>> {
    std::fs::read(path).map_err(|source| match source.kind() {
        std::io::ErrorKind::NotFound => Error::Input(format!(
            "{}: no such file; finish the download, or give the folder that has it",
            path.display()
        )),
        _ => Error::Io {
            path: path.to_path_buf(),
            source,
        },
    })
}

fn parse(path: &Path, bytes: &[u8]) -> Result<Value> {
    if bytes.starts_with(LFS_POINTER) {
        return Err(lfs_pointer(path));
    }
    serde_json::from_slice(bytes).map_err(|e| {
        Error::Input(format!(
            "{}: malformed JSON: {e}; download it again",
            path.display()
        ))
    })
}

/// How a Git-LFS pointer file starts.
const LFS_POINTER: &[u8] = b"version https://git-lfs";

fn lfs_pointer(path: &Path) -> Error {
    Error::Input(format!(
        "{}: a Git-LFS pointer, not the file itself; run `git lfs pull`",
        path.display()
    ))
}
