//! The simulator's int32 blocks against the CPU's, word by word, job by job.

use ork_compiler::compile::{self, Options};
use ork_loader::device::jobs::Jobs;
use ork_loader::device::{Cpu, Device, Ended, Sim};
use ork_loader::map::Pack;
use std::path::Path;

#[test]
fn every_job_gives_the_same_int32_blocks() {
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
            let buffer = device.bytes_mut(*place, plan.a_bytes as usize);
            for (i, byte) in buffer.iter_mut().enumerate() {
                // Every int8 code of a symmetric quantiser, -127..=127.
                *byte = ((i * 7919 % 255) as i32 - 127) as i8 as u8;
            }
        }
    }
    let jobs = Jobs::new(pack.reader());
    let mut blocks = 0;
    for (id, job) in jobs.iter().enumerate() {
        for device in &mut devices {
            device.start(&pack, &jobs, id as u32, job.rows).unwrap();
            assert_eq!(device.wait(job.half).unwrap(), Ended::Done);
        }
        for p in job.programs(plan, job.rows) {
            let len = (p.m * p.n * 4) as usize;
            let [sim, cpu] = [&devices[0], &devices[1]].map(|d| d.bytes(p.c, len));
            assert!(sim == cpu, "job {id} {p:?}");
            assert!(sim.iter().any(|b| *b != 0));
            blocks += 1;
        }
    }
    assert_eq!(blocks, plan.programs.len());
}
