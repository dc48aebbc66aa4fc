//! Cut, flipped and forged packs: always a specific error, never a panic.

use ork_compiler::compile::{self, Options};
use ork_formats::model::{Manifest, Op, Region};
use ork_formats::pack::{HEADER_BYTES, PackError, Reader};
use std::path::Path;
use std::sync::OnceLock;

fn pack() -> &'static [u8] {
    static PACK: OnceLock<Vec<u8>> = OnceLock::new();
    PACK.get_or_init(|| {
        let root = Path::new(env!("CARGO_MANIFEST_DIR"));
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("m.orkpack");
        let mut options = Options::new(root.join("tests/data/llama-bf16"), path.clone());
        options.chunk = Some(64);
        compile::compile(&options).unwrap();
        std::fs::read(path).unwrap()
    })
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
    for round in 0..1000 {
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
        forge(8, &[2]),
        PackError::Version { found: 2, .. }
    ));
    assert!(matches!(forge(24, &[0xff; 8]), PackError::Caps { .. }));
    assert!(matches!(forge(32, b"rk0000"), PackError::Soc(_)));
    assert!(matches!(forge(12, &[0xff; 4]), PackError::Section { .. }));
    // Section rows: kind, offset, stored, raw.
    for row in 0..6 {
        let row = 64 + row * 64;
        assert!(matches!(forge(row, &[0x77]), PackError::Section { .. }));
        for field in [8, 16, 24] {
            let error = forge(row + field, &[0xff; 8]);
            assert!(matches!(error, PackError::Section { .. }), "{error}");
        }
    }
    // The tokenizer's and the manifest's hashes.
    for row in [4, 5] {
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
        // The grains hint of a program has other legal values; every other bit is watched.
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

/// Replaces the manifest, which is the last section, and signs the file.
fn forge_manifest(change: impl FnOnce(&mut Manifest)) -> String {
    let good = pack();
    let reader = Reader::parse(good).unwrap();
    let mut manifest = reader.manifest().clone();
    change(&mut manifest);
    let raw = bincode::serde::encode_to_vec(&manifest, bincode::config::standard()).unwrap();
    let stored = zstd::bulk::compress(&raw, 1).unwrap();
    let mut bytes = good[..reader.sections()[5].offset as usize].to_vec();
    bytes.extend_from_slice(&stored);
    let total = bytes.len() as u64;
    bytes[16..24].copy_from_slice(&total.to_le_bytes());
    let row = 64 + 5 * 64;
    bytes[row + 16..row + 24].copy_from_slice(&(stored.len() as u64).to_le_bytes());
    bytes[row + 24..row + 32].copy_from_slice(&(raw.len() as u64).to_le_bytes());
    bytes[row + 32..row + 64].copy_from_slice(blake3::hash(&stored).as_bytes());
    sign_header(&mut bytes);
    let error = Reader::parse(&bytes).unwrap_err().to_string();
    assert!(!error.contains('\n'), "{error}");
    error
}

/// Manifests that once overflowed, panicked at run time, or reserved memory that no file justifies.
#[test]
fn forged_manifests_are_refused() {
    let error = forge_manifest(|m| {
        let form = m.tensors.iter_mut().find_map(|t| t.npu.as_mut()).unwrap();
        (form.slice_k, form.k_slices) = (u32::MAX, u32::MAX);
    });
    assert!(error.contains("overflows int32"), "{error}");
    let error = forge_manifest(|m| {
        for op in &mut m.model.ops {
            if let Op::Attention { q, out, .. } = op {
                *out = *q;
            }
        }
    });
    assert!(error.contains("attention in place"), "{error}");
    let error = forge_manifest(|m| {
        for op in &mut m.model.ops {
            if let Op::Add { x, out, .. } = op {
                *x = *out;
            }
        }
    });
    assert!(error.contains("added to itself"), "{error}");
    let error = forge_manifest(|m| m.model.slots.extend([1 << 20; 100]));
    assert!(error.contains("values a row"), "{error}");
    for region in [Region::Tasks, Region::A, Region::Ring] {
        let error = forge_manifest(|m| {
            let extents = &mut m.npu.as_mut().unwrap().extents;
            let last = extents.iter_mut().rfind(|e| e.region == region).unwrap();
            last.bytes = 64 << 20;
        });
        assert!(error.contains("the programs use"), "{error}");
    }
    let error = forge_manifest(|m| {
        m.tensors[0].name = "two\nlines".into();
        m.tensors[0].n = 0;
    });
    assert!(error.contains("two\\nlines"), "{error}");
}

/// The weight extents are whole pages, the section is what the compiler wrote: a block must end inside
/// both, since the CPU reads it from the file.
#[test]
fn weight_blocks_end_inside_the_section() {
    let good = pack();
    let reader = Reader::parse(good).unwrap();
    let sections = reader.sections();
    let mut bytes = good.to_vec();
    let cut = 64;
    let stored = sections[0].stored - cut;
    // The next section starts at the same multiple of 64 KiB only if the cut does not cross one.
    let end = (sections[0].offset + stored) as usize;
    bytes[end..end + cut as usize].fill(0);
    bytes[64 + 16..64 + 24].copy_from_slice(&stored.to_le_bytes());
    bytes[64 + 24..64 + 32].copy_from_slice(&stored.to_le_bytes());
    sign_header(&mut bytes);
    let error = Reader::parse(&bytes).unwrap_err().to_string();
    assert!(error.contains("exceeds the section's"), "{error}");
}
