//! qwen3_5: gated delta nets with a projection each for q|k|v, z, b and a; gated attention; dense MLP.

use super::decoder::{self, Decoder, Dims, Mlp, Names, Stored, slot};
use super::hybrid::{self, Delta, Slots};
use super::{Graph, rope};
use crate::checkpoint::Checkpoint;
use crate::checkpoint::config::Config;
use crate::error::Result;
use ork_formats::model::Activation;

pub(super) fn build(checkpoint: &Checkpoint, config: Config<'_>, family: &str) -> Result<Graph> {
    let text = config.object("text_config")?.unwrap_or(config);
    let mlp = Mlp {
        inner: text.count("intermediate_size")?,
        stored: Stored::Apart,
        bias: false,
        act: Activation::Silu,
    };
    let feed_forward = |d: &mut Decoder, layer| d.mlp(layer, mlp);
    build_with(checkpoint, config, family, |_| feed_forward)
}

/// The family with any feed-forward block: `blocks` prepares the decoder, its result appends one layer's.
pub(super) fn build_with<F: FnMut(&mut Decoder, u32)>(
    checkpoint: &Checkpoint,
    config: Config<'_>,
    family: &str,
    blocks: impl FnOnce(&mut Decoder) -> F,
) -> Result<Graph> {
    let text = config.object("text_config")?.unwrap_or(config);
    decoder::activation(text, family, &["silu"])?;
    let dims = Dims::read(text)?;
    let names = names(checkpoint);
    let kinds = hybrid::attention_layers(text, dims.layers)?;
    let delta = Delta::read(checkpoint, text, &names, &kinds)?;
    let tied = tied(checkpoint, config, text, &names)?;
    let mut d = Decoder::named(names, dims, delta.norm_role(), 1.0);
    let slots = d.delta_slots(&delta);
    let mut feed_forward = blocks(&mut d);
    for (layer, attends) in (0..).zip(kinds) {
        d.pre_norm(&format!("layers.{layer}.input_layernorm"));
        match attends {
            true => d.attention(layer, hybrid::attention(&dims)),
            false => {
                project(&mut d, layer, &delta, slots);
                d.delta(layer, &delta, slots);
            }
        }
        d.add(1.0);
        d.pre_norm(&format!("layers.{layer}.post_attention_layernorm"));
        feed_forward(&mut d, layer);
        d.add(1.0);
    }
    let ropes = vec![rope::nested(text, dims.head_dim, (1e5, 0.25))?];
    Ok(d.finish(family, ropes, tied, 1.0))
}

/// MLX, Hugging Face, and checkpoints of the language model alone.
fn names(checkpoint: &Checkpoint) -> Names {
    let has = |part: &str, name: &str| checkpoint.has(&format!("{part}.{name}"));
    let pick = |candidates: &[&str], name: &str| {
        let found = candidates.iter().find(|part| has(part, name));
        found.unwrap_or(&candidates[0]).to_string()
    };
    let bodies = ["model", "language_model.model", "model.language_model"];
    Names {
        body: pick(&bodies, "embed_tokens.weight"),
        head: pick(&["lm_head", "language_model.lm_head"], "weight"),
    }
}

/// The flag stands in the text config, beside it, or in both: the inner one counts, unless the outer one
/// explains a missing head.
fn tied(
    checkpoint: &Checkpoint,
    config: Config<'_>,
    text: Config<'_>,
    names: &Names,
) -> Result<bool> {
    let outer = config.flag("tie_word_embeddings", false)?;
    let head = checkpoint.has(&format!("{}.weight", names.head));
    let tied = match text.has("tie_word_embeddings") {
        true => text.flag("tie_word_embeddings", false)? || (outer && !head),
        false => outer,
    };
    decoder::has_head(checkpoint, names, tied).map(|()| tied)
}

fn project(d: &mut Decoder, layer: u32, delta: &Delta, s: Slots) {
    let part = |name: &str| format!("layers.{layer}.linear_attn.{name}");
    let x = (d.dims.hidden, slot::NORMED);
    let qkv = (delta.channels(), s.projected);
    d.linear(&part("in_proj_qkv"), false, qkv, x);
    d.linear(&part("in_proj_z"), false, (delta.values(), s.z), x);
    d.gate(&part("in_proj_b.weight"), delta.value_heads, s.b);
    d.gate(&part("in_proj_a.weight"), delta.value_heads, s.a);
}
