//! Names of the Hugging Face Hub, resolved inside its local cache. Never touches the network.

use crate::error::{Error, Result};
use std::path::{Path, PathBuf};

/// The folder of a checkpoint: `given` itself when it is there, else the snapshot that the Hub's cache has of
/// `org/name` or `org/name@revision`.
///
/// # Errors
/// [`Error::Input`] when neither is there.
pub fn resolve(given: &Path) -> Result<PathBuf> {
    resolve_in(given, cache().as_deref())
}

/// As [`resolve`], with the cache folder given.
///
/// # Errors
/// As [`resolve`].
pub fn resolve_in(given: &Path, cache: Option<&Path>) -> Result<PathBuf> {
    let name = given.to_str().filter(|_| !given.exists());
    let (Some((org, model, revision)), Some(cache)) = (name.and_then(parse), cache) else {
        // Whoever opens it says what is wrong with it.
        return Ok(given.to_path_buf());
    };
    let repository = cache.join(format!("models--{org}--{model}"));
    let wanted = revision.unwrap_or("main");
    let download = match revision {
        None => format!("hf download {org}/{model}"),
        Some(revision) => format!("hf download {org}/{model} --revision {revision}"),
    };
    let missing = |what: String| {
        Error::Input(format!(
            "{}: no such directory, and {what}; run `{download}` first or give the checkpoint's folder",
            given.display()
        ))
    };
    if !repository.is_dir() {
        return Err(missing(format!("{} has no {org}/{model}", cache.display())));
    }
    let snapshots = repository.join("snapshots");
    // A branch or tag is a file with the commit in it; a commit needs no file.
    let commit = std::fs::read_to_string(repository.join("refs").join(wanted));
    let commit = commit.unwrap_or_else(|_| wanted.to_string());
    let snapshot = snapshots.join(commit.trim());
    match safe(commit.trim()) && snapshot.is_dir() {
        true => Ok(snapshot),
        false => Err(missing(format!(
            "{} has no revision {wanted}",
            repository.display()
        ))),
    }
}

/// (org, model, revision) of `org/model[@revision]`.
fn parse(name: &str) -> Option<(&str, &str, Option<&str>)> {
    let (name, revision) = match name.split_once('@') {
        Some((name, revision)) => (name, Some(revision)),
        None => (name, None),
    };
    let (org, model) = name.split_once('/')?;
    let parts = revision.into_iter().flat_map(|r| r.split('/'));
    let valid = [org, model].into_iter().chain(parts).all(safe);
    valid.then_some((org, model, revision))
}

/// Whether a part of a name is one and can lead nowhere else.
fn safe(part: &str) -> bool {
    let allowed = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
    !part.is_empty() && !part.starts_with('.') && part.chars().all(allowed)
}

/// As Hugging Face's own tools find it.
fn cache() -> Option<PathBuf> {
    let var = |name: &str| {
        let value = std::env::var_os(name).filter(|v| !v.is_empty());
        value.map(PathBuf::from)
    };
    var("HF_HUB_CACHE")
        .or_else(|| Some(var("HF_HOME")?.join("hub")))
        .or_else(|| Some(var("XDG_CACHE_HOME")?.join("huggingface/hub")))
        .or_else(|| Some(var("HOME")?.join(".cache/huggingface/hub")))
}
