//! House rules that a compiler does not check.

use std::path::PathBuf;

fn root() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR"))
}

/// Every hand-written Rust file, with its text.
fn sources() -> Vec<(PathBuf, String)> {
    let mut files = Vec::new();
    let mut folders: Vec<PathBuf> = ["caps", "formats", "compiler", "loader", "tests", "examples"]
        .map(|f| root().join(f))
        .to_vec();
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                folders.push(path);
            } else if path.extension().is_some_and(|e| e == "rs") {
                let text = std::fs::read_to_string(&path).unwrap();
                files.push((path, text));
            }
        }
    }
    assert!(50 < files.len(), "the walk found {} files", files.len());
    files
}

/// Linux calls live in modules whose name says so, behind cfg: the host side builds on macOS.
#[test]
fn linux_only_code_is_behind_cfg() {
    const LINUX: [&str; 6] = [
        "std::os::linux",
        "libc::",
        "memfd",
        "sched_setaffinity",
        "fadvise",
        "/proc/",
    ];
    for (path, text) in sources() {
        if path.ends_with("tests/tidy.rs") {
            continue;
        }
        let guarded = text.contains("#![cfg(target_os = \"linux\")]");
        for word in LINUX {
            assert!(
                guarded || !text.contains(word),
                "{} uses {word} without #![cfg(target_os = \"linux\")]",
                path.display()
            );
        }
    }
}

/// unsafe stands only where the architecture allows it.
#[test]
fn unsafe_stays_in_its_places() {
    const ALLOWED: [&str; 9] = [
        "loader/kernels/src",
        "loader/src/map.rs",
        "loader/src/device/uapi",
        "loader/src/device/queue.rs",
        "tests/fakenpu/src",
        "tests/preload/src",
        "compiler/src/checkpoint/shards.rs",
        "compiler/src/commands/mod.rs",
        "compiler/src/pack.rs",
    ];
    for (path, text) in sources() {
        let relative = path
            .strip_prefix(root())
            .unwrap()
            .to_str()
            .unwrap()
            .to_string();
        let uses = text
            .lines()
            .any(|l| l.split("//").next().unwrap().contains("unsafe {"));
        assert!(
            !uses
                || ALLOWED.iter().any(|a| relative.starts_with(a))
                || relative.contains("fuzzing"),
            "{relative} has an unsafe block; allowed are {ALLOWED:?}"
        );
    }
}

/// Registers are rows of one table; elsewhere they have names.
#[test]
fn register_offsets_stay_in_the_table() {
    for (path, text) in sources() {
        if path.ends_with("regcmd/registers.rs")
            || path.components().any(|c| c.as_os_str() == "tests")
        {
            continue;
        }
        for (number, line) in text.lines().enumerate() {
            // Unit tests spell words out to check the table.
            if line.contains("#[cfg(test)]") {
                break;
            }
            let code = line.split("//").next().unwrap();
            for word in [
                "0x0201", "0x0801", "0x1001", "0x1040", "0x1070", "0x1110", "0x4020",
            ] {
                assert!(
                    !code.contains(word),
                    "{}:{} has the register literal {word}",
                    path.display(),
                    number + 1
                );
            }
        }
    }
}

/// A file that cannot be read in one sitting is split, unless it is a table.
#[test]
fn files_are_small_enough_to_read() {
    let mut lines: Vec<usize> = Vec::new();
    for (path, text) in sources() {
        let count = text.lines().count();
        assert!(count <= 600, "{} has {count} lines", path.display());
        lines.push(count);
    }
    lines.sort_unstable();
    let median = lines[lines.len() / 2];
    assert!(median <= 200, "the median file has {median} lines");
}

/// The loader executes data; it never learns what family a model is of.
#[test]
fn the_loader_names_no_model_family() {
    for (path, text) in sources() {
        if path.starts_with(root().join("loader/src")) {
            for (number, line) in text.lines().enumerate() {
                let code = line.split("//").next().unwrap().to_lowercase();
                for family in [
                    "llama", "qwen", "mistral", "gemma", "granite", "phi3", "smollm",
                ] {
                    assert!(
                        !code.contains(family),
                        "{}:{} names {family}",
                        path.display(),
                        number + 1
                    );
                }
            }
        }
    }
}
