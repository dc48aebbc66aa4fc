//! llama and mistral: the plain pre-norm decoder.

use super::decoder::{self, Attention, Decoder, Dims, Mlp, Stored};
use super::{Graph, Role, rope};
use crate::checkpoint::Checkpoint;
use crate::checkpoint::config::Config;
use crate::error::Result;
use ork_formats::model::Activation;

pub(super) fn build(checkpoint: &Checkpoint, config: Config<'_>, family: &str) -> Result<Graph> {
    decoder::activation(config, family, &["silu", "swish"])?;
    let dims = Dims::read(config)?;
    let bias = config.flag("attention_bias", false)?;
    let mlp = Mlp {
        inner: config.count("intermediate_size")?,
        stored: Stored::Apart,
        bias: config.flag("mlp_bias", false)?,
        act: Activation::Silu,
    };
    let mut d = Decoder::new(dims, Role::Vector, 1.0);
    for (layer, window) in (0..).zip(decoder::windows(config, dims.layers)?) {
        let attention = Attention {
            stored: Stored::Apart,
            qkv_bias: bias,
            o_bias: bias,
            head_norms: false,
            gated: false,
            rope: Some(0),
            scale: dims.score_scale(),
            window,
        };
        d.layer(layer, attention, mlp, 1.0);
    }
    let tied = decoder::tied(checkpoint, config, true)?;
    let ropes = vec![rope::build(config, dims.head_dim)?];
    Ok(d.finish(family, ropes, tied, 1.0))
}
