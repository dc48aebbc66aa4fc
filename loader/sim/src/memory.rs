//! Device memory: disjoint regions at 32-bit addresses.

use crate::Fault;

struct Region<'a> {
    base: u64,
    bytes: &'a mut [u8],
    writable: bool,
}

/// What the device can reach; everything else faults.
#[derive(Default)]
pub struct Memory<'a> {
    regions: Vec<Region<'a>>,
    /// Device address of the running program, for faults.
    pub(crate) program: u32,
}

impl<'a> Memory<'a> {
    /// Nothing mapped.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Maps `bytes` at `base`.
    ///
    /// # Panics
    /// When it overlaps another region or passes 4 GiB: the caller's allocator is broken.
    pub fn map(&mut self, base: u32, bytes: &'a mut [u8], writable: bool) {
        let (from, to) = (u64::from(base), u64::from(base) + bytes.len() as u64);
        assert!(to <= 1 << 32, "region {from:#x}..{to:#x} passes 4 GiB");
        for region in &self.regions {
            let end = region.base + region.bytes.len() as u64;
            assert!(
                to <= region.base || end <= from,
                "region {from:#x}..{to:#x} overlaps {:#x}..{end:#x}",
                region.base
            );
        }
        self.regions.push(Region {
            base: from,
            bytes,
            writable,
        });
    }

    /// The `len` bytes at `address`.
    ///
    /// # Errors
    /// [`Fault::Unmapped`].
    pub fn read(&self, address: u32, len: u64) -> Result<&[u8], Fault> {
        let start = u64::from(address);
        self.regions
            .iter()
            .find(|r| r.base <= start && start + len <= r.base + r.bytes.len() as u64)
            .map(|r| &r.bytes[(start - r.base) as usize..][..len as usize])
            .ok_or(self.unmapped(start, len))
    }

    /// As [`Memory::read`], writable.
    ///
    /// # Errors
    /// [`Fault::Unmapped`], [`Fault::ReadOnly`].
    pub fn write(&mut self, address: u32, len: u64) -> Result<&mut [u8], Fault> {
        let start = u64::from(address);
        let unmapped = self.unmapped(start, len);
        let program = self.program;
        let region = self
            .regions
            .iter_mut()
            .find(|r| r.base <= start && start + len <= r.base + r.bytes.len() as u64)
            .ok_or(unmapped)?;
        match region.writable {
            true => Ok(&mut region.bytes[(start - region.base) as usize..][..len as usize]),
            false => Err(Fault::ReadOnly {
                program,
                address: start,
                bytes: len,
            }),
        }
    }

    /// The fault of touching `bytes` at `address`, which may lie outside 32 bits.
    pub(crate) fn unmapped(&self, address: u64, bytes: u64) -> Fault {
        Fault::Unmapped {
            program: self.program,
            address,
            bytes,
        }
    }
}
