//! RK3576: a younger NPU of the same family.

use crate::{Caps, Fact, RK3588, Status};

/// Limits copied from RK3588 by the one public driver that names this chip, and unproven there.
pub const RK3576: Caps = Caps {
    name: "rk3576",
    compatible: &["rockchip,rk3576"],
    notes: "limits copied from rk3588 (ork-driver: validated=0); one public report of all-zero output \
            with rk3588-style programs on mainline rocket; extra state-init writes in the vendor kernel",
    cores: Fact {
        value: 2,
        unit: "cores",
        source: "vendor kernel rknpu_drv.c: core mask 0x3; ork-driver src/soc",
        status: Status::Derived,
    },
    max_tasks: Fact {
        value: 65535,
        unit: "tasks",
        source: "vendor kernel: 16-bit TASK_NUMBER",
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
