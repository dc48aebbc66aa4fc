//! The NPU drivers against a fake kernel: the same logits as everywhere else, no hazard, and every fault
//! ends in right text or one clear error, in bounded time, with nothing left behind.

use ork_compiler::compile::{self, Options};
use ork_fakenpu::{Abi, Config as Board, Fake, Fault};
use ork_loader::error::Error;
use ork_loader::session::{Backend, Config, Hardware, Session};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

fn pack(cores: u32) -> PathBuf {
    static PACKS: OnceLock<tempfile::TempDir> = OnceLock::new();
    let dir = PACKS.get_or_init(|| {
        let dir = tempfile::tempdir().unwrap();
        for cores in 1..=3 {
            let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("examples/prose-llama");
            let mut options = Options::new(source, dir.path().join(format!("{cores}.orkpack")));
            options.cores = Some(cores);
            compile::compile(&options).unwrap();
        }
        dir
    });
    dir.path().join(format!("{cores}.orkpack"))
}

fn config(backend: Backend) -> Config {
    Config {
        backend,
        threads: 2,
        ctx: None,
    }
}

fn hardware(fake: &Fake) -> Hardware {
    let mut hardware = Hardware {
        kernel: Arc::new(fake.clone()),
        ..Hardware::default()
    };
    hardware.options.timeout = Duration::from_millis(3000);
    hardware
}

fn backend(abi: Abi) -> Backend {
    match abi {
        Abi::Rknpu => Backend::Rknpu,
        Abi::Rocket => Backend::Rocket,
        Abi::None => Backend::Auto,
    }
}

fn prompt(n: usize) -> Vec<u32> {
    (0..n as u32).map(|i| 3 + i * 31 % 1000).collect()
}

fn truth(cores: u32, n: usize) -> Vec<f32> {
    let mut session = Session::open(&pack(cores), config(Backend::Cpu)).unwrap();
    session.prefill(&prompt(n)).unwrap()
}

/// Nothing leaked, nothing that a board would not forgive.
fn clean(fake: &Fake) {
    assert_eq!(fake.violations(), Vec::<String>::new());
    balanced(fake);
}

fn balanced(fake: &Fake) {
    let ledger = fake.ledger();
    assert_eq!(ledger.created, ledger.destroyed, "{ledger:?}");
    assert_eq!(ledger.mapped, ledger.unmapped, "{ledger:?}");
    assert_eq!(ledger.open, 0, "{ledger:?}");
}

#[test]
fn the_drivers_give_the_logits_of_the_cpu_and_the_simulator() {
    for (cores, n, overlap) in [
        (3, 1, true),
        (3, 17, true),
        (2, 17, false),
        (1, 64, true),
        (3, 512, true),
        (2, 513, true),
        (3, 513, false),
        (1, 300, false),
        (3, 1300, true),
    ] {
        let want = truth(cores, n);
        if n <= 64 {
            let mut sim = Session::open(&pack(cores), config(Backend::Sim)).unwrap();
            assert!(
                sim.prefill(&prompt(n)).unwrap() == want,
                "sim, {cores}, {n}"
            );
        }
        for abi in [Abi::Rknpu, Abi::Rocket] {
            let fake = Fake::new(Board::new(abi));
            let mut hardware = hardware(&fake);
            hardware.overlap = overlap;
            let mut session =
                Session::open_on(&pack(cores), config(backend(abi)), hardware).unwrap();
            let mapped = fake.ledger().mapped;
            let plan = session.manifest().npu.as_ref().unwrap();
            assert_eq!(mapped, plan.extents.iter().map(|e| e.bytes).sum::<u64>());
            let have = session.prefill(&prompt(n)).unwrap();
            assert!(have == want, "{abi:?}, {cores} cores, {n} rows, {overlap}");
            let stats = session.stats();
            assert_eq!((stats.device.misses, stats.fallbacks), (0, 0));
            drop(session);
            clean(&fake);
        }
    }
}

#[test]
fn imported_buffers_give_the_same_logits_one_program_at_a_time() {
    for n in [17, 130] {
        let fake = Fake::new(Board::new(Abi::Rknpu));
        let mut hardware = hardware(&fake);
        hardware.options.import = true;
        let mut session = Session::open_on(&pack(3), config(Backend::Rknpu), hardware).unwrap();
        assert!(session.prefill(&prompt(n)).unwrap() == truth(3, n));
        drop(session);
        assert_eq!(fake.violations(), Vec::<String>::new());
        let ledger = fake.ledger();
        assert_eq!((ledger.mapped, ledger.open), (ledger.unmapped, 0));
        assert_eq!(ledger.created, ledger.destroyed);
    }
}

/// One lost, late or incomplete job costs a reset and gives the right logits; jobs that stay lost give
/// the right logits from the CPU, one warning and a count.
#[test]
fn lost_jobs_do_not_show_in_the_text() {
    let n = 130;
    let want = truth(3, n);
    for abi in [Abi::Rknpu, Abi::Rocket] {
        // Behind the warm-up, inside the prompt.
        let first = 60;
        for (fault, lost_for_good) in [
            (Fault::LoseJob(first), false),
            (Fault::SkipWords(first), false),
            (Fault::LateJob(first, Duration::from_millis(700)), false),
            (Fault::LoseFrom(first), true),
        ] {
            let fake = Fake::new(Board::new(abi).with(fault));
            let mut hardware = hardware(&fake);
            hardware.options.timeout = Duration::from_millis(300);
            let began = Instant::now();
            let mut session = Session::open_on(&pack(3), config(backend(abi)), hardware).unwrap();
            let have = session.prefill(&prompt(n)).unwrap();
            assert!(have == want, "{abi:?}, {fault:?}");
            let stats = session.stats();
            assert_eq!(0 < stats.fallbacks, lost_for_good, "{abi:?}, {fault:?}");
            assert_eq!(
                session.warning().is_some(),
                lost_for_good,
                "{abi:?}, {fault:?}"
            );
            let late = matches!(fault, Fault::LateJob(..));
            assert!(late || 0 < stats.device.resets, "{abi:?}, {fault:?}");
            assert!(began.elapsed() < Duration::from_secs(60), "{fault:?}");
            drop(session);
            clean(&fake);
        }
    }
}

/// What cannot be survived is one line, the right kind, and nothing stays allocated.
#[test]
fn other_faults_are_one_clear_error() {
    let refused = |abi, faults: &[Fault], code: u8, words: &str| {
        let mut board = Board::new(abi);
        board.faults = faults.to_vec();
        let fake = Fake::new(board);
        let opened = Session::open_on(&pack(3), config(backend(abi)), hardware(&fake));
        let error = opened
            .and_then(|mut session| session.prefill(&prompt(130)))
            .expect_err(words);
        let text = error.to_string();
        assert_eq!(error.exit_code(), code, "{text}");
        assert!(text.contains(words) && !text.contains('\n'), "{text}");
        clean(&fake);
    };
    for abi in [Abi::Rknpu, Abi::Rocket] {
        for limit in [0, 1 << 20, 6 << 20] {
            refused(abi, &[Fault::NoMemoryAt(limit)], 4, "refused after");
        }
        refused(abi, &[Fault::HeldBy(4242)], 6, "held by pid 4242");
        refused(abi, &[Fault::HighAddresses], 1, "0x200000000");
        refused(abi, &[Fault::OverlappingAddresses], 1, "overlap");
        refused(abi, &[Fault::RefuseSubmit(0)], 1, "submit failed");
        refused(abi, &[Fault::RefuseSubmit(60)], 1, "submit failed");
    }
    let lost = Fault::LoseFrom(20);
    refused(Abi::Rknpu, &[lost, Fault::ResetFails], 1, "reset failed");
}

#[test]
fn old_drivers_need_force() {
    let mut board = Board::new(Abi::Rknpu);
    board.version = 804;
    let fake = Fake::new(board.clone());
    let opened = Session::open_on(&pack(3), config(Backend::Rknpu), hardware(&fake));
    let error = opened.err().expect("refused");
    assert_eq!(error.exit_code(), 6);
    let text = error.to_string();
    assert!(text.contains("0.8.4") && text.contains("0.9.8"), "{text}");
    clean(&fake);
    let fake = Fake::new(board);
    let mut hardware = hardware(&fake);
    hardware.options.force_driver = true;
    let mut session = Session::open_on(&pack(3), config(Backend::Rknpu), hardware).unwrap();
    assert!(session.prefill(&prompt(17)).unwrap() == truth(3, 17));
}

#[test]
fn auto_says_what_it_picked_and_why() {
    let picked = |board: Board| {
        let fake = Fake::new(board);
        let opened = Session::open_on(&pack(3), config(Backend::Auto), hardware(&fake));
        let session = opened.unwrap();
        let why = session.picked().unwrap().why.clone();
        (session.backend(), why)
    };
    assert_eq!(picked(Board::new(Abi::Rknpu)).0, "rknpu");
    assert_eq!(picked(Board::new(Abi::Rocket)).0, "rocket");
    let (name, why) = picked(Board::new(Abi::None));
    assert_eq!(name, "cpu");
    assert!(why.contains("no NPU driver"), "{why}");
    let (name, why) = picked(Board::new(Abi::Rknpu).with(Fault::HeldBy(7)));
    assert_eq!(name, "cpu");
    assert!(why.contains("held by pid 7"), "{why}");
}

/// A device is one session's at a time; the next one may have it afterwards.
#[test]
fn a_device_is_not_shared() {
    let fake = Fake::new(Board::new(Abi::Rknpu));
    let first = Session::open_on(&pack(1), config(Backend::Rknpu), hardware(&fake)).unwrap();
    let second = Session::open_on(&pack(1), config(Backend::Rknpu), hardware(&fake));
    let error = second.err().expect("busy").to_string();
    assert!(error.contains("busy"), "{error}");
    drop(first);
    Session::open_on(&pack(1), config(Backend::Rknpu), hardware(&fake)).unwrap();
    clean(&fake);
}

/// A thousand requests with random cancels: what is in flight ends, nothing accumulates. The board does
/// not compute here, it only takes its time.
#[test]
fn many_cancelled_requests_leave_nothing() {
    let mut board = Board::new(Abi::Rknpu);
    board.hollow = Some(500.0);
    let fake = Fake::new(board);
    let mut hardware = hardware(&fake);
    hardware.options.timeout = Duration::from_secs(5);
    let mut session = Session::open_on(&pack(3), config(Backend::Rknpu), hardware).unwrap();
    let ids = prompt(2);
    session.prefill(&ids).unwrap();
    session.reset();
    let began = Instant::now();
    let want = session.prefill(&ids).unwrap();
    let usual = began.elapsed();
    session.reset();
    let flag = Arc::new(AtomicBool::new(false));
    session.stop_on(Arc::clone(&flag));
    let before = fake.ledger();
    let mut random = 0x5eed_u64;
    let (mut whole, mut cancelled) = (0, 0);
    for _ in 0..1000 {
        random = random
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1);
        let flag = Arc::clone(&flag);
        flag.store(false, Ordering::Relaxed);
        let delay = usual.mul_f64((random >> 40) as f64 / f64::from(1 << 23));
        let canceller = std::thread::spawn(move || {
            std::thread::sleep(delay);
            flag.store(true, Ordering::Relaxed);
        });
        match session.prefill(&ids) {
            Ok(logits) => {
                assert!(logits == want);
                whole += 1;
            }
            Err(Error::Interrupted) => cancelled += 1,
            Err(other) => panic!("{other}"),
        }
        canceller.join().unwrap();
        session.reset();
    }
    assert!(
        0 < whole && 0 < cancelled,
        "{whole} whole, {cancelled} cancelled"
    );
    let after = fake.ledger();
    assert_eq!(
        (before.created, before.mapped),
        (after.created, after.mapped)
    );
    drop(session);
    clean(&fake);
}

/// Recurrent layers and routed experts: the half-chunks hand their state over in order.
#[test]
fn hybrid_families_give_the_same_logits_on_both_drivers() {
    for name in ["qwen3_next-bf16", "qwen3_5_moe-bf16"] {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("m.orkpack");
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data");
        let mut options = Options::new(source.join(name), path.clone());
        options.chunk = Some(128);
        compile::compile(&options).unwrap();
        let ids: Vec<u32> = (0..150).map(|i| 3 + i * 31 % 500).collect();
        let logits = |backend, hardware| {
            let mut session = Session::open_on(&path, config(backend), hardware).unwrap();
            session.logits_all(&ids).unwrap()
        };
        let want = logits(Backend::Cpu, Hardware::default());
        assert!(logits(Backend::Sim, Hardware::default()) == want, "{name}");
        for abi in [Abi::Rknpu, Abi::Rocket] {
            let fake = Fake::new(Board::new(abi));
            assert!(
                logits(backend(abi), hardware(&fake)) == want,
                "{name}, {abi:?}"
            );
            clean(&fake);
        }
    }
}
