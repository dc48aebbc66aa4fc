//! A real model against known answers: compiles SmolLM2-135M-Instruct (made by
//! `tools/fetch_smollm2.py DIR`) in three forms and compares greedy ids with those of its bf16 weights.
//!
//!     cargo run --release --example smollm2 -- DIR [TEXT]
//!
//! With a text file it also prints each form's perplexity. Exits with 1 where a form gives less than it
//! promises.
#![allow(clippy::print_stdout, reason = "an example talks to the terminal")]

use ork_compiler::compile::{self, Options};
use ork_compiler::place::{Decode, Scheme};
use ork_loader::chat::{Answer, Message, Role, Template};
use ork_loader::perplexity::{self, Mode, Plan};
use ork_loader::session::{Backend, Config, Session};
use ork_loader::tokenizer::Tokenizer;
use std::error::Error;
use std::path::Path;
use std::time::Instant;

const QUESTION: &str = "What is the capital of France? Answer in one short sentence.";
const OPENING: &str = "The capital of France is";
/// Greedy ids of the bf16 weights with float32 arithmetic (transformers), stop id included.
const ANSWER: [u32; 8] = [504, 3575, 282, 4649, 314, 7042, 30, 2];
/// Likewise; the first 24, which llama.cpp's bf16 run gives too. Near-ties follow.
const CONTINUATION: [u32; 24] = [
    7042, 30, 198, 198, 504, 2988, 314, 42, 216, 34, 32, 33, 40, 29, 32, 33, 29, 34, 34, 216, 33,
    34, 42, 33,
];

/// A form of the pack, and how many ids of (answer, continuation) it promises.
const FORMS: [(&str, Scheme, [usize; 2]); 3] = [
    ("lossless", Scheme::Lossless, [8, 24]),
    ("int8 decode", Scheme::Quantised(Decode::Int8), [8, 1]),
    (
        "default (int4 decode)",
        Scheme::Quantised(Decode::Int4),
        [6, 1],
    ),
];

fn main() -> Result<(), Box<dyn Error>> {
    let mut args = std::env::args_os().skip(1);
    let checkpoint = args.next().ok_or("usage: smollm2 DIR [TEXT]")?;
    let text = args.next().map(std::fs::read_to_string).transpose()?;
    let dir = tempfile::tempdir()?;
    let mut kept = true;
    println!(
        "form                   MiB  compile  answer  continuation  perplexity: prefill  seam"
    );
    for (name, scheme, promise) in FORMS {
        let pack = dir.path().join("smollm2.orkpack");
        let mut options = Options::new(checkpoint.clone().into(), pack.clone());
        (options.scheme, options.force) = (scheme, true);
        let start = Instant::now();
        compile::compile(&options)?;
        let took = start.elapsed().as_secs_f64();
        let mut session = open(&pack)?;
        let rules = session.manifest().text.clone();
        let tokenizer = Tokenizer::new(session.tokenizer_bytes(), &rules)?;
        let question = [Message::new(Role::User, QUESTION)];
        let chat = Template::new(&rules)?.encode(&tokenizer, &question, Answer::Next)?;
        let agree = [
            same(&mut session, &chat, &ANSWER)?,
            same(&mut session, &tokenizer.encode(OPENING)?, &CONTINUATION)?,
        ];
        kept &= promise[0] <= agree[0] && promise[1] <= agree[1];
        let size = std::fs::metadata(&pack)?.len() as f64 / f64::from(1 << 20);
        print!(
            "{name:<21}{size:>5.0}{took:>7.1} s{:>6}/8{:>11}/24",
            agree[0], agree[1]
        );
        if let Some(text) = &text {
            let ids = tokenizer.encode_plain(text.strip_suffix('\n').unwrap_or(text))?;
            for (mode, width) in [(Mode::Prefill, 21), (Mode::Seam, 10)] {
                let plan = Plan {
                    window: 512,
                    first: 257,
                    windows: usize::MAX,
                    mode,
                };
                let score = perplexity::score(&mut session, &ids, None, plan, |_| {})?;
                print!("{:>width$.3}", score.perplexity);
            }
        }
        println!();
    }
    match kept {
        true => Ok(()),
        false => Err("a form gives less than it promises".into()),
    }
}

/// How many greedy ids after `prompt` are those of `want`, from the first on.
fn same(session: &mut Session, prompt: &[u32], want: &[u32]) -> Result<usize, Box<dyn Error>> {
    session.reset();
    let mut logits = session.prefill(prompt)?;
    for (n, id) in want.iter().enumerate() {
        let best = logits
            .iter()
            .enumerate()
            .fold(0, |best, (i, v)| if logits[best] < *v { i } else { best });
        if best as u32 != *id {
            return Ok(n);
        }
        logits = session.decode(*id)?;
    }
    Ok(want.len())
}

fn open(pack: &Path) -> Result<Session, ork_loader::error::Error> {
    let config = Config {
        backend: Backend::Cpu,
        threads: std::thread::available_parallelism().map_or(1, usize::from),
        ctx: None,
    };
    Session::open(pack, config)
}
