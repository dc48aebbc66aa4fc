//! Where host time goes in prefill: `cargo run --release --example prefill_split -- PACK [ROWS] [GOPS]`.
//!
//! A fake device takes as long for every job as hardware of GOPS (default: the SoC's) would, all its
//! cores together, and computes nothing; what the host does around it is real. Prints one line per
//! overlap setting and the share of host work outside attention in the time that the NPU is busy.
#![allow(clippy::print_stdout, reason = "an example talks to the terminal")]

use ork_fakenpu::{Abi, Config as Board, Fake};
use ork_loader::session::{Backend, Config, Hardware, Session};
use std::error::Error;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

fn main() -> Result<(), Box<dyn Error>> {
    let mut args = std::env::args().skip(1);
    let pack = PathBuf::from(
        args.next()
            .ok_or("usage: prefill_split PACK [ROWS] [GOPS]")?,
    );
    let rows: u32 = args.next().map_or(Ok(512), |n| n.parse())?;
    let mut board = Board::new(Abi::Rknpu);
    board.coherent = true;
    let caps = board.caps;
    let gops: f64 = args
        .next()
        .map_or(Ok(f64::from(caps.npu_gop_s.value)), |n| n.parse())?;
    board.hollow = Some(gops / f64::from(caps.cores.value));
    for overlap in [false, true] {
        let fake = Fake::new(board.clone());
        let mut hardware = Hardware {
            kernel: Arc::new(fake.clone()),
            overlap,
            ..Hardware::default()
        };
        hardware.options.timeout = Duration::from_secs(60);
        let config = Config {
            backend: Backend::Rknpu,
            threads: std::thread::available_parallelism().map_or(1, usize::from),
            ctx: None,
        };
        let mut session = Session::open_on(&pack, config, hardware)?;
        let vocab = session.manifest().model.vocab;
        let ids: Vec<u32> = (0..rows).map(|i| (3 + i * 31) % vocab).collect();
        let bytes = fake.ledger().created;
        session.prefill(&ids)?;
        session.reset();
        let before = session.stats();
        let began = Instant::now();
        session.prefill(&ids)?;
        let wall = began.elapsed();
        let after = session.stats();
        let part =
            |f: fn(&ork_loader::session::Times) -> Duration| f(&after.times) - f(&before.times);
        let ms = |d: Duration| d.as_secs_f64() * 1e3;
        let parts = [
            ("quantise", part(|t| t.quantise)),
            ("copy", part(|t| t.copy)),
            ("submit", part(|t| t.submit)),
            ("dequantise", part(|t| t.dequantise)),
            ("norms and the like", part(|t| t.other)),
            ("attention", part(|t| t.attention)),
            ("wait", part(|t| t.wait)),
        ];
        let busy = Duration::from_nanos(after.device.busy_ns - before.device.busy_ns);
        let host: Duration = parts[..5].iter().map(|(_, d)| *d).sum();
        print!(
            "overlap {}: wall {:.1} ms",
            if overlap { "on " } else { "off" },
            ms(wall)
        );
        for (name, d) in parts {
            print!(", {name} {:.1}", ms(d));
        }
        println!(
            "; NPU busy {:.1} ms, host outside attention {:.0} % of it; {:.2} MB moved a token, no weight byte since load ({} bytes allocated, {} now)",
            ms(busy),
            100.0 * host.as_secs_f64() / busy.as_secs_f64(),
            (after.times.bytes - before.times.bytes) as f64 / 1e6 / f64::from(rows),
            bytes,
            fake.ledger().created
        );
    }
    Ok(())
}
