//! llama and mistral: RMSNorm, rotary GQA attention, SwiGLU.

use super::{Graph, Role, TensorDecl};
use crate::checkpoint::Checkpoint;
use crate::checkpoint::config::Config;
use crate::error::{Error, Result};
use ork_formats::model::{Activation, Cache, FloatType, Model, Op, Rope, TensorId};

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
    let config = Config::new(&checkpoint.config, "config.json");
    let hidden = config.count("hidden_size")?;
    let mlp = config.count("intermediate_size")?;
    let layers = config.layers("num_hidden_layers")?;
    let heads = config.count("num_attention_heads")?;
    let kv_heads = config.count_or("num_key_value_heads", heads)?;
    if !heads.is_multiple_of(kv_heads) {
        return Err(Error::Input(format!(
            "config.json: num_attention_heads {heads} is no multiple of num_key_value_heads {kv_heads}; correct one"
        )));
    }
    let head_dim = head_dim(config, hidden, heads)?;
    let width = |heads: u32| {
        heads.checked_mul(head_dim).ok_or_else(|| {
            Error::Input(format!(
                "config.json: {heads} heads of head_dim {head_dim} are too wide; correct head_dim"
            ))
        })
    };
    let (q, kv) = (width(heads)?, width(kv_heads)?);
    let vocab = config.count("vocab_size")?;
    let context = config.count("max_position_embeddings")?;
    let eps = config.positive("rms_norm_eps")? as f32;
    let activation = config.text("hidden_act")?.unwrap_or("silu");
    if activation != "silu" {
        return Err(Error::Input(format!(
            "config.json: hidden_act \"{activation}\" is not supported; a {family} model has silu"
        )));
    }
    let windows = windows(config, layers)?;
    let attention_bias = config.flag("attention_bias", false)?;
    let mlp_bias = config.flag("mlp_bias", false)?;
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
    for (layer, window) in (0..layers).zip(windows) {
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
            window,
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
    let head = match config.flag("tie_word_embeddings", true)? {
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

/// Most elements per head: what a pack's rotary table may hold. A corrupted number is refused before its
/// table is computed.
const HEAD_MOST: u32 = 8192;

/// Elements per head; even, since rotary embedding works on pairs.
fn head_dim(config: Config<'_>, hidden: u32, heads: u32) -> Result<u32> {
    if !config.has("head_dim") && !hidden.is_multiple_of(heads) {
        return Err(Error::Input(format!(
            "config.json: hidden_size {hidden} is no multiple of num_attention_heads {heads}; give head_dim"
        )));
    }
    match config.count_or("head_dim", hidden / heads)? {
        dim if HEAD_MOST < dim => Err(Error::Input(format!(
            "config.json: head_dim {dim} exceeds {HEAD_MOST}; correct head_dim"
        ))),
        dim if dim.is_multiple_of(2) => Ok(dim),
        dim => Err(Error::Input(format!(
            "config.json: head_dim {dim} is odd, rotary embedding needs pairs; correct head_dim"
        ))),
    }
}

/// Attention window of each layer, 0 for unlimited. As in mlx-lm only `layer_types` turns windows
/// on: a `sliding_window` alone, which many mistral configs carry, changes nothing.
fn windows(config: Config<'_>, layers: u32) -> Result<Vec<u32>> {
    let Some(kinds) = config.texts("layer_types")? else {
        return Ok(vec![0; layers as usize]);
    };
    if kinds.len() != layers as usize {
        return Err(Error::Input(format!(
            "config.json: layer_types has {} entries, num_hidden_layers is {layers}; correct one",
            kinds.len()
        )));
    }
    kinds
        .into_iter()
        .map(|kind| match kind {
            "full_attention" => Ok(0),
            "sliding_attention" => config.count("sliding_window"),
            other => Err(Error::Input(format!(
                "config.json: layer type \"{other}\" is not supported; supported are full_attention, sliding_attention"
            ))),
        })
        .collect()
}

/// Frequencies in f64 through `libm`, so that every host computes the same bits.
fn rope(config: Config<'_>, dims: u32) -> Result<Rope> {
    // Newer configs move theta and the scaling into rope_parameters.
    let parameters = config.object("rope_parameters")?;
    let theta = match parameters {
        Some(nested) if !config.has("rope_theta") => nested.positive("rope_theta")?,
        _ => config.positive("rope_theta")?,
    };
    let scaling = config.object("rope_scaling")?.or(parameters);
    for place in [Some(config), parameters].into_iter().flatten() {
        if place.has("partial_rotary_factor") && place.positive("partial_rotary_factor")? != 1.0 {
            return Err(Error::Input(
                "config.json: partial_rotary_factor other than 1 is not supported in this family"
                    .into(),
            ));
        }
    }
    let mut frequencies: Vec<f64> = (0..dims / 2)
        .map(|i| libm::pow(theta, -f64::from(2 * i) / f64::from(dims)))
        .collect();
    if let Some(scaling) = scaling {
        scale(&mut frequencies, scaling)?;
    }
    Ok(Rope {
        inv_freq: frequencies.into_iter().map(|f| f as f32).collect(),
        magnitude: 1.0,
        interleaved: config.flag("rope_traditional", false)?,
    })
}

/// Applies the context extension that `scaling` names.
fn scale(frequencies: &mut [f64], scaling: Config<'_>) -> Result<()> {
    let kind = match scaling.text("rope_type")? {
        Some(kind) => kind,
        None => scaling.text("type")?.unwrap_or("default"),
    };
    match kind {
        "default" => {}
        "linear" => {
            let factor = scaling.positive("factor")?;
            frequencies.iter_mut().for_each(|f| *f /= factor);
        }
        "llama3" => {
            let factor = scaling.positive("factor")?;
            let low = scaling.positive("low_freq_factor")?;
            let high = scaling.positive("high_freq_factor")?;
            let old = scaling.positive("original_max_position_embeddings")?;
            if high <= low {
                return Err(Error::Input(format!(
                    "config.json: high_freq_factor {high} must exceed low_freq_factor {low}; correct one"
                )));
            }
            for f in frequencies {
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
    Ok(())
}
