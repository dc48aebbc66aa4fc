//! gemma3 text: norms that multiply as 1 + w around every block, GELU, sliding windows on most layers.

use super::decoder::{self, Attention, Decoder, Dims, Mlp, Stored};
use super::{Graph, Role, rope};
use crate::checkpoint::Checkpoint;
use crate::checkpoint::config::Config;
use crate::error::Result;
use half::bf16;
use ork_formats::model::Activation;

/// Index of the table of global layers; the other is that of sliding ones.
const GLOBAL: u32 = 0;
const LOCAL: u32 = 1;

pub(super) fn build(checkpoint: &Checkpoint, config: Config<'_>, family: &str) -> Result<Graph> {
    decoder::activation(config, family, &["gelu_pytorch_tanh", "gelu_tanh"])?;
    let dims = Dims::read(config)?;
    let window = config.count("sliding_window")?;
    let pattern = config.count_or("sliding_window_pattern", 6)?;
    let scalar = config.positive_or("query_pre_attn_scalar", f64::from(dims.head_dim))?;
    let mlp = Mlp {
        inner: config.count("intermediate_size")?,
        stored: Stored::Apart,
        bias: false,
        act: Activation::GeluTanh,
    };
    // The factor is rounded to bf16, as the models were trained.
    let scale = bf16::from_f32((dims.hidden as f32).sqrt()).to_f32();
    let mut d = Decoder::new(dims, Role::OnePlus, scale);
    for layer in 0..dims.layers {
        let global = (layer + 1).is_multiple_of(pattern);
        let attention = Attention {
            stored: Stored::Apart,
            qkv_bias: false,
            o_bias: false,
            head_norms: true,
            gated: false,
            rope: Some(if global { GLOBAL } else { LOCAL }),
            scale: (1.0 / scalar.sqrt()) as f32,
            window: if global { 0 } else { window },
        };
        let name = |part: &str| format!("layers.{layer}.{part}");
        d.pre_norm(&name("input_layernorm"));
        d.attention(layer, attention);
        d.post_norm(&name("post_attention_layernorm"));
        d.add(1.0);
        d.pre_norm(&name("pre_feedforward_layernorm"));
        d.mlp(layer, mlp);
        d.post_norm(&name("post_feedforward_layernorm"));
        d.add(1.0);
    }
    let local = config.positive_or("rope_local_base_freq", 10_000.0)?;
    let ropes = vec![
        rope::build(config, dims.head_dim)?,
        rope::unscaled(local, dims.head_dim)?,
    ];
    // The flag is ignored: the head is the embedding unless there is one.
    let tied = !checkpoint.has("lm_head.weight");
    Ok(d.finish(family, ropes, tied, 1.0))
}
