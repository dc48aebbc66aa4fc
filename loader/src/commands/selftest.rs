//! `ork selftest`

use super::{BackendArg, cores, say};
use clap::Args;
use ork_loader::error::Result;
use ork_loader::selftest;
use std::path::PathBuf;

#[derive(Args)]
pub(crate) struct SelftestArgs {
    /// The .orkpack file
    pack: PathBuf,
    /// What to test besides the simulator and the CPU
    #[arg(long, value_enum, default_value = "cpu")]
    backend: BackendArg,
    /// Worker threads [default: all cores]
    #[arg(short, long)]
    threads: Option<usize>,
}

pub(crate) fn run(args: &SelftestArgs) -> Result<()> {
    let checked = selftest::run(
        &args.pack,
        args.backend.into(),
        args.threads.unwrap_or_else(cores),
    )?;
    say(&format!(
        "ok: {} sections hashed, {} texts tokenised, {} int32 blocks and {} logits compared\n",
        checked.sections, checked.texts, checked.blocks, checked.logits
    ))
    .map(drop)
}
