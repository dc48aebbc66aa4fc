//! What each SoC is: limits, windows and drivers as typed rows, every number with its source.
//!
//! This crate depends on nothing, and nothing outside it names a SoC or repeats one of its numbers.
#![no_std]
#![forbid(unsafe_code)]

mod rk3576;
mod rk3583;
mod rk3588;

pub use rk3576::RK3576;
pub use rk3583::RK3583;
pub use rk3588::RK3588;

/// How far a number can be trusted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Status {
    /// Measured on silicon by the named source.
    Measured,
    /// Computed from measured numbers, or read in a driver's source.
    Derived,
    /// Copied from a sibling chip; never checked.
    Inherited,
    /// Chosen by this project.
    Policy,
}

impl Status {
    /// Higher is weaker; policy is a choice and weakens nothing.
    fn rank(self) -> u8 {
        match self {
            Self::Policy => 0,
            Self::Measured => 1,
            Self::Derived => 2,
            Self::Inherited => 3,
        }
    }

    /// Lower-case word for reports.
    #[must_use]
    pub fn word(self) -> &'static str {
        match self {
            Self::Measured => "measured",
            Self::Derived => "derived",
            Self::Inherited => "inherited",
            Self::Policy => "policy",
        }
    }
}

/// One number with where it came from.
#[derive(Clone, Copy, Debug)]
pub struct Fact<T> {
    /// The number.
    pub value: T,
    /// Its unit.
    pub unit: &'static str,
    /// Who says so.
    pub source: &'static str,
    /// How far to trust it.
    pub status: Status,
}

/// Everything the compiler, linter, simulator and loader need to know about one SoC.
#[derive(Clone, Copy, Debug)]
pub struct Caps {
    /// Lower-case name, as `--soc` takes it.
    pub name: &'static str,
    /// Device-tree `compatible` strings.
    pub compatible: &'static [&'static str],
    /// What is known to differ from the sibling it was copied from, or to go wrong; empty for none.
    pub notes: &'static str,
    /// NPU cores.
    pub cores: Fact<u32>,
    /// Contracted length of a scheduled program is a multiple of this.
    pub k_granule: Fact<u32>,
    /// Longest contracted length of one program.
    pub k_max: Fact<u32>,
    /// What the hardware itself requires of K.
    pub k_hw_granule: Fact<u32>,
    /// Output channels come in groups of this.
    pub n_granule: Fact<u32>,
    /// Most output channels of one program.
    pub n_max: Fact<u32>,
    /// Row classes are multiples of this.
    pub row_granule: Fact<u32>,
    /// (K, most rows) of one int8 program, ascending in K.
    pub m_caps: Fact<&'static [(u32, u32)]>,
    /// Convolution buffer banks shared by features and weights.
    pub cbuf_banks: Fact<u32>,
    /// Bytes of one bank.
    pub cbuf_bank_bytes: Fact<u32>,
    /// A feature line occupies whole units of this.
    pub cbuf_line_bytes: Fact<u32>,
    /// Alignment of every address word.
    pub address_align: Fact<u32>,
    /// Usable bytes of the 32-bit IOVA window.
    pub iova_budget: Fact<u64>,
    /// Left free inside the budget.
    pub iova_margin: Fact<u64>,
    /// Largest single allocation.
    pub extent_max: Fact<u64>,
    /// Allocation granule.
    pub page: Fact<u64>,
    /// Bytes of a task descriptor.
    pub task_bytes: Fact<u32>,
    /// Most tasks of one commit.
    pub max_tasks: Fact<u32>,
    /// Default rows of a prefill chunk.
    pub chunk_default: Fact<u32>,
    /// Most rows of a prefill chunk without a flag.
    pub chunk_max: Fact<u32>,
    /// Oldest vendor driver, major*10000 + minor*100 + patch.
    pub driver_min: Fact<u32>,
    /// DRAM read rate that decode reaches, MB/s.
    pub dram_mb_s: Fact<u32>,
    /// int8 rate that prefill reaches on all cores, GOP/s.
    pub npu_gop_s: Fact<u32>,
}

impl Caps {
    /// The same numbers for a sibling chip: every status becomes [`Status::Inherited`], except what
    /// is this project's own policy.
    const fn inherited(&self) -> Self {
        const fn fact<T: Copy>(fact: Fact<T>) -> Fact<T> {
            Fact {
                status: match fact.status {
                    Status::Policy => Status::Policy,
                    _ => Status::Inherited,
                },
                ..fact
            }
        }
        Self {
            cores: fact(self.cores),
            k_granule: fact(self.k_granule),
            k_max: fact(self.k_max),
            k_hw_granule: fact(self.k_hw_granule),
            n_granule: fact(self.n_granule),
            n_max: fact(self.n_max),
            row_granule: fact(self.row_granule),
            m_caps: fact(self.m_caps),
            cbuf_banks: fact(self.cbuf_banks),
            cbuf_bank_bytes: fact(self.cbuf_bank_bytes),
            cbuf_line_bytes: fact(self.cbuf_line_bytes),
            address_align: fact(self.address_align),
            iova_budget: fact(self.iova_budget),
            iova_margin: fact(self.iova_margin),
            extent_max: fact(self.extent_max),
            page: fact(self.page),
            task_bytes: fact(self.task_bytes),
            max_tasks: fact(self.max_tasks),
            chunk_default: fact(self.chunk_default),
            chunk_max: fact(self.chunk_max),
            driver_min: fact(self.driver_min),
            dram_mb_s: fact(self.dram_mb_s),
            npu_gop_s: fact(self.npu_gop_s),
            ..*self
        }
    }

    /// The weakest status among the numbers; [`Status::Inherited`] rows are compiled for only on request,
    /// because a bad stream costs a power cycle.
    #[must_use]
    pub fn status(&self) -> Status {
        let mut weakest = self.m_caps.status;
        self.numbers(|_, _, _, _, status| {
            if weakest.rank() < status.rank() {
                weakest = status;
            }
        });
        weakest
    }

    /// Most rows of one program that contracts `k` elements; `None` where no source has a number.
    #[must_use]
    pub fn m_cap(&self, k: u32) -> Option<u32> {
        self.m_caps
            .value
            .iter()
            .find(|(cap_k, _)| *cap_k == k)
            .map(|(_, rows)| *rows)
    }

    /// Hash of every value that decides a plan (sources, estimates of speed and defaults do not): two
    /// packs with the same fingerprint were planned for the same machine. FNV-1a, 64 bit.
    #[must_use]
    pub fn fingerprint(&self) -> u64 {
        let mut hash = Fnv(0xcbf2_9ce4_8422_2325);
        hash.bytes(self.name.as_bytes());
        self.numbers(|field, value, _, _, _| {
            if !["chunk_default", "driver_min", "dram_mb_s", "npu_gop_s"].contains(&field) {
                hash.bytes(&value.to_le_bytes());
            }
        });
        for (k, rows) in self.m_caps.value {
            hash.bytes(&k.to_le_bytes());
            hash.bytes(&rows.to_le_bytes());
        }
        hash.0
    }

    /// Calls `f(field, value, unit, source, status)` for every scalar, in a fixed order.
    pub fn numbers(
        &self,
        mut f: impl FnMut(&'static str, u64, &'static str, &'static str, Status),
    ) {
        macro_rules! each {
            ($($field:ident)*) => {$(
                f(
                    stringify!($field),
                    u64::from(self.$field.value),
                    self.$field.unit,
                    self.$field.source,
                    self.$field.status,
                );
            )*};
        }
        each!(
            cores k_granule k_max k_hw_granule n_granule n_max row_granule cbuf_banks
            cbuf_bank_bytes cbuf_line_bytes address_align iova_budget iova_margin extent_max page
            task_bytes max_tasks chunk_default chunk_max driver_min dram_mb_s npu_gop_s
        );
    }
}

struct Fnv(u64);

impl Fnv {
    fn bytes(&mut self, bytes: &[u8]) {
        for byte in bytes {
            self.0 = (self.0 ^ u64::from(*byte)).wrapping_mul(0x0000_0100_0000_01b3);
        }
    }
}

/// What `--soc` means when it is not given.
pub const DEFAULT: &Caps = &RK3588;

const ALL: &[&Caps] = &[&RK3588, &RK3583, &RK3576];

/// Every SoC this project knows.
#[must_use]
pub fn all() -> &'static [&'static Caps] {
    ALL
}

/// The SoC called `name` (any case).
#[must_use]
pub fn find(name: &str) -> Option<&'static Caps> {
    ALL.iter()
        .copied()
        .find(|caps| caps.name.eq_ignore_ascii_case(name))
}

/// The SoC whose device tree says `compatible`.
#[must_use]
pub fn find_compatible(compatible: &str) -> Option<&'static Caps> {
    ALL.iter()
        .copied()
        .find(|caps| caps.compatible.contains(&compatible))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_number_names_its_source() {
        for caps in all() {
            caps.numbers(|field, _, unit, source, _| {
                assert!(!unit.is_empty(), "{field} has no unit");
                assert!(!source.is_empty(), "{field} has no source");
            });
        }
    }

    #[test]
    fn lookup_by_name_and_device_tree() {
        assert_eq!(find("RK3588").unwrap().name, "rk3588");
        assert_eq!(find_compatible("rockchip,rk3588s").unwrap().name, "rk3588");
        assert!(find("rk9999").is_none());
    }

    #[test]
    fn siblings_say_that_they_are_copies() {
        for caps in [&RK3583, &RK3576] {
            assert_eq!(caps.status(), Status::Inherited);
            assert!(!caps.notes.is_empty());
            caps.numbers(|field, _, _, _, status| {
                assert_ne!(status, Status::Measured, "{} {field}", caps.name);
            });
            assert_ne!(caps.fingerprint(), RK3588.fingerprint());
        }
    }

    #[test]
    fn fingerprint_follows_the_values() {
        let other = Caps {
            n_max: Fact {
                value: 4096,
                ..RK3588.n_max
            },
            ..RK3588
        };
        assert_ne!(RK3588.fingerprint(), other.fingerprint());
        let renamed = Caps {
            npu_gop_s: Fact {
                value: 1,
                ..RK3588.npu_gop_s
            },
            n_max: Fact {
                source: "elsewhere",
                ..RK3588.n_max
            },
            ..RK3588
        };
        assert_eq!(RK3588.fingerprint(), renamed.fingerprint());
    }

    /// The row caps obey the bank law they are derived from: ceil(m/64) * K/512 data banks out of
    /// 11. K = 2560 is held at 64 rows because no source measured more.
    #[test]
    fn row_caps_fit_the_banks() {
        for (k, rows) in RK3588.m_caps.value {
            let banks = rows.div_ceil(64) * k.div_ceil(512);
            assert!(banks < RK3588.cbuf_banks.value, "K={k} rows={rows}");
        }
    }
}
