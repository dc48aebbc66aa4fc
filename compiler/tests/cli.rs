//! The `orkc` command: every bad input ends in one clear line, its exit code, and no file.

use safetensors::tensor::{Dtype, SafeTensors, TensorView};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

fn fixture() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/data/llama-bf16")
}

fn orkc(args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_orkc"))
        .args(args)
        .output()
        .unwrap()
}

/// A copy of the fixture that a test may damage.
fn copy(dir: &Path) -> PathBuf {
    let to = dir.join("checkpoint");
    std::fs::create_dir(&to).unwrap();
    for name in [
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    ] {
        std::fs::copy(fixture().join(name), to.join(name)).unwrap();
    }
    to
}

type Tensors = BTreeMap<String, (Dtype, Vec<usize>, Vec<u8>)>;

/// Rewrites the weights after `change`.
fn edit_weights(checkpoint: &Path, change: impl FnOnce(&mut Tensors)) {
    let path = checkpoint.join("model.safetensors");
    let bytes = std::fs::read(&path).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let mut tensors: Tensors = file
        .tensors()
        .into_iter()
        .map(|(n, t)| (n, (t.dtype(), t.shape().to_vec(), t.data().to_vec())))
        .collect();
    change(&mut tensors);
    let views = tensors
        .iter()
        .map(|(n, (ty, shape, data))| (n, TensorView::new(*ty, shape.clone(), data).unwrap()));
    std::fs::write(path, safetensors::serialize(views, None).unwrap()).unwrap();
}

fn edit_config(checkpoint: &Path, key: &str, value: serde_json::Value) {
    let path = checkpoint.join("config.json");
    let mut json: serde_json::Value =
        serde_json::from_str(&std::fs::read_to_string(&path).unwrap()).unwrap();
    json[key] = value;
    std::fs::write(path, json.to_string()).unwrap();
}

/// Compiles a damaged copy; expects exit code 3, one line with every word, and no output file.
fn refused(words: &[&str], damage: impl FnOnce(&Path)) {
    let dir = tempfile::tempdir().unwrap();
    let checkpoint = copy(dir.path());
    damage(&checkpoint);
    let out = dir.path().join("out.orkpack");
    let done = orkc(&[
        "compile",
        checkpoint.to_str().unwrap(),
        "-o",
        out.to_str().unwrap(),
    ]);
    let text = String::from_utf8(done.stderr).unwrap();
    assert_eq!(done.status.code(), Some(3), "{text}");
    assert_eq!(text.trim_end().lines().count(), 1, "{text}");
    for word in words {
        assert!(text.contains(word), "{word:?} not in: {text}");
    }
    assert!(done.stdout.is_empty());
    let left: Vec<_> = std::fs::read_dir(dir.path()).unwrap().collect();
    assert_eq!(left.len(), 1, "files left beside the checkpoint: {left:?}");
}

const UP: &str = "model.layers.1.mlp.up_proj.weight";

#[test]
fn damaged_weights_are_named() {
    refused(&[UP, "missing"], |c| {
        edit_weights(c, |t| drop(t.remove(UP)));
    });
    refused(&[UP, "[192, 128]", "[128, 192]"], |c| {
        edit_weights(c, |t| t.get_mut(UP).unwrap().1 = vec![128, 192]);
    });
    refused(&[UP, "NaN", "index 3"], |c| {
        edit_weights(c, |t| {
            t.get_mut(UP).unwrap().2[6..8].copy_from_slice(&[0xc0, 0x7f]);
        });
    });
    refused(&["model.layers.0.surprise", "unexpected"], |c| {
        edit_weights(c, |t| {
            let name = "model.layers.0.surprise".to_string();
            t.insert(name, (Dtype::F32, vec![1], vec![0; 4]));
        });
    });
    refused(&[UP, "I16"], |c| {
        edit_weights(c, |t| t.get_mut(UP).unwrap().0 = Dtype::I16);
    });
}

#[test]
fn damaged_files_are_named() {
    let weights = "model.safetensors";
    refused(&[weights], |c| {
        let path = c.join("model.safetensors");
        let bytes = std::fs::read(&path).unwrap();
        std::fs::write(path, &bytes[..bytes.len() - 100]).unwrap();
    });
    refused(&[weights, "Git-LFS"], |c| {
        let text = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n";
        std::fs::write(c.join("model.safetensors"), text).unwrap();
    });
    refused(&["model-00002-of-00002.safetensors", "missing"], |c| {
        let shard = c.join("model-00001-of-00002.safetensors");
        std::fs::rename(c.join("model.safetensors"), shard).unwrap();
    });
    refused(&["model*.safetensors"], |c| {
        std::fs::remove_file(c.join("model.safetensors")).unwrap();
    });
    refused(&["config.json"], |c| {
        std::fs::remove_file(c.join("config.json")).unwrap();
    });
    refused(&["config.json"], |c| {
        std::fs::write(c.join("config.json"), "{").unwrap();
    });
    refused(&["tokenizer.json"], |c| {
        std::fs::remove_file(c.join("tokenizer.json")).unwrap();
    });
}

#[test]
fn unsupported_configs_are_named() {
    refused(&["model_type", "zebra", "llama"], |c| {
        edit_config(c, "model_type", "zebra".into());
    });
    refused(&["rope_theta"], |c| {
        edit_config(c, "rope_theta", serde_json::Value::Null);
    });
    refused(&["hidden_size"], |c| {
        edit_config(c, "hidden_size", 0.into())
    });
    refused(&["zigzag"], |c| {
        edit_config(
            c,
            "rope_scaling",
            serde_json::json!({"rope_type": "zigzag"}),
        );
    });
    refused(&["hidden_act", "relu"], |c| {
        edit_config(c, "hidden_act", "relu".into());
    });
}

#[test]
fn outputs_are_never_lost() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("out.orkpack");
    let source = fixture();
    let compile = |extra: &[&str]| {
        let mut args = vec![
            "compile",
            source.to_str().unwrap(),
            "-q",
            "-o",
            out.to_str().unwrap(),
        ];
        args.extend(extra);
        let done = orkc(&args);
        let text = String::from_utf8(done.stderr).unwrap();
        (done.status.code().unwrap(), text)
    };
    std::fs::write(&out, "my thesis").unwrap();
    for extra in [&[][..], &["--force"]] {
        let (code, text) = compile(extra);
        assert_eq!(code, 2, "{text}");
        assert_eq!(std::fs::read(&out).unwrap(), b"my thesis");
    }
    std::fs::remove_file(&out).unwrap();
    assert_eq!(compile(&[]).0, 0);
    let first = std::fs::read(&out).unwrap();
    let (code, text) = compile(&[]);
    assert!(code == 2 && text.contains("--force"), "{text}");
    assert_eq!(compile(&["--force"]).0, 0);
    assert!(std::fs::read(&out).unwrap() == first);
    let (code, text) = compile(&["--soc", "rk1", "--force"]);
    assert!(code == 5 && text.contains("rk1"), "{text}");
    assert!(std::fs::read(&out).unwrap() == first);
}

#[test]
fn sharded_checkpoints_compile_to_the_same_tensors() {
    let dir = tempfile::tempdir().unwrap();
    let checkpoint = copy(dir.path());
    let path = checkpoint.join("model.safetensors");
    let bytes = std::fs::read(&path).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let mut names = file.names();
    names.sort();
    let half = names.len() / 2;
    for (i, part) in [&names[..half], &names[half..]].into_iter().enumerate() {
        let views = part.iter().map(|n| (*n, file.tensor(n).unwrap()));
        let shard = checkpoint.join(format!("model-0000{}-of-00002.safetensors", i + 1));
        std::fs::write(shard, safetensors::serialize(views, None).unwrap()).unwrap();
    }
    std::fs::remove_file(&path).unwrap();
    let host = |checkpoint: &Path, name: &str| {
        let out = dir.path().join(name);
        let done = orkc(&[
            "compile",
            checkpoint.to_str().unwrap(),
            "-q",
            "-o",
            out.to_str().unwrap(),
        ]);
        assert_eq!(done.status.code(), Some(0), "{:?}", done);
        let bytes = std::fs::read(out).unwrap();
        let reader = ork_formats::pack::Reader::parse(&bytes).unwrap();
        reader.verify(&bytes).unwrap();
        (
            reader.host(&bytes).to_vec(),
            reader.npu_weights(&bytes).to_vec(),
        )
    };
    assert!(host(&checkpoint, "a.orkpack") == host(&fixture(), "b.orkpack"));
}

/// Warnings go to stderr, one line each, whatever is silenced; the pack is made all the same.
#[test]
fn warnings_are_printed() {
    let dir = tempfile::tempdir().unwrap();
    let checkpoint = copy(dir.path());
    edit_weights(&checkpoint, |t| {
        t.insert("mtp.norm.weight".into(), (Dtype::F32, vec![1], vec![0; 4]));
    });
    let out = dir.path().join("o.orkpack");
    let (source, pack) = (checkpoint.to_str().unwrap(), out.to_str().unwrap());
    let done = orkc(&["compile", source, "-q", "-o", pack]);
    let text = String::from_utf8(done.stderr).unwrap();
    assert_eq!(done.status.code(), Some(0), "{text}");
    assert!(
        text.starts_with("orkc: warning: ") && text.contains("1 mtp.* tensors"),
        "{text}"
    );
    assert_eq!(text.lines().count(), 1, "{text}");
    assert!(done.stdout.is_empty() && out.exists());
}

/// A name of the Hub is looked up in its local cache only.
#[test]
fn hub_names_compile_from_the_cache() {
    let dir = tempfile::tempdir().unwrap();
    let checkpoint = copy(dir.path());
    let snapshots = dir.path().join("hub/models--acme--tiny/snapshots");
    let refs = dir.path().join("hub/models--acme--tiny/refs");
    std::fs::create_dir_all(&snapshots).unwrap();
    std::fs::create_dir_all(&refs).unwrap();
    std::fs::rename(checkpoint, snapshots.join("abc123")).unwrap();
    std::fs::write(refs.join("main"), "abc123\n").unwrap();
    let out = dir.path().join("o.orkpack");
    let run = |name: &str| {
        Command::new(env!("CARGO_BIN_EXE_orkc"))
            .args(["compile", name, "-q", "-o", out.to_str().unwrap()])
            .env_remove("HF_HUB_CACHE")
            .env("HF_HOME", dir.path())
            .output()
            .unwrap()
    };
    let missing = run("acme/large");
    let text = String::from_utf8(missing.stderr).unwrap();
    assert_eq!(missing.status.code(), Some(3), "{text}");
    assert!(
        text.contains("hf download acme/large") && text.lines().count() == 1,
        "{text}"
    );
    assert_eq!(run("acme/tiny").status.code(), Some(0));
    assert!(out.exists());
}

/// Every fact of caps is shown, differences are found, unproven chips ask first.
#[test]
fn caps_are_listed_shown_and_compared() {
    let text = |args: &[&str]| {
        let done = orkc(args);
        assert_eq!(done.status.code(), Some(0), "{done:?}");
        String::from_utf8(done.stdout).unwrap()
    };
    let list = text(&["caps", "list"]);
    assert!(list.contains("rk3588") && list.contains("rk3576"), "{list}");
    let show = text(&["caps", "show", "rk3588"]);
    assert!(
        show.contains("iova_budget") && show.contains("measured"),
        "{show}"
    );
    let json: serde_json::Value =
        serde_json::from_str(&text(&["caps", "show", "rk3576", "--json"])).unwrap();
    assert_eq!(json["limits"]["cores"]["value"], 2);
    assert!(text(&["caps", "diff", "rk3588", "rk3583"]).contains("cores"));
    assert_eq!(text(&["caps", "diff", "rk3588", "rk3588"]), "");
    assert_eq!(orkc(&["caps", "show", "rk1"]).status.code(), Some(5));

    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("o.orkpack");
    let mut args = vec![
        "compile",
        "",
        "-o",
        out.to_str().unwrap(),
        "--soc",
        "rk3576",
        "-q",
    ];
    let source = fixture();
    args[1] = source.to_str().unwrap();
    let refused = orkc(&args);
    assert_eq!(refused.status.code(), Some(5));
    assert!(
        String::from_utf8(refused.stderr)
            .unwrap()
            .contains("--allow-unvalidated")
    );
    args.push("--allow-unvalidated");
    assert_eq!(orkc(&args).status.code(), Some(0));
    text(&[
        "verify",
        out.to_str().unwrap(),
        "--against",
        source.to_str().unwrap(),
    ]);
}

#[test]
fn verify_recomputes_slices_from_the_checkpoint() {
    let dir = tempfile::tempdir().unwrap();
    let checkpoint = copy(dir.path());
    let out = dir.path().join("o.orkpack");
    let (source, pack) = (checkpoint.to_str().unwrap(), out.to_str().unwrap());
    assert_eq!(
        orkc(&["compile", source, "-q", "-o", pack]).status.code(),
        Some(0)
    );
    assert_eq!(
        orkc(&["verify", pack, "--against", source]).status.code(),
        Some(0)
    );
    edit_weights(&checkpoint, |t| t.get_mut(UP).unwrap().2[0] ^= 1);
    let done = orkc(&["verify", pack, "--against", source]);
    assert_eq!(done.status.code(), Some(7));
    assert!(String::from_utf8(done.stderr).unwrap().contains(UP));
    let mut bytes = std::fs::read(&out).unwrap();
    bytes[70_000] ^= 1;
    std::fs::write(&out, bytes).unwrap();
    let done = orkc(&["verify", pack]);
    assert_eq!(done.status.code(), Some(7), "{done:?}");
}

#[test]
fn programs_are_listed_and_disassembled() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("o.orkpack");
    let (source, pack) = (fixture(), out.to_str().unwrap());
    let compiled = orkc(&["compile", source.to_str().unwrap(), "-q", "-o", pack]);
    assert_eq!(compiled.status.code(), Some(0));
    let done = orkc(&["inspect", pack, "--programs", "--json"]);
    let list: serde_json::Value = serde_json::from_slice(&done.stdout).unwrap();
    let first = &list[0];
    for key in [
        "id",
        "tensor",
        "m",
        "k",
        "n",
        "core",
        "row_class",
        "entries",
        "next",
    ] {
        assert!(first.get(key).is_some(), "{key} in {first}");
    }
    let done = orkc(&["inspect", pack, "--program", "0"]);
    let text = String::from_utf8(done.stdout).unwrap();
    assert!(text.contains("FEATURE_DATA_ADDR"), "{text}");
    let raw = dir.path().join("raw");
    let args = [
        "inspect",
        pack,
        "--program",
        "0",
        "--raw",
        raw.to_str().unwrap(),
    ];
    assert_eq!(orkc(&args).status.code(), Some(0));
    assert_eq!(
        std::fs::metadata(raw.join("regcmd.bin")).unwrap().len() % 896,
        0
    );
    assert_eq!(
        orkc(&args).status.code(),
        Some(2),
        "an existing directory is kept"
    );
    let missing = orkc(&["inspect", pack, "--program", "99999"]);
    assert_eq!(missing.status.code(), Some(2));
}

/// Killed or interrupted at any point, the old pack or a whole new one is there, never a part.
#[cfg(unix)]
#[test]
fn killed_compiles_leave_the_old_pack_or_a_whole_one() {
    use std::os::unix::process::ExitStatusExt;
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("o.orkpack");
    let source = fixture();
    let args = |chunk: &str| {
        [
            "compile",
            source.to_str().unwrap(),
            "-q",
            "--force",
            "--chunk",
            chunk,
            "-o",
            out.to_str().unwrap(),
        ]
        .map(String::from)
    };
    let compile = |chunk: &str| {
        Command::new(env!("CARGO_BIN_EXE_orkc"))
            .args(args(chunk))
            .spawn()
            .unwrap()
    };
    assert!(compile("128").wait().unwrap().success());
    let new = std::fs::read(&out).unwrap();
    assert!(compile("64").wait().unwrap().success());
    let old = std::fs::read(&out).unwrap();
    assert!(new != old);
    let mut delay = 1u64;
    for round in 0..50 {
        delay = delay
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(3);
        let mut child = compile("128");
        std::thread::sleep(std::time::Duration::from_micros((delay >> 40) % 60_000));
        let gentle = round % 2 == 0;
        if gentle {
            // The child may have ended already; then there is nothing to signal.
            let _ = Command::new("kill")
                .args(["-INT", &child.id().to_string()])
                .status();
        } else {
            child.kill().unwrap();
        }
        let status = child.wait().unwrap();
        let bytes = std::fs::read(&out).unwrap();
        assert!(
            bytes == old || bytes == new,
            "round {round}: a part of a pack"
        );

        if gentle {
            // Interrupted before the handler stood, or by it, or too late to matter.
            let ended = [Some(0), Some(130)].contains(&status.code()) || status.signal() == Some(2);
            assert!(ended, "round {round}: {status:?}");
        }
        // Only a kill that cannot be caught may leave the temporary sibling.
        for entry in std::fs::read_dir(dir.path()).unwrap() {
            let path = entry.unwrap().path();
            if path != out {
                assert!(
                    !gentle,
                    "round {round}: {} left by an interrupt",
                    path.display()
                );
                std::fs::remove_file(path).unwrap();
            }
        }
        std::fs::write(&out, &old).unwrap();
    }
}
