//! What decoder families share: dimensions, slots, and the blocks that their op lists are made of.

use super::{Graph, Piece, Role, TensorDecl};
use crate::checkpoint::Checkpoint;
use crate::checkpoint::config::Config;
use crate::error::{Error, Result};
use ork_formats::model::{
    Activation, Cache, FloatType, Model, Op, Rope, RopeId, Slot, State, StateId, TensorId,
};

/// Activation slots and their purpose.
pub(super) mod slot {
    pub(in crate::graph) const RESIDUAL: u32 = 0;
    pub(in crate::graph) const NORMED: u32 = 1;
    pub(in crate::graph) const Q: u32 = 2;
    pub(in crate::graph) const K: u32 = 3;
    pub(in crate::graph) const V: u32 = 4;
    pub(in crate::graph) const MIXED: u32 = 5;
    pub(in crate::graph) const PROJECTED: u32 = 6;
}

/// Sizes every decoder config gives.
#[derive(Clone, Copy, Debug)]
pub(super) struct Dims {
    pub(super) hidden: u32,
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
            let product = heads.checked_mul(head_dim);
            product.filter(|w| *w <= WIDEST).ok_or_else(|| {
                Error::Input(format!(
                    "config.json: {heads} heads of head_dim {head_dim} are too wide; correct head_dim"
                ))
            })
        };
        Ok(Self {
            hidden,
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
    /// `q_proj` holds the rows of a gate after those of each head; its sigmoid multiplies the result.
    pub(super) gated: bool,
    /// `None` for layers without positions.
    pub(super) rope: Option<RopeId>,
    pub(super) scale: f32,
    /// 0 is unlimited.
    pub(super) window: u32,
}

/// One layer's gated MLP.
#[derive(Clone, Copy, Debug)]
pub(super) struct Mlp {
    /// Width of the gate.
    pub(super) inner: u32,
    pub(super) stored: Stored,
    pub(super) bias: bool,
    pub(super) act: Activation,
}

/// What the checkpoint calls things.
#[derive(Clone, Debug)]
pub(super) struct Names {
    /// Prefix of the embedding, the layers and the last norm.
    pub(super) body: String,
    /// Prefix of the head's weight.
    pub(super) head: String,
}

impl Names {
    /// As most checkpoints have them.
    pub(super) fn plain() -> Self {
        Self {
            body: "model".into(),
            head: "lm_head".into(),
        }
    }
}

/// An op list in the making.
pub(super) struct Decoder {
    pub(super) dims: Dims,
    pub(super) names: Names,
    /// [`Role::Vector`], or [`Role::OnePlus`] where norms multiply as 1 + w.
    norm_role: Role,
    tensors: Vec<TensorDecl>,
    ops: Vec<Op>,
    /// Width of each slot, those of [`slot`] first.
    slots: Vec<u32>,
    /// Gate and up slots by width.
    inner: Vec<(u32, [Slot; 2])>,
    attention_gate: Option<Slot>,
    caches: Vec<Cache>,
    states: Vec<State>,
    table: TensorId,
}

impl Decoder {
    /// Starts with the embedding lookup, times `scale`.
    pub(super) fn new(dims: Dims, norm_role: Role, scale: f32) -> Self {
        Self::named(Names::plain(), dims, norm_role, scale)
    }

    /// As [`Decoder::new`], for a checkpoint with names of its own.
    pub(super) fn named(names: Names, dims: Dims, norm_role: Role, scale: f32) -> Self {
        let mut b = Self {
            norm_role,
            tensors: Vec::new(),
            ops: Vec::new(),
            slots: vec![
                dims.hidden,
                dims.hidden,
                dims.q,
                dims.kv,
                dims.kv,
                dims.q,
                dims.hidden,
            ],
            inner: Vec::new(),
            attention_gate: None,
            caches: Vec::new(),
            states: Vec::new(),
            table: 0,
            dims,
            names,
        };
        let name = b.name("embed_tokens.weight");
        b.table = b.tensor(name, dims.vocab, dims.hidden, Role::Embedding);
        b.op(Op::Embed {
            table: b.table,
            out: slot::RESIDUAL,
            scale,
        });
        b
    }

    /// `part` of the body, as the checkpoint names it.
    pub(super) fn name(&self, part: &str) -> String {
        format!("{}.{part}", self.names.body)
    }

    pub(super) fn op(&mut self, op: Op) {
        self.ops.push(op);
    }

    /// A new slot.
    pub(super) fn slot(&mut self, width: u32) -> Slot {
        self.slots.push(width);
        self.slots.len() as Slot - 1
    }

    /// Slots of a gate and an up projection; layers of one width share them.
    pub(super) fn inner_slots(&mut self, width: u32) -> [Slot; 2] {
        if let Some((_, slots)) = self.inner.iter().find(|(w, _)| *w == width) {
            return *slots;
        }
        let slots = [self.slot(width), self.slot(width)];
        self.inner.push((width, slots));
        slots
    }

    pub(super) fn state(&mut self, state: State) -> StateId {
        self.states.push(state);
        self.states.len() as StateId - 1
    }

    pub(super) fn tensor(&mut self, name: String, n: u32, k: u32, role: Role) -> TensorId {
        self.declare(TensorDecl::stored(name, n, k, role))
    }

    pub(super) fn declare(&mut self, decl: TensorDecl) -> TensorId {
        self.tensors.push(decl);
        self.tensors.len() as TensorId - 1
    }

    /// RMSNorm of `x` into `out` over groups of `width` lanes.
    pub(super) fn norm(&mut self, part: &str, width: u32, x: u32, out: u32) {
        self.norm_as(self.norm_role, part, width, x, out);
    }

    /// As [`Decoder::norm`], for a weight of another role than the model's other norms.
    pub(super) fn norm_as(&mut self, role: Role, part: &str, width: u32, x: u32, out: u32) {
        let name = self.name(&format!("{part}.weight"));
        let weight = self.tensor(name, 1, width, role);
        self.op(Op::RmsNorm {
            x,
            weight,
            out,
            eps: self.dims.eps,
        });
    }

    /// Norm of the residual stream.
    pub(super) fn pre_norm(&mut self, part: &str) {
        self.norm(part, self.dims.hidden, slot::RESIDUAL, slot::NORMED);
    }

    /// Norm of a block's result, in place.
    pub(super) fn post_norm(&mut self, part: &str) {
        self.norm(part, self.dims.hidden, slot::PROJECTED, slot::PROJECTED);
    }

    /// `bias` is whether the projection has one.
    pub(super) fn linear(&mut self, part: &str, bias: bool, n: (u32, Slot), k: (u32, Slot)) {
        let name = self.name(part);
        let weight = self.tensor(format!("{name}.weight"), n.0, k.0, Role::Matrix);
        let bias = bias.then(|| self.tensor(format!("{name}.bias"), 1, n.0, Role::Vector));
        self.op(Op::Linear {
            x: k.1,
            weight,
            bias,
            out: n.1,
        });
    }

    /// A projection of `x` `[k]` into `out` whose rows are `pieces` of stored tensors.
    pub(super) fn gathered(
        &mut self,
        name: String,
        role: Role,
        pieces: Vec<Piece>,
        (k, x): (u32, Slot),
        out: Slot,
    ) {
        let n = pieces.iter().map(Piece::rows).sum();
        let weight = self.declare(TensorDecl {
            name,
            pieces,
            stack: 1,
            n,
            k,
            role,
        });
        self.op(Op::Linear {
            x,
            weight,
            bias: None,
            out,
        });
    }

    /// Projections that are row ranges of one stored tensor: (name, rows, slot) each.
    fn fused(&mut self, part: &str, k: u32, parts: &[(&str, u32, Slot)]) {
        let of = self.name(part);
        let rows = parts.iter().map(|(_, n, _)| n).sum();
        let mut first = 0;
        for (name, n, out) in parts {
            let piece = Piece::strided(&of, &[rows, k], (first, *n), rows);
            let (name, x) = (format!("{of}.{name}"), (k, slot::NORMED));
            self.gathered(name, Role::Matrix, vec![piece], x, *out);
            first += n;
        }
    }

    /// Queries, keys, values, and the gate's slot where there is one.
    fn project(&mut self, layer: u32, a: Attention) -> Option<Slot> {
        let Dims {
            hidden,
            heads,
            head_dim,
            q,
            kv,
            ..
        } = self.dims;
        let part = |name: &str| format!("layers.{layer}.self_attn.{name}");
        let parts = [
            ("q_proj", q, slot::Q),
            ("k_proj", kv, slot::K),
            ("v_proj", kv, slot::V),
        ];
        if a.stored == Stored::Fused {
            self.fused(&part("qkv_proj.weight"), hidden, &parts);
            return None;
        }
        let apart = if a.gated { &parts[1..] } else { &parts[..] };
        for (name, n, out) in apart {
            self.linear(&part(name), a.qkv_bias, (*n, *out), (hidden, slot::NORMED));
        }
        if !a.gated {
            return None;
        }
        let gate = match self.attention_gate {
            Some(slot) => slot,
            None => self.slot(q),
        };
        self.attention_gate = Some(gate);
        let of = self.name(&part("q_proj.weight"));
        for (name, first, out) in [("query", 0, slot::Q), ("gate", head_dim, gate)] {
            let shape = [2 * heads * head_dim, hidden];
            let piece = Piece::strided(&of, &shape, (first, head_dim), 2 * head_dim);
            let (name, x) = (format!("{of}.{name}"), (hidden, slot::NORMED));
            self.gathered(name, Role::Matrix, vec![piece], x, out);
        }
        Some(gate)
    }

    /// Projections, head norms, rotary embedding, attention, output projection.
    pub(super) fn attention(&mut self, layer: u32, a: Attention) {
        let Dims {
            hidden,
            heads,
            kv_heads,
            head_dim,
            q,
            ..
        } = self.dims;
        let part = |name: &str| format!("layers.{layer}.self_attn.{name}");
        let gate = self.project(layer, a);
        for (norm, x, heads) in [("q_norm", slot::Q, heads), ("k_norm", slot::K, kv_heads)] {
            if a.head_norms {
                self.norm(&part(norm), head_dim, x, x);
            }
            if let Some(rope) = a.rope {
                self.op(Op::Rope {
                    x,
                    heads,
                    head_dim,
                    rope,
                });
            }
        }
        self.caches.push(Cache { kv_heads, head_dim });
        self.op(Op::Attention {
            q: slot::Q,
            k: slot::K,
            v: slot::V,
            out: slot::MIXED,
            heads,
            scale: a.scale,
            window: a.window,
            cache: self.caches.len() as u32 - 1,
        });
        if let Some(gate) = gate {
            self.op(Op::Glu {
                gate,
                up: slot::MIXED,
                out: slot::MIXED,
                act: Activation::Sigmoid,
            });
        }
        let out = (hidden, slot::PROJECTED);
        self.linear(&part("o_proj"), a.o_bias, out, (q, slot::MIXED));
    }

    /// Gate, up, activation, down.
    pub(super) fn mlp(&mut self, layer: u32, m: Mlp) {
        self.mlp_into(&format!("layers.{layer}.mlp"), m, slot::PROJECTED);
    }

    /// As [`Decoder::mlp`], of any name, into any slot of the hidden width.
    pub(super) fn mlp_into(&mut self, part: &str, m: Mlp, out: Slot) {
        let hidden = self.dims.hidden;
        let [gate, up] = self.inner_slots(m.inner);
        let parts = [("gate_proj", m.inner, gate), ("up_proj", m.inner, up)];
        match m.stored {
            Stored::Fused => self.fused(&format!("{part}.gate_up_proj.weight"), hidden, &parts),
            Stored::Apart => {
                for (name, n, out) in parts {
                    let name = format!("{part}.{name}");
                    self.linear(&name, m.bias, (n, out), (hidden, slot::NORMED));
                }
            }
        }
        self.op(Op::Glu {
            gate,
            up,
            out: gate,
            act: m.act,
        });
        let name = format!("{part}.down_proj");
        self.linear(&name, m.bias, (hidden, out), (m.inner, gate));
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
        self.pre_norm(&format!("layers.{layer}.input_layernorm"));
        self.attention(layer, a);
        self.add(residual);
        self.pre_norm(&format!("layers.{layer}.post_attention_layernorm"));
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
        self.pre_norm("norm");
        if logits_scaling != 1.0 {
            self.ops.push(Op::Scale {
                x: slot::NORMED,
                scale: 1.0 / logits_scaling,
            });
        }
        let head = match tied {
            true => self.table,
            false => {
                let name = format!("{}.weight", self.names.head);
                self.tensor(name, d.vocab, d.hidden, Role::Embedding)
            }
        };
        Graph {
            family: family.into(),
            model: Model {
                vocab: d.vocab,
                context: d.context,
                slots: self.slots,
                caches: self.caches,
                states: self.states,
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
    has_head(checkpoint, &Names::plain(), tied).map(|()| tied)
}

/// Refuses an untied checkpoint without a head.
pub(super) fn has_head(checkpoint: &Checkpoint, names: &Names, tied: bool) -> Result<()> {
    let head = format!("{}.weight", names.head);
    match tied || checkpoint.has(&head) {
        true => Ok(()),
        false => Err(Error::Input(format!(
            "{head} is missing and config.json says tie_word_embeddings false; set it to true if the head is the embedding"
        ))),
    }
}

/// Widest layer: products of a few of them stay inside u32.
pub(super) const WIDEST: u32 = 1 << 24;

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
