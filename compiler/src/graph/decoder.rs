//! What decoder families share: dimensions, slots, and the blocks that their op lists are made of.

use super::{Graph, Part, Role, TensorDecl};
use crate::checkpoint::Checkpoint;
use crate::checkpoint::config::Config;
use crate::error::{Error, Result};
use ork_formats::model::{Activation, Cache, FloatType, Model, Op, Rope, RopeId, TensorId};

/// Activation slots and their purpose.
pub(super) mod slot {
    pub(in crate::graph) const RESIDUAL: u32 = 0;
    pub(in crate::graph) const NORMED: u32 = 1;
    pub(in crate::graph) const Q: u32 = 2;
    pub(in crate::graph) const K: u32 = 3;
    pub(in crate::graph) const V: u32 = 4;
    pub(in crate::graph) const MIXED: u32 = 5;
    pub(in crate::graph) const PROJECTED: u32 = 6;
    pub(in crate::graph) const GATE: u32 = 7;
    pub(in crate::graph) const UP: u32 = 8;
}

/// Sizes every decoder config gives.
#[derive(Clone, Copy, Debug)]
pub(super) struct Dims {
    pub(super) hidden: u32,
    pub(super) mlp: u32,
    pub(super) layers: u32,
    pub(super) heads: u32,
    pub(super) kv_heads: u32,
    pub(super) head_dim: u32,
    /// Width of all query heads.
    pub(super) q: u32,
    /// Width of all key (or value) heads.
    pub(super) kv: u32,
    pub(super) vocab: u32,
    pub(super) context: u32,
    pub(super) eps: f32,
}

impl Dims {
    pub(super) fn read(config: Config<'_>) -> Result<Self> {
        let hidden = config.count("hidden_size")?;
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
        Ok(Self {
            hidden,
            mlp: config.count("intermediate_size")?,
            layers: config.layers("num_hidden_layers")?,
            heads,
            kv_heads,
            head_dim,
            q: width(heads)?,
            kv: width(kv_heads)?,
            vocab: config.count("vocab_size")?,
            context: config.count("max_position_embeddings")?,
            eps: config.positive("rms_norm_eps")? as f32,
        })
    }

    /// 1 / sqrt(head_dim), the usual factor on attention scores.
    pub(super) fn score_scale(&self) -> f32 {
        1.0 / (self.head_dim as f32).sqrt()
    }
}

/// Refuses an activation that the family does not have; `names` are its spellings.
pub(super) fn activation(config: Config<'_>, family: &str, names: &[&str]) -> Result<()> {
    for key in ["hidden_act", "hidden_activation"] {
        match config.text(key)? {
            Some(found) if !names.contains(&found) => {
                return Err(Error::Input(format!(
                    "config.json: {key} \"{found}\" is not supported; a {family} model has {}",
                    names[0]
                )));
            }
            _ => {}
        }
    }
    Ok(())
}

/// How a layer's projections are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Stored {
    /// One tensor each.
    Apart,
    /// q, k, v rows in `qkv_proj`; gate, up rows in `gate_up_proj`.
    Fused,
}

/// One layer's attention.
#[derive(Clone, Copy, Debug)]
pub(super) struct Attention {
    pub(super) stored: Stored,
    pub(super) qkv_bias: bool,
    pub(super) o_bias: bool,
    /// RMSNorm over each query and key head before the rotary embedding.
    pub(super) head_norms: bool,
    /// `None` for layers without positions.
    pub(super) rope: Option<RopeId>,
    pub(super) scale: f32,
    /// 0 is unlimited.
    pub(super) window: u32,
}

/// One layer's gated MLP.
#[derive(Clone, Copy, Debug)]
pub(super) struct Mlp {
    pub(super) stored: Stored,
    pub(super) bias: bool,
    pub(super) act: Activation,
}

/// An op list in the making.
pub(super) struct Decoder {
    pub(super) dims: Dims,
    /// [`Role::Vector`], or [`Role::OnePlus`] where norms multiply as 1 + w.
    norm_role: Role,
    tensors: Vec<TensorDecl>,
    ops: Vec<Op>,
    table: TensorId,
}

impl Decoder {
    /// Starts with the embedding lookup, times `scale`.
    pub(super) fn new(dims: Dims, norm_role: Role, scale: f32) -> Self {
        let mut b = Self {
            dims,
            norm_role,
            tensors: Vec::new(),
            ops: Vec::new(),
            table: 0,
        };
        let name = "model.embed_tokens.weight".to_string();
        b.table = b.tensor(name, dims.vocab, dims.hidden, Role::Embedding);
        b.ops.push(Op::Embed {
            table: b.table,
            out: slot::RESIDUAL,
            scale,
        });
        b
    }

    fn tensor(&mut self, name: String, n: u32, k: u32, role: Role) -> TensorId {
        self.declare(TensorDecl {
            name,
            part: None,
            n,
            k,
            role,
        })
    }

    fn declare(&mut self, decl: TensorDecl) -> TensorId {
        self.tensors.push(decl);
        self.tensors.len() as TensorId - 1
    }

    /// RMSNorm of `x` into `out` over groups of `width` lanes.
    pub(super) fn norm(&mut self, name: String, width: u32, x: u32, out: u32) {
        let weight = self.tensor(format!("{name}.weight"), 1, width, self.norm_role);
        self.ops.push(Op::RmsNorm {
            x,
            weight,
            out,
            eps: self.dims.eps,
        });
    }

    /// Norm of the residual stream.
    pub(super) fn pre_norm(&mut self, name: String) {
        self.norm(name, self.dims.hidden, slot::RESIDUAL, slot::NORMED);
    }

    /// Norm of a block's result, in place.
    pub(super) fn post_norm(&mut self, name: String) {
        self.norm(name, self.dims.hidden, slot::PROJECTED, slot::PROJECTED);
    }

    /// `bias` is whether the projection has one.
    fn linear(&mut self, name: String, bias: bool, (n, out): (u32, u32), (k, x): (u32, u32)) {
        let weight = self.tensor(format!("{name}.weight"), n, k, Role::Matrix);
        let bias = bias.then(|| self.tensor(format!("{name}.bias"), 1, n, Role::Vector));
        self.ops.push(Op::Linear {
            x,
            weight,
            bias,
            out,
        });
    }

    /// Projections that are row ranges of one stored tensor `of`: (name, rows, slot) each.
    fn fused(&mut self, of: &str, k: u32, parts: &[(&str, u32, u32)]) {
        let rows = parts.iter().map(|(_, n, _)| n).sum();
        let mut first = 0;
        for (name, n, out) in parts {
            let weight = self.declare(TensorDecl {
                name: format!("{of}.{name}"),
                part: Some(Part {
                    of: of.to_string(),
                    rows,
                    first,
                }),
                n: *n,
                k,
                role: Role::Matrix,
            });
            first += n;
            self.ops.push(Op::Linear {
                x: slot::NORMED,
                weight,
                bias: None,
                out: *out,
            });
        }
    }

    /// Projections, head norms, rotary embedding, attention, output projection.
    pub(super) fn attention(&mut self, layer: u32, a: Attention) {
        let Dims {
            hidden,
            heads,
            kv_heads,
            head_dim,
            q,
            kv,
            ..
        } = self.dims;
        let name = |part: &str| format!("model.layers.{layer}.self_attn.{part}");
        let parts = [
            ("q_proj", q, slot::Q),
            ("k_proj", kv, slot::K),
            ("v_proj", kv, slot::V),
        ];
        match a.stored {
            Stored::Fused => self.fused(&name("qkv_proj.weight"), hidden, &parts),
            Stored::Apart => {
                for (part, n, out) in parts {
                    self.linear(name(part), a.qkv_bias, (n, out), (hidden, slot::NORMED));
                }
            }
        }
        for (norm, x, heads) in [("q_norm", slot::Q, heads), ("k_norm", slot::K, kv_heads)] {
            if a.head_norms {
                self.norm(name(norm), head_dim, x, x);
            }
            if let Some(rope) = a.rope {
                self.ops.push(Op::Rope {
                    x,
                    heads,
                    head_dim,
                    rope,
                });
            }
        }
        self.ops.push(Op::Attention {
            q: slot::Q,
            k: slot::K,
            v: slot::V,
            out: slot::MIXED,
            heads,
            scale: a.scale,
            window: a.window,
            cache: layer,
        });
        let out = (hidden, slot::PROJECTED);
        self.linear(name("o_proj"), a.o_bias, out, (q, slot::MIXED));
    }

    /// Gate, up, activation, down.
    pub(super) fn mlp(&mut self, layer: u32, m: Mlp) {
        let Dims { hidden, mlp, .. } = self.dims;
        let name = |part: &str| format!("model.layers.{layer}.mlp.{part}");
        let parts = [("gate_proj", mlp, slot::GATE), ("up_proj", mlp, slot::UP)];
        match m.stored {
            Stored::Fused => self.fused(&name("gate_up_proj.weight"), hidden, &parts),
            Stored::Apart => {
                for (part, n, out) in parts {
                    self.linear(name(part), m.bias, (n, out), (hidden, slot::NORMED));
                }
            }
        }
        self.ops.push(Op::Glu {
            gate: slot::GATE,
            up: slot::UP,
            out: slot::GATE,
            act: m.act,
        });
        let out = (hidden, slot::PROJECTED);
        self.linear(name("down_proj"), m.bias, out, (mlp, slot::GATE));
    }

    /// Adds the block's result, times `scale`, to the residual stream.
    pub(super) fn add(&mut self, scale: f32) {
        self.ops.push(Op::Add {
            x: slot::PROJECTED,
            out: slot::RESIDUAL,
            scale,
        });
    }

    /// A whole layer of the common kind: norm, attention, add, norm, MLP, add.
    pub(super) fn layer(&mut self, layer: u32, a: Attention, m: Mlp, residual: f32) {
        self.pre_norm(format!("model.layers.{layer}.input_layernorm"));
        self.attention(layer, a);
        self.add(residual);
        self.pre_norm(format!("model.layers.{layer}.post_attention_layernorm"));
        self.mlp(layer, m);
        self.add(residual);
    }

    /// Final norm and head. The logits are divided by `logits_scaling` (1 in most families).
    pub(super) fn finish(
        mut self,
        family: &str,
        ropes: Vec<Rope>,
        tied: bool,
        logits_scaling: f32,
    ) -> Graph {
        let d = self.dims;
        self.pre_norm("model.norm".into());
        if logits_scaling != 1.0 {
            self.ops.push(Op::Scale {
                x: slot::NORMED,
                scale: 1.0 / logits_scaling,
            });
        }
        let head = match tied {
            true => self.table,
            false => self.tensor("lm_head.weight".into(), d.vocab, d.hidden, Role::Embedding),
        };
        let cache = Cache {
            kv_heads: d.kv_heads,
            head_dim: d.head_dim,
        };
        Graph {
            family: family.into(),
            model: Model {
                vocab: d.vocab,
                context: d.context,
                slots: vec![
                    d.hidden, d.hidden, d.q, d.kv, d.kv, d.q, d.hidden, d.mlp, d.mlp,
                ],
                caches: vec![cache; d.layers as usize],
                ropes,
                kv: FloatType::F16,
                ops: self.ops,
                hidden: slot::NORMED,
                head,
            },
            tensors: self.tensors,
        }
    }
}

/// Whether the embedding is also the head.
const TIED: &str = "tie_word_embeddings";

/// `tie_word_embeddings` of the model's own config, of the top, or of text_config: wrapped models say it in any.
pub(super) fn tied_flag(checkpoint: &Checkpoint, config: Config<'_>) -> Result<Option<bool>> {
    let top = Config::new(&checkpoint.config, "config.json");
    let text = top.object("text_config")?;
    let mut places = [Some(config), Some(top), text].into_iter().flatten();
    let place = places.find(|place| place.has(TIED));
    place.map(|place| place.flag(TIED, false)).transpose()
}

/// Whether the embedding is the head, `default` where nothing says; a checkpoint that is untied must bring
/// its head.
pub(super) fn tied(checkpoint: &Checkpoint, config: Config<'_>, default: bool) -> Result<bool> {
    let tied = tied_flag(checkpoint, config)?.unwrap_or(default);
    match tied || checkpoint.has("lm_head.weight") {
        true => Ok(tied),
        false => Err(Error::Input(
            "lm_head.weight is missing and config.json says tie_word_embeddings false; set it to true if the head is the embedding"
                .into(),
        )),
    }
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
pub(super) fn windows(config: Config<'_>, layers: u32) -> Result<Vec<u32>> {
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
