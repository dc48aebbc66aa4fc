//! Going back in a sequence: free with attention alone, by snapshot where layers are recurrent.

use ork_compiler::compile::{self, Options};
use ork_compiler::place::Experts;
use ork_loader::session::{Backend, Config, Session};
use std::path::Path;
use std::sync::OnceLock;

/// Attention alone, and delta nets with experts.
const FIXTURES: [&str; 2] = ["qwen3-bf16", "qwen3_5_moe-bf16"];

fn packs() -> &'static [Vec<u8>; 2] {
    static PACKS: OnceLock<[Vec<u8>; 2]> = OnceLock::new();
    PACKS.get_or_init(|| FIXTURES.map(|name| compiled(name, Experts::Int8)))
}

fn compiled(name: &str, experts: Experts) -> Vec<u8> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data");
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("m.orkpack");
    let mut options = Options::new(root.join(name), path.clone());
    options.experts = experts;
    compile::compile(&options).unwrap();
    std::fs::read(path).unwrap()
}

fn open(pack: &[u8], threads: usize) -> Session {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("m.orkpack");
    std::fs::write(&path, pack).unwrap();
    let config = Config {
        backend: Backend::Cpu,
        threads,
        ctx: None,
    };
    Session::open(&path, config).unwrap()
}

fn ids(n: u32, seed: u32) -> Vec<u32> {
    (0..n).map(|i| (i * 37 + seed * 101) % 500).collect()
}

fn decode(session: &mut Session, ids: &[u32]) -> Vec<f32> {
    ids.iter()
        .flat_map(|id| session.decode(*id).unwrap())
        .collect()
}

#[test]
fn a_restored_session_repeats_itself_to_the_bit() {
    for pack in packs() {
        let mut session = open(pack, 2);
        session.prefill(&ids(21, 1)).unwrap();
        let point = session.snapshot();
        assert_eq!(point.position(), 21);
        let first = decode(&mut session, &ids(7, 2));
        assert_eq!(session.position(), 28);
        session.restore(&point).unwrap();
        assert_eq!(session.position(), 21);
        assert!(decode(&mut session, &ids(7, 2)) == first);
        // The snapshot is untouched by what came after it.
        session.restore(&point).unwrap();
        session.prefill(&ids(40, 3)).unwrap();
        session.restore(&point).unwrap();
        assert!(decode(&mut session, &ids(7, 2)) == first);
    }
    let [one, other] = packs();
    let foreign = open(one, 1).snapshot();
    assert!(open(other, 1).restore(&foreign).is_err());
}

#[test]
fn resuming_equals_computing_from_the_start() {
    for (pack, recurrent) in packs().iter().zip([false, true]) {
        let mut session = open(pack, 2);
        let turn = ids(20, 1);
        assert_eq!(session.resume(&turn).unwrap().1, 20);
        let answer = ids(6, 2);
        decode(&mut session, &answer);
        let held = [&turn[..], &answer].concat();

        // The next turn continues: only what is new is computed.
        let next = [&held[..], &ids(9, 3)].concat();
        assert_eq!(session.resume(&next).unwrap().1, 9);
        decode(&mut session, &ids(4, 4));

        // An answer that its template rewrites: back to the end of the first turn, no further.
        let other = [&held[..], &ids(5, 5)].concat();
        let (logits, computed) = session.resume(&other).unwrap();
        assert_eq!(computed, 5);
        let mut fresh = open(pack, 1);
        fresh.prefill(&turn).unwrap();
        decode(&mut fresh, &answer);
        assert!(fresh.prefill(&ids(5, 5)).unwrap() == logits);

        // Before any snapshot: a recurrent model starts again.
        let early = [&turn[..7], &ids(8, 6)].concat();
        let (logits, computed) = session.resume(&early).unwrap();
        assert_eq!(computed, if recurrent { 15 } else { 8 });
        if recurrent {
            assert!(open(pack, 1).prefill(&early).unwrap() == logits);
        }
        assert_eq!(session.position(), 15);

        session.reset();
        assert_eq!(session.position(), 0);
        assert!(session.prefill(&early).unwrap() == open(pack, 2).prefill(&early).unwrap());
    }
}

#[test]
fn truncation_says_how_much_remains() {
    let [attention, hybrid] = packs();
    let mut session = open(attention, 1);
    session.prefill(&ids(30, 1)).unwrap();
    assert_eq!((session.truncate(50), session.truncate(12)), (30, 12));
    let mut session = open(hybrid, 1);
    session.resume(&ids(30, 1)).unwrap();
    session.decode(5).unwrap();
    assert_eq!(session.truncate(30), 30);
    assert_eq!(session.truncate(29), 0);
}

/// Chunks, decode steps and threads are ways to cut the same work.
#[test]
fn recurrent_layers_and_experts_do_not_see_chunks_or_threads() {
    for experts in [Experts::Int8, Experts::Decode] {
        let pack = compiled("qwen3_5_moe-bf16", experts);
        let prompt = ids(33, 1);
        let whole = open(&pack, 1).logits_all(&prompt).unwrap();
        let mut session = open(&pack, 3);
        let mut parts = Vec::new();
        for part in prompt.chunks(5) {
            parts.extend(session.logits_all(part).unwrap());
        }
        assert!(whole == parts, "{experts:?}");
    }
}
