//! Tokenizers and chat templates against Hugging Face: the cases that transformers wrote, and random
//! strings through its own `tokenizers` crate, which shares no code with ours.

mod fixtures;

use fixtures::{FIXTURES, fixture};
use ork_compiler::compile::{self, Options};
use ork_compiler::place::Scheme;
use ork_loader::chat::{Answer, Message, Role, Template};
use ork_loader::session::{Backend, Config, Session};
use ork_loader::tokenizer::Tokenizer;
use serde_json::Value;
use std::path::{Path, PathBuf};

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

fn session(checkpoint: &Path) -> Session {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("t.orkpack");
    let mut options = Options::new(checkpoint.to_path_buf(), path.clone());
    options.scheme = Scheme::Lossless;
    compile::compile(&options).unwrap();
    let config = Config {
        backend: Backend::Cpu,
        threads: 1,
        ctx: None,
    };
    Session::open(&path, config).unwrap()
}

fn tokenizer(session: &Session) -> Tokenizer {
    Tokenizer::new(session.tokenizer_bytes(), &session.manifest().text).unwrap()
}

fn ids(value: &Value) -> Vec<u32> {
    serde_json::from_value(value.clone()).unwrap()
}

#[test]
fn cases_of_transformers() {
    for name in FIXTURES {
        let session = session(&fixture(name));
        let text = &session.manifest().text;
        let tokenizer = tokenizer(&session);
        let json = std::fs::read_to_string(fixture(name).join("expected.json")).unwrap();
        let want: Value = serde_json::from_str(&json).unwrap();
        let cases = want["encode_cases"].as_array().unwrap();
        assert!(!cases.is_empty());
        for case in cases {
            let source = case["text"].as_str().unwrap();
            let got = tokenizer.encode(source).unwrap();
            assert_eq!(got, ids(&case["ids"]), "{name}: {source:?}");
        }
        let mut stop = ids(&want["eos_token_ids"]);
        stop.sort_unstable();
        assert_eq!(text.stop, stop, "{name}");

        let messages: Vec<Message> = want["chat_messages"]
            .as_array()
            .unwrap()
            .iter()
            .map(|m| {
                let role = match m["role"].as_str().unwrap() {
                    "system" => Role::System,
                    "user" => Role::User,
                    _ => Role::Assistant,
                };
                Message::new(role, m["content"].as_str().unwrap())
            })
            .collect();
        let template = Template::new(text).unwrap();
        let rendered = template.render(&messages, Answer::Next).unwrap();
        assert_eq!(rendered, want["chat_text"].as_str().unwrap(), "{name}");
        let got = template
            .encode(&tokenizer, &messages, Answer::Next)
            .unwrap();
        assert_eq!(got, ids(&want["chat_ids"]), "{name}");
    }
}

/// xorshift64: the same strings on every machine.
struct Random(u64);

impl Random {
    fn below(&mut self, n: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 % n as u64) as usize
    }

    fn pick<'a>(&mut self, from: &[&'a str]) -> &'a str {
        from[self.below(from.len())]
    }

    fn char(&mut self) -> char {
        let (low, high) = [
            (0x20, 0x7f),
            (0x20, 0x7f),
            (0x00, 0x20),
            (0x80, 0x250),
            (0x300, 0x370),
            (0x370, 0x600),
            (0x600, 0x700),
            (0x900, 0xe80),
            (0x2000, 0x2c00),
            (0x3000, 0x3400),
            (0x4e00, 0xa000),
            (0xac00, 0xd7a4),
            (0xf900, 0x1_0000),
            (0x1_0000, 0x2_0000),
            (0x1_f300, 0x1_fa00),
            (0xe_0000, 0xe_0200),
        ][self.below(16)];
        let code = low + self.below((high - low) as usize) as u32;
        char::from_u32(code).unwrap_or('\u{fffd}')
    }

    /// Words, spaces, digits, contractions, code, scripts, special tokens and plain noise.
    fn string(&mut self, specials: &[(String, u32)]) -> String {
        const PIECES: [&str; 40] = [
            "the",
            "The",
            "quick",
            " brown",
            "ing",
            "'s",
            "'LL",
            "don't",
            "I'VE",
            " ",
            "  ",
            "   ",
            "\n",
            "\n\n",
            " \n",
            "\t",
            "\r\n",
            "0",
            "12",
            "1234567",
            "3.14",
            "...",
            "!?",
            "--",
            "/* x */",
            "{\"a\": [1, 2]}",
            "http://a.b/c?d=e",
            "é",
            "e\u{301}",
            "ﬁ",
            "\u{200d}",
            "👩‍👩‍👧",
            "🇩🇪",
            "日本語",
            "العربية",
            "עברית",
            "ไทย",
            "हिन्दी",
            "한국어",
            "\u{feff}",
        ];
        let mut text = String::new();
        for _ in 0..1 + self.below(14) {
            match self.below(12) {
                0..8 => text += self.pick(&PIECES),
                8..11 => text.push(self.char()),
                _ if specials.is_empty() => text.push(self.char()),
                _ => text += &specials[self.below(specials.len())].0,
            }
        }
        text
    }
}

/// 20,000 strings a tokenizer, or `ORK_FUZZ_STRINGS`.
fn count() -> usize {
    std::env::var("ORK_FUZZ_STRINGS").map_or(20_000, |n| n.parse().expect("a number"))
}

/// ASCII characters that a byte-level vocabulary without an unknown token cannot express (SmolLM2
/// lacks six control characters). Both drop them, but Hugging Face then merges their neighbours within
/// a word and kitoken does not: the one known difference.
fn missing_ascii(checkpoint: &Path) -> Vec<char> {
    let json = std::fs::read_to_string(checkpoint.join("tokenizer.json")).unwrap();
    let json: Value = serde_json::from_str(&json).unwrap();
    let vocab = json["model"]["vocab"].as_object().unwrap();
    if json["model"]["byte_fallback"] == true {
        return Vec::new();
    }
    // GPT-2 spells control characters and the space as U+0100 and on; the rest of ASCII as itself.
    let spelled = |c: u8| match c {
        0..=32 => char::from_u32(0x100 + u32::from(c)).unwrap(),
        127 => '\u{121}',
        c => char::from(c),
    };
    (0..128)
        .filter(|c| !vocab.contains_key(&spelled(*c).to_string()))
        .map(char::from)
        .collect()
}

/// Each distinct tokenizer in the repository, and those of the checkpoints named by
/// `ORK_TOKENIZERS` (directories, colon-separated).
#[test]
fn random_strings_equal_hugging_face() {
    let mut checkpoints: Vec<PathBuf> = ["llama-bf16", "qwen3-bf16", "gemma3-bf16"]
        .map(fixture)
        .into();
    checkpoints.push(root().join("examples/prose-llama"));
    if let Some(more) = std::env::var_os("ORK_TOKENIZERS") {
        checkpoints.extend(std::env::split_paths(&more));
    }
    for checkpoint in checkpoints {
        let session = session(&checkpoint);
        let ours = tokenizer(&session);
        let theirs = tokenizers::Tokenizer::from_file(checkpoint.join("tokenizer.json")).unwrap();
        let missing = missing_ascii(&checkpoint);
        let mut random = Random(0x0bad_5eed);
        let mut different = Vec::new();
        for _ in 0..count() {
            let mut text = random.string(ours.specials());
            text.retain(|c| !missing.contains(&c));
            let want = theirs.encode(text.as_str(), false).unwrap();
            let got = ours.encode_plain(&text).unwrap();
            if got != want.get_ids() {
                different.push((text, got, want.get_ids().to_vec()));
            }
        }
        assert!(
            different.is_empty(),
            "{}: {} differ, the first (text, ours, theirs) {:?}",
            checkpoint.display(),
            different.len(),
            different[0]
        );
    }
}
