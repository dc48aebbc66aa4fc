//! qwen3_next: gated delta nets with grouped projections, gated attention, experts with a shared one.

use super::decoder::{self, Decoder, Dims, Mlp, Names, Stored, slot};
use super::experts::{Experts, sparse_layers};
use super::hybrid::{self, Delta, Slots};
use super::{Graph, Piece, Role, rope};
use crate::checkpoint::Checkpoint;
use crate::checkpoint::config::Config;
use crate::error::Result;
use ork_formats::model::Activation;

pub(super) fn build(checkpoint: &Checkpoint, config: Config<'_>, family: &str) -> Result<Graph> {
    decoder::activation(config, family, &["silu"])?;
    let dims = Dims::read(config)?;
    let names = Names::plain();
    let kinds = hybrid::attention_layers(config, dims.layers)?;
    let delta = Delta::read(checkpoint, config, &names, &kinds)?;
    let experts = Experts::read(config, false)?.with_shared(config)?;
    let mut d = Decoder::named(names, dims, delta.norm_role(), 1.0);
    let (delta_slots, expert_slots) = (d.delta_slots(&delta), d.expert_slots(&experts));
    let sparse = sparse_layers(config, dims.layers)?;
    for (layer, (attends, sparse)) in (0..).zip(kinds.into_iter().zip(sparse)) {
        d.pre_norm(&format!("layers.{layer}.input_layernorm"));
        match attends {
            true => d.attention(layer, hybrid::attention(&dims)),
            false => {
                project(&mut d, layer, &delta, delta_slots);
                d.delta(layer, &delta, delta_slots);
            }
        }
        d.add(1.0);
        d.pre_norm(&format!("layers.{layer}.post_attention_layernorm"));
        match sparse {
            true => d.experts(checkpoint, layer, &experts, expert_slots),
            false => {
                let mlp = Mlp {
                    inner: config.count("intermediate_size")?,
                    stored: Stored::Apart,
                    bias: false,
                    act: Activation::Silu,
                };
                d.mlp(layer, mlp);
            }
        }
        d.add(1.0);
    }
    let tied = decoder::tied(checkpoint, config, false)?;
    let ropes = vec![rope::partial(config, dims.head_dim, 0.25)?];
    Ok(d.finish(family, ropes, tied, 1.0))
}

/// The stored rows are grouped by key head: its queries, keys, then values and gates of its value heads.
fn project(d: &mut Decoder, layer: u32, delta: &Delta, s: Slots) {
    let hidden = d.dims.hidden;
    let x = (hidden, slot::NORMED);
    let dk = delta.key_dim;
    let per_key = delta.value_heads / delta.key_heads;
    let values = per_key * delta.value_dim;
    let of = d.name(&format!("layers.{layer}.linear_attn.in_proj_qkvz.weight"));
    let stride = 2 * dk + 2 * values;
    let shape = [delta.key_heads * stride, hidden];
    let rows = |first, run| Piece::strided(&of, &shape, (first, run), stride);
    let qkv = vec![rows(0, dk), rows(dk, dk), rows(2 * dk, values)];
    let z = vec![rows(2 * dk + values, values)];
    d.gathered(format!("{of}.qkv"), Role::Matrix, qkv, x, s.projected);
    d.gathered(format!("{of}.z"), Role::Matrix, z, x, s.z);
    let of = d.name(&format!("layers.{layer}.linear_attn.in_proj_ba.weight"));
    let shape = [2 * delta.value_heads, hidden];
    for (name, first, out) in [("b", 0, s.b), ("a", per_key, s.a)] {
        let piece = Piece::strided(&of, &shape, (first, per_key), 2 * per_key);
        d.gathered(format!("{of}.{name}"), Role::Gate, vec![piece], x, out);
    }
}
