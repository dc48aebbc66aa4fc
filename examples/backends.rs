//! One pack on every backend: `cargo run --release --example backends -- PACK [ROWS]`.
//!
//! Prefills a prompt of ROWS ids (default 200) in the simulator, on the CPU, and through both drivers on
//! a fake kernel, with and without overlap; the logits must be the same bits.
#![allow(clippy::print_stdout, reason = "an example talks to the terminal")]

use ork_fakenpu::{Abi, Config as Board, Fake};
use ork_loader::session::{Backend, Config, Hardware, Session};
use std::error::Error;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

fn main() -> Result<(), Box<dyn Error>> {
    let mut args = std::env::args().skip(1);
    let pack = PathBuf::from(args.next().ok_or("usage: backends PACK [ROWS]")?);
    let rows: u32 = args.next().map_or(Ok(200), |n| n.parse())?;
    let config = |backend| Config {
        backend,
        threads: std::thread::available_parallelism().map_or(1, usize::from),
        ctx: None,
    };
    let mut cpu = Session::open(&pack, config(Backend::Cpu))?;
    let vocab = cpu.manifest().model.vocab;
    let ids: Vec<u32> = (0..rows).map(|i| (3 + i * 31) % vocab).collect();
    let want = cpu.prefill(&ids)?;
    println!("cpu: {} logits", want.len());
    let simulated = Session::open(&pack, config(Backend::Sim))?.prefill(&ids)?;
    report("sim", simulated == want)?;
    for (abi, backend) in [(Abi::Rknpu, Backend::Rknpu), (Abi::Rocket, Backend::Rocket)] {
        for overlap in [true, false] {
            let fake = Fake::new(Board::new(abi));
            let mut hardware = Hardware {
                kernel: Arc::new(fake.clone()),
                overlap,
                ..Hardware::default()
            };
            // The fake computes with the simulator, much slower than hardware.
            hardware.options.timeout = Duration::from_secs(600);
            let mut session = Session::open_on(&pack, config(backend), hardware)?;
            let same = session.prefill(&ids)? == want;
            drop(session);
            let violations = fake.violations();
            let name = format!("{abi:?} on the fake kernel, overlap {overlap}");
            report(&name, same && violations.is_empty())?;
        }
    }
    Ok(())
}

fn report(name: &str, same: bool) -> Result<(), String> {
    match same {
        true => {
            println!("{name}: identical");
            Ok(())
        }
        false => Err(format!("{name}: differs")),
    }
}
