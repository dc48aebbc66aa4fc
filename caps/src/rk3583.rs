//! RK3583: an RK3588 with two NPU cores.

use crate::{Caps, Fact, RK3588, Status};

/// Everything but the core count is copied from RK3588; nobody has published a run.
pub const RK3583: Caps = Caps {
    name: "rk3583",
    compatible: &["rockchip,rk3583", "rockchip,rk3583s"],
    notes: "two cores by the vendor kernel; all limits copied from rk3588, none checked",
    cores: Fact {
        value: 2,
        unit: "cores",
        source: "vendor kernel rknpu_drv.c: core mask 0x3",
        status: Status::Derived,
    },
    npu_gop_s: Fact {
        value: 385,
        unit: "GOP/s",
        source: "two thirds of rk3588's figure",
        status: Status::Inherited,
    },
    ..RK3588.inherited()
};
