//! Words to register values.

use crate::Fault;
use ork_formats::regcmd::{ENABLE_WORD, Reg, Word, lookup, reg};
use std::collections::HashMap;

/// Enable bits that start a matmul, with and without the reader unit other generators turn on.
const ENABLES: [u32; 2] = [0x0d, 0x1d];

/// The register file as one program leaves it; the last write wins.
pub(crate) struct Registers(HashMap<(u16, u16), u32>);

impl Registers {
    /// Decodes words up to the enable word, checking every one.
    pub(crate) fn decode(words: &[Word]) -> Result<Self, Fault> {
        let mut values = HashMap::new();
        for (index, word) in words.iter().enumerate() {
            if word.0 == 0 {
                continue;
            }
            let (block, offset) = (word.block(), word.offset());
            if lookup(block, offset).is_none() {
                return Err(Fault::UnknownRegister {
                    index,
                    block,
                    offset,
                });
            }
            values.insert((block, offset), word.value());
            if block == ENABLE_WORD {
                let registers = Self(values);
                let enable = registers.get(reg::PC_ENABLE);
                return match ENABLES.contains(&enable) {
                    true => Ok(registers),
                    false => Err(Fault::Enable(enable)),
                };
            }
        }
        Err(Fault::NoEnable)
    }

    /// Value of `register`; 0 where the program never wrote it.
    pub(crate) fn get(&self, register: Reg) -> u32 {
        let key = (register.block, register.offset);
        self.0.get(&key).copied().unwrap_or(0)
    }
}
