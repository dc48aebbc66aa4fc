//! Cut, flipped and forged packs: always a specific error, never a panic.

use ork_compiler::compile::{self, Options};
use ork_formats::model::{HostForm, Manifest, Op};
use ork_formats::pack::{HEADER_BYTES, PackError, Reader};
use std::path::Path;
use std::sync::OnceLock;

fn pack() -> &'static [u8] {
    static PACK: OnceLock<Vec<u8>> = OnceLock::new();
    PACK.get_or_init(|| compiled("llama-bf16"))
}

/// Recurrent layers and experts.
fn hybrid() -> &'static [u8] {
    static PACK: OnceLock<Vec<u8>> = OnceLock::new();
    PACK.get_or_init(|| compiled("qwen3_next-bf16"))
}

fn compiled(fixture: &str) -> Vec<u8> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data");
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("m.orkpack");
    let mut options = Options::new(root.join(fixture), path.clone());
    options.chunk = Some(64);
    compile::compile(&options).unwrap();
    std::fs::read(path).unwrap()
}

struct Random(u64);

impl Random {
    fn below(&mut self, n: usize) -> usize {
        self.0 = self
            .0
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1);
        (self.0 >> 33) as usize % n
    }
}

/// Recomputes the header checksum, as a forger would.
fn sign_header(bytes: &mut [u8]) {
    let hash = blake3::hash(&bytes[..HEADER_BYTES - 32]);
    bytes[HEADER_BYTES - 32..HEADER_BYTES].copy_from_slice(hash.as_bytes());
}

#[test]
fn an_honest_pack_passes() {
    let reader = Reader::parse(pack()).unwrap();
    reader.verify(pack()).unwrap();
}

#[test]
fn every_cut_is_named() {
    let good = pack();
    let mut cuts = vec![0, 1, 7, 8, 63, 4095, 4096, good.len() - 1];
    for section in Reader::parse(good).unwrap().sections() {
        for edge in [section.offset, section.offset + section.stored] {
            cuts.extend([edge as usize - 1, edge as usize, edge as usize + 1]);
        }
    }
    let mut random = Random(1);
    cuts.extend((0..200).map(|_| random.below(good.len())));
    for cut in cuts.into_iter().filter(|cut| *cut < good.len()) {
        let error = Reader::parse(&good[..cut]).unwrap_err();
        let named = matches!(
            error,
            PackError::Empty | PackError::CutHeader { .. } | PackError::Length { .. }
        );
        assert!(named, "cut at {cut}: {error}");
    }
    let longer = [good, &[0]].concat();
    assert!(matches!(
        Reader::parse(&longer).unwrap_err(),
        PackError::Length { .. }
    ));
}

#[test]
fn no_flipped_bit_passes_verify() {
    let mut bytes = pack().to_vec();
    let mut random = Random(2);
    for round in 0..10_000 {
        // Half of the flips in the small structural parts.
        let at = match round % 2 {
            0 => random.below(bytes.len()),
            _ => random.below(HEADER_BYTES),
        };
        let bit = 1 << random.below(8);
        bytes[at] ^= bit;
        let passed = Reader::parse(&bytes).is_ok_and(|r| r.verify(&bytes).is_ok());
        assert!(!passed, "byte {at}, mask {bit:#x}");
        bytes[at] ^= bit;
    }
}

/// A forger who fixes the header's checksum still meets the proofs behind it.
#[test]
fn forged_headers_are_refused() {
    let good = pack();
    let forge = |at: usize, value: &[u8]| {
        let mut bytes = good.to_vec();
        bytes[at..at + value.len()].copy_from_slice(value);
        sign_header(&mut bytes);
        Reader::parse(&bytes).unwrap_err()
    };
    assert!(matches!(
        forge(8, &[3]),
        PackError::Version { found: 3, .. }
    ));
    assert!(matches!(
        forge(8, &[0]),
        PackError::Version { found: 0, .. }
    ));
    // Version 1 has no golden section.
    assert!(matches!(forge(8, &[1]), PackError::Section { .. }));
    assert!(matches!(forge(24, &[0xff; 8]), PackError::Caps { .. }));
    assert!(matches!(forge(32, b"rk0000"), PackError::Soc(_)));
    assert!(matches!(forge(12, &[0xff; 4]), PackError::Section { .. }));
    // Section rows: kind, offset, stored, raw.
    for row in 0..7 {
        let row = 64 + row * 64;
        assert!(matches!(forge(row, &[0x77]), PackError::Section { .. }));
        for field in [8, 16, 24] {
            let error = forge(row + field, &[0xff; 8]);
            assert!(matches!(error, PackError::Section { .. }), "{error}");
        }
    }
    // The hashes of the cold sections.
    for row in [4, 5, 6] {
        let error = forge(64 + row * 64 + 32, &[0; 32]);
        assert!(matches!(error, PackError::SectionHash(_)), "{error}");
    }
}

/// Forges sections with every hash made right: what is left is what the proofs catch.
#[test]
fn forged_streams_and_relocations_are_refused() {
    let good = pack();
    let sections = Reader::parse(good).unwrap().sections().to_vec();
    let forge = |index: usize, change: &dyn Fn(&mut [u8])| {
        let mut bytes = good.to_vec();
        let s = sections[index];
        let range = s.offset as usize..(s.offset + s.stored) as usize;
        change(&mut bytes[range.clone()]);
        let hash = blake3::hash(&bytes[range]);
        bytes[64 + index * 64 + 32..][..32].copy_from_slice(hash.as_bytes());
        sign_header(&mut bytes);
        Reader::parse(&bytes).unwrap_err()
    };
    let mut random = Random(3);
    for _ in 0..300 {
        let at = random.below(sections[2].stored as usize);
        let error = forge(2, &|s| s[at] ^= 1 << (at % 8));
        // Every bit but those of the grains hint is watched; no flip of this seed makes a legal hint.
        let named = matches!(error, PackError::Program { .. } | PackError::Reloc { .. });
        assert!(named, "program byte {at}: {error}");
        let at = random.below(sections[3].stored as usize);
        let error = forge(3, &|s| s[at] ^= 0x40);
        assert!(
            matches!(error, PackError::Reloc { .. }),
            "reloc byte {at}: {error}"
        );
    }
}

/// Re-encodes a changed manifest with every hash and length made right.
fn forge_manifest(change: impl FnOnce(&mut Manifest)) -> PackError {
    forge_manifest_of(pack(), change).expect_err("the forged manifest passed")
}

fn forge_manifest_of(good: &[u8], change: impl FnOnce(&mut Manifest)) -> Result<(), PackError> {
    let reader = Reader::parse(good).unwrap();
    let mut manifest = reader.manifest().clone();
    change(&mut manifest);
    let raw = bincode::serde::encode_to_vec(&manifest, bincode::config::standard()).unwrap();
    let stored = zstd::bulk::compress(&raw, 1).unwrap();
    // The manifest is the last section.
    let index = reader.sections().len() - 1;
    let start = reader.sections()[index].offset as usize;
    let mut bytes = [&good[..start], &stored].concat();
    let row = 64 + index * 64;
    let total = bytes.len() as u64;
    bytes[row + 16..row + 24].copy_from_slice(&(stored.len() as u64).to_le_bytes());
    bytes[row + 24..row + 32].copy_from_slice(&(raw.len() as u64).to_le_bytes());
    bytes[row + 32..row + 64].copy_from_slice(blake3::hash(&stored).as_bytes());
    bytes[16..24].copy_from_slice(&total.to_le_bytes());
    sign_header(&mut bytes);
    Reader::parse(&bytes).map(drop)
}

/// One forged manifest per rule; each must be refused with words that name what is wrong.
#[test]
fn forged_manifests_are_refused() {
    type Forgery = (&'static str, fn(&mut Manifest));
    let npu = |m: &mut Manifest| m.tensors.iter().position(|t| t.npu.is_some()).unwrap();
    let cases: &[Forgery] = &[
        ("slot", |m| m.model.hidden = 999),
        ("activation slots", |m| m.model.slots.clear()),
        ("slot width", |m| m.model.slots[0] = u32::MAX),
        ("vocab", |m| m.model.vocab = 0),
        ("context", |m| m.model.context = u32::MAX),
        ("cache width", |m| m.model.caches[0].head_dim = u32::MAX),
        ("rope", |m| m.model.ropes[0].inv_freq.clear()),
        ("finite", |m| m.model.ropes[0].inv_freq[0] = f32::NAN),
        ("tensor", |m| m.model.head = 10_000),
        ("prompt id", |m| m.text.prefix = vec![1 << 30]),
        ("cache 0 serves", |m| {
            let op = m
                .model
                .ops
                .iter_mut()
                .find(|o| matches!(o, Op::Attention { .. }));
            if let Some(Op::Attention { cache, .. }) = op {
                *cache = 1;
            }
        }),
        ("attention over", |m| {
            for op in &mut m.model.ops {
                if let Op::Attention { q, out, .. } = op {
                    *out = *q;
                }
            }
        }),
        ("added to slot", |m| {
            for op in &mut m.model.ops {
                if let Op::Add { x, out, .. } = op {
                    *x = *out;
                }
            }
        }),
        ("its shape needs", |m| m.tensors[0].n += 16),
        ("the op needs", |m| m.model.vocab /= 2),
        ("exceed the host", |m| {
            if let HostForm::Int8 { at, .. } = &mut m.tensors[0].host {
                at.offset = !63;
            }
        }),
        ("aligned", |m| {
            if let HostForm::Int8 { at, .. } = &mut m.tensors[0].host {
                at.offset += 1;
            }
        }),
        ("without an NPU plan", |m| m.npu = None),
        ("cores", |m| m.npu.as_mut().unwrap().cores = 99),
        ("chunk", |m| m.npu.as_mut().unwrap().chunk = 4096),
        ("chunk", |m| m.npu.as_mut().unwrap().half_rows = 63),
        ("extent 0 has", |m| {
            m.npu.as_mut().unwrap().extents[0].bytes = 1 << 40
        }),
        ("out of order", |m| {
            m.npu.as_mut().unwrap().extents.reverse()
        }),
        ("A buffers overlap", |m| {
            let plan = m.npu.as_mut().unwrap();
            plan.a_buffers[1] = plan.a_buffers[0];
        }),
        ("program bytes", |m| {
            m.npu.as_mut().unwrap().programs.truncate(1)
        }),
    ];
    for (word, change) in cases {
        let error = forge_manifest(change);
        assert!(matches!(error, PackError::Model(_)), "{word}: {error}");
        assert!(error.to_string().contains(word), "{word:?} not in: {error}");
    }
    let form = |change: fn(&mut ork_formats::model::NpuForm)| {
        forge_manifest(|m| {
            let index = npu(m);
            change(m.tensors[index].npu.as_mut().unwrap());
        })
    };
    for error in [
        form(|f| (f.slice_k, f.k_slices) = (u32::MAX, u32::MAX)),
        form(|f| f.k_slices = 0),
        form(|f| f.blocks[0].n0 = 7),
        form(|f| f.blocks[0].at.extent = 77),
        form(|f| f.blocks[0].at.offset = !15),
        form(|f| f.blocks.push(f.blocks[0])),
        form(|f| f.chains[0].first = u32::MAX),
        form(|f| f.chains[0].count = u32::MAX),
        form(|f| f.chains[0].core = 9),
        form(|f| f.chains.push(f.chains[0])),
        form(|f| f.chains.truncate(1)),
    ] {
        assert!(matches!(error, PackError::Model(_)), "{error}");
    }
    let program = |change: fn(&mut ork_formats::model::Program)| {
        forge_manifest(|m| change(&mut m.npu.as_mut().unwrap().programs[0]))
    };
    for error in [
        program(|p| p.m = 0),
        program(|p| p.k *= 2),
        program(|p| p.n = u32::MAX),
        program(|p| p.row0 = u32::MAX),
        program(|p| p.a.offset += 64),
        program(|p| p.w.offset += 1024),
        program(|p| p.c.extent = 0),
        program(|p| p.c.offset = !15),
    ] {
        assert!(matches!(error, PackError::Model(_)), "{error}");
    }
    // A result moved elsewhere in the ring contradicts its relocation.
    let moved = program(|p| p.c.offset += 16);
    assert!(
        matches!(moved, PackError::Model(_) | PackError::Reloc { .. }),
        "{moved}"
    );
}

/// The rules of recurrent layers and experts, one forgery each.
#[test]
fn forged_states_and_experts_are_refused() {
    type Forgery = (&'static str, fn(&mut Manifest));
    /// Changes every op of one kind.
    macro_rules! ops {
        ($kind:ident { $($field:ident),+ } => $change:expr) => {
            |m: &mut Manifest| {
                for op in &mut m.model.ops {
                    if let Op::$kind { $($field,)+ .. } = op {
                        $change;
                    }
                }
            }
        };
    }
    let cases: &[Forgery] = &[
        ("state of", |m| m.model.states[0].rows = 0),
        ("state of", |m| m.model.states[1].width = u32::MAX),
        ("states of", |m| m.model.states[1].heads = 1 << 20),
        ("state 0 serves", ops!(Conv { state } => *state = 2)),
        ("state 99 of", ops!(Delta { state } => *state = 99)),
        ("heads of a convolution", |m| m.model.states[0].heads = 2),
        ("channels", |m| m.model.states[0].width /= 2),
        ("in place", ops!(Conv { x, out } => *out = *x)),
        ("the op needs", |m| m.model.states[0].rows = 4),
        ("channels out", ops!(Conv { out } => *out = 0)),
        ("0 key heads", ops!(Delta { key_heads } => *key_heads = 0)),
        ("3 key heads", ops!(Delta { key_heads } => *key_heads = 3)),
        ("q, k and v", ops!(Delta { key_heads } => *key_heads = 1)),
        ("width of a", ops!(Delta { a } => *a = 0)),
        ("width of b", ops!(Delta { b } => *b = 0)),
        ("of the delta rule", ops!(Delta { out } => *out = 3)),
        ("eps", ops!(Delta { eps } => *eps = f32::NAN)),
        ("eps", ops!(Delta { eps } => *eps = -1.0)),
        ("scale", ops!(Delta { scale } => *scale = f32::INFINITY)),
        ("the op needs", ops!(Delta { a_log } => *a_log = 0)),
        ("the op needs", ops!(Delta { dt_bias } => *dt_bias = 0)),
        ("0 of 8 experts", ops!(Moe { top } => *top = 0)),
        ("9 of 8 experts", ops!(Moe { top } => *top = 9)),
        ("experts over", ops!(Moe { x, out } => *out = *x)),
        (
            "the op needs 8 times",
            ops!(Moe { gate, down } => *gate = *down),
        ),
        (
            "the op needs 8 times",
            ops!(Moe { gate, down } => *down = *gate),
        ),
        ("the op needs", ops!(Moe { up } => *up = 0)),
        ("the op needs", ops!(Moe { router } => *router = 0)),
        (
            "width of the gate",
            ops!(AddGated { gate, x } => *gate = *x),
        ),
        ("gated by", ops!(AddGated { x, out } => *out = *x)),
        ("addends", ops!(AddGated { x, gate } => *x = *gate)),
        ("8 times", |m| {
            let stack = m.tensors.iter().position(|t| t.stack == 8).unwrap();
            let other = m.tensors.iter().position(|t| t.npu.is_some()).unwrap();
            for op in &mut m.model.ops {
                if let Op::Linear { weight, .. } = op
                    && *weight == other as u32
                {
                    *weight = stack as u32;
                }
            }
        }),
        ("a stack of 0", |m| m.tensors[0].stack = 0),
        ("a stack of", |m| m.tensors[0].stack = u32::MAX),
        ("its shape needs", |m| m.tensors[0].stack = 2),
        ("without an int8 form", |m| {
            let t = m.tensors.iter_mut().find(|t| t.batch.is_some());
            t.unwrap().batch = None;
        }),
        ("its shape needs", |m| {
            let t = m.tensors.iter_mut().find_map(|t| t.batch.as_mut());
            t.unwrap().at.bytes -= 64;
        }),
        ("its shape needs", |m| {
            let t = m.tensors.iter_mut().find_map(|t| t.batch.as_mut());
            t.unwrap().scales.bytes -= 4;
        }),
        ("exceed the host", |m| {
            let t = m.tensors.iter_mut().find_map(|t| t.batch.as_mut());
            t.unwrap().at.offset = !63;
        }),
    ];
    for (word, change) in cases {
        let error = forge_manifest_of(hybrid(), change).expect_err(word);
        assert!(matches!(error, PackError::Model(_)), "{word}: {error}");
        assert!(error.to_string().contains(word), "{word:?} not in: {error}");
    }
}

/// Reserved header bytes are zero, whatever the checksum says.
#[test]
fn reserved_bytes_are_checked() {
    for at in [48, 63, 68, 64 + 7 * 64, HEADER_BYTES - 33, 40] {
        let mut bytes = pack().to_vec();
        bytes[at] ^= 1;
        sign_header(&mut bytes);
        let error = Reader::parse(&bytes).unwrap_err();
        assert_eq!(error, PackError::Padding(at as u64));
    }
}

/// The previous version, which had no golden section, is still read.
#[test]
fn version_one_is_read() {
    let good = pack();
    let sections = Reader::parse(good).unwrap().sections().to_vec();
    let (golden, manifest) = (sections[5], sections[6]);
    let stored = &good[manifest.offset as usize..];
    let mut bytes = [&good[..golden.offset as usize], stored].concat();
    let total = bytes.len() as u64;
    bytes[8..12].copy_from_slice(&1u32.to_le_bytes());
    bytes[12..16].copy_from_slice(&6u32.to_le_bytes());
    bytes[16..24].copy_from_slice(&total.to_le_bytes());
    bytes.copy_within(64 + 6 * 64..64 + 7 * 64, 64 + 5 * 64);
    bytes[64 + 5 * 64 + 8..][..8].copy_from_slice(&golden.offset.to_le_bytes());
    bytes[64 + 6 * 64..64 + 7 * 64].fill(0);
    sign_header(&mut bytes);
    let reader = Reader::parse(&bytes).unwrap();
    reader.verify(&bytes).unwrap();
    assert_eq!(reader.version(), 1);
    assert!(reader.golden().is_none());
    assert_eq!(reader.manifest(), Reader::parse(good).unwrap().manifest());
}
