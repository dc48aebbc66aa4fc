//! One variant per way a stream goes wrong.

/// Where the hardware would fault, hang or return garbage.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[allow(
    missing_docs,
    reason = "the messages say what each fault and its numbers are"
)]
pub enum Fault {
    #[error("word {index} writes an unknown register {block:04x}:{offset:04x}")]
    UnknownRegister {
        index: usize,
        block: u16,
        offset: u16,
    },
    #[error("the program ends without an enable word")]
    NoEnable,
    #[error("enable value {0:#x} does not start a matmul")]
    Enable(u32),
    #[error("program at {program:#x}: {bytes} bytes at {address:#x} are not mapped")]
    Unmapped {
        program: u32,
        address: u64,
        bytes: u64,
    },
    #[error("program at {program:#x}: {bytes} bytes at {address:#x} are mapped read-only")]
    ReadOnly {
        program: u32,
        address: u64,
        bytes: u64,
    },
    #[error("address {address:#x} is not a multiple of 16")]
    Unaligned { address: u32 },
    #[error("{0} is zero: the word was never relocated")]
    ZeroAddress(&'static str),
    #[error("{data} data and {weight} weight banks do not split {banks}")]
    BankSplit { data: u32, weight: u32, banks: u32 },
    #[error("too few data banks: {have}, the features need {need}")]
    DataBanks { have: u32, need: u32 },
    #[error("{0} selects an unsupported precision or mode, {1:#x}")]
    Mode(&'static str, u32),
    #[error("K {0} is not a multiple of 32")]
    K(u32),
    #[error("N {0} is not a multiple of 32")]
    N(u32),
    #[error("N {0} exceeds {1}: the hardware's result would be silently wrong")]
    NMax(u32, u32),
    #[error("{0} is {1}, but {2} is {3}")]
    Contradiction(&'static str, u32, &'static str, u32),
    #[error("task {task} of {tasks} has no link to the next")]
    MissingLink { task: u32, tasks: u32 },
}
