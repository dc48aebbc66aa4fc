//! The float reference against mlx-lm's own float32 logits and greedy ids.

use ork_compiler::checkpoint::Checkpoint;
use ork_compiler::error::Error;
use ork_compiler::reference::Reference;
use ork_compiler::{graph, text};
use ork_formats::model::Op;
use safetensors::SafeTensors;
use serde_json::{Value, json};
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
    let expected: Value = serde_json::from_str(&json).unwrap();
    let tokenizer = kitoken::Kitoken::from_slice(&definition).unwrap();
    let cases = expected["encode_cases"].as_array().unwrap();
    assert_eq!(cases.len(), 10);
    for case in cases {
        let text = case["text"].as_str().unwrap();
        let ids = tokenizer.encode(text, true).unwrap();
        let have = [rules.prefix.clone(), ids].concat();
        let want: Vec<u32> = serde_json::from_value(case["ids"].clone()).unwrap();
        assert_eq!(have, want, "{text:?}");
        let decoded = tokenizer.decode(&have, false).unwrap();
        assert_eq!(decoded, case["decoded"].as_str().unwrap().as_bytes());
    }
    // The chat text spells its own control tokens, and gets no prefix.
    let chat = tokenizer.encode(expected["chat_text"].as_str().unwrap(), true);
    let want: Vec<u32> = serde_json::from_value(expected["chat_ids"].clone()).unwrap();
    assert_eq!(chat.unwrap(), want);
    assert!(rules.chat_template.unwrap().contains("<|im_start|>"));
}

/// Everything that reads a checkpoint.
fn read(dir: &Path) -> Result<(), Error> {
    let opened = Checkpoint::open(dir)?;
    let graph = graph::build(&opened)?;
    Reference::new(&opened, &graph)?;
    text::freeze(dir, &opened.config).map(|_| ())
}

/// A copy of the fixture after `damage`; it must be refused in one line holding every word, with
/// exit code 3.
fn refused(words: &[&str], damage: impl FnOnce(&Path)) {
    let dir = tempfile::tempdir().unwrap();
    copy(dir.path());
    damage(dir.path());
    let error = read(dir.path()).expect_err(words[0]);
    let text = error.to_string();
    assert_eq!(error.exit_code(), 3, "{text}");
    assert!(!text.contains('\n'), "{text}");
    for word in words {
        assert!(text.contains(word), "{word:?} not in: {text}");
    }
}

fn copy(to: &Path) {
    for entry in std::fs::read_dir(checkpoint("tests/data/llama-bf16")).unwrap() {
        let entry = entry.unwrap();
        std::fs::copy(entry.path(), to.join(entry.file_name())).unwrap();
    }
}

fn config(dir: &Path, changes: &[(&str, Value)]) {
    let path = dir.join("config.json");
    let mut value: Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    for (key, change) in changes {
        value[*key] = change.clone();
    }
    std::fs::write(path, value.to_string()).unwrap();
}

fn build(changes: &[(&str, Value)]) -> graph::Graph {
    let dir = tempfile::tempdir().unwrap();
    copy(dir.path());
    config(dir.path(), changes);
    graph::build(&Checkpoint::open(dir.path()).unwrap()).unwrap()
}

#[test]
fn bad_configs_name_the_key() {
    let cases: &[(&[&str], &str, Value)] = &[
        (&["hidden_size", "missing"], "hidden_size", Value::Null),
        (&["hidden_size", "\"big\""], "hidden_size", json!("big")),
        (&["num_hidden_layers"], "num_hidden_layers", json!(99999)),
        (&["4", "3", "multiple"], "num_key_value_heads", json!(3)),
        (
            &["hidden_size 128", "head_dim"],
            "num_attention_heads",
            json!(6),
        ),
        (&["head_dim 33", "odd"], "head_dim", json!(33)),
        (
            &["attention_bias", "true or false"],
            "attention_bias",
            json!(1),
        ),
        (
            &["self_attn.q_proj.bias", "missing"],
            "attention_bias",
            json!(true),
        ),
        (&["mlp.gate_proj.bias", "missing"], "mlp_bias", json!(true)),
        (&["rms_norm_eps"], "rms_norm_eps", json!(-1)),
        (&["rope_theta", "missing"], "rope_theta", Value::Null),
        (&["rope_theta"], "rope_theta", json!(0)),
        (&["rope_scaling", "an object"], "rope_scaling", json!("x")),
        (
            &["zigzag", "llama3"],
            "rope_scaling",
            json!({"type": "zigzag"}),
        ),
        (
            &["factor", "missing"],
            "rope_scaling",
            json!({"type": "linear"}),
        ),
        (
            &["factor", "missing"],
            "rope_parameters",
            json!({"rope_type": "yarn"}),
        ),
        (
            &["partial_rotary_factor"],
            "partial_rotary_factor",
            json!(1.5),
        ),
        (
            &["layer_types", "1", "4"],
            "layer_types",
            json!(["full_attention"]),
        ),
        (
            &["embed_tokens", "[512, 128]", "[600, 128]"],
            "vocab_size",
            json!(600),
        ),
        (&["model_type", "a string"], "model_type", json!(7)),
    ];
    for (words, key, value) in cases {
        refused(words, |d| config(d, &[(key, value.clone())]));
    }
}

#[test]
fn damaged_files_say_what_is_wrong() {
    let weights = |d: &Path| d.join("model.safetensors");
    let whole = std::fs::metadata(checkpoint("tests/data/llama-bf16/model.safetensors"));
    let whole = whole.unwrap().len();
    let (cut, want) = ((whole - 100).to_string(), whole.to_string());
    refused(&["model.safetensors", &cut, &want], |d| {
        let file = std::fs::File::options().write(true).open(weights(d));
        file.unwrap().set_len(whole - 100).unwrap();
    });
    refused(&["model.safetensors", "100 bytes, its header says"], |d| {
        let file = std::fs::File::options().write(true).open(weights(d));
        file.unwrap().set_len(100).unwrap();
    });
    let pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n";
    for name in ["config.json", "model.safetensors", "tokenizer.json"] {
        refused(&[name, "git lfs pull"], |d| {
            std::fs::write(d.join(name), pointer).unwrap();
        });
    }
    for name in ["config.json", "tokenizer.json"] {
        refused(&[name, "no such file"], |d| {
            std::fs::remove_file(d.join(name)).unwrap();
        });
        refused(&[name, "malformed JSON"], |d| {
            std::fs::write(d.join(name), "{\"a\": ").unwrap();
        });
    }
    refused(&["no such directory"], |d| {
        std::fs::remove_dir_all(d).unwrap();
    });
    // A stray copy: the index hides it, without the index every tensor is there twice.
    let stray = |d: &Path| std::fs::copy(weights(d), d.join("model-2.safetensors")).unwrap();
    refused(&["is in another file too"], |d| {
        stray(d);
        std::fs::remove_file(d.join("model.safetensors.index.json")).unwrap();
    });
    let dir = tempfile::tempdir().unwrap();
    copy(dir.path());
    stray(dir.path());
    read(dir.path()).unwrap();
    // The index names this file, which the rename takes away.
    refused(&["model-00001-of-00003", "1 of 3"], |d| {
        std::fs::rename(weights(d), d.join("model-00002-of-00003.safetensors")).unwrap();
    });
}

#[test]
fn rope_scalings_and_spellings() {
    let plain = &build(&[]).model.ropes[0];
    assert!(!plain.interleaved && plain.inv_freq.len() == 16);
    let moved = json!({"rope_theta": 10000.0, "rope_type": "linear", "factor": 4.0});
    let nested = build(&[("rope_theta", Value::Null), ("rope_parameters", moved)]);
    for (a, b) in nested.model.ropes[0].inv_freq.iter().zip(&plain.inv_freq) {
        assert_eq!(*a, b / 4.0);
    }
    let llama3 = json!({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
        "high_freq_factor": 4.0, "original_max_position_embeddings": 64});
    let scaled = build(&[("rope_scaling", llama3), ("rope_traditional", json!(true))]);
    let rope = &scaled.model.ropes[0];
    assert!(rope.interleaved);
    // Short waves stay, long ones stretch by the factor.
    assert_eq!(rope.inv_freq[0], plain.inv_freq[0]);
    assert_eq!(rope.inv_freq[15], plain.inv_freq[15] / 8.0);
}

#[test]
fn aliases_ties_and_windows() {
    // Tied: the stray lm_head is skipped and the embedding is the head.
    let tied = build(&[("tie_word_embeddings", Value::Null)]);
    assert_eq!(
        tied.tensors[tied.model.head as usize].name,
        "model.embed_tokens.weight"
    );
    let (full, sliding) = ("full_attention", "sliding_attention");
    let graph = build(&[
        ("model_type", json!("mistral")),
        ("sliding_window", json!(32)),
        ("layer_types", json!([full, sliding, full, sliding])),
    ]);
    let windows = graph.model.ops.iter().filter_map(|op| match op {
        Op::Attention { window, .. } => Some(*window),
        _ => None,
    });
    assert_eq!(windows.collect::<Vec<_>>(), [0, 32, 0, 32]);
}
