//! Structure-aware fuzzing, written once: the property tests feed it bytes of a seeded generator, the
//! targets under `fuzz/` feed it what libFuzzer invents.
//!
//! Every subject is one function from bytes to nothing that panics where an invariant fails. The
//! bytes only make choices, so any input is a valid case and a short one simply chooses zero.

pub mod checkpoint;
pub mod pack;
pub mod streams;

use serde_json::Value;
use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

/// Choices read from bytes; zero once they are used up.
pub struct Source<'a>(pub &'a [u8]);

impl Source<'_> {
    pub fn byte(&mut self) -> u8 {
        let Some((first, rest)) = self.0.split_first() else {
            return 0;
        };
        self.0 = rest;
        *first
    }

    pub fn word(&mut self) -> u32 {
        (0..4).fold(0, |word, _| word << 8 | u32::from(self.byte()))
    }

    /// A number below `n`, 0 when `n` is 0.
    pub fn below(&mut self, n: usize) -> usize {
        match n {
            0 | 1 => 0,
            2..=256 => usize::from(self.byte()) % n,
            _ => self.word() as usize % n,
        }
    }

    /// Numbers at which arithmetic goes wrong, and neighbours of `old`.
    pub fn number(&mut self, old: u64) -> u64 {
        const EDGES: [u64; 16] = [
            0,
            1,
            31,
            32,
            64,
            512,
            1 << 16,
            1 << 20,
            1 << 24,
            i32::MAX as u64,
            1 << 31,
            u32::MAX as u64,
            1 << 32,
            i64::MAX as u64,
            u64::MAX - 1,
            u64::MAX,
        ];
        match self.below(8) {
            0 => old.wrapping_add(1),
            1 => old.wrapping_sub(1),
            2 => old.wrapping_mul(2),
            3 => old / 2,
            4 => old ^ 1 << self.below(32),
            5 => u64::from(self.byte()),
            6 => EDGES[self.below(16)],
            _ => u64::from(self.word()),
        }
    }
}

/// Changes one place of a tree: a number, a text, a truth, or the entries of a list or object. The way
/// down picks among the children of each level, so big lists do not drown the small fields.
pub fn mutate(value: &mut Value, source: &mut Source<'_>) {
    match value {
        Value::Object(map) if !map.is_empty() && source.below(24) != 0 => {
            let at = source.below(map.len());
            let child = map.values_mut().nth(at).expect("below the length");
            mutate(child, source);
        }
        Value::Array(list) if !list.is_empty() && source.below(6) != 0 => {
            let at = source.below(list.len());
            mutate(&mut list[at], source);
        }
        Value::Object(map) => {
            let key = map.keys().nth(source.below(map.len())).cloned();
            if let Some(old) = key.and_then(|key| map.remove(&key))
                && source.below(2) == 0
            {
                map.insert("line\nbreak".into(), old);
            }
        }
        Value::Array(list) => {
            let (a, b) = (source.below(list.len()), source.below(list.len()));
            match source.below(4) {
                _ if list.is_empty() => {}
                0 => drop(list.remove(a)),
                1 => list.insert(a, list[b].clone()),
                2 => list.swap(a, b),
                _ => list.truncate(a),
            }
        }
        Value::Number(number) => {
            *value = match number.as_u64() {
                Some(old) => source.number(old).into(),
                None => (f64::from(f32::from_bits(source.word()))).into(),
            };
        }
        Value::String(text) => match source.below(4) {
            0 => *text = String::new(),
            1 => text.push_str("\nsecond line\u{1b}[31m\u{85}"),
            2 => *text = "F64".into(),
            _ => *value = source.word().into(),
        },
        Value::Bool(truth) => *truth = !*truth,
        Value::Null => *value = source.number(0).into(),
    }
}

/// Counts what each thread holds, so that a property can bound what its subject asked for.
pub struct Meter;

thread_local! {
    static HELD: Cell<isize> = const { Cell::new(0) };
    static PEAK: Cell<isize> = const { Cell::new(0) };
}

fn count(bytes: isize) {
    // A thread that is ending has no counters any more, and nothing measures it.
    let _ = HELD.try_with(|held| {
        held.set(held.get() + bytes);
        let _ = PEAK.try_with(|peak| peak.set(peak.get().max(held.get())));
    });
}

// SAFETY: every call goes to the system allocator unchanged; counting neither allocates nor unwinds.
unsafe impl GlobalAlloc for Meter {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count(layout.size() as isize);
        // SAFETY: the caller's promises are the ones the system allocator asks for.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        count(layout.size() as isize);
        // SAFETY: as above.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        count(-(layout.size() as isize));
        // SAFETY: as above; every block of ours came from the system allocator.
        unsafe { System.dealloc(at, layout) }
    }
}

#[global_allocator]
static METER: Meter = Meter;

/// Runs `f`; returns its result and the most bytes this thread held beyond what it held before.
pub fn metered<T>(f: impl FnOnce() -> T) -> (T, usize) {
    let before = HELD.get();
    PEAK.set(before);
    let result = f();
    (result, (PEAK.get() - before) as usize)
}

/// Errors are shown to people on one terminal line.
pub fn assert_one_line(error: &impl std::fmt::Display) {
    let text = error.to_string();
    assert!(!text.chars().any(char::is_control), "{text:?}");
}

/// Any test checkpoint cut to its first layer: header, config, data.
pub fn one_layer(fixture: &str) -> (Value, Value, Vec<u8>) {
    let dir = data_of(fixture);
    let (mut small, mut data) = (serde_json::Map::new(), Vec::new());
    for file in ["", "-00001-of-00002", "-00002-of-00002"] {
        let Ok(file) = std::fs::read(dir.join(format!("model{file}.safetensors"))) else {
            continue;
        };
        let length = u64::from_le_bytes(file[..8].try_into().expect("8 bytes")) as usize;
        let header: Value = serde_json::from_slice(&file[8..8 + length]).expect("a header");
        for (name, tensor) in header.as_object().expect("an object") {
            let later = name.starts_with("model.layers.") && !name.starts_with("model.layers.0.");
            let Some(offsets) = tensor["data_offsets"].as_array().filter(|_| !later) else {
                continue;
            };
            let [from, to] = [0, 1].map(|i| offsets[i].as_u64().expect("an offset") as usize);
            let mut tensor = tensor.clone();
            let start = data.len();
            data.extend_from_slice(&file[8 + length..][from..to]);
            tensor["data_offsets"] = serde_json::json!([start, data.len()]);
            small.insert(name.clone(), tensor);
        }
    }
    assert!(!small.is_empty(), "no weights in {}", dir.display());
    let config = std::fs::read(dir.join("config.json")).expect("its config");
    let mut config: Value = serde_json::from_slice(&config).expect("JSON");
    config["num_hidden_layers"] = 1.into();
    (small.into(), config, data)
}

/// A safetensors file of `header` and `data`.
pub fn safetensors(header: &[u8], data: &[u8]) -> Vec<u8> {
    [&(header.len() as u64).to_le_bytes(), header, data].concat()
}

/// The folder of a test checkpoint.
pub fn data_of(fixture: &str) -> std::path::PathBuf {
    let root = std::path::Path::new(env!("CARGO_MANIFEST_DIR"));
    // The fuzz workspace sits one folder below the root package.
    let near = root.join("tests/data").join(fixture);
    match near.exists() {
        true => near,
        false => root.join("../tests/data").join(fixture),
    }
}
