//! Bad input gives one clear line, the right exit code, and touches nothing.

use ork_compiler::compile::{self, Options};
use ork_loader::map::Pack;
use std::path::Path;

fn refuse(checkpoint: &Path, out: &Path) -> (u8, String) {
    let options = Options::new(checkpoint.to_path_buf(), out.to_path_buf());
    let error = compile::compile(&options).unwrap_err();
    (error.exit_code(), error.to_string())
}

#[test]
fn checkpoints_that_are_none() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("out.orkpack");
    let (code, text) = refuse(&dir.path().join("nowhere"), &out);
    assert_eq!(code, 3, "{text}");
    assert!(text.contains("no such directory"), "{text}");

    let family = dir.path().join("family");
    std::fs::create_dir(&family).unwrap();
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/llama-bf16");
    for file in ["model.safetensors", "tokenizer.json"] {
        std::fs::copy(source.join(file), family.join(file)).unwrap();
    }
    let config = std::fs::read_to_string(source.join("config.json")).unwrap();
    let config = config.replace("\"model_type\": \"llama\"", "\"model_type\": \"zebra\"");
    std::fs::write(family.join("config.json"), config).unwrap();
    let (code, text) = refuse(&family, &out);
    assert_eq!(code, 3, "{text}");
    assert!(text.contains("zebra") && !text.contains('\n'), "{text}");

    // Names out of the files may hold anything; the error is one line all the same.
    for (from, to) in [
        ("\"model_type\": \"llama\"", "\"model_type\": \"ze\\nbra\""),
        (
            "\"hidden_act\": \"silu\"",
            "\"hidden_act\": \"ge\\u001b[2Jlu\"",
        ),
        ("\"mlp_bias\": false", "\"head_dim\": 16777216"),
    ] {
        let config = std::fs::read_to_string(source.join("config.json")).unwrap();
        std::fs::write(family.join("config.json"), config.replace(from, to)).unwrap();
        let (code, text) = refuse(&family, &out);
        assert_eq!(code, 3, "{text}");
        assert!(!text.chars().any(char::is_control), "{text:?}");
    }
    assert!(!out.exists());
}

#[test]
fn packs_that_are_none() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("x.orkpack");
    for (bytes, code, word) in [
        (&b""[..], 3, "empty"),
        (&b"GGUF\x03\0\0\0 and more"[..], 5, "GGUF"),
        (&b"version https://git-lfs.github.com/spec/v1"[..], 5, "LFS"),
        (&b"\x89ORK"[..], 3, "cut"),
    ] {
        std::fs::write(&path, bytes).unwrap();
        let error = Pack::open(&path).err().unwrap();
        assert_eq!(error.exit_code(), code, "{error}");
        assert!(error.to_string().contains(word), "{error}");
        assert_eq!(std::fs::read(&path).unwrap(), bytes);
    }
}
