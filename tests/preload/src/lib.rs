//! libc calls that `ork`'s drivers make, answered by the fake kernel for the device nodes and passed on
//! for everything else. `ORK_FAKE=rknpu|rocket` chooses the driver, `ORK_FAKE_LOSE=N` loses job N, `ORK_FAKE_NODES` is a folder whose `dri` and
//! `accel` hold a file per node.
//! Violations go to stderr when a node is closed.

#[cfg(target_os = "linux")]
mod hooks;
