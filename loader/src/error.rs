//! Every way `ork` can fail, each with its exit code.

use std::path::PathBuf;

/// A failure, worded for the person who typed the command.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The command line or the prompt makes no sense.
    #[error("{0}")]
    Usage(String),
    /// The pack is damaged or not a pack.
    #[error("{0}")]
    Input(String),
    /// The request does not fit the context or a budget.
    #[error("{0}")]
    Fit(String),
    /// The pack is for another SoC or format version.
    #[error("{0}")]
    Mismatch(String),
    /// The device is held by someone else or absent.
    #[error("{0}")]
    Busy(String),
    /// The pack's own answers or hashes contradict what was computed.
    #[error("{0}")]
    Verify(String),
    /// Stopped by a signal.
    #[error("interrupted")]
    Interrupted,
    /// Execution failed.
    #[error("{0}")]
    Failed(String),
    /// The operating system refused.
    #[error("{}: {source}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// What it said.
        source: std::io::Error,
    },
}

/// Shorthand for this crate.
pub type Result<T> = std::result::Result<T, Error>;

impl Error {
    /// Exit code of the process.
    #[must_use]
    pub fn exit_code(&self) -> u8 {
        match self {
            Self::Failed(_) | Self::Io { .. } => 1,
            Self::Usage(_) => 2,
            Self::Input(_) => 3,
            Self::Fit(_) => 4,
            Self::Mismatch(_) => 5,
            Self::Busy(_) => 6,
            Self::Verify(_) => 7,
            Self::Interrupted => 130,
        }
    }
}
