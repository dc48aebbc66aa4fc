//! Reads an MLX or Hugging Face checkpoint: `config.json` and safetensors shards, mapped, never cast, with
//! plain and quantised tensors behind one view.

mod affine;
pub(crate) mod config;
mod declared;
mod floats;
mod fp8;
pub mod hub;
mod mx;
mod packed;
mod quantised;
mod shards;
mod tensor;

pub(crate) use quantised::owner;
pub use tensor::Tensor;

use crate::error::{Error, Result};
use declared::Quantisation;
use quantised::{Unit, module};
use serde_json::Value;
use shards::{Shard, Stored};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Mutex;

/// An open checkpoint.
pub struct Checkpoint {
    /// `config.json`.
    pub config: Value,
    config_hash: [u8; 32],
    dir: PathBuf,
    shards: Vec<Shard>,
    /// Tensor name -> (shard, name in it).
    index: BTreeMap<String, (usize, String)>,
    quantisation: Quantisation,
    /// In the order in which they were noticed.
    warnings: Mutex<Vec<String>>,
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
        let quantisation = Quantisation::read(dir, &config)?;
        let mut index = BTreeMap::new();
        let mut shards = Vec::new();
        for path in shards::list(dir)? {
            let shard = Shard::open(&path)?;
            for name in shard.names() {
                let at = (shards.len(), name.clone());
                if index.insert(quantisation.rename(&name), at).is_some() {
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
            quantisation,
            warnings: Mutex::default(),
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

    /// Dimensions as the file has them; codes in words have fewer columns than the values they hold.
    #[must_use]
    pub fn stored_shape(&self, name: &str) -> Option<&[usize]> {
        self.stored(name).map(|stored| stored.shape)
    }

    /// One tensor of `columns` columns, whatever its format. The model says how many columns there are:
    /// packed shapes alone do not.
    ///
    /// # Errors
    /// [`Error::Input`] when it is missing, of an unsupported type, or lacks its scales.
    pub fn tensor(&self, name: &str, columns: usize) -> Result<Tensor<'_>> {
        let Some((shard, inner)) = self.index.get(name) else {
            return Err(self.missing(name));
        };
        let shard = &self.shards[*shard];
        let weight = shard.stored(inner).ok_or_else(|| self.missing(name))?;
        Unit {
            name,
            file: shard.path().display().to_string(),
            weight,
            checkpoint: self,
            k: columns,
        }
        .tensor()
    }

    fn stored(&self, name: &str) -> Option<Stored<'_>> {
        let (shard, inner) = self.index.get(name)?;
        self.shards[*shard].stored(inner)
    }

    fn missing(&self, name: &str) -> Error {
        let dir = self.dir.display();
        let left = self
            .names()
            .find(|other| owner(other, |weight| weight == name).is_some());
        Error::Input(match left {
            Some(scale) => format!(
                "{dir}: tensor {name} is missing but its {scale} is there; the download is incomplete, get every shard of one revision"
            ),
            None => format!(
                "{dir}: tensor {name} is missing; the download is incomplete or of another family"
            ),
        })
    }

    /// Notes what is odd but no reason to stop.
    pub(crate) fn warn(&self, text: String) {
        let mut warnings = self.warnings.lock().expect("no holder panics");
        if !warnings.contains(&text) {
            warnings.push(text);
        }
    }

    /// What was odd so far, a line each.
    #[must_use]
    pub fn warnings(&self) -> Vec<String> {
        self.warnings.lock().expect("no holder panics").clone()
    }

    /// Compares what the tensors are with what `config.json` says of them; the tensors are believed.
    pub(crate) fn compare_declared<'a>(&self, tensors: impl Iterator<Item = &'a Tensor<'a>>) {
        for text in self.quantisation.conflicts(tensors) {
            self.warn(text);
        }
    }

    /// A tensor is done with: its pages, and those of what stands beside it, may leave memory.
    pub(crate) fn release(&self, name: &str) {
        let beside = self
            .index
            .range(module(name).to_string()..)
            .take_while(|(other, _)| other.starts_with(module(name)))
            .map(|(other, _)| other.as_str());
        for name in beside {
            if let Some((shard, inner)) = self.index.get(name) {
                self.shards[*shard].release(inner);
            }
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
