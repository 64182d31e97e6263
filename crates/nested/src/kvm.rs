// SPDX-License-Identifier: Apache-2.0
//! Whether an inner guest can be run, found out by running one.

use std::fs;
use std::path::Path;

use anyhow::Result;
use bench::rig::modprobe;
use lab_case::outcome::skip;

use crate::exec::run;
use crate::guest::{Guest, GuestSpec, Image, QEMU};

/// Left once a guest has booted in this VM.
const MARK: &str = "/run/nested/kvm-works";

/// Makes a virtual machine that never runs and stays as long as the outer one.
///
/// KVM patches running code (static keys) with the first and the last machine, and with the first
/// and the last virtual CPU whose interrupt controller is off, which is so until its guest has
/// booted. QEMU's emulation before 8.1 may go on with what it translated before such a patch, if
/// another virtual CPU translated it in that moment: the outer kernel then panics (`Oops: int3` in
/// `apic_has_pending_timer`). Where there is always such a machine, nothing is patched.
fn keep_one() -> Result<()> {
    let machine = ["-machine", "q35,accel=kvm", "-m", "16M", "-S", "-daemonize"];
    let quiet = ["-nodefaults", "-no-user-config", "-display", "none"];
    run(&[[QEMU].as_slice(), &quiet, &machine].concat()).map(drop)
}

/// Boots a guest, once in the life of this VM; an error with [`lab_case::outcome::Skip`] at its
/// root if that does not work.
pub fn must_work(image: &Image) -> Result<()> {
    if Path::new(MARK).exists() {
        return Ok(());
    }
    let flags = fs::read_to_string("/proc/cpuinfo")?;
    let has = |flag: &str| flags.split_whitespace().any(|word| word == flag);
    let module = match (has("svm"), has("vmx")) {
        (true, _) => "kvm_amd",
        (_, true) => "kvm_intel",
        _ => return Err(skip("this VM's CPU has neither svm nor vmx")),
    };
    modprobe(&[module]).map_err(|error| skip(format!("{error:#}")))?;
    keep_one().map_err(|error| skip(format!("no virtual machine can be made here: {error:#}")))?;
    if let Err(error) = Guest::boot(image, &GuestSpec { vcpus: 1, ..GuestSpec::default() }) {
        return Err(skip(format!("no guest boots under KVM here: {error:#}").replace('\n', " ")));
    }
    fs::write(MARK, "")?;
    Ok(())
}
