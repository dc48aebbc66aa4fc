//! Targets that take no whole pack: one line that names the file, and what was there stays.
#![cfg(target_os = "linux")]

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

fn fixture() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/data/llama-bf16")
}

/// Runs a shell script with `$ORKC`, `$CKPT` and `$DIR`.
fn shell(wrapper: &[&str], script: &str, dir: &Path) -> Output {
    let mut argv = wrapper.to_vec();
    argv.extend(["sh", "-c", script]);
    Command::new(argv[0])
        .args(&argv[1..])
        .env("ORKC", env!("CARGO_BIN_EXE_orkc"))
        .env("CKPT", fixture())
        .env("DIR", dir)
        .output()
        .unwrap()
}

fn refused(done: &Output, code: i32, reason: &str) {
    let text = String::from_utf8_lossy(&done.stderr);
    assert_eq!(done.status.code(), Some(code), "{text}");
    let lines: Vec<&str> = text.lines().filter(|l| l.contains("error")).collect();
    assert_eq!(lines.len(), 1, "{text}");
    assert!(
        lines[0].contains("m.orkpack") && lines[0].contains(reason),
        "{text}"
    );
}

fn names(dir: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(dir).unwrap();
    entries
        .map(|e| e.unwrap().file_name().into_string().unwrap())
        .collect()
}

/// A quota that ends in the middle of the file: the write fails, the old pack stays, nothing else does.
#[test]
fn a_write_that_fails_midway_keeps_the_old_pack() {
    let dir = tempfile::tempdir().unwrap();
    let first = shell(
        &[],
        r#""$ORKC" compile "$CKPT" -o "$DIR/m.orkpack" -q --chunk 64"#,
        dir.path(),
    );
    assert!(first.status.success());
    let old = std::fs::read(dir.path().join("m.orkpack")).unwrap();
    let done = shell(
        &[],
        r#"trap "" XFSZ; ulimit -f 256; "$ORKC" compile "$CKPT" -o "$DIR/m.orkpack" -q --force"#,
        dir.path(),
    );
    refused(&done, 1, "File too large");
    assert_eq!(names(dir.path()), ["m.orkpack"]);
    assert!(std::fs::read(dir.path().join("m.orkpack")).unwrap() == old);
}

/// A tmpfs too small for the pack, and one that is read-only, in a mount namespace of their own where
/// the kernel lets us have one.
#[test]
fn full_and_read_only_disks_are_named() {
    let namespace = ["unshare", "-rm"];
    let dir = tempfile::tempdir().unwrap();
    if !shell(&namespace, "mount -t tmpfs x \"$DIR\"", dir.path())
        .status
        .success()
    {
        // No mount namespaces here: the quota test stands alone.
        return;
    }
    let script = |options: &str| {
        format!(
            r#"mount -t tmpfs -o {options} x "$DIR"
            "$ORKC" compile "$CKPT" -o "$DIR/m.orkpack" -q; code=$?
            [ -z "$(ls -A "$DIR")" ] || echo "error: left $(ls -A "$DIR")" >&2
            exit $code"#
        )
    };
    let full = shell(&namespace, &script("size=256k"), dir.path());
    refused(&full, 4, "262144 free");
    let read_only = shell(&namespace, &script("ro"), dir.path());
    refused(&read_only, 1, "Read-only");
}
