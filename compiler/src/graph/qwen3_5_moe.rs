//! qwen3_5_moe: qwen3_5 with experts and a shared one in every layer.

use super::decoder::Decoder;
use super::experts::Experts;
use super::{Graph, qwen3_5};
use crate::checkpoint::Checkpoint;
use crate::checkpoint::config::Config;
use crate::error::Result;

pub(super) fn build(checkpoint: &Checkpoint, config: Config<'_>, family: &str) -> Result<Graph> {
    let text = config.object("text_config")?.unwrap_or(config);
    let experts = Experts::read(text, true)?.with_shared(text)?;
    qwen3_5::build_with(checkpoint, config, family, |d| {
        let slots = d.expert_slots(&experts);
        move |d: &mut Decoder, layer| d.experts(checkpoint, layer, &experts, slots)
    })
}
