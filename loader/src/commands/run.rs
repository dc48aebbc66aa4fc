//! `ork run`

use super::sampling::{OnOverflow, Sampling};
use super::{Open, say, second_signal, stop_flag, warn};
use clap::Args;
use ork_loader::chat::{Answer, Message, Role, Template};
use ork_loader::error::{Error, Result};
use ork_loader::generate::{self, Outcome, Overflow, Request};
use ork_loader::session::Session;
use ork_loader::tokenizer::Tokenizer;
use serde_json::json;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

#[derive(Args)]
pub(crate) struct RunArgs {
    #[command(flatten)]
    open: Open,
    /// Prompt text
    #[arg(short, long, required_unless_present_any = ["ids", "file"], conflicts_with_all = ["ids", "file"])]
    prompt: Option<String>,
    /// Read the prompt from a UTF-8 file, `-` for stdin
    #[arg(short, long, conflicts_with = "ids")]
    file: Option<PathBuf>,
    /// Prompt as token ids: 1,2,3
    #[arg(long, value_delimiter = ',')]
    ids: Vec<u32>,
    /// Treat the prompt as a user's message in the model's chat template
    #[arg(long, conflicts_with_all = ["raw", "ids"])]
    chat: bool,
    /// Continue the prompt as plain text (the default without --chat and --system)
    #[arg(long)]
    raw: bool,
    /// System message; implies --chat
    #[arg(long, conflicts_with_all = ["raw", "ids"])]
    system: Option<String>,
    /// Most tokens to generate
    #[arg(short, default_value_t = 128)]
    n: usize,
    #[command(flatten)]
    sampling: Sampling,
    /// Print generated ids instead of text
    #[arg(long)]
    print_ids: bool,
    /// Print the result and timings as JSON
    #[arg(long, conflicts_with = "print_ids")]
    json: bool,
    /// Print timings to stderr
    #[arg(long)]
    stats: bool,
}

pub(crate) fn run(args: &RunArgs) -> Result<()> {
    let mut session = args.open.session()?;
    let mut sampler = args.sampling.sampler(&session.manifest().text.generation)?;
    let tokenizer = Tokenizer::new(session.tokenizer_bytes(), &session.manifest().text)?;
    let prompt = prompt(args, &session, &tokenizer)?;
    let stop = stop_flag(second_signal(&session))?;
    session.stop_on(Arc::clone(&stop));
    let quiet = args.print_ids || args.json;
    let request = Request {
        prompt: &prompt,
        n: args.n,
        stops: &args.sampling.stop,
    };
    let outcome = generate::generate(&mut session, &tokenizer, request, &mut sampler, |text| {
        let goes_on = quiet || say(text)?;
        Ok(goes_on && !stop.load(Ordering::Relaxed))
    })?;
    warn(&mut session);
    if args.json {
        say(&format!("{:#}\n", result(&session, &outcome, prompt.len())))?;
    } else {
        if args.print_ids {
            let ids: Vec<String> = outcome.ids.iter().map(u32::to_string).collect();
            say(&ids.join(","))?;
        }
        say("\n")?;
    }
    if args.stats {
        eprintln!("{}", stats(&session, &outcome));
    }
    match stop.load(Ordering::Relaxed) {
        true => Err(Error::Interrupted),
        false => Ok(()),
    }
}

fn prompt(args: &RunArgs, session: &Session, tokenizer: &Tokenizer) -> Result<Vec<u32>> {
    let context = session.context() as usize;
    let text = &session.manifest().text;
    let kept = text.prefix.len();
    let Some(prompt) = words(args)? else {
        let overflow = overflow(args.sampling.on_overflow, 0);
        return generate::fit(&args.ids, context, args.n, overflow);
    };
    if !args.chat && args.system.is_none() {
        let ids = tokenizer.encode(&prompt)?;
        let overflow = overflow(args.sampling.on_overflow, kept);
        return generate::fit(&ids, context, args.n, overflow);
    }
    let template = Template::new(text)?;
    let mut messages = Vec::new();
    if let Some(system) = &args.system {
        messages.push(Message::new(Role::System, system));
    }
    messages.push(Message::new(Role::User, prompt));
    let ids = template.encode(tokenizer, &messages, Answer::Next)?;
    let keep = match (args.sampling.on_overflow, &args.system) {
        (OnOverflow::KeepSystem, Some(_)) => template
            .encode(tokenizer, &messages[..1], Answer::None)?
            .len(),
        _ => 0,
    };
    generate::fit(
        &ids,
        context,
        args.n,
        overflow(args.sampling.on_overflow, keep),
    )
}

/// The prompt's text, from wherever it was given.
fn words(args: &RunArgs) -> Result<Option<String>> {
    let Some(path) = &args.file else {
        return Ok(args.prompt.clone());
    };
    let mut bytes = Vec::new();
    match path == Path::new("-") {
        true => std::io::stdin().read_to_end(&mut bytes).map(drop),
        false => std::fs::read(path).map(|read| bytes = read),
    }
    .map_err(|source| Error::Io {
        path: path.clone(),
        source,
    })?;
    String::from_utf8(bytes).map(Some).map_err(|e| {
        let at = e.utf8_error().valid_up_to();
        Error::Input(format!(
            "{}: not UTF-8 at byte {at}; convert the text first",
            path.display()
        ))
    })
}

fn overflow(policy: OnOverflow, keep: usize) -> Overflow {
    match policy {
        OnOverflow::Error => Overflow::Error,
        OnOverflow::TruncateLeft | OnOverflow::KeepSystem => Overflow::TruncateLeft { keep },
    }
}

fn rate(n: usize, seconds: f64) -> f64 {
    n as f64 / seconds.max(1e-9)
}

/// Lines of timings.
pub(crate) fn stats(session: &Session, outcome: &Outcome) -> String {
    let (prefill, decode) = (outcome.prefill.as_secs_f64(), outcome.decode.as_secs_f64());
    let stats = session.stats();
    let (t, d) = (stats.times, stats.device);
    let ms = |d: Duration| d.as_secs_f64() * 1e3;
    format!(
        "prefill {} tokens, {:.1} tok/s; decode {} tokens, {:.1} tok/s; stopped by {:?}\n\
         {}: {} submits, {} misses, {} resets, {} jobs on the CPU instead; {:.1} MB moved; busy {:.1} ms\n\
         host ms: quantise {:.1}, copy {:.1}, submit {:.1}, wait {:.1}, dequantise {:.1}, attention {:.1}, other {:.1}",
        outcome.computed,
        rate(outcome.computed, prefill),
        outcome.ids.len(),
        rate(outcome.steps, decode),
        outcome.stop,
        session.backend(),
        d.submits,
        d.misses,
        d.resets,
        stats.fallbacks,
        t.bytes as f64 / 1e6,
        d.busy_ns as f64 / 1e6,
        ms(t.quantise),
        ms(t.copy),
        ms(t.submit),
        ms(t.wait),
        ms(t.dequantise),
        ms(t.attention),
        ms(t.other),
    )
}

fn result(session: &Session, outcome: &Outcome, prompt: usize) -> serde_json::Value {
    let (prefill, decode) = (outcome.prefill.as_secs_f64(), outcome.decode.as_secs_f64());
    let stats = session.stats();
    json!({
        "prompt_tokens": prompt,
        "ids": outcome.ids,
        "text": outcome.text,
        "stop": outcome.stop,
        "prefill_seconds": prefill,
        "prefill_tokens_per_second": rate(outcome.computed, prefill),
        "decode_seconds": decode,
        "decode_tokens_per_second": rate(outcome.steps, decode),
        "backend": session.backend(),
        "device": stats.device,
        "fallbacks": stats.fallbacks,
    })
}
