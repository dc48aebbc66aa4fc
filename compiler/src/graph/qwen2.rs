//! qwen2: biases on q, k, v, whatever the config says.

use super::decoder::{self, Attention, Decoder, Dims, Mlp, Stored};
use super::{Graph, Role, rope};
use crate::checkpoint::Checkpoint;
use crate::checkpoint::config::Config;
use crate::error::Result;
use ork_formats::model::Activation;

pub(super) fn build(checkpoint: &Checkpoint, config: Config<'_>, family: &str) -> Result<Graph> {
    decoder::activation(config, family, &["silu"])?;
    let dims = Dims::read(config)?;
    let attention = Attention {
        stored: Stored::Apart,
        qkv_bias: true,
        o_bias: false,
        head_norms: false,
        gated: false,
        rope: Some(0),
        scale: dims.score_scale(),
        window: 0,
    };
    let mlp = Mlp {
        inner: config.count("intermediate_size")?,
        stored: Stored::Apart,
        bias: false,
        act: Activation::Silu,
    };
    let mut d = Decoder::new(dims, Role::Vector, 1.0);
    for layer in 0..dims.layers {
        d.layer(layer, attention, mlp, 1.0);
    }
    let tied = decoder::tied(checkpoint, config, true)?;
    let ropes = vec![rope::build(config, dims.head_dim)?];
    Ok(d.finish(family, ropes, tied, 1.0))
}
