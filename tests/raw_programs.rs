//! A pack's programs as raw files, run by the `run_stream` example: what others would do with them.

#[allow(dead_code, unreachable_pub, reason = "an example included as a module")]
#[path = "../examples/run_stream.rs"]
mod run_stream;

use ork_compiler::compile::{self, Options};
use ork_compiler::programs::{self, Raw};
use ork_formats::layout::weight_index;
use ork_formats::pack::Reader;
use std::path::Path;

/// Half-chunks of 512 rows, so that chains have several programs (K 1024 takes 320 rows at most).
fn pack() -> Vec<u8> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("m.orkpack");
    let mut options = Options::new(root.join("examples/prose-llama"), path.clone());
    options.chunk = Some(1024);
    compile::compile(&options).unwrap();
    std::fs::read(path).unwrap()
}

fn run_stream(args: &[String]) -> u8 {
    run_stream::execute([&["run_stream".to_string()], args].concat())
}

fn naive(a: &[u8], w: &[u8], (m, k, n): (usize, usize, usize)) -> Vec<u8> {
    let mut out = Vec::with_capacity(m * n * 4);
    for row in 0..m {
        for col in 0..n {
            let sum: i32 = (0..k)
                .map(|i| {
                    let weight = w[weight_index(col, i, k / 32)] as i8;
                    i32::from(a[row * k + i] as i8) * i32::from(weight)
                })
                .sum();
            out.extend(sum.to_le_bytes());
        }
    }
    out
}

/// Writes the files and the arguments that map them; activations for `tasks` programs.
fn files(dir: &Path, raw: &Raw, a: &[u8], c_bytes: u32) -> Vec<String> {
    let d = &raw.description;
    let mut args = Vec::new();
    for (name, bytes, at) in [
        ("regcmd.bin", &raw.regcmd[..], d.regcmd),
        ("weights.bin", &raw.weights, d.w.addr),
        ("a.bin", a, d.a.addr),
    ] {
        let path = dir.join(name);
        std::fs::write(&path, bytes).unwrap();
        args.extend(["--load".into(), format!("{}@{at:#x}", path.display())]);
    }
    args.extend(["--zero".into(), format!("{:#x}:{c_bytes}", d.c.addr)]);
    args.extend(["--regcmd".into(), format!("{:#x}", d.regcmd)]);
    args.extend(["--entries".into(), d.entries.to_string()]);
    args
}

fn activations(bytes: u32) -> Vec<u8> {
    (0..bytes)
        .map(|i| ((i * 7919 % 255) as i32 - 127) as i8 as u8)
        .collect()
}

#[test]
fn raw_programs_compute_their_products() {
    let file = pack();
    let reader = Reader::parse(&file).unwrap();
    let list = programs::list(reader.manifest());
    let chained = list.iter().find(|r| r.next.is_some()).unwrap().id;
    for id in [0, chained, chained + 1, list.len() as u32 - 1] {
        let raw = programs::raw(&reader, &file, id).unwrap();
        let d = &raw.description;
        assert_eq!(
            (d.a.addr, d.w.addr, d.c.addr),
            (0x1000_0000, 0x2000_0000, 0x3000_0000)
        );
        assert_eq!((d.regcmd, d.entries), (0x4000_0000, 112));
        let dir = tempfile::tempdir().unwrap();
        let a = activations(d.a.bytes);
        let mut args = files(dir.path(), &raw, &a, d.c.bytes);
        let out = dir.path().join("c.bin");
        let dump = format!("{:#x}:{}={}", d.c.addr, d.c.bytes, out.display());
        args.extend(["--dump".into(), dump]);
        assert_eq!(run_stream(&args), 0);
        let shape = (d.m as usize, d.k as usize, d.n as usize);
        let want = naive(&a, &raw.weights[..d.w.bytes as usize], shape);
        assert!(std::fs::read(out).unwrap() == want, "program {id}");
    }
}

#[test]
fn links_stay_inside_the_file() {
    let file = pack();
    let reader = Reader::parse(&file).unwrap();
    let list = programs::list(reader.manifest());
    let chained = list.iter().find(|r| r.next.is_some()).unwrap().id;
    let raw = programs::raw(&reader, &file, chained).unwrap();
    let all = [&[raw.description.clone()][..], &raw.description.followers].concat();
    assert_eq!(raw.regcmd.len(), all.len() * 896);
    let end = |f: fn(&programs::Description) -> programs::Area, base: u32| {
        all.iter().map(|d| f(d).addr + f(d).bytes).max().unwrap() - base
    };
    let a = activations(end(|d| d.a, 0x1000_0000));
    let dir = tempfile::tempdir().unwrap();
    let mut args = files(dir.path(), &raw, &a, end(|d| d.c, 0x3000_0000));
    args.extend(["--tasks".into(), all.len().to_string()]);
    assert_eq!(run_stream(&args), 0);
    // One more than there are: the last has no link.
    *args.last_mut().unwrap() = (all.len() + 1).to_string();
    assert_eq!(run_stream(&args), 1);
}

#[test]
fn memory_that_was_not_given_is_not_touched() {
    let file = pack();
    let reader = Reader::parse(&file).unwrap();
    let raw = programs::raw(&reader, &file, 0).unwrap();
    let d = &raw.description;
    let dir = tempfile::tempdir().unwrap();
    let a = activations(d.a.bytes);
    for (a, c) in [(&a[..a.len() - 16], d.c.bytes), (&a[..], d.c.bytes - 4)] {
        assert_eq!(run_stream(&files(dir.path(), &raw, a, c)), 3);
    }
    let bad = ["--regcmd", "zebra", "--entries", "1"].map(String::from);
    assert_eq!(run_stream(&bad), 2);
}
