//! docs/errors.md against the programs: every row is produced here, with its text and exit code.

use ork_compiler::checkpoint::{Checkpoint, hub};
use ork_compiler::compile::{self, Options};
use ork_compiler::place::{Decode, Scheme};
use ork_compiler::{against, error};
use ork_fakenpu::{Abi, Config as Board, Fake, Fault};
use ork_formats::model::Text;
use ork_formats::pack::{HEADER_BYTES, Reader};
use ork_loader::chat::{Answer, Message, Role, Template};
use ork_loader::generate;
use ork_loader::map::Pack;
use ork_loader::perplexity::{self, Mode, Plan};
use ork_loader::session::{Backend, Config, Hardware, Session};
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};

type Outcome = (u8, String);

fn fixture() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/llama-bf16")
}

fn good() -> &'static [u8] {
    static PACK: OnceLock<Vec<u8>> = OnceLock::new();
    PACK.get_or_init(|| {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("m.orkpack");
        let mut options = Options::new(fixture(), path.clone());
        options.chunk = Some(64);
        compile::compile(&options).unwrap();
        std::fs::read(path).unwrap()
    })
}

fn compiled<T>(result: Result<T, error::Error>) -> Outcome {
    let error = result.err().expect("an error");
    (error.exit_code(), error.to_string())
}

fn loaded<T>(result: Result<T, ork_loader::error::Error>) -> Outcome {
    let error = result.err().expect("an error");
    (error.exit_code(), error.to_string())
}

/// Compiles the fixture after `change` to its copy and to the options.
fn compile_changed(change: impl FnOnce(&Path, &mut Options)) -> Outcome {
    let dir = tempfile::tempdir().unwrap();
    let checkpoint = dir.path().join("checkpoint");
    std::fs::create_dir(&checkpoint).unwrap();
    for entry in std::fs::read_dir(fixture()).unwrap() {
        let path = entry.unwrap().path();
        std::fs::copy(&path, checkpoint.join(path.file_name().unwrap())).unwrap();
    }
    let mut options = Options::new(checkpoint.clone(), dir.path().join("out.orkpack"));
    change(&checkpoint, &mut options);
    compiled(compile::compile(&options))
}

fn replace(path: &Path, from: &str, to: &str) {
    let text = std::fs::read_to_string(path).unwrap();
    assert!(text.contains(from), "{from} in {}", path.display());
    std::fs::write(path, text.replace(from, to)).unwrap();
}

/// Sets bytes of one tensor of the fixture's only weight file.
fn poke(checkpoint: &Path, name: &str, bytes: &[u8]) {
    let path = checkpoint.join("model.safetensors");
    let mut file = std::fs::read(&path).unwrap();
    let header = u64::from_le_bytes(file[..8].try_into().unwrap()) as usize;
    let json: serde_json::Value = serde_json::from_slice(&file[8..8 + header]).unwrap();
    let at = json[name]["data_offsets"][0].as_u64().unwrap() as usize + 8 + header;
    file[at..at + bytes.len()].copy_from_slice(bytes);
    std::fs::write(path, file).unwrap();
}

/// Says of a BF16 tensor that its bytes are FP8, so twice as many rows.
fn cast_to_fp8(checkpoint: &Path, name: &str) {
    let path = checkpoint.join("model.safetensors");
    let bytes = std::fs::read(&path).unwrap();
    let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    let views = file.tensors().into_iter().map(|(n, view)| {
        let fp8 = |shape: &[usize]| {
            let shape = vec![shape[0] * 2, shape[1]];
            safetensors::tensor::TensorView::new(safetensors::Dtype::F8_E4M3, shape, view.data())
        };
        let view = if n == name {
            fp8(view.shape()).unwrap()
        } else {
            view
        };
        (n, view)
    });
    std::fs::write(&path, safetensors::serialize(views, None).unwrap()).unwrap();
}

/// Opens a pack made of `bytes`.
fn open_bytes(bytes: &[u8]) -> Outcome {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("x.orkpack");
    std::fs::write(&path, bytes).unwrap();
    loaded(Pack::open(&path))
}

/// Opens the good pack with `change` made and the header signed again.
fn open_forged(change: impl FnOnce(&mut Vec<u8>)) -> Outcome {
    let mut bytes = good().to_vec();
    change(&mut bytes);
    let hash = blake3::hash(&bytes[..HEADER_BYTES - 32]);
    bytes[HEADER_BYTES - 32..HEADER_BYTES].copy_from_slice(hash.as_bytes());
    open_bytes(&bytes)
}

/// Rewrites section `index` in place and signs its row.
fn forge_section(bytes: &mut [u8], index: usize, change: impl FnOnce(&mut [u8])) {
    let section = Reader::parse(good()).unwrap().sections()[index];
    let range = section.offset as usize..(section.offset + section.stored) as usize;
    change(&mut bytes[range.clone()]);
    let hash = blake3::hash(&bytes[range]);
    bytes[64 + index * 64 + 32..][..32].copy_from_slice(hash.as_bytes());
}

/// Replaces the manifest, the last section, by `raw`.
fn forge_manifest(bytes: &mut Vec<u8>, raw: &[u8]) {
    let sections = Reader::parse(good()).unwrap().sections().to_vec();
    let index = sections.len() - 1;
    let stored = zstd::bulk::compress(raw, 1).unwrap();
    bytes.truncate(sections[index].offset as usize);
    bytes.extend(&stored);
    let total = bytes.len() as u64;
    let row = 64 + index * 64;
    bytes[row + 16..row + 24].copy_from_slice(&(stored.len() as u64).to_le_bytes());
    bytes[row + 24..row + 32].copy_from_slice(&(raw.len() as u64).to_le_bytes());
    bytes[row + 32..row + 64].copy_from_slice(blake3::hash(&stored).as_bytes());
    bytes[16..24].copy_from_slice(&total.to_le_bytes());
}

fn session(ctx: Option<u32>) -> Result<Session, ork_loader::error::Error> {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("m.orkpack");
    std::fs::write(&path, good()).unwrap();
    let config = Config {
        backend: Backend::Cpu,
        threads: 1,
        ctx,
    };
    Session::open(&path, config)
}

fn prefill(ids: &[u32]) -> Outcome {
    loaded(session(Some(8)).unwrap().prefill(ids))
}

const UP: &str = "model.layers.0.mlp.up_proj.weight";

fn produce_compiler(id: &str) -> Option<Outcome> {
    Some(match id {
        "no-directory" => compiled(Checkpoint::open(Path::new("/nonexistent"))),
        "no-config" => compile_changed(|c, _| std::fs::remove_file(c.join("config.json")).unwrap()),
        "unknown-family" => compile_changed(|c, _| {
            replace(
                &c.join("config.json"),
                "\"model_type\": \"llama\"",
                "\"model_type\": \"zebra\"",
            );
        }),
        "ram" => compile_changed(|_, options| options.max_ram = Some(1 << 20)),
        "disk" => compiled(ork_compiler::room::check_disk(
            Path::new("/m.orkpack"),
            u64::MAX,
        )),
        "tokenizer-frozen" => compile_changed(|c, _| {
            replace(
                &c.join("tokenizer.json"),
                "\"type\": \"ByteLevel\"",
                "\"type\": \"ByteZebra\"",
            );
        }),
        "tensor-missing" => compile_changed(|c, _| {
            replace(
                &c.join("config.json"),
                "\"num_hidden_layers\": 4",
                "\"num_hidden_layers\": 5",
            );
        }),
        "tensor-shape" => compile_changed(|c, _| {
            replace(
                &c.join("config.json"),
                "\"intermediate_size\": 192",
                "\"intermediate_size\": 96",
            );
        }),
        "scale-missing" => compile_changed(|c, _| cast_to_fp8(c, UP)),
        "scale-stray" => compile_changed(|c, _| {
            let path = c.join("model.safetensors");
            let bytes = std::fs::read(&path).unwrap();
            let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
            let norm = file.tensor("model.norm.weight").unwrap();
            let mut views: Vec<_> = file.tensors();
            views.push((format!("{UP}_scale_inv"), norm));
            std::fs::write(&path, safetensors::serialize(views, None).unwrap()).unwrap();
        }),
        "scheme-unknown" => compile_changed(|c, _| {
            replace(
                &c.join("config.json"),
                "\"mlp_bias\": false",
                "\"quantization_config\": {\"quant_method\": \"gptq\"}",
            );
        }),
        "hub-missing" => compiled(hub::resolve_in(
            Path::new("org/name"),
            Some(Path::new("/nonexistent")),
        )),
        "tensor-not-finite" => compile_changed(|c, _| poke(c, UP, &[0xc0, 0x7f])),
        "git-lfs" => compile_changed(|c, _| {
            let text = "version https://git-lfs.github.com/spec/v1\n";
            std::fs::write(c.join("model.safetensors"), text).unwrap();
        }),
        "shard-missing" => compile_changed(|c, _| {
            std::fs::remove_file(c.join("model.safetensors.index.json")).unwrap();
            let shard = c.join("model-00001-of-00002.safetensors");
            std::fs::rename(c.join("model.safetensors"), shard).unwrap();
        }),
        "unknown-soc" => compile_changed(|_, o| o.soc = "rk1".into()),
        "unvalidated-soc" => compile_changed(|_, o| o.soc = "rk3576".into()),
        "bad-chunk" => compile_changed(|_, o| o.chunk = Some(100)),
        "bad-cores" => compile_changed(|_, o| o.cores = Some(9)),
        "output-exists" => compile_changed(|_, o| std::fs::write(&o.output, good()).unwrap()),
        "output-foreign" => compile_changed(|_, o| std::fs::write(&o.output, "thesis").unwrap()),
        "source-differs" => {
            let dir = tempfile::tempdir().unwrap();
            for name in ["config.json", "model.safetensors", "tokenizer.json"] {
                std::fs::copy(fixture().join(name), dir.path().join(name)).unwrap();
            }
            poke(dir.path(), UP, &[1, 2]);
            compiled(against::check(
                &Reader::parse(good()).unwrap(),
                good(),
                dir.path(),
            ))
        }
        _ => return None,
    })
}

fn produce_pack(id: &str) -> Option<Outcome> {
    let reader = Reader::parse(good()).unwrap();
    Some(match id {
        "pack-missing" => loaded(Pack::open(Path::new("/nonexistent.orkpack"))),
        "pack-empty" => open_bytes(b""),
        "pack-foreign" => open_bytes(b"GGUF\x03\0\0\0"),
        "pack-magic" => open_bytes(b"plain text"),
        "pack-cut-header" => open_bytes(&good()[..100]),
        "pack-version" => open_forged(|b| b[8] = 9),
        "pack-header-hash" => {
            let mut bytes = good().to_vec();
            bytes[70] ^= 1;
            open_bytes(&bytes)
        }
        "pack-length" => open_bytes(&good()[..good().len() - 1]),
        "pack-soc" => open_forged(|b| b[32..38].copy_from_slice(b"rk0000")),
        "pack-caps" => open_forged(|b| b[24] ^= 1),
        "pack-section" => open_forged(|b| b[64 + 8] ^= 1),
        "pack-section-hash" => open_forged(|b| b[64 + 2 * 64 + 32] ^= 1),
        "pack-padding" => open_forged(|b| b[5000] = 1),
        "pack-decode" => open_forged(|b| forge_manifest(b, b"\xff\xff\xff")),
        "pack-manifest" => open_forged(|b| {
            let mut manifest = reader.manifest().clone();
            manifest.model.vocab = 0;
            let raw =
                bincode::serde::encode_to_vec(&manifest, bincode::config::standard()).unwrap();
            forge_manifest(b, &raw);
        }),
        "pack-program" => open_forged(|b| forge_section(b, 2, |s| s[2] ^= 1)),
        "pack-reloc" => open_forged(|b| forge_section(b, 3, |s| s[8] ^= 0x40)),
        _ => return None,
    })
}

fn produce_loader(id: &str) -> Option<Outcome> {
    Some(match id {
        "selftest" => {
            let dir = tempfile::tempdir().unwrap();
            let path = dir.path().join("m.orkpack");
            let mut bytes = good().to_vec();
            bytes[65536 + 9] ^= 1;
            std::fs::write(&path, bytes).unwrap();
            loaded(ork_loader::selftest::run(&path, Backend::Cpu, 1))
        }
        "device-absent" => on_board(Board::new(Abi::None), Scheme::Quantised(Decode::Int4)),
        "device-busy" => on_board(
            Board::new(Abi::Rknpu).with(Fault::HeldBy(7)),
            Scheme::Quantised(Decode::Int4),
        ),
        "device-old" => {
            let mut board = Board::new(Abi::Rknpu);
            board.version = 800;
            on_board(board, Scheme::Quantised(Decode::Int4))
        }
        "device-memory" => on_board(
            Board::new(Abi::Rknpu).with(Fault::NoMemoryAt(1)),
            Scheme::Quantised(Decode::Int4),
        ),
        "device-address" => on_board(
            Board::new(Abi::Rknpu).with(Fault::HighAddresses),
            Scheme::Quantised(Decode::Int4),
        ),
        "device-submit" => on_board(
            Board::new(Abi::Rknpu).with(Fault::RefuseSubmit(0)),
            Scheme::Quantised(Decode::Int4),
        ),
        "device-lossless" => on_board(Board::new(Abi::Rknpu), Scheme::Lossless),
        "snapshot-foreign" => {
            let mut long = session(None).unwrap();
            long.prefill(&[1; 9]).unwrap();
            let mut short = session(Some(8)).unwrap();
            loaded(short.restore(&long.snapshot()))
        }
        "prompt-empty" => prefill(&[]),
        "id-range" => prefill(&[512]),
        "context-full" => prefill(&[1; 9]),
        "context-option" => loaded(session(Some(513))),
        "prompt-long" => loaded(generate::fit(&[1; 9], 8, 4, generate::Overflow::Error)),
        "no-template" => template(None, &[]),
        "template-broken" => template(Some("{% for %}"), &[]),
        "template-refuses" => template(
            Some("{{ raise_exception('no system message') }}"),
            &[Message::new(Role::System, "x")],
        ),
        "text-short" => {
            let plan = Plan {
                window: 512,
                first: 257,
                windows: 1,
                mode: Mode::Prefill,
            };
            let score = |mut s| perplexity::score(&mut s, &[1; 9], None, plan, |_| {});
            loaded(session(None).and_then(score))
        }
        _ => return None,
    })
}

/// Opens a pack on a fake board.
fn on_board(board: Board, scheme: Scheme) -> Outcome {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("m.orkpack");
    let mut options = Options::new(fixture(), path.clone());
    options.scheme = scheme;
    compile::compile(&options).unwrap();
    let config = Config {
        backend: Backend::Rknpu,
        threads: 1,
        ctx: None,
    };
    let hardware = Hardware {
        kernel: Arc::new(Fake::new(board)),
        ..Hardware::default()
    };
    loaded(Session::open_on(&path, config, hardware))
}

fn template(source: Option<&str>, messages: &[Message]) -> Outcome {
    let text = Text {
        chat_template: source.map(String::from),
        ..Text::default()
    };
    loaded(Template::new(&text).and_then(|t| t.render(messages, Answer::Next)))
}

/// Whether `text` consists of the pattern's parts, in order, with anything where `…` stands.
fn matches(pattern: &str, text: &str) -> bool {
    let mut rest = text;
    let mut parts = pattern.split('…');
    let first = parts.next().unwrap();
    if !rest.starts_with(first) {
        return false;
    }
    rest = &rest[first.len()..];
    for part in parts {
        match rest.find(part) {
            Some(at) => rest = &rest[at + part.len()..],
            None => return false,
        }
    }
    rest.is_empty() || pattern.ends_with('…')
}

#[test]
fn every_row_of_the_catalogue_is_produced() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/errors.md");
    let text = std::fs::read_to_string(path).unwrap();
    let rows: Vec<Vec<&str>> = text
        .lines()
        .filter(|l| l.starts_with("| ") && !l.starts_with("| id"))
        .map(|l| l.split('|').map(str::trim).collect())
        .collect();
    assert!(30 < rows.len());
    for row in rows {
        let (id, exit, pattern) = (row[1], row[2].parse::<u8>().unwrap(), row[3]);
        let (code, text) = produce_compiler(id)
            .or_else(|| produce_pack(id))
            .or_else(|| produce_loader(id))
            .unwrap_or_else(|| panic!("nothing produces {id}"));
        assert_eq!(code, exit, "{id}: {text}");
        assert!(matches(pattern, &text), "{id}: {text:?} is not {pattern:?}");
        assert!(!text.contains('\n'), "{id}: {text:?}");
    }
}
