// SPDX-License-Identifier: Apache-2.0
//! An inner guest: stock QEMU with KVM, inside of the lab's VM.

mod agent;
mod cpio;
mod image;

pub use agent::Output;
pub use image::{Driver, Image, Mount, OwnDriver};

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Result, bail};
use bench::process::Running;
use lab_case::outcome::skip;
use lab_case::qmp::Qmp;
use serde_json::json;
use tempfile::TempDir;

use self::agent::Agent;
use crate::exec::wait_until;

pub(crate) const QEMU: &str = "qemu-system-x86_64";
const BOOT_LIMIT: Duration = Duration::from_secs(300);
const COMMAND_LIMIT: Duration = Duration::from_secs(240);
const MIGRATION_LIMIT: Duration = Duration::from_secs(240);
/// Readings of the dirty log before limits of speed are lifted, so that the migration ends.
const ROUNDS_UNDER_LOAD: u64 = 4;
/// Lines of console and log that an error shows.
const TAIL_LINES: usize = 40;

/// What a guest is made of.
#[derive(Clone, Debug)]
pub struct GuestSpec {
    /// Virtual CPUs.
    pub vcpus: u16,
    /// MiB of memory.
    pub memory_mib: u32,
    /// QEMU's arguments for the disks under test.
    pub disks: Vec<String>,
    /// Wait for a migration instead of booting.
    pub incoming: bool,
}

impl Default for GuestSpec {
    fn default() -> Self {
        Self { vcpus: 2, memory_mib: 320, disks: Vec::new(), incoming: false }
    }
}

/// A running guest; QEMU is killed on drop, which is a power cut for the guest.
#[derive(Debug)]
pub struct Guest {
    agent: Agent,
    qmp: Qmp,
    qemu: Running,
    folder: TempDir,
}

impl Guest {
    /// Boots a guest and waits for its agent.
    pub fn boot(image: &Image, spec: &GuestSpec) -> Result<Self> {
        let mut guest = Self::start(image, spec)?;
        guest.wait_ready()?;
        Ok(guest)
    }

    /// Starts QEMU without waiting for the guest.
    pub fn start(image: &Image, spec: &GuestSpec) -> Result<Self> {
        let folder = tempfile::Builder::new().prefix("nested-guest-").tempdir()?;
        let args = arguments(image, spec, folder.path());
        let mut qemu = Running::start(QEMU, &args, &folder.path().join("qemu"))?;
        for name in ["qmp", "commands"] {
            qemu.wait_for_socket(&folder.path().join(name))?;
        }
        let qmp = Qmp::connect(&folder.path().join("qmp"))?;
        let agent = Agent::connect(&folder.path().join("commands"))?;
        Ok(Self { agent, qmp, qemu, folder })
    }

    /// Waits until a guest that boots (again) listens.
    pub fn wait_ready(&mut self) -> Result<()> {
        let ready = self.agent.wait_ready(BOOT_LIMIT);
        ready.map_err(|error| self.explain(error.context("the guest does not come up")))
    }

    /// Runs a shell command in the guest.
    pub fn run(&mut self, command: &str) -> Result<Output> {
        let output = self.agent.run(command, COMMAND_LIMIT);
        output.map_err(|error| self.explain(error))
    }

    /// Why there is no answer, with what was said last. A guest that KVM itself gave up says nothing
    /// of its disk: on newer kernels KVM ends one whose access to a device seems to come from the
    /// delivery of an interrupt ("Suberror: 3"), which QEMU's emulation of SVM claims now and then.
    pub fn explain(&mut self, error: anyhow::Error) -> anyhow::Error {
        let tail = self.tail();
        let status = self.qmp.execute("query-status", json!({})).unwrap_or_default();
        match tail.lines().find(|line| line.contains("KVM internal error. Suberror: 3")) {
            Some(said) if status["status"] == "internal-error" => {
                skip(format!("KVM gave a guest up here: {}", said.trim()))
            }
            _ => error.context(tail),
        }
    }

    /// Runs a shell command that has to succeed.
    pub fn ok(&mut self, command: &str) -> Result<String> {
        let output = self.run(command)?;
        if output.code != 0 {
            let text = output.text.trim();
            bail!("in the guest: `{command}` ended with {}: {text}\n{}", output.code, self.tail());
        }
        Ok(output.text)
    }

    /// The device node of the virtio disk with this serial number.
    pub fn virtio_disk(&mut self, serial: &str) -> Result<String> {
        let command = format!(
            "for d in /sys/block/vd*; do [ \"$(cat $d/serial)\" = {serial} ] && echo /dev/${{d##*/}}; \
             done; true"
        );
        let found = self.ok(&command)?.trim().to_owned();
        if found.is_empty() {
            bail!("the guest sees no disk {serial}\n{}", self.tail());
        }
        Ok(found)
    }

    /// Runs a command of QEMU's monitor.
    pub fn monitor(&mut self, command: &str, arguments: serde_json::Value) -> Result<()> {
        self.qmp.execute(command, arguments).map(drop)
    }

    /// Lines that the guest wrote to its progress port.
    pub fn progress(&self) -> Result<Vec<String>> {
        let bytes = fs::read(self.folder.path().join("progress"))?;
        // The last line may be cut off by a power cut.
        let whole = bytes.iter().rposition(|&byte| byte == b'\n').map_or(0, |at| at + 1);
        Ok(String::from_utf8_lossy(&bytes[..whole]).lines().map(str::to_owned).collect())
    }

    /// Kills QEMU at once: a power cut.
    pub fn cut_power(self) {
        drop(self);
    }

    /// Sends the guest to another QEMU that waits for it, and waits until it runs there. Limits of
    /// speed are lifted after some rounds.
    pub fn migrate_to(&mut self, target: &mut Self) -> Result<Migration> {
        let uri = format!("unix:{}", target.migration_socket().display());
        self.monitor("migrate", json!({ "uri": uri }))?;
        let (mut info, mut lifted) = (serde_json::Value::Null, false);
        wait_until("the migration", MIGRATION_LIMIT, || {
            info = self.qmp.execute("query-migrate", json!({}))?;
            if !lifted && info["ram"]["dirty-sync-count"].as_u64() >= Some(ROUNDS_UNDER_LOAD) {
                lifted = true;
                let fast = json!({ "max-bandwidth": 0, "downtime-limit": 20_000 });
                self.monitor("migrate-set-parameters", fast)?;
            }
            match info["status"].as_str() {
                Some("completed") => Ok(true),
                Some("failed" | "cancelled") => {
                    bail!("the migration failed: {info}\n{}", target.tail())
                }
                _ => Ok(false),
            }
        })
        .map_err(|error| self.explain(error))?;
        wait_until("the guest's start at the destination", Duration::from_secs(60), || {
            let status = target.qmp.execute("query-status", json!({}))?;
            Ok(status["status"] == "running")
        })
        .map_err(|error| target.explain(error))?;
        Ok(Migration {
            rounds: info["ram"]["dirty-sync-count"].as_u64().unwrap_or(0),
            downtime_ms: info["downtime"].as_u64().unwrap_or(0),
        })
    }

    fn migration_socket(&self) -> PathBuf {
        self.folder.path().join("migration")
    }

    /// The last lines of QEMU's output and the guest's console.
    pub fn tail(&self) -> String {
        let mut text = String::new();
        for name in ["qemu", "console"] {
            let bytes = fs::read(self.folder.path().join(name)).unwrap_or_default();
            let log = String::from_utf8_lossy(&bytes);
            let lines: Vec<_> = log.lines().collect();
            for line in &lines[lines.len().saturating_sub(TAIL_LINES)..] {
                text += &format!("  {name}| {line}\n");
            }
        }
        text
    }

    /// QEMU's process id.
    pub fn pid(&self) -> u32 {
        self.qemu.pid()
    }
}

/// What QEMU says about a migration that ended well.
#[derive(Clone, Copy, Debug)]
pub struct Migration {
    /// How often the dirty log was read.
    pub rounds: u64,
    /// How long the guest stood still.
    pub downtime_ms: u64,
}

fn arguments(image: &Image, spec: &GuestSpec, folder: &Path) -> Vec<String> {
    let file = |name: &str| folder.join(name).display().to_string();
    let memory = spec.memory_mib;
    let command_line = "console=ttyS0 quiet panic=-1 mitigations=off";
    let text = format!(
        "-nodefaults -no-user-config -display none -machine q35,memory-backend=memory -enable-kvm \
         -cpu host -smp {vcpus} -m {memory} \
         -object memory-backend-memfd,id=memory,size={memory}M,share=on \
         -kernel {kernel} -initrd {initramfs} \
         -drive if=none,id=root,file={root},format=raw,readonly=on \
         -device virtio-blk-pci,drive=root,num-queues={vcpus} \
         -device virtio-serial-pci \
         -chardev socket,id=commands,path={commands},server=on,wait=off \
         -device virtserialport,chardev=commands,name=nested.commands \
         -chardev file,id=progress,path={progress} \
         -device virtserialport,chardev=progress,name=nested.progress \
         -chardev file,id=console,path={console} -serial chardev:console \
         -qmp unix:{qmp},server=on,wait=off",
        vcpus = spec.vcpus,
        kernel = image.kernel.display(),
        initramfs = image.initramfs.display(),
        root = image.root.display(),
        commands = file("commands"),
        progress = file("progress"),
        console = file("console"),
        qmp = file("qmp"),
    );
    let mut args: Vec<_> = text.split_whitespace().map(str::to_owned).collect();
    args.extend(["-append".to_owned(), command_line.to_owned()]);
    if spec.incoming {
        args.extend(["-incoming".to_owned(), format!("unix:{}", file("migration"))]);
    }
    args.extend(spec.disks.iter().cloned());
    args
}
