//! A checkpoint becomes a pack becomes logits: against mlx-lm's float32 references.

use ork_compiler::compile::{self, Options};
use ork_compiler::place::Scheme;
use ork_loader::perplexity::{self, Mode, Plan};
use ork_loader::session::{Backend, Config, Session};
use safetensors::SafeTensors;
use std::path::{Path, PathBuf};

fn root() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR"))
}

struct Reference {
    prompt: Vec<u32>,
    logits: Vec<f32>,
    greedy: Vec<u32>,
}

fn reference(dir: &Path) -> Reference {
    let bytes = std::fs::read(dir.join("reference.safetensors")).unwrap();
    let tensors = SafeTensors::deserialize(&bytes).unwrap();
    let words = |name: &str| -> Vec<[u8; 4]> {
        let data = tensors.tensor(name).unwrap().data().to_vec();
        data.chunks_exact(4)
            .map(|b| b.try_into().unwrap())
            .collect()
    };
    let ids = |name: &str| words(name).into_iter().map(u32::from_le_bytes).collect();
    Reference {
        prompt: ids("prompt_ids"),
        logits: words("logits")
            .into_iter()
            .map(f32::from_le_bytes)
            .collect(),
        greedy: ids("greedy_ids"),
    }
}

fn compile(checkpoint: &Path, out: &Path, change: impl FnOnce(&mut Options)) {
    let mut options = Options::new(checkpoint.to_path_buf(), out.to_path_buf());
    change(&mut options);
    compile::compile(&options).unwrap();
}

fn open(pack: &Path, backend: Backend, threads: usize) -> Session {
    let config = Config {
        backend,
        threads,
        ctx: None,
    };
    Session::open(pack, config).unwrap()
}

fn argmax(row: &[f32]) -> u32 {
    (0..row.len()).fold(0, |best, i| if row[best] < row[i] { i } else { best }) as u32
}

fn greedy(session: &mut Session, prompt: &[u32], n: usize) -> Vec<u32> {
    let mut logits = session.prefill(prompt).unwrap();
    let mut ids = Vec::new();
    while ids.len() < n {
        ids.push(argmax(&logits));
        logits = session.decode(*ids.last().unwrap()).unwrap();
    }
    ids
}

fn worst(a: &[f32], b: &[f32]) -> f32 {
    assert_eq!(a.len(), b.len());
    a.iter()
        .zip(b)
        .map(|(x, y)| (x - y).abs())
        .fold(0.0, f32::max)
}

fn lossless_matches(checkpoint: &str) {
    let checkpoint = root().join(checkpoint);
    let want = reference(&checkpoint);
    let dir = tempfile::tempdir().unwrap();
    let pack = dir.path().join("m.orkpack");
    compile(&checkpoint, &pack, |o| o.scheme = Scheme::Lossless);
    let mut session = open(&pack, Backend::Cpu, 2);
    let logits = session.logits_all(&want.prompt).unwrap();
    let error = worst(&logits, &want.logits);
    assert!(error <= 5e-3, "max |dlogit| {error}");
    session.reset();
    assert_eq!(
        greedy(&mut session, &want.prompt, want.greedy.len()),
        want.greedy
    );
}

#[test]
fn lossless_llama_bf16() {
    lossless_matches("tests/data/llama-bf16");
}

#[test]
fn lossless_prose_llama() {
    lossless_matches("examples/prose-llama");
}

/// The simulator executes the pack's streams; the CPU computes the same blocks from the map.
#[test]
fn simulator_and_cpu_agree_bit_for_bit() {
    for checkpoint in ["tests/data/llama-bf16", "examples/prose-llama"] {
        let checkpoint = root().join(checkpoint);
        let dir = tempfile::tempdir().unwrap();
        let pack = dir.path().join("m.orkpack");
        compile(&checkpoint, &pack, |_| {});
        let prompt = reference(&checkpoint).prompt;
        let sim = open(&pack, Backend::Sim, 2).logits_all(&prompt).unwrap();
        for threads in [1, 2] {
            let cpu = open(&pack, Backend::Cpu, threads)
                .logits_all(&prompt)
                .unwrap();
            assert!(
                sim == cpu,
                "{} with {threads} threads",
                checkpoint.display()
            );
        }
    }
}

/// Both halves of a chunk, a partly filled last class, several chunks.
#[test]
fn chunk_boundaries_do_not_show() {
    let checkpoint = root().join("examples/prose-llama");
    let dir = tempfile::tempdir().unwrap();
    let prompt: Vec<u32> = (0..300u32).map(|i| 3 + (i * 37) % 2000).collect();
    let mut last = None;
    for chunk in [64, 192, 512] {
        let pack = dir.path().join(format!("{chunk}.orkpack"));
        compile(&checkpoint, &pack, |o| o.chunk = Some(chunk));
        let sim = open(&pack, Backend::Sim, 2).prefill(&prompt).unwrap();
        let cpu = open(&pack, Backend::Cpu, 2).prefill(&prompt).unwrap();
        assert!(sim == cpu, "chunk {chunk}");
        if let Some(other) = last.replace(cpu) {
            assert!(other == sim, "chunk {chunk} changes the logits");
        }
    }
}

#[test]
fn one_and_two_jobs_write_the_same_bytes() {
    let checkpoint = root().join("examples/prose-llama");
    let dir = tempfile::tempdir().unwrap();
    let read = |jobs: usize| {
        let pack = dir.path().join(format!("{jobs}.orkpack"));
        compile(&checkpoint, &pack, |o| o.jobs = Some(jobs));
        std::fs::read(pack).unwrap()
    };
    assert!(read(1) == read(2));
}

/// Perplexity over the held-out text: windows of 256, targets 1..255, tail dropped, no BOS.
/// Prefill scores every row; decode feeds the same ids one by one after a prefilled half window.
#[test]
fn default_pack_perplexity_is_within_three_percent() {
    let checkpoint = root().join("examples/prose-llama");
    let dir = tempfile::tempdir().unwrap();
    let pack = dir.path().join("m.orkpack");
    compile(&checkpoint, &pack, |_| {});
    let exact = dir.path().join("exact.orkpack");
    compile(&checkpoint, &exact, |o| o.scheme = Scheme::Lossless);
    let text = std::fs::read_to_string(checkpoint.join("eval_small.txt")).unwrap();

    let mut session = open(&pack, Backend::Cpu, 2);
    let tokenizer =
        ork_loader::tokenizer::Tokenizer::new(session.tokenizer_bytes(), &session.manifest().text)
            .unwrap();
    let ids = tokenizer.encode(&text).unwrap();
    assert_eq!(ids.len(), 8556, "tokens of the held-out text");
    let score = |session: &mut Session, mode, windows| {
        let plan = Plan {
            window: 256,
            first: 1,
            windows,
            mode,
        };
        perplexity::score(session, &ids, None, plan, |_| {}).unwrap()
    };
    let mut exact = open(&exact, Backend::Cpu, 2);
    let float = score(&mut exact, Mode::Prefill, 33);
    assert_eq!((float.windows, float.targets), (33, 8415));
    assert!(
        (float.perplexity / 32.343_588 - 1.0).abs() < 5e-4,
        "{float:?}"
    );
    let prefill = score(&mut session, Mode::Prefill, 33);
    let ratio = prefill.perplexity / float.perplexity;
    assert!(ratio < 1.03, "prefill {ratio}");

    // What a user gets: half a window prefilled, the rest decoded from the 4-bit slice.
    let float = score(&mut exact, Mode::Seam, 9);
    let seam = score(&mut session, Mode::Seam, 9);
    let ratio = seam.perplexity / float.perplexity;
    assert!(ratio < 1.03, "seam {ratio}");
}

/// Requests that cannot be served are refused with both numbers, and leave the session usable.
#[test]
fn impossible_requests_are_refused() {
    let checkpoint = root().join("tests/data/llama-bf16");
    let dir = tempfile::tempdir().unwrap();
    let pack = dir.path().join("m.orkpack");
    compile(&checkpoint, &pack, |_| {});
    let config = |ctx| Config {
        backend: Backend::Cpu,
        threads: 1,
        ctx,
    };
    let mut session = Session::open(&pack, config(Some(8))).unwrap();
    let refuse = |session: &mut Session, ids: &[u32]| {
        let error = session.prefill(ids).unwrap_err();
        (error.exit_code(), error.to_string())
    };
    let (code, text) = refuse(&mut session, &[1; 9]);
    assert!(
        code == 4 && text.contains('9') && text.contains('8'),
        "{text}"
    );
    let (code, text) = refuse(&mut session, &[512]);
    assert!(code == 2 && text.contains("512"), "{text}");
    assert_eq!(refuse(&mut session, &[]).0, 2);
    let want = session.prefill(&[1, 2, 3]).unwrap();
    assert_eq!(session.position(), 3);
    session.reset();
    assert!(session.prefill(&[1, 2, 3]).unwrap() == want);
    let error = Session::open(&pack, config(Some(513))).err().unwrap();
    assert_eq!(error.exit_code(), 2, "{error}");
}

#[test]
fn packs_pass_their_own_selftest_and_damage_does_not() {
    let checkpoint = root().join("tests/data/llama-bf16");
    let dir = tempfile::tempdir().unwrap();
    let pack = dir.path().join("m.orkpack");
    compile(&checkpoint, &pack, |_| {});
    let checked = ork_loader::selftest::run(&pack, Backend::Cpu, 2).unwrap();
    assert_eq!(checked.texts, 3);
    assert!(2 <= checked.blocks && checked.logits == 512, "{checked:?}");
    // One weight bit: the hash finds it, and so would the blocks.
    let mut bytes = std::fs::read(&pack).unwrap();
    bytes[65536 + 5] ^= 1;
    std::fs::write(&pack, bytes).unwrap();
    let error = ork_loader::selftest::run(&pack, Backend::Cpu, 1).unwrap_err();
    assert_eq!(error.exit_code(), 7, "{error}");
    let lossless = dir.path().join("l.orkpack");
    compile(&checkpoint, &lossless, |o| o.scheme = Scheme::Lossless);
    assert_eq!(
        ork_loader::selftest::run(&lossless, Backend::Cpu, 1)
            .unwrap()
            .blocks,
        0
    );
}
