//! The `ork` command on files that are no packs: one line, the right exit code, the file untouched.

use std::process::{Command, Output};

fn ork(args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_ork"))
        .args(args)
        .output()
        .unwrap()
}

#[test]
fn foreign_and_damaged_files_are_named() {
    let dir = std::env::temp_dir().join(format!("ork-cli-{}", std::process::id()));
    std::fs::create_dir_all(&dir).unwrap();
    let path = dir.join("x.orkpack");
    let name = path.to_str().unwrap();
    let old = [&[7u8; 200][..], b"ORKPK01\0"].concat();
    let cases: [(&[u8], i32, &str); 8] = [
        (b"", 3, "empty"),
        (b"\x89ORK\r\n\x1a\n", 3, "cut"),
        (b"plain text", 3, "not an .orkpack"),
        (b"GGUF\x03\0\0\0", 5, "GGUF"),
        (b"RKNN\0\0\0\0", 5, "RKNN"),
        (b"RKLLM\0\0\0", 5, "RKLLM"),
        (b"version https://git-lfs.github.com/spec/v1", 5, "Git-LFS"),
        (&old, 5, "ORKPK01"),
    ];
    for (bytes, code, word) in cases {
        std::fs::write(&path, bytes).unwrap();
        for args in [
            &["run", name, "-p", "x"][..],
            &["inspect", name],
            &["logits", name, "--ids", "1", "-o", "never"],
        ] {
            let done = ork(args);
            let text = String::from_utf8(done.stderr).unwrap();
            assert_eq!(done.status.code(), Some(code), "{text}");
            assert!(
                text.contains(word) && text.trim_end().lines().count() == 1,
                "{text}"
            );
            assert!(done.stdout.is_empty());
            assert_eq!(std::fs::read(&path).unwrap(), bytes);
        }
    }
    std::fs::remove_dir_all(dir).unwrap();
}

#[test]
fn usage_errors_exit_with_two() {
    for args in [
        &[][..],
        &["run"],
        &["run", "x.orkpack"],
        &["run", "x.orkpack", "-p", "a", "--ids", "1"],
        &["frobnicate"],
    ] {
        assert_eq!(ork(args).status.code(), Some(2), "{args:?}");
    }
    let missing = ork(&["inspect", "/nonexistent.orkpack"]);
    let text = String::from_utf8(missing.stderr).unwrap();
    assert!(text.contains("/nonexistent.orkpack"), "{text}");
    assert_eq!(missing.status.code(), Some(3));
}
