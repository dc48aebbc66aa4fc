//! smollm3: llama without rotary embedding on every fourth layer.

use super::decoder::{self, Attention, Decoder, Dims, Mlp, Stored};
use super::{Graph, Role, rope};
use crate::checkpoint::Checkpoint;
use crate::checkpoint::config::Config;
use crate::error::{Error, Result};
use ork_formats::model::Activation;

pub(super) fn build(checkpoint: &Checkpoint, config: Config<'_>, family: &str) -> Result<Graph> {
    decoder::activation(config, family, &["silu"])?;
    let dims = Dims::read(config)?;
    let bias = config.flag("attention_bias", false)?;
    let mlp = Mlp {
        inner: config.count("intermediate_size")?,
        stored: Stored::Apart,
        bias: config.flag("mlp_bias", false)?,
        act: Activation::Silu,
    };
    let mut d = Decoder::new(dims, Role::Vector, 1.0);
    for (layer, rotary) in (0..).zip(rotary_layers(config, dims.layers)?) {
        let attention = Attention {
            stored: Stored::Apart,
            qkv_bias: bias,
            o_bias: bias,
            head_norms: false,
            gated: false,
            rope: rotary.then_some(0),
            scale: dims.score_scale(),
            window: 0,
        };
        d.layer(layer, attention, mlp, 1.0);
    }
    let tied = decoder::tied(checkpoint, config, true)?;
    let ropes = vec![rope::build(config, dims.head_dim)?];
    Ok(d.finish(family, ropes, tied, 1.0))
}

/// `no_rope_layers` holds 1 for layers WITH rotary embedding, against its name.
fn rotary_layers(config: Config<'_>, layers: u32) -> Result<Vec<bool>> {
    match config.flags("no_rope_layers")? {
        Some(list) if list.len() == layers as usize => Ok(list),
        Some(list) => Err(Error::Input(format!(
            "config.json: no_rope_layers has {} entries, num_hidden_layers is {layers}; correct one",
            list.len()
        ))),
        None => {
            let interval = config.count_or("no_rope_layer_interval", 4)?;
            Ok((1..=layers).map(|i| !i.is_multiple_of(interval)).collect())
        }
    }
}
