//! Writes a checkpoint of random bf16 weights in the shape of a real model, sharded, to measure compiles
//! with: `cargo run --release --example random_checkpoint -- DIR [qwen3-4b | qwen3-0.6b]`.
//!
//!     /usr/bin/time -v target/release/orkc compile DIR -o big.orkpack
#![allow(clippy::print_stdout, reason = "an example talks to the terminal")]

use serde_json::{Value, json};
use std::error::Error;
use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};

struct Shape {
    hidden: usize,
    mlp: usize,
    layers: usize,
    heads: usize,
    kv_heads: usize,
}

const HEAD_DIM: usize = 128;
const VOCAB: usize = 151_936;
/// Bytes of a shard, about.
const SHARD: usize = 4 << 30;

fn main() -> Result<(), Box<dyn Error>> {
    let mut args = std::env::args().skip(1);
    let dir = PathBuf::from(args.next().ok_or("usage: random_checkpoint DIR [SHAPE]")?);
    let shape = match args.next().as_deref() {
        None | Some("qwen3-4b") => Shape {
            hidden: 2560,
            mlp: 9728,
            layers: 36,
            heads: 32,
            kv_heads: 8,
        },
        Some("qwen3-0.6b") => Shape {
            hidden: 1024,
            mlp: 3072,
            layers: 28,
            heads: 16,
            kv_heads: 8,
        },
        Some(other) => return Err(format!("{other}: qwen3-4b or qwen3-0.6b").into()),
    };
    std::fs::create_dir_all(&dir)?;
    let data = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/qwen3-bf16");
    for name in [
        "tokenizer.json",
        "tokenizer_config.json",
        "generation_config.json",
        "chat_template.jinja",
    ] {
        std::fs::copy(data.join(name), dir.join(name))?;
    }
    let config: Value = serde_json::from_slice(&std::fs::read(data.join("config.json"))?)?;
    let mut config = config;
    for (key, value) in [
        ("hidden_size", shape.hidden),
        ("intermediate_size", shape.mlp),
        ("num_hidden_layers", shape.layers),
        ("num_attention_heads", shape.heads),
        ("num_key_value_heads", shape.kv_heads),
        ("head_dim", HEAD_DIM),
        ("vocab_size", VOCAB),
        ("max_position_embeddings", 40_960),
    ] {
        config[key] = value.into();
    }
    config["tie_word_embeddings"] = true.into();
    std::fs::write(dir.join("config.json"), config.to_string())?;

    let mut shards: Vec<Vec<(String, Vec<usize>)>> = vec![Vec::new()];
    let mut filled = 0;
    for (name, dims) in tensors(&shape) {
        let bytes = 2 * dims.iter().product::<usize>();
        if SHARD < filled + bytes {
            shards.push(Vec::new());
            filled = 0;
        }
        filled += bytes;
        shards.last_mut().expect("never empty").push((name, dims));
    }
    let mut random = 0x9e37_79b9_7f4a_7c15u64;
    for (i, shard) in shards.iter().enumerate() {
        let name = format!("model-{:05}-of-{:05}.safetensors", i + 1, shards.len());
        write(&dir.join(&name), shard, &mut random)?;
        println!("{name}: {} tensors", shard.len());
    }
    Ok(())
}

fn tensors(s: &Shape) -> Vec<(String, Vec<usize>)> {
    let mut out = vec![(
        "model.embed_tokens.weight".to_string(),
        vec![VOCAB, s.hidden],
    )];
    for layer in 0..s.layers {
        let (q, kv) = (s.heads * HEAD_DIM, s.kv_heads * HEAD_DIM);
        for (name, dims) in [
            ("input_layernorm", vec![s.hidden]),
            ("self_attn.q_proj", vec![q, s.hidden]),
            ("self_attn.k_proj", vec![kv, s.hidden]),
            ("self_attn.v_proj", vec![kv, s.hidden]),
            ("self_attn.q_norm", vec![HEAD_DIM]),
            ("self_attn.k_norm", vec![HEAD_DIM]),
            ("self_attn.o_proj", vec![s.hidden, q]),
            ("post_attention_layernorm", vec![s.hidden]),
            ("mlp.gate_proj", vec![s.mlp, s.hidden]),
            ("mlp.up_proj", vec![s.mlp, s.hidden]),
            ("mlp.down_proj", vec![s.hidden, s.mlp]),
        ] {
            out.push((format!("model.layers.{layer}.{name}.weight"), dims));
        }
    }
    out.push(("model.norm.weight".into(), vec![s.hidden]));
    out
}

/// A safetensors file, streamed: one tensor's values at a time.
fn write(path: &Path, shard: &[(String, Vec<usize>)], random: &mut u64) -> std::io::Result<()> {
    let mut header = serde_json::Map::new();
    let mut at = 0;
    for (name, dims) in shard {
        let end = at + 2 * dims.iter().product::<usize>();
        header.insert(
            name.clone(),
            json!({"dtype": "BF16", "shape": dims, "data_offsets": [at, end]}),
        );
        at = end;
    }
    let header = Value::Object(header).to_string();
    let mut file = BufWriter::with_capacity(1 << 20, File::create(path)?);
    file.write_all(&(header.len() as u64).to_le_bytes())?;
    file.write_all(header.as_bytes())?;
    for (_, dims) in shard {
        for _ in 0..dims.iter().product::<usize>() / 4 {
            *random ^= *random << 13;
            *random ^= *random >> 7;
            *random ^= *random << 17;
            // Four bf16 values of sign, exponent 2^-7 to 2^-4, and mantissa.
            let words: [u16; 4] = std::array::from_fn(|i| {
                let bits = (*random >> (16 * i)) as u16;
                bits & 0x81ff | 0x3c00
            });
            for word in words {
                file.write_all(&word.to_le_bytes())?;
            }
        }
    }
    file.flush()
}
