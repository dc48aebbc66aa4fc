//! `orkc inspect`

use super::{Opened, io, print, say};
use clap::Args;
use ork_compiler::error::{Error, Result};
use ork_compiler::programs;
use ork_compiler::report::{Facts, Report};
use ork_formats::pack::Kind;
use std::path::PathBuf;

#[derive(Args)]
pub(crate) struct InspectArgs {
    /// Pack
    pack: PathBuf,
    /// Print as JSON
    #[arg(long)]
    json: bool,
    /// List the command programs
    #[arg(long, conflicts_with = "program")]
    programs: bool,
    /// Disassemble one program
    #[arg(long, value_name = "ID")]
    program: Option<u32>,
    /// With --program: write regcmd.bin, weights.bin and program.json into a new directory
    #[arg(long, value_name = "DIR", requires = "program")]
    raw: Option<PathBuf>,
}

pub(crate) fn run(args: &InspectArgs) -> Result<()> {
    let pack = Opened::new(&args.pack)?;
    match (args.program, &args.raw) {
        (Some(id), Some(dir)) => write_raw(&pack, id, dir),
        (Some(id), None) => say(&programs::disassemble(&pack.reader, id)?),
        (None, _) if args.programs => {
            let list = programs::list(pack.reader.manifest());
            match args.json {
                true => say(&(serde_json::to_string_pretty(&list).expect("plain data") + "\n")),
                false => say(&list.iter().map(ToString::to_string).collect::<String>()),
            }
        }
        (None, _) => summary(&pack, args.json),
    }
}

fn summary(pack: &Opened, json: bool) -> Result<()> {
    let reader = &pack.reader;
    let host = reader
        .sections()
        .iter()
        .find(|s| s.kind == Kind::HostWeights);
    let facts = Facts {
        host_bytes: host.map_or(0, |s| s.stored),
        file_bytes: Some(reader.total()),
        provenance: true,
        ..Facts::default()
    };
    print(&Report::new(reader.manifest(), reader.caps(), facts), json)
}

/// A new directory, so that nothing of anybody's is overwritten.
fn write_raw(pack: &Opened, id: u32, dir: &PathBuf) -> Result<()> {
    let raw = programs::raw(&pack.reader, &pack.map, id)?;
    std::fs::create_dir(dir).map_err(|e| match e.kind() {
        std::io::ErrorKind::AlreadyExists => Error::Usage(format!(
            "{} exists; --raw makes a new directory",
            dir.display()
        )),
        _ => io(dir)(e),
    })?;
    let json = serde_json::to_vec_pretty(&raw.description).expect("plain data");
    for (name, bytes) in [
        ("regcmd.bin", &raw.regcmd),
        ("weights.bin", &raw.weights),
        ("program.json", &json),
    ] {
        let path = dir.join(name);
        std::fs::write(&path, bytes).map_err(io(&path))?;
    }
    Ok(())
}
