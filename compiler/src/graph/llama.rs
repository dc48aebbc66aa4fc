//! llama and mistral: RMSNorm, rotary GQA attention, SwiGLU.

use super::{Graph, Role, TensorDecl};
use crate::checkpoint::Checkpoint;
use crate::error::{Error, Result};
use ork_formats::model::{Activation, Cache, FloatType, Model, Op, Rope, TensorId};
use serde_json::Value;

/// Activation slots and their purpose.
mod slot {
    pub(super) const RESIDUAL: u32 = 0;
    pub(super) const NORMED: u32 = 1;
    pub(super) const Q: u32 = 2;
    pub(super) const K: u32 = 3;
    pub(super) const V: u32 = 4;
    pub(super) const MIXED: u32 = 5;
    pub(super) const PROJECTED: u32 = 6;
    pub(super) const GATE: u32 = 7;
    pub(super) const UP: u32 = 8;
}

fn number(config: &Value, key: &str) -> Result<u32> {
    let value = config[key].as_u64().filter(|v| (1..1 << 20).contains(v));
    value.map(|v| v as u32).ok_or_else(|| {
        Error::Input(format!(
            "config.json: {key} is {}, expected a positive integer",
            config[key]
        ))
    })
}

fn flag(config: &Value, key: &str, default: bool) -> bool {
    config[key].as_bool().unwrap_or(default)
}

struct Builder {
    tensors: Vec<TensorDecl>,
    ops: Vec<Op>,
    eps: f32,
}

impl Builder {
    fn tensor(&mut self, name: String, n: u32, k: u32, role: Role) -> TensorId {
        self.tensors.push(TensorDecl { name, n, k, role });
        self.tensors.len() as TensorId - 1
    }

    fn norm(&mut self, name: String, width: u32) {
        let weight = self.tensor(name, 1, width, Role::Vector);
        self.ops.push(Op::RmsNorm {
            x: slot::RESIDUAL,
            weight,
            out: slot::NORMED,
            eps: self.eps,
        });
    }

    /// `bias` is whether the projection has one.
    fn linear(&mut self, name: String, bias: bool, (n, x): (u32, u32), (k, out): (u32, u32)) {
        let weight = self.tensor(format!("{name}.weight"), n, k, Role::Matrix);
        let bias = bias.then(|| self.tensor(format!("{name}.bias"), 1, n, Role::Vector));
        self.ops.push(Op::Linear {
            x,
            weight,
            bias,
            out,
        });
    }
}

pub(super) fn build(checkpoint: &Checkpoint, family: &str) -> Result<Graph> {
    let config = &checkpoint.config;
    let hidden = number(config, "hidden_size")?;
    let mlp = number(config, "intermediate_size")?;
    let layers = number(config, "num_hidden_layers")?;
    let heads = number(config, "num_attention_heads")?;
    let kv_heads = match config["num_key_value_heads"] {
        Value::Null => heads,
        _ => number(config, "num_key_value_heads")?,
    };
    let head_dim = match config["head_dim"] {
        Value::Null => hidden / heads,
        _ => number(config, "head_dim")?,
    };
    if heads % kv_heads != 0 {
        return Err(Error::Input(format!(
            "config.json: {heads} attention heads over {kv_heads} key-value heads"
        )));
    }
    let vocab = number(config, "vocab_size")?;
    let context = number(config, "max_position_embeddings")?;
    let eps = config["rms_norm_eps"]
        .as_f64()
        .ok_or_else(|| Error::Input("config.json: rms_norm_eps is missing".into()))?
        as f32;
    let activation = config["hidden_act"].as_str().unwrap_or("silu");
    if activation != "silu" {
        return Err(Error::Input(format!(
            "config.json: hidden_act \"{activation}\", a {family} model has silu"
        )));
    }
    let (q, kv) = (heads * head_dim, kv_heads * head_dim);
    let attention_bias = flag(config, "attention_bias", false);
    let mlp_bias = flag(config, "mlp_bias", false);
    let mut b = Builder {
        tensors: Vec::new(),
        ops: Vec::new(),
        eps,
    };
    let table = b.tensor(
        "model.embed_tokens.weight".into(),
        vocab,
        hidden,
        Role::Embedding,
    );
    b.ops.push(Op::Embed {
        table,
        out: slot::RESIDUAL,
        scale: 1.0,
    });
    for layer in 0..layers {
        let name = |part: &str| format!("model.layers.{layer}.{part}");
        b.norm(name("input_layernorm.weight"), hidden);
        for (part, n, out) in [
            ("self_attn.q_proj", q, slot::Q),
            ("self_attn.k_proj", kv, slot::K),
            ("self_attn.v_proj", kv, slot::V),
        ] {
            b.linear(name(part), attention_bias, (n, slot::NORMED), (hidden, out));
        }
        for (x, heads) in [(slot::Q, heads), (slot::K, kv_heads)] {
            b.ops.push(Op::Rope {
                x,
                heads,
                head_dim,
                rope: 0,
            });
        }
        b.ops.push(Op::Attention {
            q: slot::Q,
            k: slot::K,
            v: slot::V,
            out: slot::MIXED,
            heads,
            scale: 1.0 / (head_dim as f32).sqrt(),
            window: 0,
            cache: layer,
        });
        b.linear(
            name("self_attn.o_proj"),
            attention_bias,
            (hidden, slot::MIXED),
            (q, slot::PROJECTED),
        );
        let add = Op::Add {
            x: slot::PROJECTED,
            out: slot::RESIDUAL,
            scale: 1.0,
        };
        b.ops.push(add);
        b.norm(name("post_attention_layernorm.weight"), hidden);
        b.linear(
            name("mlp.gate_proj"),
            mlp_bias,
            (mlp, slot::NORMED),
            (hidden, slot::GATE),
        );
        b.linear(
            name("mlp.up_proj"),
            mlp_bias,
            (mlp, slot::NORMED),
            (hidden, slot::UP),
        );
        b.ops.push(Op::Glu {
            gate: slot::GATE,
            up: slot::UP,
            out: slot::GATE,
            act: Activation::Silu,
        });
        b.linear(
            name("mlp.down_proj"),
            mlp_bias,
            (hidden, slot::GATE),
            (mlp, slot::PROJECTED),
        );
        b.ops.push(add);
    }
    b.norm("model.norm.weight".into(), hidden);
    let head = match flag(config, "tie_word_embeddings", true) {
        true => table,
        false => b.tensor("lm_head.weight".into(), vocab, hidden, Role::Embedding),
    };
    Ok(Graph {
        family: family.into(),
        model: Model {
            vocab,
            context,
            slots: vec![hidden, hidden, q, kv, kv, q, hidden, mlp, mlp],
            caches: vec![Cache { kv_heads, head_dim }; layers as usize],
            ropes: vec![rope(config, head_dim)?],
            kv: FloatType::F16,
            ops: b.ops,
            hidden: slot::NORMED,
            head,
        },
        tensors: b.tensors,
    })
}

/// Frequencies in f64 through `libm`, so that every host computes the same bits.
fn rope(config: &Value, dims: u32) -> Result<Rope> {
    let parameters = &config["rope_parameters"];
    let theta = [&config["rope_theta"], &parameters["rope_theta"]]
        .into_iter()
        .find_map(Value::as_f64)
        .ok_or_else(|| Error::Input("config.json: rope_theta is missing".into()))?;
    let scaling = match &config["rope_scaling"] {
        Value::Null => parameters,
        scaling => scaling,
    };
    let kind = [&scaling["rope_type"], &scaling["type"]]
        .into_iter()
        .find_map(Value::as_str)
        .unwrap_or("default");
    let get = |key: &str| {
        scaling[key]
            .as_f64()
            .ok_or_else(|| Error::Input(format!("config.json: rope scaling {kind} without {key}")))
    };
    let mut frequencies: Vec<f64> = (0..dims / 2)
        .map(|i| libm::pow(theta, -f64::from(2 * i) / f64::from(dims)))
        .collect();
    match kind {
        "default" => {}
        "linear" => {
            let factor = get("factor")?;
            frequencies.iter_mut().for_each(|f| *f /= factor);
        }
        "llama3" => {
            let (factor, low, high) = (
                get("factor")?,
                get("low_freq_factor")?,
                get("high_freq_factor")?,
            );
            let old = get("original_max_position_embeddings")?;
            for f in &mut frequencies {
                let wavelength = std::f64::consts::TAU / *f;
                if old / low < wavelength {
                    *f /= factor;
                } else if old / high < wavelength {
                    let m = (old / wavelength - low) / (high - low);
                    *f = *f / factor * (1.0 - m) + *f * m;
                }
            }
        }
        other => {
            return Err(Error::Input(format!(
                "config.json: rope scaling \"{other}\" is not supported; supported are default, linear, llama3"
            )));
        }
    }
    Ok(Rope {
        inv_freq: frequencies.into_iter().map(|f| f as f32).collect(),
        magnitude: 1.0,
        interleaved: flag(config, "rope_traditional", false),
    })
}
