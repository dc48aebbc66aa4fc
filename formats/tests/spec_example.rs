//! The worked example of README.md is a file that the writer really writes.
#![cfg(feature = "write")]

use ork_caps::RK3588;
use ork_formats::golden::Golden;
use ork_formats::model::Manifest;
use ork_formats::pack::write::Writer;
use ork_formats::pack::{ALIGN, Kind};
use std::fmt::Write;

/// The smallest container: five host bytes, empty bulk sections, cold sections with nothing in them.
fn example() -> Vec<u8> {
    let path = std::env::temp_dir().join(format!("spec-example-{}.orkpack", std::process::id()));
    let mut writer = Writer::create(&path, false, &RK3588).unwrap();
    writer.begin(Kind::NpuWeights, 0).unwrap();
    let host = writer.begin(Kind::HostWeights, 5).unwrap();
    writer.write(host, b"hello").unwrap();
    writer.begin(Kind::Programs, 0).unwrap();
    writer.begin(Kind::Relocs, 0).unwrap();
    writer.tokenizer(b"").unwrap();
    writer.golden(&Golden::default()).unwrap();
    writer.manifest(&Manifest::empty()).unwrap();
    writer.seal().unwrap();
    writer.publish().unwrap();
    let bytes = std::fs::read(&path).unwrap();
    std::fs::remove_file(path).unwrap();
    bytes
}

fn dump(bytes: &[u8], at: usize, len: usize) -> String {
    let mut text = String::new();
    for (i, line) in bytes[at..at + len].chunks(16).enumerate() {
        write!(text, "{:05x} ", at + i * 16).unwrap();
        for byte in line {
            write!(text, " {byte:02x}").unwrap();
        }
        text.push('\n');
    }
    text
}

#[test]
fn the_readme_shows_these_bytes() {
    let bytes = example();
    let readme = include_str!("../README.md");
    for (at, len) in [(0, 64), (64, 64), (128, 64), (ALIGN as usize, 5)] {
        let lines = dump(&bytes, at, len);
        assert!(readme.contains(&lines), "README.md lacks\n{lines}");
    }
}
