//! The `ork` command itself, unmodified, against device nodes that a preloaded library serves.
#![cfg(all(target_os = "linux", target_env = "gnu"))]

use ork_compiler::compile::{self, Options};
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

/// Builds the command and the library in the profile of this test, where they are not fresh.
fn built() -> PathBuf {
    let test = std::env::current_exe().unwrap();
    let folder = test.parent().unwrap().parent().unwrap().to_path_buf();
    let profile = match folder.file_name().unwrap().to_str().unwrap() {
        "debug" => "dev",
        other => other,
    };
    let done = Command::new(env!("CARGO"))
        .args(["build", "-q", "-p", "ork-preload", "-p", "ork-loader"])
        .args(["--profile", profile, "--target-dir"])
        .arg(folder.parent().unwrap())
        .current_dir(env!("CARGO_MANIFEST_DIR"))
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&done.stderr);
    assert!(done.status.success(), "{said}");
    folder
}

fn ork(folder: &Path, pack: &Path, nodes: &Path, driver: Option<&str>, more: &[&str]) -> Output {
    let mut command = Command::new(folder.join("ork"));
    command
        .arg("run")
        .arg(pack)
        .args(["-p", "And it came to pass", "-n", "8", "--temp", "0"])
        .args(more);
    if let Some(driver) = driver {
        command
            .env("LD_PRELOAD", folder.join("libork_preload.so"))
            .env("ORK_FAKE", driver)
            .env("ORK_FAKE_NODES", nodes);
    }
    command.output().unwrap()
}

#[test]
fn an_unmodified_ork_runs_on_both_drivers() {
    let folder = built();
    let dir = tempfile::tempdir().unwrap();
    for node in ["dri/card0", "dri/card1", "dri/renderD129", "accel/accel0"] {
        let path = dir.path().join(node);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, b"").unwrap();
    }
    let pack = dir.path().join("p.orkpack");
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("examples/prose-llama");
    compile::compile(&Options::new(source, pack.clone())).unwrap();
    let want = ork(&folder, &pack, dir.path(), None, &["--backend", "cpu"]);
    assert!(want.status.success() && !want.stdout.is_empty());
    for driver in ["rknpu", "rocket"] {
        let backend = format!("--backend={driver}");
        for more in [&["--stats"][..], &[&backend, "--overlap", "off", "--stats"]] {
            let have = ork(&folder, &pack, dir.path(), Some(driver), more);
            let said = String::from_utf8_lossy(&have.stderr);
            assert!(have.status.success(), "{said}");
            assert_eq!(have.stdout, want.stdout, "{driver}: {said}");
            let line = format!("\n{driver}: ");
            assert!(said.contains(&line), "ran elsewhere: {said}");
            assert!(!said.contains("violation"), "{said}");
        }
    }
    let absent = ork(
        &folder,
        &pack,
        dir.path(),
        Some("rknpu"),
        &["--backend=rocket"],
    );
    assert_eq!(absent.status.code(), Some(6));
}
