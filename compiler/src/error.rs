//! Every way `orkc` can fail, each with its exit code.

use ork_formats::one_line;
use std::path::PathBuf;

/// A failure, worded for the person who typed the command.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The command line makes no sense.
    #[error("{}", one_line(.0))]
    Usage(String),
    /// The checkpoint is missing, damaged or of an unknown kind.
    #[error("{}", one_line(.0))]
    Input(String),
    /// The model exceeds a budget.
    #[error("{}", one_line(.0))]
    Fit(String),
    /// A pack or SoC is of the wrong kind or version.
    #[error("{}", one_line(.0))]
    Mismatch(String),
    /// An independent checker refused the result.
    #[error("{}", one_line(.0))]
    Verify(String),
    /// Stopped by a signal.
    #[error("interrupted; nothing was written")]
    Interrupted,
    /// The operating system refused.
    #[error("{}: {source}", path.display())]
    Io {
        /// The file or directory.
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
            Self::Io { .. } => 1,
            Self::Usage(_) => 2,
            Self::Input(_) => 3,
            Self::Fit(_) => 4,
            Self::Mismatch(_) => 5,
            Self::Verify(_) => 7,
            Self::Interrupted => 130,
        }
    }
}
