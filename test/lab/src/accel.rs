// SPDX-License-Identifier: Apache-2.0
//! KVM or emulation: the lab boots a guest to decide, and never relies on the existence of
//! `/dev/kvm`.
//!
//! On some machines the device opens and creates virtual machines in which no ordinary kernel
//! boots. So the lab boots a guest under KVM with a short time-out, and keeps the answer until the
//! machine, QEMU or the guest kernel change.

use std::fmt;
use std::fs::{self, OpenOptions};
use std::time::Duration;

use anyhow::{Context, Result};

use crate::cache::{Cache, key_of};
use crate::guest::{Guest, GuestBase, GuestSpec};
use crate::job::Job;
use crate::qemu::Qemu;

/// A guest boots in about two seconds if KVM works, even on slow machines.
const BOOT_TIMEOUT: Duration = Duration::from_secs(15);

/// The execution of a guest's instructions in QEMU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Accel {
    /// Hardware virtualization.
    Kvm,
    /// Emulation.
    Tcg,
}

impl Accel {
    /// The options of `qemu` for this accelerator.
    pub fn qemu_args(self, qemu: &Qemu) -> [&'static str; 4] {
        match self {
            Accel::Kvm => ["-accel", "kvm", "-cpu", "host"],
            // A named model, as in the lab's other machines: with `max`, old emulators failed more
            // often.
            Accel::Tcg => ["-accel", qemu.tcg(), "-cpu", "EPYC"],
        }
    }

    /// The part of a guest kernel's command line that adapts it to emulation.
    ///
    /// At boot the kernel checks a timer's rate against a loop and panics if ticks are missing,
    /// which on a busy machine means nothing; it omits the check under a hypervisor. An emulated
    /// CPU's time stamp counter is the same for all CPUs, which kernels do not trust either.
    pub fn kernel_args(self) -> &'static str {
        match self {
            Accel::Kvm => "",
            Accel::Tcg => " no_timer_check tsc=reliable",
        }
    }
}

impl fmt::Display for Accel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Accel::Kvm => "KVM",
            Accel::Tcg => "TCG (emulation)",
        })
    }
}

/// The accelerator to use, and why.
#[derive(Debug, Clone)]
pub struct AccelChoice {
    /// The accelerator.
    pub accel: Accel,
    /// The observation behind the choice.
    pub reason: String,
}

impl AccelChoice {
    /// Decides, or reads the decision made since the machine started.
    pub fn cached(cache: &Cache, base: &GuestBase) -> Result<Self> {
        if let Err(error) = OpenOptions::new().read(true).write(true).open("/dev/kvm") {
            return Ok(Self::tcg(format!("/dev/kvm cannot be opened: {error}")));
        }
        let boot_id = fs::read_to_string("/proc/sys/kernel/random/boot_id")
            .context("cannot read the machine's boot id")?;
        let key = key_of(&[&boot_id, &base.qemu.to_string(), base.kernel.release()]);
        let entry = cache.entry(&format!("kvm-{key}"), |staging| {
            eprintln!("lab: trying to boot a guest under KVM (up to {} s)", BOOT_TIMEOUT.as_secs());
            let answer = match boots_under_kvm(base) {
                Ok(()) => "yes".to_owned(),
                Err(error) => {
                    kit::interrupt::check()?;
                    let text = error.root_cause().to_string();
                    text.lines().next().unwrap_or("no reason given").to_owned()
                }
            };
            Ok(fs::write(staging.join("answer"), answer)?)
        })?;
        let answer = fs::read_to_string(entry.join("answer"))?;
        Ok(match answer.as_str() {
            "yes" => Self { accel: Accel::Kvm, reason: "a guest boots under KVM".to_owned() },
            why => Self::tcg(format!("no guest boots under KVM here ({why})")),
        })
    }

    fn tcg(reason: String) -> Self {
        Self { accel: Accel::Tcg, reason }
    }
}

fn boots_under_kvm(base: &GuestBase) -> Result<()> {
    let job = Job::without_disk("true\n");
    let spec = GuestSpec { accel: Accel::Kvm, vcpus: 1, disks: Vec::new(), job };
    Guest::boot(base, &spec)?.finish(BOOT_TIMEOUT)?;
    Ok(())
}
