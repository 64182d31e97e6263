// SPDX-License-Identifier: Apache-2.0
//! A guest that libvirt runs, with the agent in its initramfs.

use std::fs;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use kit::agent::{Agent, Output, Shell};

use super::page::{self, Boot};
use crate::host::packages::system::sh;
use crate::initramfs::{Initramfs, modules_of};

const INIT: &str = include_str!("init.sh");
/// Driver of the served disk.
const DRIVER: &str = "virtio_blk";
/// Programs for the guest besides busybox.
const PROGRAMS: &[&str] = &["/usr/sbin/mke2fs", "/usr/sbin/resize2fs"];
/// Directory of the files that the guest boots.
const BOOT: &str = "/var/lib/libvirt/boot";
const CONSOLE: &str = "/var/log/libvirt/qemu/guest.console";
/// QEMU's own output.
const OUTPUT: &str = "/var/log/libvirt/qemu/guest.log";
const COMMAND_LINE: &str = "console=ttyS0 quiet panic=-1 mitigations=off no_timer_check";

/// An emulated guest in an emulated machine boots slowly.
const BOOT_LIMIT: Duration = Duration::from_secs(900);
const COMMAND_LIMIT: Duration = Duration::from_secs(600);

/// A running guest.
#[derive(Debug)]
pub(super) struct Guest {
    agent: Agent,
}

impl Guest {
    /// Makes the files that the guest boots, and writes the documented domain to `file`.
    pub(super) fn prepare(file: &Path) -> Result<()> {
        let (release, modules) = modules_of(Path::new("/"), DRIVER)?;
        let mut initramfs = Initramfs::new(Path::new("/"), INIT)?;
        for module in &modules {
            initramfs.module(module, "")?;
        }
        initramfs.programs(PROGRAMS)?;
        fs::create_dir_all(BOOT)?;
        let initramfs_path = format!("{BOOT}/guest.initramfs");
        fs::write(&initramfs_path, initramfs.finish()?).context(initramfs_path.clone())?;
        let kernel = format!("/boot/vmlinuz-{release}");
        let domain = page::domain(&Boot {
            kernel: &kernel,
            initramfs: &initramfs_path,
            command_line: COMMAND_LINE,
            console: CONSOLE,
        })?;
        fs::write(file, domain).with_context(|| file.display().to_string())
    }

    /// Waits for the agent of a guest that libvirt has started.
    pub(super) fn wait() -> Result<Self> {
        let path = sh(
            "virsh dumpxml guest | sed -n \"s/.*<source mode='bind' path='\\([^']*\\)'.*/\\1/p\"",
        )?;
        ensure!(path.ends_with("agent.commands"), "the domain has no port of the agent: {path}");
        let mut agent = Agent::connect(Path::new(&path))?;
        agent
            .wait_ready(BOOT_LIMIT)
            .map_err(|error| explained(error, "the guest does not boot"))?;
        Ok(Self { agent })
    }
}

impl Shell for Guest {
    fn run(&mut self, command: &str) -> Result<Output> {
        let output = self.agent.run(command, COMMAND_LIMIT);
        output.map_err(|error| explained(error, "the guest does not answer"))
    }
}

/// Adds the last lines of QEMU and of the guest's console.
fn explained(error: anyhow::Error, what: &str) -> anyhow::Error {
    let tail = sh(&format!("virsh domstate guest --reason; tail -n 20 {OUTPUT} {CONSOLE}"));
    error.context(format!("{what}\n{}", tail.unwrap_or_else(|why| format!("{why:#}"))))
}
