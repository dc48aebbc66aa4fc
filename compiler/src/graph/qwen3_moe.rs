//! qwen3_moe: qwen3 with routed experts in most layers, no shared expert.

use super::decoder::{self, Attention, Decoder, Dims, Mlp, Stored};
use super::experts::{Experts, sparse_layers};
use super::{Graph, Role, rope};
use crate::checkpoint::Checkpoint;
use crate::checkpoint::config::Config;
use crate::error::{Error, Result};
use ork_formats::model::Activation;

pub(super) fn build(checkpoint: &Checkpoint, config: Config<'_>, family: &str) -> Result<Graph> {
    decoder::activation(config, family, &["silu"])?;
    let dims = Dims::read(config)?;
    if !config.has("tie_word_embeddings") {
        return Err(Error::Input(
            "config.json: tie_word_embeddings is missing; add true or false".into(),
        ));
    }
    let experts = Experts::read(config, false)?;
    let attention = Attention {
        stored: Stored::Apart,
        qkv_bias: false,
        o_bias: false,
        head_norms: true,
        gated: false,
        rope: Some(0),
        scale: dims.score_scale(),
        window: 0,
    };
    let mut d = Decoder::new(dims, Role::Vector, 1.0);
    let slots = d.expert_slots(&experts);
    for (layer, sparse) in (0..).zip(sparse_layers(config, dims.layers)?) {
        d.pre_norm(&format!("layers.{layer}.input_layernorm"));
        d.attention(layer, attention);
        d.add(1.0);
        d.pre_norm(&format!("layers.{layer}.post_attention_layernorm"));
        match sparse {
            true => d.experts(checkpoint, layer, &experts, slots),
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
    // As mlx-lm: this family's rope_scaling is ignored.
    let ropes = vec![rope::without_scaling(config, dims.head_dim)?];
    Ok(d.finish(family, ropes, tied, 1.0))
}
