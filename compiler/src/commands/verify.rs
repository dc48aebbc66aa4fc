//! `orkc verify`

use super::{Opened, say};
use clap::Args;
use ork_compiler::against;
use ork_compiler::checkpoint::hub;
use ork_compiler::error::{Error, Result};
use std::path::PathBuf;

#[derive(Args)]
pub(crate) struct VerifyArgs {
    /// Pack
    pack: PathBuf,
    /// Recompute every slice from this checkpoint and compare
    #[arg(long, value_name = "CKPT")]
    against: Option<PathBuf>,
}

pub(crate) fn run(args: &VerifyArgs) -> Result<()> {
    let pack = Opened::new(&args.pack)?;
    let named = |text: String| Error::Verify(format!("{}: {text}", args.pack.display()));
    pack.reader
        .verify(&pack.map)
        .map_err(|e| named(e.to_string()))?;
    if let Some(checkpoint) = &args.against {
        let checkpoint = hub::resolve(checkpoint)?;
        against::check(&pack.reader, &pack.map, &checkpoint).map_err(|e| match e {
            Error::Verify(text) => named(text),
            other => other,
        })?;
    }
    let sections = pack.reader.sections().len();
    say(&match &args.against {
        None => format!("ok: {sections} sections, {} bytes\n", pack.reader.total()),
        Some(checkpoint) => format!(
            "ok: {sections} sections, {} bytes, every slice recomputed from {}\n",
            pack.reader.total(),
            checkpoint.display()
        ),
    })
}
