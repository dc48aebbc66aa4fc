//! One file per subcommand, and what they share.

pub(crate) mod chat;
pub(crate) mod inspect;
pub(crate) mod logits;
pub(crate) mod ppl;
pub(crate) mod run;
pub(crate) mod sampling;
pub(crate) mod selftest;

use clap::{Args, ValueEnum};
use ork_loader::error::{Error, Result};
use ork_loader::session::{Backend, Config, Session};
use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::flag;
use std::io::Write;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

#[derive(Args)]
pub(crate) struct Open {
    /// The .orkpack file
    pack: PathBuf,
    /// Where prefill runs
    #[arg(long, value_enum, default_value = "cpu")]
    backend: BackendArg,
    /// Worker threads [default: all cores]
    #[arg(short, long)]
    threads: Option<usize>,
    /// Positions to allow [default: the model's]
    #[arg(short, long)]
    ctx: Option<u32>,
}

#[derive(Clone, Copy, ValueEnum)]
enum BackendArg {
    Cpu,
    Sim,
}

impl Open {
    pub(crate) fn session(&self) -> Result<Session> {
        let config = Config {
            backend: match self.backend {
                BackendArg::Cpu => Backend::Cpu,
                BackendArg::Sim => Backend::Sim,
            },
            threads: self.threads.unwrap_or_else(cores),
            ctx: self.ctx,
        };
        Session::open(&self.pack, config)
    }
}

pub(crate) fn cores() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

/// Writes to stdout at once. False when the reader went away (`| head`), which ends the program quietly;
/// anything else is an error.
pub(crate) fn say(text: &str) -> Result<bool> {
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

/// A flag that SIGINT and SIGTERM set, so that an answer stops between two tokens. `last` says what a
/// second signal does: end the process, or set the flag again.
pub(crate) fn stop_flag(last: Second) -> Result<Arc<AtomicBool>> {
    let stop = Arc::new(AtomicBool::new(false));
    for signal in [SIGINT, SIGTERM] {
        let conditional = match last {
            Second::Ends => flag::register_conditional_default(signal, Arc::clone(&stop)).map(drop),
            Second::Repeats => Ok(()),
        };
        conditional
            .and_then(|()| flag::register(signal, Arc::clone(&stop)))
            .map_err(|source| Error::Io {
                path: "signal handler".into(),
                source,
            })?;
    }
    Ok(stop)
}

/// What a second signal does.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Second {
    Ends,
    Repeats,
}
