//! The properties of the root package's tests, for the targets.

#[path = "../../tests/fuzzing/mod.rs"]
pub mod fuzzing;
