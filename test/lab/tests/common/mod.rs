// SPDX-License-Identifier: Apache-2.0
//! Shared parts of the tests with real guests: the lab, and the daemon built from the sources.
#![allow(dead_code, reason = "each test program uses its part")]

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::LazyLock;

use anyhow::Result;
use lab::emulator::again_if_lost;
use lab::run::Lab;

pub(crate) static LAB: LazyLock<Lab> = LazyLock::new(|| {
    let lab = Lab::open().unwrap_or_else(|error| panic!("the lab cannot be set up: {error:#}"));
    eprintln!("accelerator: {}: {}", lab.choice.accel, lab.choice.reason);
    lab
});

/// Runs a test with guests, and again if the emulator has failed in it.
pub(crate) fn with_guests(test: impl FnMut() -> Result<()>) {
    let name = std::thread::current().name().unwrap_or("a guest").to_owned();
    again_if_lost(&name, test).unwrap_or_else(|error| panic!("{error:#}"));
}

/// The daemon as it stands in the sources, from the directory where this test was built.
pub(crate) fn build_daemon() -> PathBuf {
    let directory = Path::new(env!("CARGO_BIN_EXE_lab")).parent().unwrap();
    let mut build = Command::new(env!("CARGO"));
    build.args(["build", "--quiet", "-p", "vhost-blk", "--bin", "vhost-blk"]);
    if directory.ends_with("release") {
        build.arg("--release");
    }
    build.arg("--target-dir").arg(directory.parent().unwrap());
    assert!(build.status().unwrap().success(), "the daemon does not build");
    directory.join("vhost-blk")
}

/// QEMU's arguments for a disk with two queues; `more` goes to the socket.
pub(crate) fn disk_args(socket: &Path, more: &str) -> Vec<String> {
    let chardev = format!("socket,id=disk,path={}{more}", socket.display());
    let device = "vhost-user-blk-pci,chardev=disk,num-queues=2".into();
    vec!["-chardev".into(), chardev, "-device".into(), device]
}
