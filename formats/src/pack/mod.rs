//! The container: header page, section table, sections.
//!
//! [`Reader`] proves everything before it hands out a view; the writer (feature `write`) is
//! deterministic and never leaves a half-written file under the final name.

mod error;
mod header;
mod prove;
mod read;
#[cfg(feature = "write")]
pub mod write;

pub use error::PackError;
pub use header::{ALIGN, HEADER_BYTES, Kind, MAGIC, OLDEST, Section, VERSION};
pub use read::Reader;

/// Most bytes a compressed section may expand to.
pub const COLD_LIMIT: u64 = 256 << 20;
