//! Routed experts, in every layout that checkpoints have, and the shared expert beside them.

use super::decoder::{Decoder, Mlp, Stored, slot};
use super::{Piece, Role, TensorDecl};
use crate::checkpoint::Checkpoint;
use crate::checkpoint::config::Config;
use crate::error::{Error, Result};
use ork_formats::model::{Activation, Op, Slot, TensorId};

/// Most experts of a layer: what a pack's stack may hold.
const MOST: u32 = 1 << 12;

/// A model's mixture of experts.
#[derive(Clone, Copy, Debug)]
pub(super) struct Experts {
    /// Experts of a layer.
    count: u32,
    /// Experts of a token.
    top: u32,
    /// Width of one expert.
    inner: u32,
    /// Whether the chosen probabilities are divided by their sum.
    renormalise: bool,
    /// Width of the shared expert.
    shared: Option<u32>,
}

/// How a layer's experts are stored.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Layout {
    /// `experts.{e}.gate_proj.weight` `[inner, hidden]`, one tensor an expert.
    Apart,
    /// `switch_mlp.gate_proj.weight` `[experts, inner, hidden]`.
    Stacked,
    /// `experts.gate_up_proj` `[experts, 2 inner, hidden]`, gate rows first.
    Fused,
}

impl Experts {
    pub(super) fn read(config: Config<'_>, renormalise: bool) -> Result<Self> {
        let count = config.count("num_experts")?;
        let top = config.count("num_experts_per_tok")?;
        if count < top {
            return Err(Error::Input(format!(
                "config.json: num_experts_per_tok {top} exceeds num_experts {count}; correct one"
            )));
        }
        let inner = config.count("moe_intermediate_size")?;
        let widest = inner.max(config.count("hidden_size")?);
        if MOST < count || u64::from(u32::MAX) < 2 * u64::from(widest) * u64::from(count) {
            return Err(Error::Input(format!(
                "config.json: {count} experts of {inner}; at most {MOST} of which all fit 32-bit row numbers are supported, correct num_experts"
            )));
        }
        Ok(Self {
            count,
            top,
            inner,
            renormalise: config.flag("norm_topk_prob", renormalise)?,
            shared: None,
        })
    }

    /// With the shared expert that the config describes.
    pub(super) fn with_shared(self, config: Config<'_>) -> Result<Self> {
        Ok(Self {
            shared: Some(config.count("shared_expert_intermediate_size")?),
            ..self
        })
    }
}

/// Slots of the experts' ops.
#[derive(Clone, Copy)]
pub(super) struct Slots {
    router: Slot,
    /// (result, gate) of the shared expert.
    shared: Option<(Slot, Slot)>,
}

/// Which layers have experts; the others have a dense MLP.
pub(super) fn sparse_layers(config: Config<'_>, layers: u32) -> Result<Vec<bool>> {
    let step = config.count_or("decoder_sparse_step", 1)?;
    let dense = config.indices("mlp_only_layers")?;
    let sparse = |layer: u32| !dense.contains(&layer) && (layer + 1).is_multiple_of(step);
    Ok((0..layers).map(sparse).collect())
}

impl Decoder {
    pub(super) fn expert_slots(&mut self, experts: &Experts) -> Slots {
        let hidden = self.dims.hidden;
        Slots {
            router: self.slot(experts.count),
            shared: experts.shared.map(|_| (self.slot(hidden), self.slot(1))),
        }
    }

    /// Router, experts, and the shared expert times its gate.
    pub(super) fn experts(
        &mut self,
        checkpoint: &Checkpoint,
        layer: u32,
        experts: &Experts,
        slots: Slots,
    ) {
        let hidden = self.dims.hidden;
        let part = |name: &str| format!("layers.{layer}.mlp.{name}");
        let x = (hidden, slot::NORMED);
        self.gate(&part("gate.weight"), experts.count, slots.router);
        let [gate, up, down] = self.expert_tensors(checkpoint, layer, experts);
        self.op(Op::Moe {
            x: x.1,
            router: slots.router,
            gate,
            up,
            down,
            out: slot::PROJECTED,
            top: experts.top,
            renormalise: experts.renormalise,
            act: Activation::Silu,
        });
        if let (Some(inner), Some((shared, gate))) = (experts.shared, slots.shared) {
            let mlp = Mlp {
                inner,
                stored: Stored::Apart,
                bias: false,
                act: Activation::Silu,
            };
            self.mlp_into(&part("shared_expert"), mlp, shared);
            self.gate(&part("shared_expert_gate.weight"), 1, gate);
            self.op(Op::AddGated {
                x: shared,
                gate,
                out: slot::PROJECTED,
            });
        }
    }

    /// A small matrix over the normed stream whose results decide.
    pub(super) fn gate(&mut self, part: &str, n: u32, out: Slot) {
        let (name, hidden) = (self.name(part), self.dims.hidden);
        let weight = self.tensor(name, n, hidden, Role::Gate);
        self.op(Op::Linear {
            x: slot::NORMED,
            weight,
            bias: None,
            out,
        });
    }

    fn expert_tensors(
        &mut self,
        checkpoint: &Checkpoint,
        layer: u32,
        experts: &Experts,
    ) -> [TensorId; 3] {
        let (hidden, inner, count) = (self.dims.hidden, experts.inner, experts.count);
        let mlp = self.name(&format!("layers.{layer}.mlp"));
        let fused = format!("{mlp}.experts.gate_up_proj");
        let layout = match () {
            () if checkpoint.has(&format!("{mlp}.switch_mlp.gate_proj.weight")) => Layout::Stacked,
            () if checkpoint.has(&fused) => Layout::Fused,
            () => Layout::Apart,
        };
        let shapes = [
            ("gate_proj", inner, hidden),
            ("up_proj", inner, hidden),
            ("down_proj", hidden, inner),
        ];
        shapes.map(|(proj, n, k)| {
            let stacked = |of: String| vec![Piece::whole(of, &[count, n, k], count * n)];
            let half = |first| Piece::strided(&fused, &[count, 2 * n, k], (first, n), 2 * n);
            let pieces = match (layout, proj) {
                (Layout::Stacked, _) => stacked(format!("{mlp}.switch_mlp.{proj}.weight")),
                (Layout::Fused, "gate_proj") => vec![half(0)],
                (Layout::Fused, "up_proj") => vec![half(n)],
                (Layout::Fused, _) => stacked(format!("{mlp}.experts.down_proj")),
                (Layout::Apart, _) => {
                    let of = |e| format!("{mlp}.experts.{e}.{proj}.weight");
                    // Where the last one is missing it alone is declared, and named in the error.
                    let first = if checkpoint.has(&of(count - 1)) {
                        0
                    } else {
                        count - 1
                    };
                    let experts = first..count;
                    experts.map(|e| Piece::whole(of(e), &[n, k], n)).collect()
                }
            };
            self.declare(TensorDecl {
                name: format!("{mlp}.experts.{proj}"),
                pieces,
                stack: count,
                n,
                k,
                role: Role::Experts,
            })
        })
    }
}
