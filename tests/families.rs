//! Every supported family against mlx-lm's float32 references, from checkpoint to logits.

mod fixtures;

use fixtures::{FIXTURES, fixture};
use ork_compiler::checkpoint::Checkpoint;
use ork_compiler::compile::{self, Options};
use ork_compiler::graph;
use ork_compiler::place::Scheme;
use ork_compiler::reference::Reference;
use ork_loader::session::{Backend, Config, Session};
use safetensors::SafeTensors;
use std::path::{Path, PathBuf};

struct Expected {
    prompt: Vec<u32>,
    logits: Vec<f32>,
    greedy: Vec<u32>,
}

fn expected(dir: &Path) -> Expected {
    let bytes = std::fs::read(dir.join("reference.safetensors")).unwrap();
    let tensors = SafeTensors::deserialize(&bytes).unwrap();
    let words = |name: &str| -> Vec<[u8; 4]> {
        let data = tensors.tensor(name).unwrap().data();
        data.chunks_exact(4)
            .map(|b| b.try_into().unwrap())
            .collect()
    };
    let ids = |name: &str| words(name).into_iter().map(u32::from_le_bytes).collect();
    Expected {
        prompt: ids("prompt_ids"),
        logits: words("logits")
            .into_iter()
            .map(f32::from_le_bytes)
            .collect(),
        greedy: ids("greedy_ids"),
    }
}

fn worst(a: &[f32], b: &[f32]) -> f32 {
    assert_eq!(a.len(), b.len());
    a.iter()
        .zip(b)
        .map(|(x, y)| (x - y).abs())
        .fold(0.0, f32::max)
}

fn argmax(row: &[f32]) -> u32 {
    (0..row.len()).fold(0, |best, i| if row[best] < row[i] { i } else { best }) as u32
}

fn pack(checkpoint: &Path, dir: &Path, lossless: bool) -> PathBuf {
    let path = dir.join(format!("{lossless}.orkpack"));
    let mut options = Options::new(checkpoint.to_path_buf(), path.clone());
    if lossless {
        options.scheme = Scheme::Lossless;
    }
    compile::compile(&options).unwrap();
    path
}

fn open(pack: &Path, backend: Backend) -> Session {
    let config = Config {
        backend,
        threads: 2,
        ctx: None,
    };
    Session::open(pack, config).unwrap()
}

#[test]
fn references_match_mlx() {
    for name in FIXTURES {
        let dir = fixture(name);
        let want = expected(&dir);
        let checkpoint = Checkpoint::open(&dir).unwrap();
        let graph = graph::build(&checkpoint).unwrap();
        let reference = Reference::new(&checkpoint, &graph).unwrap();
        let error = worst(&reference.forward(&want.prompt).unwrap(), &want.logits);
        assert!(error <= 2e-3, "{name}: max |dlogit| {error}");
        let greedy = reference.greedy(&want.prompt, want.greedy.len()).unwrap();
        assert_eq!(greedy, want.greedy, "{name}");
    }
}

#[test]
fn lossless_packs_match_mlx() {
    for name in FIXTURES {
        let dir = tempfile::tempdir().unwrap();
        let want = expected(&fixture(name));
        let mut session = open(&pack(&fixture(name), dir.path(), true), Backend::Cpu);
        let error = worst(&session.logits_all(&want.prompt).unwrap(), &want.logits);
        assert!(error <= 5e-3, "{name}: max |dlogit| {error}");
        session.reset();
        let mut logits = session.prefill(&want.prompt).unwrap();
        for (step, id) in want.greedy.iter().enumerate() {
            assert_eq!(argmax(&logits), *id, "{name}, step {step}");
            logits = session.decode(*id).unwrap();
        }
    }
}

/// The quantised packs: both backends to the bit, and close enough to the reference that most rows
/// choose the same id (the weights are random, so quantisation moves near-ties).
#[test]
fn default_packs_agree_across_backends_and_with_mlx() {
    for name in FIXTURES {
        let dir = tempfile::tempdir().unwrap();
        let want = expected(&fixture(name));
        let path = pack(&fixture(name), dir.path(), false);
        let sim = open(&path, Backend::Sim).logits_all(&want.prompt).unwrap();
        let cpu = open(&path, Backend::Cpu).logits_all(&want.prompt).unwrap();
        assert!(sim == cpu, "{name}");
        let vocab = cpu.len() / want.prompt.len();
        let agree = cpu
            .chunks_exact(vocab)
            .zip(want.logits.chunks_exact(vocab))
            .filter(|(a, b)| argmax(a) == argmax(b))
            .count();
        // Random routers have near-ties too, and an expert that flips moves a whole row.
        let least = if name.contains("moe") || name.contains("next") {
            10
        } else {
            16
        };
        assert!(
            least <= agree,
            "{name}: {agree} of {} rows",
            want.prompt.len()
        );
    }
}
