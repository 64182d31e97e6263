// SPDX-License-Identifier: Apache-2.0
//! KVM or emulation: decided by booting a guest, never by looking at `/dev/kvm`.
//!
//! On some machines the device opens and creates virtual machines in which no ordinary kernel gets
//! anywhere. So a guest is booted under KVM with a short time-out, and the answer is kept until the
//! machine, QEMU or the guest kernel change.

use std::fmt;
use std::fs::{self, OpenOptions};
use std::time::Duration;

use anyhow::{Context, Result};

use crate::cache::{Cache, key_of};
use crate::guest::{Guest, GuestBase, GuestSpec, qemu_version};
use crate::job::Job;

/// A guest boots in about two seconds where KVM works, also on slow machines.
const BOOT_TIMEOUT: Duration = Duration::from_secs(15);

/// How QEMU runs the guest's instructions.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Accel {
    /// Hardware virtualization.
    Kvm,
    /// Emulation, a thread for each virtual CPU.
    Tcg,
}

impl Accel {
    /// QEMU's options for it.
    pub fn qemu_args(self) -> [&'static str; 4] {
        match self {
            Accel::Kvm => ["-accel", "kvm", "-cpu", "host"],
            Accel::Tcg => ["-accel", "tcg,thread=multi", "-cpu", "max"],
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
    /// What was seen.
    pub reason: String,
}

impl AccelChoice {
    /// Decides, or reads what was decided since the machine started.
    pub fn cached(cache: &Cache, base: &GuestBase) -> Result<Self> {
        if let Err(error) = OpenOptions::new().read(true).write(true).open("/dev/kvm") {
            return Ok(Self::tcg(format!("/dev/kvm cannot be opened: {error}")));
        }
        let boot_id = fs::read_to_string("/proc/sys/kernel/random/boot_id")
            .context("cannot read the machine's boot id")?;
        let key = key_of(&[&boot_id, &qemu_version()?, base.kernel.release()]);
        let entry = cache.entry(&format!("kvm-{key}"), |staging| {
            eprintln!("lab: trying to boot a guest under KVM (up to {} s)", BOOT_TIMEOUT.as_secs());
            let answer = match boots_under_kvm(base) {
                Ok(()) => "yes".to_owned(),
                Err(error) => {
                    crate::interrupt::check()?;
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
    let spec = GuestSpec { accel: Accel::Kvm, vcpus: 1, disk: None, job };
    Guest::boot(base, &spec)?.finish(BOOT_TIMEOUT)?;
    Ok(())
}
