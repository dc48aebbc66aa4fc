//! Compiles the embedded model, prints its plan, checks the NPU simulator against the CPU and streams
//! a paragraph: `cargo run --release --example quickstart`.
#![allow(
    clippy::print_stdout,
    clippy::print_stderr,
    reason = "an example talks to the terminal"
)]

use ork_compiler::compile;
use ork_loader::generate;
use ork_loader::sampler::{Sampler, Settings};
use ork_loader::session::{Backend, Config, Session};
use ork_loader::tokenizer::Tokenizer;
use std::error::Error;
use std::io::Write;
use std::path::Path;

const PROMPT: &str = "It is a truth universally acknowledged, that";

fn main() -> Result<(), Box<dyn Error>> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let dir = tempfile::tempdir()?;
    let pack = dir.path().join("prose-llama.orkpack");
    let report = compile::compile(&compile::Options::new(
        root.join("examples/prose-llama"),
        pack.clone(),
    ))?;
    println!("{report}");

    let ids = {
        let session = open(&pack, Backend::Cpu)?;
        Tokenizer::new(session.tokenizer_bytes(), &session.manifest().text)?.encode(PROMPT)?
    };
    let sim = open(&pack, Backend::Sim)?.prefill(&ids)?;
    let mut session = open(&pack, Backend::Cpu)?;
    let cpu = session.prefill(&ids)?;
    session.reset();
    if sim != cpu {
        return Err("simulator and CPU disagree on the prompt's logits".into());
    }
    println!(
        "prompt of {} tokens: simulator and CPU give identical logits\n",
        ids.len()
    );

    let tokenizer = Tokenizer::new(session.tokenizer_bytes(), &session.manifest().text)?;
    print!("{PROMPT}");
    let mut sampler = Sampler::new(Settings {
        temperature: 0.8,
        top_k: 40,
        top_p: 0.95,
        seed: 1,
        ..Settings::GREEDY
    });
    let request = generate::Request {
        prompt: &ids,
        n: 160,
        stops: &[],
    };
    generate::generate(&mut session, &tokenizer, request, &mut sampler, |piece| {
        print!("{piece}");
        Ok(std::io::stdout().flush().is_ok())
    })?;
    println!();
    Ok(())
}

fn open(pack: &Path, backend: Backend) -> Result<Session, ork_loader::error::Error> {
    Session::open(
        pack,
        Config {
            backend,
            threads: std::thread::available_parallelism().map_or(1, usize::from),
            ctx: None,
        },
    )
}
