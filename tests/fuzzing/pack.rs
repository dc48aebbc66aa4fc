//! Packs: a forger who makes every hash right is refused, or has written a pack that runs.

use super::{Source, assert_one_line, metered, mutate, one_layer, safetensors};
use ork_compiler::compile::{self, Options};
use ork_formats::model::Manifest;
use ork_formats::pack::{ALIGN, HEADER_BYTES, Kind, Reader};
use ork_loader::session::{Backend, Config, Session};
use serde_json::Value;
use std::sync::OnceLock;

/// Held per byte of file and of decompressed section: decoded entries are wider than their bytes.
const WIDENING: usize = 32;
/// Held whatever the file: error texts, tables of the decompressor.
const FIXED: usize = 1 << 20;

struct Honest {
    sections: Vec<Vec<u8>>,
    header: Vec<u8>,
    manifest: Value,
}

/// One layer of attention and dense MLP; one of a delta net and experts.
fn honest() -> &'static [Honest; 2] {
    static HONEST: OnceLock<[Honest; 2]> = OnceLock::new();
    HONEST.get_or_init(|| ["llama-bf16", "qwen3_next-bf16"].map(compiled))
}

fn compiled(fixture: &str) -> Honest {
    let (header, config, data) = one_layer(fixture);
    let dir = tempfile::tempdir().expect("a temporary folder");
    for name in ["tokenizer.json", "tokenizer_config.json"] {
        let from = super::data_of(fixture).join(name);
        std::fs::copy(from, dir.path().join(name)).expect("copied");
    }
    let shard = safetensors(header.to_string().as_bytes(), &data);
    std::fs::write(dir.path().join("model.safetensors"), shard).expect("written");
    std::fs::write(dir.path().join("config.json"), config.to_string()).expect("written");
    let path = dir.path().join("m.orkpack");
    let mut options = Options::new(dir.path().to_path_buf(), path.clone());
    options.chunk = Some(64);
    compile::compile(&options).expect("the honest pack");
    let file = std::fs::read(path).expect("written above");
    let reader = Reader::parse(&file).expect("an honest pack parses");
    let range = |s: &ork_formats::pack::Section| s.offset as usize..(s.offset + s.stored) as usize;
    Honest {
        sections: reader
            .sections()
            .iter()
            .map(|s| file[range(s)].to_vec())
            .collect(),
        header: file[..HEADER_BYTES].to_vec(),
        manifest: serde_json::to_value(reader.manifest()).expect("plain data"),
    }
}

/// Mutates the manifest, the sections and the header, signs everything again, parses and runs.
pub fn check(bytes: &[u8]) {
    let source = &mut Source(bytes);
    if let Some(file) = forge(source) {
        examine(&file);
    }
}

/// Every invariant of one file.
pub fn examine(file: &[u8]) {
    let (parsed, peak) = metered(|| Reader::parse(file));
    let row = |index: usize, at: usize| {
        let bytes = file.get(64 + index * 64 + at..)?.get(..8)?;
        Some(u64::from_le_bytes(bytes.try_into().expect("8 bytes")))
    };
    // What a compressed section may promise is bounded by what it stores.
    let promised: u64 = (0..Kind::ALL.len())
        .filter(|i| Kind::ALL[*i].compressed())
        .filter_map(|i| Some(row(i, 24)?.min(row(i, 16)?.saturating_mul(4096))))
        .map(|raw| raw.min(file.len() as u64 * 4096))
        .sum();
    let justified = FIXED + WIDENING * (file.len() + promised as usize);
    assert!(
        peak <= justified,
        "{peak} bytes held, {justified} justified"
    );
    let reader = match parsed {
        Ok(reader) => reader,
        Err(error) => return assert_one_line(&error),
    };
    // The bulk hashes are the user's choice to check, so a pack must run without them too.
    if let Err(error) = reader.verify(file) {
        assert_one_line(&error);
    }
    let manifest = reader.manifest();
    // Deep op lists are legal and slow; the interesting ones are near the honest one.
    if 200 < manifest.model.ops.len() {
        return;
    }
    let dir = tempfile::tempdir().expect("a temporary folder");
    let path = dir.path().join("m.orkpack");
    std::fs::write(&path, file).expect("written");
    let logits: Vec<Vec<u32>> = [Backend::Sim, Backend::Cpu]
        .into_iter()
        .map(|backend| {
            let config = Config {
                backend,
                threads: 1,
                ctx: None,
            };
            let (session, peak) = metered(|| Session::open(&path, config));
            assert!(
                peak <= justified,
                "{peak} bytes held, {justified} justified"
            );
            let mut session = session.expect("a parsed pack opens");
            let rows = session.context().min(3);
            let ids: Vec<u32> = (0..rows).map(|i| i % manifest.model.vocab).collect();
            let out = session.prefill(&ids).and_then(|mut out| {
                if session.position() < session.context() {
                    out.extend(session.decode(0)?);
                }
                Ok(out)
            });
            match out {
                Ok(out) => out.into_iter().map(f32::to_bits).collect(),
                // A forged factor may be huge; that is noticed and said, by both in the same place.
                Err(error) => {
                    assert_one_line(&error);
                    let text = error.to_string();
                    assert!(text.contains("weights are damaged"), "{text}");
                    text.bytes().map(u32::from).collect()
                }
            }
        })
        .collect();
    assert_eq!(logits[0], logits[1], "the simulator and the CPU disagree");
}

fn forge(source: &mut Source<'_>) -> Option<Vec<u8>> {
    let honest = &honest()[source.below(2)];
    let mut sections = honest.sections.clone();
    let mut manifest = honest.manifest.clone();
    for _ in 0..source.below(4) {
        // Most of what matters is in the ops, the tensors and the plan.
        match source.below(8) {
            0 => mutate(&mut manifest, source),
            1..=3 => mutate(&mut manifest["model"], source),
            4 => mutate(&mut manifest["tensors"], source),
            _ => mutate(&mut manifest["npu"], source),
        }
    }
    // Trees that are no manifest any more say nothing about the reader.
    let manifest: Manifest = serde_json::from_value(manifest).ok()?;
    let config = bincode::config::standard();
    let mut raw = bincode::serde::encode_to_vec(&manifest, config).expect("plain data");
    let position = |kind| Kind::ALL.iter().position(|k| *k == kind);
    let last = position(Kind::Manifest).expect("every pack has one");
    let mut index = sections.len();
    match source.below(8) {
        0 => index = source.below(last),
        1 => damage(&mut raw, source),
        _ => {}
    }
    sections[last] = zstd::bulk::compress(&raw, 1).expect("compresses");
    if let Some(section) = sections.get_mut(index) {
        damage(section, source);
        let length = source.number(section.len() as u64) as usize;
        if source.below(2) == 0 && length < 1 << 20 {
            section.resize(length, 0);
        }
    }
    let mut file = honest.header.clone();
    for (index, (section, kind)) in sections.iter().zip(Kind::ALL).enumerate() {
        let offset = file.len().next_multiple_of(ALIGN as usize);
        file.resize(offset, 0);
        file.extend_from_slice(section);
        let row = 64 + index * 64;
        let mut raw_bytes = section.len() as u64;
        if kind.compressed() {
            raw_bytes = u64::from_le_bytes(file[row + 24..][..8].try_into().expect("8 bytes"));
        }
        if kind == Kind::Manifest {
            raw_bytes = raw.len() as u64;
        }
        for (at, value) in [
            (8, offset as u64),
            (16, section.len() as u64),
            (24, raw_bytes),
        ] {
            file[row + at..][..8].copy_from_slice(&value.to_le_bytes());
        }
        file[row + 32..][..32].copy_from_slice(blake3::hash(section).as_bytes());
    }
    let total = file.len() as u64;
    file[16..24].copy_from_slice(&total.to_le_bytes());
    if source.below(8) == 0 {
        // The header's fields up to the last row's end.
        let at = 8 * source.below((64 + Kind::ALL.len() * 64) / 8);
        let old = u64::from_le_bytes(file[at..at + 8].try_into().expect("8 bytes"));
        let new = source.number(old);
        file[at..at + 8].copy_from_slice(&new.to_le_bytes());
    }
    let hash = blake3::hash(&file[..HEADER_BYTES - 32]);
    file[HEADER_BYTES - 32..HEADER_BYTES].copy_from_slice(hash.as_bytes());
    Some(file)
}

fn damage(bytes: &mut [u8], source: &mut Source<'_>) {
    if !bytes.is_empty() {
        let at = source.below(bytes.len());
        bytes[at] ^= 1 << source.below(8);
    }
}
