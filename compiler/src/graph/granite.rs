//! granite: llama with multipliers on embedding, scores, residuals and logits.

use super::decoder::{self, Attention, Decoder, Dims, Mlp, Stored};
use super::{Graph, Role, rope};
use crate::checkpoint::Checkpoint;
use crate::checkpoint::config::Config;
use crate::error::Result;
use ork_formats::model::Activation;

pub(super) fn build(checkpoint: &Checkpoint, config: Config<'_>, family: &str) -> Result<Graph> {
    decoder::activation(config, family, &["silu"])?;
    let dims = Dims::read(config)?;
    let bias = config.flag("attention_bias", false)?;
    let attention = Attention {
        stored: Stored::Apart,
        qkv_bias: bias,
        o_bias: bias,
        head_norms: false,
        gated: false,
        rope: Some(0),
        scale: config.positive("attention_multiplier")? as f32,
        window: 0,
    };
    let mlp = Mlp {
        inner: config.count("intermediate_size")?,
        stored: Stored::Apart,
        bias: config.flag("mlp_bias", false)?,
        act: Activation::Silu,
    };
    let residual = config.positive("residual_multiplier")? as f32;
    let embedding = config.positive("embedding_multiplier")? as f32;
    let mut d = Decoder::new(dims, Role::Vector, embedding);
    for layer in 0..dims.layers {
        d.layer(layer, attention, mlp, residual);
    }
    let tied = decoder::tied(checkpoint, config, true)?;
    let ropes = vec![rope::build(config, dims.head_dim)?];
    let scaling = config.positive("logits_scaling")? as f32;
    Ok(d.finish(family, ropes, tied, scaling))
}
