//! `orkc`: compiles checkpoints into packs.
#![allow(
    clippy::print_stdout,
    clippy::print_stderr,
    reason = "a command line program reports on stdout and fails on stderr"
)]

use clap::{Args, Parser, Subcommand};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use ork_compiler::checkpoint::Checkpoint;
use ork_compiler::compile::{Options, compile};
use ork_compiler::error::{Error, Result};
use ork_compiler::report::{Facts, Report};
use ork_compiler::{graph, reference, text};
use ork_formats::pack::{Kind, Reader};
use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::flag;
use std::fs::{File, OpenOptions};
use std::io::{IsTerminal, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

#[derive(Parser)]
#[command(version, about = "Compiles MLX checkpoints into .orkpack files")]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Compile a checkpoint
    Compile(CompileArgs),
    /// Write the logits of a plain f32 forward pass
    Reference(ReferenceArgs),
    /// Describe a pack
    Inspect(InspectArgs),
}

#[derive(Args)]
struct CompileArgs {
    /// Checkpoint directory
    checkpoint: PathBuf,
    /// Pack to write
    #[arg(short, long)]
    output: PathBuf,
    /// Target SoC
    #[arg(long, default_value = ork_caps::DEFAULT.name)]
    soc: String,
    /// Rows of a prefill chunk [default: the SoC's]
    #[arg(long)]
    chunk: Option<u32>,
    /// NPU cores [default: all of the SoC]
    #[arg(long)]
    cores: Option<u32>,
    /// Keep the source floats and stay off the NPU
    #[arg(long)]
    lossless: bool,
    /// Threads; never changes the result [default: one per CPU]
    #[arg(long)]
    jobs: Option<usize>,
    /// Replace an existing pack
    #[arg(long)]
    force: bool,
    /// Print the summary as JSON
    #[arg(long)]
    json: bool,
    /// No progress, no summary
    #[arg(short, long)]
    quiet: bool,
}

#[derive(Args)]
struct ReferenceArgs {
    /// Checkpoint directory
    checkpoint: PathBuf,
    /// Text to tokenize
    #[arg(long, required_unless_present = "ids", conflicts_with = "ids")]
    prompt: Option<String>,
    /// Token ids
    #[arg(long, value_delimiter = ',')]
    ids: Option<Vec<u32>>,
    /// safetensors file to write: `logits`, f32 [tokens, vocab]
    #[arg(short, long)]
    output: PathBuf,
}

#[derive(Args)]
struct InspectArgs {
    /// Pack
    pack: PathBuf,
    /// Print as JSON
    #[arg(long)]
    json: bool,
}

fn main() -> ExitCode {
    let done = match Cli::parse().command {
        Command::Compile(args) => run_compile(args),
        Command::Reference(args) => run_reference(&args),
        Command::Inspect(args) => run_inspect(&args),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => {
            eprintln!("orkc: error: {e}");
            ExitCode::from(e.exit_code())
        }
    }
}

/// A first SIGINT or SIGTERM stops the compile between two tensors and leaves nothing behind; a second
/// one ends the process as usual.
fn stop_on_signals() -> Result<Arc<AtomicBool>> {
    let stop = Arc::new(AtomicBool::new(false));
    for signal in [SIGINT, SIGTERM] {
        flag::register_conditional_default(signal, Arc::clone(&stop))
            .and_then(|_| flag::register(signal, Arc::clone(&stop)))
            .map_err(io(Path::new("signal handler")))?;
    }
    Ok(stop)
}

fn run_compile(args: CompileArgs) -> Result<()> {
    let report = compile(&Options {
        checkpoint: args.checkpoint,
        output: args.output,
        soc: args.soc,
        chunk: args.chunk,
        cores: args.cores,
        lossless: args.lossless,
        jobs: args.jobs,
        force: args.force,
        progress: progress(args.quiet),
        stop: stop_on_signals()?,
    })?;
    if args.quiet && !args.json {
        return Ok(());
    }
    print(&report, args.json)
}

/// A bar on stderr, only where somebody watches.
fn progress(quiet: bool) -> ProgressBar {
    if quiet || !std::io::stderr().is_terminal() {
        return ProgressBar::hidden();
    }
    let style = ProgressStyle::with_template("{wide_bar} {bytes}/{total_bytes} {eta}")
        .expect("the template is constant");
    ProgressBar::with_draw_target(None, ProgressDrawTarget::stderr()).with_style(style)
}

fn print(report: &Report, json: bool) -> Result<()> {
    let text = if json {
        serde_json::to_string_pretty(report).expect("a report is plain data") + "\n"
    } else {
        report.to_string()
    };
    std::io::stdout()
        .write_all(text.as_bytes())
        .map_err(io(Path::new("stdout")))
}

fn run_reference(args: &ReferenceArgs) -> Result<()> {
    // Claimed before the long computation, so that an existing file costs nothing.
    let mut file = create_new(&args.output)?;
    let written = reference_logits(args).and_then(|bytes| {
        file.write_all(&bytes).map_err(io(&args.output))?;
        file.sync_all().map_err(io(&args.output))
    });
    if written.is_err() {
        // Only the file made above; the first error is the one worth reporting.
        let _ = std::fs::remove_file(&args.output);
    }
    written
}

fn create_new(path: &Path) -> Result<File> {
    OpenOptions::new()
        .write(true)
        .create_new(true)
        .open(path)
        .map_err(|e| match e.kind() {
            std::io::ErrorKind::AlreadyExists => Error::Usage(format!(
                "{} exists and is never overwritten; choose another name",
                path.display()
            )),
            _ => io(path)(e),
        })
}

/// The safetensors file of the logits.
fn reference_logits(args: &ReferenceArgs) -> Result<Vec<u8>> {
    let checkpoint = Checkpoint::open(&args.checkpoint)?;
    let graph = graph::build(&checkpoint)?;
    let ids = match (&args.ids, &args.prompt) {
        (Some(ids), _) => ids.clone(),
        (None, prompt) => {
            let prompt = prompt.as_deref().unwrap_or_default();
            tokenize(&args.checkpoint, &checkpoint, prompt)?
        }
    };
    if let Some(id) = ids.iter().find(|id| graph.model.vocab <= **id) {
        return Err(Error::Usage(format!(
            "token id {id} is outside the vocabulary of {}",
            graph.model.vocab
        )));
    }
    if ids.is_empty() {
        return Err(Error::Usage("the prompt has no tokens".to_string()));
    }
    let logits = reference::Reference::new(&checkpoint, &graph)?.forward(&ids)?;
    let bytes: Vec<u8> = logits.iter().flat_map(|v| v.to_le_bytes()).collect();
    let shape = vec![ids.len(), graph.model.vocab as usize];
    let view = safetensors::tensor::TensorView::new(safetensors::Dtype::F32, shape, &bytes)
        .map_err(|e| Error::Verify(format!("logits: {e}")))?;
    safetensors::serialize([("logits", view)], None)
        .map_err(|e| Error::Verify(format!("logits: {e}")))
}

/// Ids of `prompt`, exactly as a pack of this checkpoint would see them.
fn tokenize(dir: &Path, checkpoint: &Checkpoint, prompt: &str) -> Result<Vec<u32>> {
    let (definition, rules) = text::freeze(dir, &checkpoint.config)?;
    let tokenizer = kitoken::Kitoken::from_slice(&definition)
        .map_err(|e| Error::Input(format!("tokenizer: {e}")))?;
    let body = tokenizer
        .encode(prompt, true)
        .map_err(|e| Error::Input(format!("prompt: {e}")))?;
    Ok([rules.prefix, body, rules.suffix].concat())
}

fn run_inspect(args: &InspectArgs) -> Result<()> {
    let file = File::open(&args.pack).map_err(io(&args.pack))?;
    // SAFETY: read-only private mapping; orkc is the only reader and packs are replaced by rename,
    // never changed in place. A concurrent truncation by another program is outside this contract.
    let map = unsafe { memmap2::Mmap::map(&file) }.map_err(io(&args.pack))?;
    let reader = Reader::parse(&map).map_err(|e| {
        let text = format!("{}: {e}", args.pack.display());
        match e.is_mismatch() {
            true => Error::Mismatch(text),
            false => Error::Input(text),
        }
    })?;
    let host = reader
        .sections()
        .iter()
        .find(|s| s.kind == Kind::HostWeights);
    let facts = Facts {
        host_bytes: host.map_or(0, |s| s.stored),
        file_bytes: Some(reader.total()),
        ..Facts::default()
    };
    print(
        &Report::new(reader.manifest(), reader.caps(), facts),
        args.json,
    )
}

fn io(path: &Path) -> impl Fn(std::io::Error) -> Error + '_ {
    |source| Error::Io {
        path: path.to_path_buf(),
        source,
    }
}
