//! RK3588 / RK3588S.

use crate::{Caps, Fact, Status};

const fn measured<T>(value: T, unit: &'static str, source: &'static str) -> Fact<T> {
    Fact {
        value,
        unit,
        source,
        status: Status::Measured,
    }
}

const fn derived<T>(value: T, unit: &'static str, source: &'static str) -> Fact<T> {
    Fact {
        value,
        unit,
        source,
        status: Status::Derived,
    }
}

const fn policy<T>(value: T, unit: &'static str, source: &'static str) -> Fact<T> {
    Fact {
        value,
        unit,
        source,
        status: Status::Policy,
    }
}

/// 3 NPU cores, 4xA76 + 4xA55. "ork-driver" is the public oRKLLM/ork-driver, which states its
/// figures as measured on silicon; "vendor kernel" is the rknpu driver source.
pub const RK3588: Caps = Caps {
    name: "rk3588",
    compatible: &["rockchip,rk3588", "rockchip,rk3588s"],
    notes: "",
    cores: measured(3, "cores", "vendor kernel rknpu_drv.c, ork-driver src/soc"),
    k_granule: measured(
        512,
        "elements",
        "ork-driver docs: 768 and 1792 wrong, 1536, 2560, 3584 right",
    ),
    k_max: measured(4096, "elements", "ork-driver full-K programs"),
    k_hw_granule: measured(32, "elements", "ork-driver, mtx512: K % 32"),
    n_granule: measured(
        32,
        "channels",
        "ork-driver, gregordinary: N = 16 is garbage",
    ),
    n_max: measured(8192, "channels", "ork-driver docs: 16384 silently wrong"),
    row_granule: derived(64, "rows", "one 32 KiB bank at K = 512"),
    m_caps: derived(
        &[
            (512, 704),
            (1024, 320),
            (1536, 192),
            (2048, 128),
            (2560, 64),
            (3072, 64),
            (3584, 64),
            (4096, 64),
        ],
        "(elements, rows)",
        "ork-driver: 512, 1024, 2048, 4096 measured, rest by the bank law; 2560 held at 64",
    ),
    cbuf_banks: measured(
        12,
        "banks",
        "Mesa rocket, mtx512, ork-driver: the split always sums to 12",
    ),
    cbuf_bank_bytes: measured(32768, "bytes", "Mesa rocket: 256 entries of 128 bytes"),
    cbuf_line_bytes: derived(
        64,
        "bytes",
        "fits every failing shape gregordinary published",
    ),
    address_align: derived(16, "bytes", "ork-driver stream validator"),
    iova_budget: measured(
        3900 << 20,
        "bytes",
        "ork-driver: EFAULT at 4.03 GiB, ceiling 3900 MiB",
    ),
    iova_margin: policy(64 << 20, "bytes", "room for the driver's own mappings"),
    extent_max: policy(
        64 << 20,
        "bytes",
        "a single 68 MB heap allocation hung (ork-driver)",
    ),
    page: derived(4096, "bytes", "IOMMU page"),
    task_bytes: derived(40, "bytes", "vendor kernel rknpu_ioctl.h struct rknpu_task"),
    max_tasks: derived(4095, "tasks", "vendor kernel: 12-bit TASK_NUMBER"),
    chunk_default: policy(512, "rows", "execution contract"),
    chunk_max: measured(1024, "rows", "M = 2048 wedged boards (ggml-ork docs)"),
    driver_min: measured(
        908,
        "major*10000+minor*100+patch",
        "rknpu 0.9.8 in the field",
    ),
    dram_mb_s: measured(21_800, "MB/s", "ork-driver: aggregate decode read rate"),
    npu_gop_s: measured(578, "GOP/s", "ork-driver: prefill matmul overall, 3 cores"),
};
