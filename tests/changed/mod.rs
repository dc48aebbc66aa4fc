//! Changed copies of fixtures, and what becomes of them.

use ork_compiler::compile::{self, Options};
use ork_compiler::error;
use ork_compiler::place::Scheme;
use ork_formats::model::Manifest;
use ork_formats::pack::Reader;
use safetensors::tensor::{Dtype, SafeTensors, TensorView};
use serde_json::Value;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

pub(crate) type Tensors = BTreeMap<String, (Dtype, Vec<usize>, Vec<u8>)>;

pub(crate) fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("tests/data")
        .join(name)
}

/// A changed copy of a fixture.
pub(crate) struct Copy {
    dir: tempfile::TempDir,
}

pub(crate) fn copy(name: &str) -> Copy {
    let dir = tempfile::tempdir().unwrap();
    for entry in std::fs::read_dir(fixture(name)).unwrap() {
        let path = entry.unwrap().path();
        let file = path.file_name().unwrap();
        if file != "reference.safetensors" {
            std::fs::copy(&path, dir.path().join(file)).unwrap();
        }
    }
    Copy { dir }
}

impl Copy {
    pub(crate) fn path(&self) -> &Path {
        self.dir.path()
    }

    pub(crate) fn file(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    pub(crate) fn json(self, name: &str, change: impl FnOnce(&mut Value)) -> Self {
        let path = self.file(name);
        let text = std::fs::read_to_string(&path).unwrap();
        let mut json = serde_json::from_str(&text).unwrap();
        change(&mut json);
        std::fs::write(path, json.to_string()).unwrap();
        self
    }

    pub(crate) fn config(self, change: impl FnOnce(&mut Value)) -> Self {
        self.json("config.json", change)
    }

    pub(crate) fn tensors(self, change: impl FnOnce(&mut Tensors)) -> Self {
        let path = self.file("model.safetensors");
        let mut tensors = read(&path);
        change(&mut tensors);
        write(&path, &tensors);
        self
    }

    pub(crate) fn compile(&self, scheme: Scheme) -> Result<Compiled, error::Error> {
        compile_at(self.path(), scheme)
    }

    /// Compiles; nothing may be odd.
    pub(crate) fn quiet(&self) -> Compiled {
        let done = self.compile(Scheme::Lossless).unwrap();
        assert!(done.warnings.is_empty(), "{:?}", done.warnings);
        done
    }

    /// Compiles with one warning that has every word.
    pub(crate) fn warned(&self, words: &[&str]) -> Compiled {
        let done = self.compile(Scheme::Lossless).unwrap();
        let [text] = &done.warnings[..] else {
            panic!("{:?}", done.warnings);
        };
        for word in words {
            assert!(text.contains(word), "{word:?} not in: {text}");
        }
        done
    }

    /// Refused with exit code 3 and one line that has every word.
    pub(crate) fn refused(&self, words: &[&str]) {
        let error = self.compile(Scheme::Lossless).err().expect("an error");
        let text = error.to_string();
        assert_eq!(error.exit_code(), 3, "{text}");
        assert!(!text.contains('\n'), "{text}");
        for word in words {
            assert!(text.contains(word), "{word:?} not in: {text}");
        }
    }
}

fn read(path: &Path) -> Tensors {
    let bytes = std::fs::read(path).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let tensors = file.tensors().into_iter();
    tensors
        .map(|(n, t)| (n, (t.dtype(), t.shape().to_vec(), t.data().to_vec())))
        .collect()
}

fn write(path: &Path, tensors: &Tensors) {
    let views = tensors
        .iter()
        .map(|(n, (ty, shape, data))| (n, TensorView::new(*ty, shape.clone(), data).unwrap()));
    std::fs::write(path, safetensors::serialize(views, None).unwrap()).unwrap();
}

pub(crate) struct Compiled {
    pub(crate) warnings: Vec<String>,
    pub(crate) bytes: Vec<u8>,
    pub(crate) manifest: Manifest,
}

impl Compiled {
    /// All weights as the pack holds them.
    pub(crate) fn weights(&self) -> (&[u8], &[u8]) {
        let reader = Reader::parse(&self.bytes).unwrap();
        (reader.host(&self.bytes), reader.npu_weights(&self.bytes))
    }
}

pub(crate) fn compile_at(checkpoint: &Path, scheme: Scheme) -> Result<Compiled, error::Error> {
    let out = tempfile::tempdir().unwrap();
    let path = out.path().join("out.orkpack");
    let mut options = Options::new(checkpoint.to_path_buf(), path.clone());
    options.scheme = scheme;
    let report = compile::compile(&options)?;
    let bytes = std::fs::read(path).unwrap();
    let manifest = Reader::parse(&bytes).unwrap().manifest().clone();
    Ok(Compiled {
        warnings: report.warnings,
        bytes,
        manifest,
    })
}

/// The fixture's own weights.
pub(crate) fn plain(name: &str) -> Compiled {
    let done = compile_at(&fixture(name), Scheme::Lossless).unwrap();
    assert!(done.warnings.is_empty(), "{:?}", done.warnings);
    done
}

pub(crate) fn same(a: &Compiled, b: &Compiled) {
    assert!(a.weights() == b.weights());
}

pub(crate) fn tensor(dtype: Dtype, shape: &[usize], data: Vec<u8>) -> (Dtype, Vec<usize>, Vec<u8>) {
    (dtype, shape.to_vec(), data)
}
