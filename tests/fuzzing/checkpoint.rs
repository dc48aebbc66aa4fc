//! Checkpoints: mutated safetensors headers and configs are refused in one line, or indexed truly.

use super::{Source, assert_one_line, metered, mutate, one_layer, safetensors};
use ork_compiler::checkpoint::Checkpoint;
use ork_compiler::graph;
use serde_json::Value;
use std::sync::OnceLock;

/// A header and a config of a few kilobytes justify no more than this.
const MEMORY: usize = 32 << 20;

/// Plain, and one for each way that a unit of quantised tensors is read.
const NAMES: [&str; 4] = [
    "llama-bf16",
    "qwen3-affine4-g64",
    "qwen3-nvfp4",
    "qwen3-fp8-hf",
];

/// Mutates both files, opens the folder and builds the graph.
pub fn check(bytes: &[u8]) {
    static HONEST: OnceLock<Vec<(Value, Value, Vec<u8>)>> = OnceLock::new();
    let honest = HONEST.get_or_init(|| NAMES.map(one_layer).into());
    let source = &mut Source(bytes);
    let (header, config, data) = &honest[source.below(NAMES.len())];
    let (mut header, mut config) = (header.clone(), config.clone());
    for _ in 0..source.below(4) {
        mutate(&mut config, source);
    }
    // The optional fields have parsers of their own.
    if source.below(3) == 0 {
        extend(&mut config, source);
    }
    for _ in 0..source.below(3) {
        mutate(&mut header, source);
    }
    let mut config = config.to_string().into_bytes();
    let header = header.to_string();
    let mut shard = safetensors(header.as_bytes(), data);
    match source.below(12) {
        0 => damage(&mut config, source),
        1 => damage(&mut shard[..8], source),
        2 => damage(&mut shard[8..8 + header.len()], source),
        3 => shard.truncate(source.below(header.len() + 64)),
        _ => {}
    }
    let dir = tempfile::tempdir().expect("a temporary folder");
    std::fs::write(dir.path().join("config.json"), &config).expect("written");
    std::fs::write(dir.path().join("model.safetensors"), &shard).expect("written");
    let (result, peak) = metered(|| {
        let checkpoint = Checkpoint::open(dir.path())?;
        let graph = graph::build(&checkpoint)?;
        for decl in &graph.tensors {
            let rows = decl.rows(&checkpoint)?;
            let elements = u64::from(decl.stack) * u64::from(decl.n) * u64::from(decl.k);
            if let Some(ty) = rows.plain() {
                assert_eq!(rows.bytes(), elements * ty.bytes());
            }
            assert_eq!(decl.read_f32(&checkpoint)?.len() as u64, elements);
        }
        Ok::<_, ork_compiler::error::Error>(())
    });
    if let Err(error) = result {
        assert_one_line(&error);
    }
    assert!(peak < MEMORY, "{peak} bytes held");
}

fn extend(config: &mut Value, source: &mut Source<'_>) {
    let Some(fields) = config.as_object_mut() else {
        return;
    };
    let mut extra = serde_json::json!({
        "head_dim": 32,
        "rope_scaling": {
            "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
            "high_freq_factor": 4.0, "original_max_position_embeddings": 256
        },
        "layer_types": ["sliding_attention"],
        "sliding_window": 64,
        "rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 1.0},
        "tie_word_embeddings": true
    });
    mutate(&mut extra, source);
    if let Value::Object(extra) = extra {
        let keep = source.byte();
        let chosen = extra.into_iter().enumerate();
        fields.extend(
            chosen
                .filter(|(i, _)| keep >> (i % 8) & 1 == 1)
                .map(|(_, field)| field),
        );
    }
}

fn damage(bytes: &mut [u8], source: &mut Source<'_>) {
    for _ in 0..=source.below(4) {
        let at = source.below(bytes.len());
        bytes[at] = source.byte();
    }
}
