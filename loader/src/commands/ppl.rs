//! `ork ppl`

use super::{Open, say};
use clap::{Args, ValueEnum};
use ork_loader::error::{Error, Result};
use ork_loader::perplexity::{self, Mode, Plan};
use ork_loader::tokenizer::Tokenizer;
use serde_json::json;
use std::io::IsTerminal;
use std::path::PathBuf;

#[derive(Args)]
pub(crate) struct PplArgs {
    #[command(flatten)]
    open: Open,
    /// UTF-8 text
    text: PathBuf,
    /// Tokens of a window
    #[arg(long, default_value_t = 512)]
    window: usize,
    /// Score every target, not only the second half of each window
    #[arg(long)]
    full: bool,
    /// Most windows [default: all]
    #[arg(long)]
    windows: Option<usize>,
    /// Which weights score
    #[arg(long, value_enum, default_value = "prefill")]
    mode: ModeArg,
    /// Print as JSON
    #[arg(long)]
    json: bool,
}

#[derive(Clone, Copy, ValueEnum)]
enum ModeArg {
    /// All through prefill
    Prefill,
    /// All through decode
    Decode,
    /// Half a window prefilled, the rest decoded
    Seam,
}

pub(crate) fn run(args: &PplArgs) -> Result<()> {
    let text = std::fs::read_to_string(&args.text)
        .map_err(|e| Error::Input(format!("{}: {e}", args.text.display())))?;
    let mut session = args.open.session()?;
    let rules = session.manifest().text.clone();
    let tokenizer = Tokenizer::new(session.tokenizer_bytes(), &rules)?;
    // One trailing newline is an editor's, not the text's.
    let ids = tokenizer.encode_plain(text.strip_suffix('\n').unwrap_or(&text))?;
    let plan = Plan {
        window: args.window,
        first: if args.full { 1 } else { args.window / 2 + 1 },
        windows: args.windows.unwrap_or(usize::MAX),
        mode: match args.mode {
            ModeArg::Prefill => Mode::Prefill,
            ModeArg::Decode => Mode::Decode,
            ModeArg::Seam => Mode::Seam,
        },
    };
    let watched = std::io::stderr().is_terminal();
    let begin = rules.prefix.first().copied();
    let score = perplexity::score(&mut session, &ids, begin, plan, |score| {
        if watched {
            eprint!(
                "\r{} windows, perplexity {:.4}",
                score.windows, score.perplexity
            );
        }
    })?;
    if watched {
        eprintln!();
    }
    match args.json {
        true => say(&format!(
            "{:#}\n",
            json!({
                "perplexity": score.perplexity,
                "targets": score.targets,
                "windows": score.windows,
                "window": args.window,
                "tokens": ids.len(),
            })
        )),
        false => say(&format!(
            "perplexity {:.4} over {} targets in {} windows of {}\n",
            score.perplexity, score.targets, score.windows, args.window
        )),
    }
    .map(drop)
}
