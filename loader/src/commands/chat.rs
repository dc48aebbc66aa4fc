//! `ork chat`

use super::sampling::{OnOverflow, Sampling};
use super::{Open, Second, run, say, stop_flag, warn};
use clap::Args;
use ork_loader::chat::{Answer, Message, Role, Template};
use ork_loader::error::{Error, Result};
use ork_loader::generate::{self, Outcome, Overflow, Request, Stop};
use ork_loader::sampler::Sampler;
use ork_loader::session::Session;
use ork_loader::tokenizer::Tokenizer;
use std::io::{BufRead, IsTerminal};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

#[derive(Args)]
pub(crate) struct ChatArgs {
    #[command(flatten)]
    open: Open,
    /// System message
    #[arg(long)]
    system: Option<String>,
    /// Most tokens of one answer
    #[arg(short, default_value_t = 512)]
    n: usize,
    #[command(flatten)]
    sampling: Sampling,
    /// Print timings to stderr after each answer
    #[arg(long)]
    stats: bool,
}

const HELP: &str = "/reset forgets the conversation, /system TEXT starts over with another system \
                    message, /exit or Ctrl-D ends; Ctrl-C stops an answer";

struct Conversation<'a> {
    args: &'a ChatArgs,
    session: Session,
    tokenizer: Tokenizer,
    template: Template,
    sampler: Sampler,
    messages: Vec<Message>,
    stop: Arc<AtomicBool>,
}

/// What a line asks for.
enum Line<'a> {
    Empty,
    Exit,
    Help,
    Reset,
    System(&'a str),
    Unknown(&'a str),
    Say(&'a str),
}

fn parse(line: &str) -> Line<'_> {
    let line = line.trim();
    let (word, rest) = line.split_once(char::is_whitespace).unwrap_or((line, ""));
    match word {
        "" => Line::Empty,
        "/exit" | "/quit" => Line::Exit,
        "/help" => Line::Help,
        "/reset" => Line::Reset,
        "/system" => Line::System(rest.trim()),
        word if word.starts_with('/') => Line::Unknown(word),
        _ => Line::Say(line),
    }
}

pub(crate) fn run(args: &ChatArgs) -> Result<()> {
    let session = args.open.session()?;
    let text = &session.manifest().text;
    let mut chat = Conversation {
        args,
        tokenizer: Tokenizer::new(session.tokenizer_bytes(), text)?,
        template: Template::new(text)?,
        sampler: args.sampling.sampler(&text.generation)?,
        messages: Vec::new(),
        stop: stop_flag(Second::Repeats)?,
        session,
    };
    chat.session.stop_on(Arc::clone(&chat.stop));
    chat.restart(args.system.as_deref().unwrap_or(""));
    let person = std::io::stdin().is_terminal();
    if person {
        eprintln!("{HELP}");
    }
    let mut input = std::io::stdin().lock();
    loop {
        if person {
            eprint!("> ");
        }
        let Some(line) = read_line(&mut input)? else {
            return Ok(());
        };
        match parse(&line) {
            Line::Empty => {}
            Line::Exit => return Ok(()),
            Line::Help => eprintln!("{HELP}"),
            Line::Reset => {
                let system = args.system.as_deref().unwrap_or("");
                chat.restart(system);
            }
            Line::System(system) => chat.restart(system),
            Line::Unknown(word) => eprintln!("{word} is no command; {HELP}"),
            Line::Say(text) => {
                if !chat.answer(text)? {
                    return Ok(());
                }
            }
        }
    }
}

/// One line of input, invalid UTF-8 replaced; `None` at the end.
fn read_line(input: &mut impl BufRead) -> Result<Option<String>> {
    let mut bytes = Vec::new();
    let read = input
        .read_until(b'\n', &mut bytes)
        .map_err(|source| Error::Io {
            path: "stdin".into(),
            source,
        })?;
    Ok((read != 0).then(|| String::from_utf8_lossy(&bytes).into_owned()))
}

impl Conversation<'_> {
    fn restart(&mut self, system: &str) {
        self.messages.clear();
        if !system.is_empty() {
            self.messages.push(Message::new(Role::System, system));
        }
        self.session.reset();
    }

    /// Says `text`, streams the answer; false when stdout went away. A turn that cannot be served is taken
    /// back and explained, and the conversation goes on.
    fn answer(&mut self, text: &str) -> Result<bool> {
        self.messages.push(Message::new(Role::User, text));
        self.stop.store(false, Ordering::Relaxed);
        match self.generate() {
            Ok((outcome, reader)) => {
                say("\n")?;
                warn(&mut self.session);
                if self.args.stats {
                    eprintln!("{}", run::stats(&self.session, &outcome));
                }
                if matches!(outcome.stop, Stop::Context) {
                    eprintln!("the context is full; /reset, or pass --on-overflow keep-system");
                }
                self.messages
                    .push(Message::new(Role::Assistant, outcome.text));
                Ok(reader)
            }
            Err(error @ (Error::Fit(_) | Error::Usage(_))) => {
                self.messages.pop();
                eprintln!("ork: {error}");
                Ok(true)
            }
            // Stopped while the question was read: there is no answer to keep.
            Err(Error::Interrupted) => {
                self.messages.pop();
                say("\n")
            }
            Err(error) => Err(error),
        }
    }

    fn generate(&mut self) -> Result<(Outcome, bool)> {
        let prompt = self.prompt()?;
        let mut reader = true;
        let request = Request {
            prompt: &prompt,
            n: self.args.n,
            stops: &self.args.sampling.stop,
        };
        let stop = Arc::clone(&self.stop);
        let outcome = generate::generate(
            &mut self.session,
            &self.tokenizer,
            request,
            &mut self.sampler,
            |text| {
                reader = say(text)?;
                Ok(reader && !stop.load(Ordering::Relaxed))
            },
        )?;
        Ok((outcome, reader))
    }

    /// The conversation as ids, older turns dropped where the policy allows it.
    fn prompt(&mut self) -> Result<Vec<u32>> {
        let context = self.session.context() as usize;
        let encode = |messages: &[Message]| {
            self.template
                .encode(&self.tokenizer, messages, Answer::Next)
        };
        let mut ids = encode(&self.messages)?;
        if self.args.sampling.on_overflow == OnOverflow::Error {
            return generate::fit(&ids, context, self.args.n, Overflow::Error);
        }
        let first = usize::from(self.messages[0].role == Role::System);
        let room = context - self.args.n.min(context / 4);
        // A turn is a question and its answer.
        while room < ids.len() && first + 2 < self.messages.len() {
            self.messages.drain(first..first + 2);
            ids = encode(&self.messages)?;
        }
        let keep = match self.args.sampling.on_overflow {
            OnOverflow::KeepSystem if first == 1 => self
                .template
                .encode(&self.tokenizer, &self.messages[..first], Answer::None)?
                .len(),
            _ => 0,
        };
        generate::fit(&ids, context, self.args.n, Overflow::TruncateLeft { keep })
    }
}
