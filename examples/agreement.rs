//! How close default packs stay to float32: `cargo run --release --example agreement [-- DIR...]`, where
//! each directory holds a checkpoint and its `reference.safetensors`; the repository's fixtures if none.
//!
//! Top-1 is the share of rows whose likeliest id is the reference's; KL is the mean divergence of a
//! row's distribution from the reference's, in nats.
#![allow(clippy::print_stdout, reason = "an example talks to the terminal")]

use ork_compiler::compile::{self, Options};
use ork_loader::session::{Backend, Config, Session};
use safetensors::SafeTensors;
use std::error::Error;
use std::path::{Path, PathBuf};

fn main() -> Result<(), Box<dyn Error>> {
    let mut dirs: Vec<PathBuf> = std::env::args_os().skip(1).map(PathBuf::from).collect();
    if dirs.is_empty() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR"));
        for entry in std::fs::read_dir(root.join("tests/data"))? {
            dirs.push(entry?.path());
        }
        dirs.push(root.join("examples/prose-llama"));
        dirs.retain(|d| d.join("reference.safetensors").is_file());
        dirs.sort();
    }
    println!("| checkpoint | rows | prefill top-1 | prefill KL | decode top-1 | decode KL |");
    println!("|---|---|---|---|---|---|");
    let scratch = tempfile::tempdir()?;
    for dir in dirs {
        let bytes = std::fs::read(dir.join("reference.safetensors"))?;
        let tensors = SafeTensors::deserialize(&bytes)?;
        let words = |name: &str| -> Result<Vec<[u8; 4]>, Box<dyn Error>> {
            let (words, _) = tensors.tensor(name)?.data().as_chunks::<4>();
            Ok(words.to_vec())
        };
        let ids: Vec<u32> = words("prompt_ids")?
            .into_iter()
            .map(u32::from_le_bytes)
            .collect();
        let want: Vec<f32> = words("logits")?
            .into_iter()
            .map(f32::from_le_bytes)
            .collect();
        let pack = scratch.path().join("m.orkpack");
        let mut options = Options::new(dir.clone(), pack.clone());
        options.force = true;
        compile::compile(&options)?;
        let config = Config {
            backend: Backend::Cpu,
            threads: std::thread::available_parallelism().map_or(1, usize::from),
            ctx: None,
        };
        let mut session = Session::open(&pack, config)?;
        let vocab = want.len() / ids.len();
        let prefill = session.logits_all(&ids)?;
        session.reset();
        let mut decode = session.prefill(&ids[..1])?;
        for id in &ids[1..] {
            decode.extend(session.decode(*id)?);
        }
        let (a, b) = (
            compare(&prefill, &want, vocab),
            compare(&decode, &want, vocab),
        );
        println!(
            "| {} | {} | {:.0} % | {:.4} | {:.0} % | {:.4} |",
            dir.file_name().unwrap_or_default().display(),
            ids.len(),
            a.0,
            a.1,
            b.0,
            b.1
        );
    }
    Ok(())
}

/// (top-1 agreement in per cent, mean KL divergence from `want` in nats) of `[rows][vocab]` logits.
fn compare(got: &[f32], want: &[f32], vocab: usize) -> (f64, f64) {
    let rows = (want.len() / vocab) as f64;
    let (mut same, mut divergence) = (0u32, 0.0);
    for (g, w) in got.chunks_exact(vocab).zip(want.chunks_exact(vocab)) {
        same += u32::from(best(g) == best(w));
        let (g, w) = (log_softmax(g), log_softmax(w));
        divergence += w
            .iter()
            .zip(&g)
            .map(|(w, g)| w.exp() * (w - g))
            .sum::<f64>();
    }
    (100.0 * f64::from(same) / rows, divergence / rows)
}

fn best(row: &[f32]) -> usize {
    (0..row.len()).fold(0, |best, i| if row[best] < row[i] { i } else { best })
}

fn log_softmax(row: &[f32]) -> Vec<f64> {
    let most = row.iter().fold(f32::NEG_INFINITY, |m, v| m.max(*v));
    let sum: f64 = row.iter().map(|v| f64::from(v - most).exp()).sum();
    row.iter().map(|v| f64::from(v - most) - sum.ln()).collect()
}
