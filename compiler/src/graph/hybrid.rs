//! Hybrids of gated delta nets and gated attention: what qwen3_next and qwen3_5 share.

use super::decoder::{Attention, Decoder, Dims, Names, Stored, slot};
use super::{Piece, Role, TensorDecl};
use crate::checkpoint::Checkpoint;
use crate::checkpoint::config::Config;
use crate::error::{Error, Result};
use ork_formats::model::{Activation, Op, Slot, State};

/// Added to the squared length of queries and keys.
const L2_EPS: f32 = 1e-6;

/// Sizes of the delta nets.
#[derive(Clone, Copy, Debug)]
pub(super) struct Delta {
    pub(super) key_heads: u32,
    pub(super) value_heads: u32,
    pub(super) key_dim: u32,
    pub(super) value_dim: u32,
    /// Taps of the convolution.
    taps: u32,
    /// Last dimension of conv1d.weight: 1 in converted checkpoints, the taps in raw ones.
    raw: bool,
}

/// Slots of the delta nets' ops.
#[derive(Clone, Copy)]
pub(super) struct Slots {
    /// q, k and v as projected.
    pub(super) projected: Slot,
    convolved: Slot,
    /// The output gate.
    pub(super) z: Slot,
    /// The step.
    pub(super) b: Slot,
    /// The decay.
    pub(super) a: Slot,
    mixed: Slot,
}

impl Delta {
    pub(super) fn read(
        checkpoint: &Checkpoint,
        config: Config<'_>,
        names: &Names,
        attention: &[bool],
    ) -> Result<Self> {
        let key_heads = config.count("linear_num_key_heads")?;
        let value_heads = config.count("linear_num_value_heads")?;
        let (key_dim, value_dim) = (
            config.count("linear_key_head_dim")?,
            config.count("linear_value_head_dim")?,
        );
        let taps = config.count("linear_conv_kernel_dim")?;
        if !value_heads.is_multiple_of(key_heads) {
            return Err(Error::Input(format!(
                "config.json: linear_num_value_heads {value_heads} is no multiple of linear_num_key_heads {key_heads}; correct one"
            )));
        }
        let rows = 4 * (u64::from(key_heads) * u64::from(key_dim))
            + 4 * (u64::from(value_heads) * u64::from(value_dim));
        if taps < 2 || u64::from(u32::MAX) < rows {
            return Err(Error::Input(format!(
                "config.json: {taps} taps over {key_heads} x {key_dim} keys and {value_heads} x {value_dim} values; correct the linear_* numbers"
            )));
        }
        let first = attention.iter().position(|attends| !attends);
        let raw = match first {
            Some(layer) => {
                let name = format!("{}.layers.{layer}.{CONV}", names.body);
                checkpoint
                    .stored_shape(&name)
                    .and_then(<[usize]>::last)
                    .is_some_and(|last| *last != 1)
            }
            None => false,
        };
        Ok(Self {
            key_heads,
            value_heads,
            key_dim,
            value_dim,
            taps,
            raw,
        })
    }

    /// Role of the norms: raw checkpoints store them less one.
    pub(super) fn norm_role(&self) -> Role {
        match self.raw {
            true => Role::OnePlus,
            false => Role::Vector,
        }
    }

    /// Width of all keys.
    pub(super) fn keys(&self) -> u32 {
        self.key_heads * self.key_dim
    }

    /// Width of all values.
    pub(super) fn values(&self) -> u32 {
        self.value_heads * self.value_dim
    }

    /// Channels of the convolution: q, k and v.
    pub(super) fn channels(&self) -> u32 {
        2 * self.keys() + self.values()
    }
}

const CONV: &str = "linear_attn.conv1d.weight";

/// Which layers attend; the others are delta nets. The interval decides, and `layer_types` must agree.
pub(super) fn attention_layers(config: Config<'_>, layers: u32) -> Result<Vec<bool>> {
    let interval = config.count_or("full_attention_interval", 4)?;
    let attends: Vec<bool> = (1..=layers).map(|i| i.is_multiple_of(interval)).collect();
    let Some(kinds) = config.texts("layer_types")? else {
        return Ok(attends);
    };
    let named: Vec<bool> = kinds.iter().map(|kind| *kind == "full_attention").collect();
    match named == attends {
        true => Ok(attends),
        false => Err(Error::Input(format!(
            "config.json: layer_types names {} of {} layers full_attention, full_attention_interval {interval} means {} of {layers}, or others; correct one",
            named.iter().filter(|a| **a).count(),
            named.len(),
            attends.iter().filter(|a| **a).count(),
        ))),
    }
}

/// The attention of both families.
pub(super) fn attention(dims: &Dims) -> Attention {
    Attention {
        stored: Stored::Apart,
        qkv_bias: false,
        o_bias: false,
        head_norms: true,
        gated: true,
        rope: Some(0),
        scale: dims.score_scale(),
        window: 0,
    }
}

impl Decoder {
    pub(super) fn delta_slots(&mut self, d: &Delta) -> Slots {
        Slots {
            projected: self.slot(d.channels()),
            convolved: self.slot(d.channels()),
            z: self.slot(d.values()),
            b: self.slot(d.value_heads),
            a: self.slot(d.value_heads),
            mixed: self.slot(d.values()),
        }
    }

    /// Convolution, delta rule, gated norm and output projection, behind the input projections.
    pub(super) fn delta(&mut self, layer: u32, d: &Delta, s: Slots) {
        let part = |name: &str| format!("layers.{layer}.linear_attn.{name}");
        let channels = d.channels();
        let of = self.name(&format!("layers.{layer}.{CONV}"));
        let shape = match d.raw {
            true => [channels, 1, d.taps],
            false => [channels, d.taps, 1],
        };
        let weight = self.declare(TensorDecl {
            pieces: vec![Piece::whole(of.clone(), &shape, channels)],
            name: of,
            stack: 1,
            n: channels,
            k: d.taps,
            role: Role::Vector,
        });
        let state = self.state(State {
            heads: 1,
            rows: d.taps - 1,
            width: channels,
        });
        self.op(Op::Conv {
            x: s.projected,
            weight,
            out: s.convolved,
            state,
        });
        let [a_log, dt_bias] = ["A_log", "dt_bias"].map(|name| {
            let name = self.name(&part(name));
            self.tensor(name, 1, d.value_heads, Role::Vector)
        });
        let state = self.state(State {
            heads: d.value_heads,
            rows: d.value_dim,
            width: d.key_dim,
        });
        self.op(Op::Delta {
            qkv: s.convolved,
            a: s.a,
            b: s.b,
            a_log,
            dt_bias,
            out: s.mixed,
            key_heads: d.key_heads,
            scale: 1.0 / (d.key_dim as f32).sqrt(),
            eps: L2_EPS,
            state,
        });
        // This norm is stored as it multiplies, whatever the others are.
        self.norm_as(Role::Vector, &part("norm"), d.value_dim, s.mixed, s.mixed);
        self.op(Op::Glu {
            gate: s.z,
            up: s.mixed,
            out: s.mixed,
            act: Activation::Silu,
        });
        let out = (self.dims.hidden, slot::PROJECTED);
        self.linear(&part("out_proj"), false, out, (d.values(), s.mixed));
    }
}
