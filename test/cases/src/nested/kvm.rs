// SPDX-License-Identifier: Apache-2.0
//! A check that an inner guest runs: boots one.

use anyhow::Result;
use kit::outcome::skip;
use kit::system::modprobe;
use std::fs;

use crate::nested::Lab;
use crate::nested::guest::{Guest, GuestSpec, Image, QEMU};
use kit::process::run_to_end;

/// File in the work directory that marks this machine as one in which a guest has booted.
const MARK: &str = "kvm-works";

/// Makes a virtual machine that never runs and exists as long as the outer one.
///
/// KVM patches running code (static keys) with the first and the last machine, and with the first
/// and the last virtual CPU whose interrupt controller is off, which is the case until its guest
/// has booted. QEMU's emulation before 8.1 can continue with code that it translated before such a
/// patch, if another virtual CPU translated it at that moment: the outer kernel then panics
/// (`Oops: int3` in `apic_has_pending_timer`). While such a machine exists, KVM patches nothing.
fn keep_one() -> Result<()> {
    let machine = ["-machine", "q35,accel=kvm", "-m", "16M", "-S", "-daemonize"];
    let quiet = ["-nodefaults", "-no-user-config", "-display", "none"];
    run_to_end(&[[QEMU].as_slice(), &quiet, &machine].concat()).map(drop)
}

/// Boots a guest, once per work directory; returns an error with [`kit::outcome::Skip`] at its root if that
/// fails.
pub(crate) fn must_work(lab: &Lab, image: &Image) -> Result<()> {
    let mark = lab.work.join(MARK);
    if mark.exists() {
        return Ok(());
    }
    let flags = fs::read_to_string("/proc/cpuinfo")?;
    let has = |flag: &str| flags.split_whitespace().any(|word| word == flag);
    let module = match (has("svm"), has("vmx")) {
        (true, _) => "kvm_amd",
        (_, true) => "kvm_intel",
        _ => return Err(skip("this VM's CPU has neither svm nor vmx")),
    };
    modprobe(module, &[]).map_err(|error| skip(format!("{error:#}")))?;
    if !lab.on_host {
        keep_one()
            .map_err(|error| skip(format!("no virtual machine can be made here: {error:#}")))?;
    }
    if let Err(error) = Guest::boot(image, &GuestSpec { vcpus: 1, ..GuestSpec::default() }) {
        return Err(skip(format!("no guest boots under KVM here: {error:#}").replace('\n', " ")));
    }
    fs::write(mark, "")?;
    Ok(())
}
