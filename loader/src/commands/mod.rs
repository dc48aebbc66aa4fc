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
use ork_loader::session::{Backend, Config, Hardware, Session};
use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::flag;
use std::io::Write;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

#[derive(Args)]
pub(crate) struct Open {
    /// The .orkpack file
    pack: PathBuf,
    /// Where prefill runs
    #[arg(long, value_enum, default_value = "auto")]
    backend: BackendArg,
    /// Let CPU and NPU work at the same time; the numbers do not depend on it
    #[arg(long, value_enum, default_value = "on", hide_short_help = true)]
    overlap: Switch,
    /// Take device memory from dma-heap where it is small enough, one program per submit (rknpu)
    #[arg(long, hide_short_help = true)]
    import: bool,
    /// Try an rknpu driver older than the oldest known to work
    #[arg(long, hide_short_help = true)]
    force_driver: bool,
    /// Longest wait for one NPU job, in milliseconds
    #[arg(long, default_value_t = 2000, hide_short_help = true)]
    npu_timeout_ms: u64,
    /// Worker threads [default: all cores]
    #[arg(short, long)]
    threads: Option<usize>,
    /// Positions to allow [default: the model's]
    #[arg(short, long)]
    ctx: Option<u32>,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum BackendArg {
    /// rknpu, rocket or cpu: what is there and can run the pack
    Auto,
    /// The NPU through the vendor's driver
    Rknpu,
    /// The NPU through the mainline driver
    Rocket,
    /// The bit-exact NPU simulator
    Sim,
    /// CPU kernels
    Cpu,
}

impl From<BackendArg> for Backend {
    fn from(arg: BackendArg) -> Self {
        match arg {
            BackendArg::Auto => Self::Auto,
            BackendArg::Rknpu => Self::Rknpu,
            BackendArg::Rocket => Self::Rocket,
            BackendArg::Sim => Self::Sim,
            BackendArg::Cpu => Self::Cpu,
        }
    }
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Switch {
    On,
    Off,
}

impl Open {
    pub(crate) fn session(&self) -> Result<Session> {
        let config = Config {
            backend: self.backend.into(),
            threads: self.threads.unwrap_or_else(cores),
            ctx: self.ctx,
        };
        let mut hardware = Hardware {
            overlap: self.overlap == Switch::On,
            ..Hardware::default()
        };
        hardware.options.import = self.import;
        hardware.options.force_driver = self.force_driver;
        hardware.options.timeout = Duration::from_millis(self.npu_timeout_ms.max(1));
        let session = Session::open_on(&self.pack, config, hardware)?;
        // On a machine without an NPU the CPU is no news.
        if let Some(picked) = session.picked().filter(|p| p.npu) {
            eprintln!("ork: backend {}", picked.why);
        }
        Ok(session)
    }
}

/// A running NPU job must not lose its process: with a device in use no signal ends it at once.
pub(crate) fn second_signal(session: &Session) -> Second {
    match session.on_hardware() {
        true => Second::Repeats,
        false => Second::Ends,
    }
}

/// Says what the device had to complain about.
pub(crate) fn warn(session: &mut Session) {
    if let Some(warning) = session.warning() {
        eprintln!("ork: warning: {warning}");
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
