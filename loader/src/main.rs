//! `ork`: runs packs.
#![allow(
    clippy::print_stdout,
    clippy::print_stderr,
    reason = "a command line program reports on stdout and fails on stderr"
)]

use clap::{Args, Parser, Subcommand, ValueEnum};
use ork_loader::error::{Error, Result};
use ork_loader::generate;
use ork_loader::map::Pack;
use ork_loader::sampler::Sampler;
use ork_loader::selftest;
use ork_loader::session::{Backend, Config, Session};
use ork_loader::tokenizer::Tokenizer;
use safetensors::tensor::{Dtype, TensorView};
use std::fs::OpenOptions;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

#[derive(Parser)]
#[command(version, about = "Runs .orkpack files")]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Generate text
    Run(RunArgs),
    /// Write the logits of every prompt row, all through prefill
    Logits(LogitsArgs),
    /// Describe a pack
    Inspect(InspectArgs),
    /// Check a pack on this machine against the answers it carries
    Selftest(SelftestArgs),
}

#[derive(Args)]
struct Open {
    /// The .orkpack file
    pack: PathBuf,
    /// Where prefill runs
    #[arg(long, value_enum, default_value = "cpu")]
    backend: BackendArg,
    /// Worker threads [default: all cores]
    #[arg(short, long)]
    threads: Option<usize>,
}

#[derive(Clone, Copy, ValueEnum)]
enum BackendArg {
    Cpu,
    Sim,
}

#[derive(Args)]
struct RunArgs {
    #[command(flatten)]
    open: Open,
    /// Prompt text
    #[arg(short, long, required_unless_present = "ids", conflicts_with = "ids")]
    prompt: Option<String>,
    /// Prompt as token ids: 1,2,3
    #[arg(long, value_delimiter = ',')]
    ids: Vec<u32>,
    /// Most tokens to generate
    #[arg(short, default_value_t = 128)]
    n: usize,
    /// Temperature; 0 is greedy
    #[arg(long, default_value_t = 0.8)]
    temp: f32,
    /// Sample among the k likeliest; 0 is all
    #[arg(long, default_value_t = 40)]
    top_k: usize,
    /// Sample among the likeliest that sum to p
    #[arg(long, default_value_t = 0.95)]
    top_p: f32,
    /// Random seed
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// Print generated ids instead of text
    #[arg(long)]
    print_ids: bool,
    /// Print timings to stderr
    #[arg(long)]
    stats: bool,
}

#[derive(Args)]
struct LogitsArgs {
    #[command(flatten)]
    open: Open,
    /// Token ids: 1,2,3
    #[arg(long, value_delimiter = ',', required = true)]
    ids: Vec<u32>,
    /// Output .safetensors; tensor `logits`, f32 [tokens, vocab]
    #[arg(short, long)]
    output: PathBuf,
}

#[derive(Args)]
struct SelftestArgs {
    /// The .orkpack file
    pack: PathBuf,
    /// Worker threads [default: all cores]
    #[arg(short, long)]
    threads: Option<usize>,
}

#[derive(Args)]
struct InspectArgs {
    /// The .orkpack file
    pack: PathBuf,
    /// Print the whole manifest as JSON
    #[arg(long)]
    json: bool,
}

fn main() -> ExitCode {
    let result = match Cli::parse().command {
        Command::Run(args) => run(&args),
        Command::Logits(args) => logits(&args),
        Command::Inspect(args) => inspect(&args),
        Command::Selftest(args) => selftest(&args),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            // One line, whatever a library's message looks like (those of regexes draw pictures).
            let text = error.to_string();
            let lines: Vec<&str> = text.lines().map(str::trim).collect();
            eprintln!("ork: error: {}", lines.join(" "));
            ExitCode::from(error.exit_code())
        }
    }
}

fn cores() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

fn selftest(args: &SelftestArgs) -> Result<()> {
    let checked = selftest::run(&args.pack, args.threads.unwrap_or_else(cores))?;
    say(&format!(
        "ok: {} sections hashed, {} texts tokenised, {} int32 blocks and {} logits compared\n",
        checked.sections, checked.texts, checked.blocks, checked.logits
    ))
    .map(drop)
}

fn open(args: &Open) -> Result<Session> {
    let config = Config {
        backend: match args.backend {
            BackendArg::Cpu => Backend::Cpu,
            BackendArg::Sim => Backend::Sim,
        },
        threads: args.threads.unwrap_or_else(cores),
        ctx: None,
    };
    Session::open(&args.pack, config)
}

/// Writes to stdout at once. False when the reader went away (`| head`), which ends the program quietly;
/// anything else is an error.
fn say(text: &str) -> Result<bool> {
    let mut out = std::io::stdout();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Ok(()) => Ok(true),
        Err(e) if e.kind() == std::io::ErrorKind::BrokenPipe => Ok(false),
        Err(source) => Err(Error::Io {
            path: "stdout".into(),
            source,
        }),
    }
}

/// Refuses numbers that no sampler can use.
fn sampler(args: &RunArgs) -> Result<Sampler> {
    if !args.temp.is_finite() || args.temp < 0.0 {
        return Err(Error::Usage(format!(
            "--temp {}: must be 0 or more",
            args.temp
        )));
    }
    if !(0.0..=1.0).contains(&args.top_p) {
        return Err(Error::Usage(format!(
            "--top-p {}: must be within 0..1",
            args.top_p
        )));
    }
    Ok(Sampler::new(args.temp, args.top_k, args.top_p, args.seed))
}

fn run(args: &RunArgs) -> Result<()> {
    let mut sampler = sampler(args)?;
    let mut session = open(&args.open)?;
    let tokenizer = Tokenizer::new(session.tokenizer_bytes(), &session.manifest().text)?;
    let prompt = match &args.prompt {
        Some(text) => tokenizer.encode(text)?,
        None => args.ids.clone(),
    };
    let outcome = generate::generate(
        &mut session,
        &tokenizer,
        &prompt,
        args.n,
        &mut sampler,
        |t| if args.print_ids { Ok(true) } else { say(t) },
    )?;
    if args.print_ids {
        let ids: Vec<String> = outcome.ids.iter().map(u32::to_string).collect();
        say(&ids.join(","))?;
    }
    say("\n")?;
    if args.stats {
        let rate = |n: usize, t: std::time::Duration| n as f64 / t.as_secs_f64().max(1e-9);
        eprintln!(
            "prefill {} tokens, {:.1} tok/s; decode {} tokens, {:.1} tok/s; stopped by {:?}",
            prompt.len(),
            rate(prompt.len(), outcome.prefill),
            outcome.ids.len(),
            rate(outcome.ids.len(), outcome.decode),
            outcome.stop
        );
    }
    Ok(())
}

fn logits(args: &LogitsArgs) -> Result<()> {
    let mut session = open(&args.open)?;
    let logits = session.logits_all(&args.ids)?;
    let bytes: Vec<u8> = logits.iter().flat_map(|v| v.to_le_bytes()).collect();
    let shape = vec![args.ids.len(), session.manifest().model.vocab as usize];
    let view = TensorView::new(Dtype::F32, shape, &bytes)
        .map_err(|e| Error::Failed(format!("logits: {e}")))?;
    let file = safetensors::serialize([("logits", view)], None)
        .map_err(|e| Error::Failed(format!("logits: {e}")))?;
    write_new(&args.output, &file)
}

/// Creates a file; an existing one is never overwritten.
fn write_new(path: &Path, bytes: &[u8]) -> Result<()> {
    let mut file = OpenOptions::new()
        .write(true)
        .create_new(true)
        .open(path)
        .map_err(|source| match source.kind() {
            std::io::ErrorKind::AlreadyExists => {
                Error::Usage(format!("{} exists; choose another name", path.display()))
            }
            _ => Error::Io {
                path: path.to_path_buf(),
                source,
            },
        })?;
    file.write_all(bytes).map_err(|source| {
        // Only the file made above; the first error is the one worth reporting.
        let _ = std::fs::remove_file(path);
        Error::Io {
            path: path.to_path_buf(),
            source,
        }
    })
}

fn inspect(args: &InspectArgs) -> Result<()> {
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
