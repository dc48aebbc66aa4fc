//! Fails when an arrow appears that the architecture forbids (see ARCHITECTURE.md).

use std::path::Path;

/// Crate folder -> workspace crates its normal dependencies may name.
const ALLOWED: &[(&str, &[&str])] = &[
    ("caps", &[]),
    ("formats", &["ork-caps"]),
    ("loader/kernels", &[]),
    ("loader/sim", &["ork-caps", "ork-formats"]),
    ("compiler", &["ork-caps", "ork-formats"]),
    ("loader/rings", &[]),
    (
        "loader",
        &[
            "ork-caps",
            "ork-formats",
            "ork-kernels",
            "ork-rings",
            "ork-sim",
        ],
    ),
];

#[test]
fn crates_depend_only_on_allowed_crates() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    for (krate, allowed) in ALLOWED {
        let manifest = std::fs::read_to_string(root.join(krate).join("Cargo.toml")).unwrap();
        let normal = manifest.split("[dev-dependencies]").next().unwrap();
        for line in normal.lines().filter(|l| l.starts_with("ork-")) {
            let name = line.split(['.', ' ', '=']).next().unwrap();
            assert!(
                allowed.contains(&name),
                "{krate} must not depend on {name}; allowed: {allowed:?}"
            );
        }
    }
}

/// SoC names and numbers belong to caps.
#[test]
fn only_caps_knows_soc_names() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    for krate in ["formats", "loader", "compiler"] {
        for file in rust_files(&root.join(krate).join("src")) {
            let text = std::fs::read_to_string(&file).unwrap();
            for (index, line) in text.lines().enumerate() {
                // Unit tests pick a SoC to test with.
                if line.contains("#[cfg(test)]") {
                    break;
                }
                let code = line.split("//").next().unwrap().to_lowercase();
                assert!(
                    !code.contains("rk35"),
                    "{}:{} names a SoC outside caps",
                    file.display(),
                    index + 1
                );
            }
        }
    }
}

fn rust_files(dir: &Path) -> Vec<std::path::PathBuf> {
    let mut out = Vec::new();
    for entry in std::fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            out.extend(rust_files(&path));
        } else if path.extension().is_some_and(|e| e == "rs") {
            out.push(path);
        }
    }
    out
}
