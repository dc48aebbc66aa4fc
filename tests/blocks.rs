//! The simulator's int32 blocks against the CPU's, word by word, chain by chain.

use ork_compiler::compile::{self, Options};
use ork_loader::device::{Cpu, Device, Sim};
use ork_loader::map::Pack;
use std::path::Path;

#[test]
fn every_chain_gives_the_same_int32_blocks() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("m.orkpack");
    let mut options = Options::new(root.join("examples/prose-llama"), path.clone());
    options.chunk = Some(192);
    compile::compile(&options).unwrap();
    let pack = Pack::open(&path).unwrap();
    let plan = pack.reader().manifest().npu.as_ref().unwrap();
    let mut devices: [Box<dyn Device>; 2] =
        [Box::new(Sim::new(&pack, 2)), Box::new(Cpu::new(&pack))];
    for device in &mut devices {
        for place in &plan.a_buffers {
            let buffer = &mut device.bytes_mut(place.extent)[place.offset as usize..];
            for (i, byte) in buffer[..plan.a_bytes as usize].iter_mut().enumerate() {
                // Every int8 code of a symmetric quantiser, -127..=127.
                *byte = ((i * 7919 % 255) as i32 - 127) as i8 as u8;
            }
        }
    }
    let mut blocks = 0;
    for tensor in &pack.reader().manifest().tensors {
        let Some(form) = &tensor.npu else { continue };
        for chain in &form.chains {
            for device in &mut devices {
                device.run(&pack, &[*chain], chain.rows).unwrap();
            }
            for p in &plan.programs[chain.first as usize..(chain.first + chain.count) as usize] {
                let [sim, cpu] = [&devices[0], &devices[1]].map(|d| {
                    &d.bytes(p.c.extent)[p.c.offset as usize..][..(p.m * p.n * 4) as usize]
                });
                assert!(sim == cpu, "{} {chain:?} {p:?}", tensor.name);
                assert!(sim.iter().any(|b| *b != 0));
                blocks += 1;
            }
        }
    }
    assert_eq!(blocks, plan.programs.len());
}
