//! The float reference against mlx-lm's own float32 logits and greedy ids.

use ork_compiler::checkpoint::Checkpoint;
use ork_compiler::reference::Reference;
use ork_compiler::{graph, text};
use safetensors::SafeTensors;
use std::path::{Path, PathBuf};

fn checkpoint(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..").join(path)
}

#[test]
fn logits_and_greedy_ids_match() {
    for path in ["tests/data/llama-bf16", "examples/prose-llama"] {
        let dir = checkpoint(path);
        let bytes = std::fs::read(dir.join("reference.safetensors")).unwrap();
        let tensors = SafeTensors::deserialize(&bytes).unwrap();
        let words = |name: &str| -> Vec<[u8; 4]> {
            let data = tensors.tensor(name).unwrap().data();
            data.chunks_exact(4)
                .map(|b| b.try_into().unwrap())
                .collect()
        };
        let ids =
            |name: &str| -> Vec<u32> { words(name).into_iter().map(u32::from_le_bytes).collect() };
        let opened = Checkpoint::open(&dir).unwrap();
        let graph = graph::build(&opened).unwrap();
        let reference = Reference::new(&opened, &graph).unwrap();
        let prompt = ids("prompt_ids");
        let logits = reference.forward(&prompt).unwrap();
        let want = words("logits").into_iter().map(f32::from_le_bytes);
        assert_eq!(logits.len(), want.len());
        let worst = logits
            .iter()
            .zip(want)
            .map(|(a, b)| (a - b).abs())
            .fold(0.0, f32::max);
        assert!(worst <= 2e-3, "{path}: max |dlogit| {worst}");
        let greedy = ids("greedy_ids");
        assert_eq!(reference.greedy(&prompt, greedy.len()).unwrap(), greedy);
    }
}

#[test]
fn prompt_rules_are_frozen_once() {
    let dir = checkpoint("tests/data/llama-bf16");
    let opened = Checkpoint::open(&dir).unwrap();
    let (definition, rules) = text::freeze(&dir, &opened.config).unwrap();
    assert_eq!(rules.prefix, [508]);
    assert!(rules.suffix.is_empty());
    assert_eq!(rules.stop, [509, 511]);
    let json = std::fs::read_to_string(dir.join("expected.json")).unwrap();
    let expected: serde_json::Value = serde_json::from_str(&json).unwrap();
    let tokenizer = kitoken::Kitoken::from_slice(&definition).unwrap();
    let cases = expected["encode_cases"].as_array().unwrap();
    assert_eq!(cases.len(), 10);
    for case in cases {
        let text = case["text"].as_str().unwrap();
        let ids = tokenizer.encode(text, true).unwrap();
        let have = [rules.prefix.clone(), ids].concat();
        let want: Vec<u32> = serde_json::from_value(case["ids"].clone()).unwrap();
        assert_eq!(have, want, "{text:?}");
    }
}
