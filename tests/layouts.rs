//! The same weights in every layout that checkpoints have give the same logits.

use ork_compiler::checkpoint::Checkpoint;
use ork_compiler::graph;
use ork_compiler::reference::Reference;
use safetensors::tensor::TensorView;
use safetensors::{Dtype, SafeTensors};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

#[derive(Clone)]
struct Tensor {
    ty: Dtype,
    shape: Vec<usize>,
    data: Vec<u8>,
}

type Tensors = BTreeMap<String, Tensor>;

fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("tests/data")
        .join(name)
}

fn read(name: &str) -> (Value, Tensors) {
    let mut tensors = Tensors::new();
    for entry in std::fs::read_dir(fixture(name)).unwrap() {
        let path = entry.unwrap().path();
        let file = path.file_name().unwrap().to_string_lossy().into_owned();
        if !file.starts_with("model") || !file.ends_with(".safetensors") {
            continue;
        }
        let bytes = std::fs::read(path).unwrap();
        for (name, view) in SafeTensors::deserialize(&bytes).unwrap().tensors() {
            let tensor = Tensor {
                ty: view.dtype(),
                shape: view.shape().to_vec(),
                data: view.data().to_vec(),
            };
            tensors.insert(name, tensor);
        }
    }
    let config = std::fs::read(fixture(name).join("config.json")).unwrap();
    (serde_json::from_slice(&config).unwrap(), tensors)
}

fn write(dir: &Path, config: &Value, tensors: &Tensors) {
    let views = tensors.iter().map(|(name, t)| {
        let view = TensorView::new(t.ty, t.shape.clone(), &t.data).unwrap();
        (name.clone(), view)
    });
    let bytes = safetensors::serialize(views, None).unwrap();
    std::fs::write(dir.join("model.safetensors"), bytes).unwrap();
    std::fs::write(dir.join("config.json"), config.to_string()).unwrap();
}

const IDS: [u32; 9] = [5, 17, 99, 400, 3, 3, 250, 77, 8];

/// Logits of the fixture after `change`, and what it warned of.
fn logits(name: &str, change: impl FnOnce(&mut Value, &mut Tensors)) -> (Vec<f32>, Vec<String>) {
    let dir = tempfile::tempdir().unwrap();
    let (mut config, mut tensors) = read(name);
    change(&mut config, &mut tensors);
    write(dir.path(), &config, &tensors);
    let checkpoint = Checkpoint::open(dir.path()).unwrap();
    let graph = graph::build(&checkpoint).unwrap();
    let reference = Reference::new(&checkpoint, &graph).unwrap();
    (reference.forward(&IDS).unwrap(), checkpoint.warnings())
}

fn refused(name: &str, change: impl FnOnce(&mut Value, &mut Tensors)) -> String {
    let dir = tempfile::tempdir().unwrap();
    let (mut config, mut tensors) = read(name);
    change(&mut config, &mut tensors);
    write(dir.path(), &config, &tensors);
    let built = graph::build(&Checkpoint::open(dir.path()).unwrap());
    let error = built.expect_err("a bad checkpoint").to_string();
    assert!(!error.contains('\n'), "{error}");
    error
}

fn rename(tensors: &mut Tensors, to: impl Fn(&str) -> String) {
    *tensors = std::mem::take(tensors)
        .into_iter()
        .map(|(name, t)| (to(&name), t))
        .collect();
}

/// `[experts, n, k]` as `experts` tensors.
fn unstack(tensors: &mut Tensors) {
    for (name, t) in tensors.clone() {
        let Some((mlp, proj)) = name.split_once(".switch_mlp.") else {
            continue;
        };
        tensors.remove(&name);
        let one = t.data.len() / t.shape[0];
        for (e, data) in t.data.chunks_exact(one).enumerate() {
            let expert = Tensor {
                ty: t.ty,
                shape: t.shape[1..].to_vec(),
                data: data.to_vec(),
            };
            tensors.insert(format!("{mlp}.experts.{e}.{proj}"), expert);
        }
    }
}

/// Gate and up rows of each expert in one tensor.
fn fuse(tensors: &mut Tensors) {
    for (name, gate) in tensors.clone() {
        let Some(mlp) = name.strip_suffix(".switch_mlp.gate_proj.weight") else {
            continue;
        };
        let mut take = |proj: &str| {
            tensors
                .remove(&format!("{mlp}.switch_mlp.{proj}.weight"))
                .unwrap()
        };
        let (_, up, down) = (take("gate_proj"), take("up_proj"), take("down_proj"));
        let one = gate.data.len() / gate.shape[0];
        let pairs = gate.data.chunks_exact(one).zip(up.data.chunks_exact(one));
        let fused = Tensor {
            ty: gate.ty,
            shape: vec![gate.shape[0], 2 * gate.shape[1], gate.shape[2]],
            data: pairs.flat_map(|(g, u)| [g, u].concat()).collect(),
        };
        tensors.insert(format!("{mlp}.experts.gate_up_proj"), fused);
        tensors.insert(format!("{mlp}.experts.down_proj"), down);
    }
}

/// As Hugging Face stores delta nets: `[C, 1, K]` taps, norms less one (in f32, so that nothing rounds).
fn raw(tensors: &mut Tensors) {
    for (name, t) in tensors.iter_mut() {
        if name.ends_with("conv1d.weight") {
            t.shape.swap(1, 2);
        }
        let shifted = name.ends_with("layernorm.weight")
            || name.ends_with("model.norm.weight")
            || name.ends_with("q_norm.weight")
            || name.ends_with("k_norm.weight");
        if shifted {
            assert_eq!(t.ty, Dtype::BF16);
            let widen =
                |b: &[u8]| f32::from_bits(u32::from(u16::from_le_bytes([b[0], b[1]])) << 16);
            let values = t.data.chunks_exact(2).map(widen);
            t.data = values.flat_map(|v| (v - 1.0).to_le_bytes()).collect();
            t.ty = Dtype::F32;
        }
    }
}

#[test]
fn experts_may_be_stacked_apart_or_fused() {
    for name in ["qwen3_moe-bf16", "qwen3_next-bf16", "qwen3_5_moe-bf16"] {
        let (want, _) = logits(name, |_, _| {});
        assert!(logits(name, |_, t| unstack(t)).0 == want, "{name} apart");
        assert!(logits(name, |_, t| fuse(t)).0 == want, "{name} fused");
    }
    let error = refused("qwen3_moe-bf16", |_, t| {
        unstack(t);
        t.remove("model.layers.2.mlp.experts.7.up_proj.weight");
    });
    assert!(error.contains("layers.2.mlp.experts.7.up_proj"), "{error}");
    assert!(error.contains("missing"), "{error}");
}

#[test]
fn raw_and_converted_delta_nets_agree() {
    let mlx = "language_model.model.";
    for name in ["qwen3_next-bf16", "qwen3_5-bf16", "qwen3_5_moe-bf16"] {
        let (want, none) = logits(name, |_, _| {});
        assert!(none.is_empty());
        let (have, skipped) = logits(name, |_, t| {
            raw(t);
            fuse(t);
            if !name.contains("next") {
                rename(t, |n| match n.strip_prefix(mlx) {
                    Some(rest) => format!("model.language_model.{rest}"),
                    None => n.replace("language_model.lm_head", "lm_head"),
                });
            }
            let extra = t.values().next().unwrap().clone();
            for name in ["mtp.fc.weight", "model.visual.a", "model.visual.b"] {
                t.insert(name.into(), extra.clone());
            }
        });
        let off = want.iter().zip(&have).map(|(a, b)| (a - b).abs());
        let off = off.fold(0.0, f32::max);
        assert!(off < 1e-4, "{name}: {off}");
        assert!(skipped[0].starts_with("2 model.visual.* tensors"));
        assert!(skipped[1].starts_with("1 mtp.* tensors"));
        assert_eq!(skipped.len(), 2);
        // A converted checkpoint that kept its mtp tensors is still a converted one.
        let kept = |_: &mut Value, t: &mut Tensors| {
            let extra = t.values().next().unwrap().clone();
            t.insert("mtp.fc.weight".into(), extra);
        };
        assert!(logits(name, kept).0 == want, "{name}");
    }
    // The language model alone.
    let (want, _) = logits("qwen3_5-bf16", |_, _| {});
    let (have, _) = logits("qwen3_5-bf16", |config, t| {
        *config = config["text_config"].take();
        rename(t, |n| n.replace("language_model.", ""));
    });
    assert!(have == want);
}

#[test]
fn config_quirks() {
    // theta and the rotated part come from rope_parameters alone.
    let (want, _) = logits("qwen3_5-bf16", |_, _| {});
    let other = |config: &mut Value, _: &mut Tensors| {
        config["text_config"]["rope_theta"] = json!(7.0);
        config["text_config"]["partial_rotary_factor"] = json!(1.0);
    };
    assert!(logits("qwen3_5-bf16", other).0 == want);
    // Renormalising is this family's default and not that one's.
    let silent = |config: &mut Value, _: &mut Tensors| {
        config.as_object_mut().unwrap().remove("norm_topk_prob");
    };
    let off = |config: &mut Value, _: &mut Tensors| config["norm_topk_prob"] = json!(false);
    let (default, explicit) = (
        logits("qwen3_next-bf16", silent).0,
        logits("qwen3_next-bf16", off).0,
    );
    assert!(default == explicit && default != logits("qwen3_next-bf16", |_, _| {}).0);
    let inner = |on: bool| {
        move |config: &mut Value, _: &mut Tensors| {
            config["text_config"]["norm_topk_prob"] = json!(on);
        }
    };
    let (want, _) = logits("qwen3_5_moe-bf16", |_, _| {});
    assert!(logits("qwen3_5_moe-bf16", inner(true)).0 == want);
    assert!(logits("qwen3_5_moe-bf16", inner(false)).0 != want);
    // Layers that the config makes dense look for a dense MLP.
    for (key, value) in [
        ("mlp_only_layers", json!([2])),
        ("decoder_sparse_step", json!(2)),
    ] {
        let error = refused("qwen3_moe-bf16", |config, _| config[key] = value);
        assert!(error.contains("mlp.gate_proj.weight is missing"), "{error}");
    }
    // A tie may stand beside the text config only.
    let (tied, _) = logits("qwen3_5-bf16", |config, t| {
        config["tie_word_embeddings"] = json!(true);
        t.remove("language_model.lm_head.weight");
    });
    assert!(tied.iter().all(|v| v.is_finite()));
}

#[test]
fn contradictions_are_refused_with_both_numbers() {
    let name = "qwen3_5_moe-bf16";
    let text = |key: &'static str, value: Value| {
        refused(name, |config, _| config["text_config"][key] = value)
    };
    for (error, words) in [
        (text("full_attention_interval", json!(2)), ["1", "2"]),
        (text("num_experts_per_tok", json!(9)), ["9", "8"]),
        (text("linear_num_value_heads", json!(5)), ["5", "2"]),
        (text("linear_conv_kernel_dim", json!(1)), ["1 taps", "keys"]),
        (text("num_experts", json!(9)), ["[8, ", "[9, "]),
        (text("moe_intermediate_size", json!(16)), ["32", "16"]),
        (
            text("linear_conv_kernel_dim", json!(3)),
            ["[256, 4, 1]", "[256, 3, 1]"],
        ),
    ] {
        for word in words {
            assert!(error.contains(word), "{word:?} not in: {error}");
        }
    }
    let error = refused(name, |_, t| {
        t.remove("language_model.lm_head.weight");
    });
    assert!(error.contains("tie_word_embeddings"), "{error}");
}
