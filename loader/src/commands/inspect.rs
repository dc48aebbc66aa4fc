//! `ork inspect`

use super::say;
use clap::Args;
use ork_loader::error::{Error, Result};
use ork_loader::map::Pack;
use std::path::PathBuf;

#[derive(Args)]
pub(crate) struct InspectArgs {
    /// The .orkpack file
    pack: PathBuf,
    /// Print the whole manifest as JSON
    #[arg(long)]
    json: bool,
}

pub(crate) fn run(args: &InspectArgs) -> Result<()> {
    let pack = Pack::open(&args.pack)?;
    let manifest = pack.reader().manifest();
    if args.json {
        let json = serde_json::to_string_pretty(manifest)
            .map_err(|e| Error::Failed(format!("manifest: {e}")))?;
        return say(&(json + "\n")).map(drop);
    }
    let mut text = format!(
        "family     {}\nsoc        {}\ncompiler   {}\ntensors    {}\n",
        manifest.provenance.family,
        pack.reader().caps().name,
        manifest.provenance.compiler,
        manifest.tensors.len()
    );
    if let Some(plan) = &manifest.npu {
        text.push_str(&format!(
            "programs   {} on {} cores, chunk {}\n",
            plan.programs.len(),
            plan.cores,
            plan.chunk
        ));
    }
    for (name, bytes) in pack.reader().section_sizes() {
        text.push_str(&format!("section    {name:<13} {bytes} bytes\n"));
    }
    for (name, value) in &manifest.provenance.options {
        text.push_str(&format!("option     {name} = {value}\n"));
    }
    say(&text).map(drop)
}
