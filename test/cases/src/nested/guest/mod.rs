// SPDX-License-Identifier: Apache-2.0
//! An inner guest: stock QEMU with KVM, inside the lab's VM.

mod image;

pub(crate) use image::{Driver, Image, Mount, OwnDriver};

use std::fs;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Result, bail, ensure};
pub(crate) use kit::agent::Output;
use kit::agent::{Agent, Shell};
use kit::outcome::skip;
use kit::process::{OwnedChild, StopWith};
use kit::qmp::Qmp;
use kit::soak::Machine;
use serde_json::json;
use tempfile::TempDir;

use kit::wait::wait_until_so;

pub(crate) const QEMU: &str = "qemu-system-x86_64";
const BOOT_LIMIT: Duration = Duration::from_secs(300);
const COMMAND_LIMIT: Duration = Duration::from_secs(240);
const MIGRATION_LIMIT: Duration = Duration::from_secs(240);
/// Passes over the dirty log before the speed limits are lifted, so that the migration ends.
const ROUNDS_UNDER_LOAD: u64 = 4;
/// Lines of the console and the log that an error includes.
const TAIL_LINES: usize = 40;

/// Configuration of a guest.
#[derive(Clone, Debug)]
pub(crate) struct GuestSpec {
    /// Virtual CPUs.
    pub(crate) vcpus: u16,
    /// MiB of memory.
    pub(crate) memory_mib: u32,
    /// QEMU's arguments for the disks under test.
    pub(crate) disks: Vec<String>,
    /// Waits for a migration instead of booting.
    pub(crate) incoming: bool,
}

impl Default for GuestSpec {
    fn default() -> Self {
        Self { vcpus: 2, memory_mib: 320, disks: Vec::new(), incoming: false }
    }
}

/// A running guest; QEMU is killed on drop, which is a power cut for the guest.
#[derive(Debug)]
pub(crate) struct Guest {
    agent: Agent,
    qmp: Qmp<UnixStream>,
    /// Ends before its directory is removed.
    qemu: OwnedChild,
    directory: TempDir,
}

impl Guest {
    /// Boots a guest and waits for its agent.
    pub(crate) fn boot(image: &Image, spec: &GuestSpec) -> Result<Self> {
        let mut guest = Self::start(image, spec)?;
        guest.wait_ready()?;
        Ok(guest)
    }

    /// Starts QEMU without waiting for the guest.
    pub(crate) fn start(image: &Image, spec: &GuestSpec) -> Result<Self> {
        let directory = tempfile::Builder::new().prefix("nested-guest-").tempdir()?;
        let args = arguments(image, spec, directory.path());
        let mut qemu = OwnedChild::spawn(&args, &directory.path().join("qemu"), StopWith::Kill)?;
        for name in ["qmp", "commands"] {
            qemu.wait_until_it_listens(&directory.path().join(name))?;
        }
        let qmp = Qmp::connect(&directory.path().join("qmp"))?;
        let agent = Agent::connect(&directory.path().join("commands"))?;
        Ok(Self { agent, qmp, qemu, directory })
    }

    /// Waits until the agent of a booting (or rebooting) guest listens.
    pub(crate) fn wait_ready(&mut self) -> Result<()> {
        let ready = self.agent.wait_ready(BOOT_LIMIT);
        ready.map_err(|error| self.explain(error.context("the guest does not come up")))
    }

    /// Runs a shell command in the guest.
    pub(crate) fn run(&mut self, command: &str) -> Result<Output> {
        let output = self.agent.run(command, COMMAND_LIMIT);
        output.map_err(|error| self.explain(error))
    }

    /// Explains a missing answer with the last output. If KVM itself ended the guest, its end says
    /// nothing about the disk: KVM of newer kernels ends a guest whose access to a device seems to
    /// come from the delivery of an interrupt ("Suberror: 3"), which QEMU's emulation of SVM
    /// reports now and then.
    pub(crate) fn explain(&mut self, error: anyhow::Error) -> anyhow::Error {
        let tail = self.tail();
        let status = self.qmp.execute("query-status", json!({})).unwrap_or_default();
        match tail.lines().find(|line| line.contains("KVM internal error. Suberror: 3")) {
            Some(said) if status["status"] == "internal-error" => {
                skip(format!("KVM gave a guest up here: {}", said.trim()))
            }
            _ => error.context(tail),
        }
    }

    /// Runs a shell command that must succeed.
    pub(crate) fn ok(&mut self, command: &str) -> Result<String> {
        let output = self.run(command)?;
        if output.code != 0 {
            let text = output.text.trim();
            bail!("in the guest: `{command}` ended with {}: {text}\n{}", output.code, self.tail());
        }
        Ok(output.text)
    }

    /// The device node of the virtio disk with this serial number.
    pub(crate) fn virtio_disk(&mut self, serial: &str) -> Result<String> {
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

    /// QEMU's process.
    pub(crate) fn process_id(&self) -> u32 {
        self.qemu.id()
    }

    /// Runs a command of QEMU's monitor.
    pub(crate) fn monitor(&mut self, command: &str, arguments: serde_json::Value) -> Result<()> {
        self.qmp.execute(command, arguments).map(drop)
    }

    /// Lines that the guest wrote to its progress port.
    pub(crate) fn progress(&self) -> Result<Vec<String>> {
        let bytes = fs::read(self.directory.path().join("progress"))?;
        // A power cut can truncate the last line.
        let whole = bytes.iter().rposition(|&byte| byte == b'\n').map_or(0, |at| at + 1);
        Ok(String::from_utf8_lossy(&bytes[..whole]).lines().map(str::to_owned).collect())
    }

    /// Kills QEMU at once, which is a power cut for the guest.
    pub(crate) fn cut_power(self) {
        drop(self);
    }

    /// Migrates the guest to another QEMU that waits for it, and waits until it runs there. Speed
    /// limits are lifted after some rounds.
    pub(crate) fn migrate_to(&mut self, target: &mut Self) -> Result<Migration> {
        self.migrate_during(target, |_| Ok(()))
    }

    /// As [`Self::migrate_to`]; makes a change while the guest's memory is copied, which must not
    /// end before. So the migration must be slow at first ([`Self::limit_migration`]).
    pub(crate) fn migrate_during(
        &mut self,
        target: &mut Self,
        change: impl FnOnce(&mut Self) -> Result<()>,
    ) -> Result<Migration> {
        let uri = format!("unix:{}", target.migration_socket().display());
        self.monitor("migrate", json!({ "uri": uri }))?;
        let mut info = serde_json::Value::Null;
        wait_until_so(MIGRATION_LIMIT, "the begin of the copy", || {
            info = self.qmp.execute("query-migrate", json!({}))?;
            Ok(info["status"] != "setup" && info["status"] != "none")
        })?;
        change(self)?;
        info = self.qmp.execute("query-migrate", json!({}))?;
        ensure!(info["status"] == "active", "the change came too late: {info}");
        let mut lifted = false;
        wait_until_so(MIGRATION_LIMIT, "the migration", || {
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
        wait_until_so(Duration::from_secs(60), "the guest's start at the destination", || {
            let status = target.qmp.execute("query-status", json!({}))?;
            Ok(status["status"] == "running")
        })
        .map_err(|error| target.explain(error))?;
        Ok(Migration {
            rounds: info["ram"]["dirty-sync-count"].as_u64().unwrap_or(0),
            downtime_ms: info["downtime"].as_u64().unwrap_or(0),
        })
    }

    /// Limits the speed of a migration to so many bytes a second, so that the guest writes during it
    /// and it does not end early; [`Self::migrate_to`] lifts the limit.
    pub(crate) fn limit_migration(&mut self, bytes_per_second: u64) -> Result<()> {
        let slow = json!({ "max-bandwidth": bytes_per_second, "downtime-limit": 1 });
        self.monitor("migrate-set-parameters", slow)
    }

    fn migration_socket(&self) -> PathBuf {
        self.directory.path().join("migration")
    }

    /// The last lines of QEMU's output and the guest's console.
    pub(crate) fn tail(&self) -> String {
        let mut text = String::new();
        for name in ["qemu", "console"] {
            let bytes = fs::read(self.directory.path().join(name)).unwrap_or_default();
            let log = String::from_utf8_lossy(&bytes);
            let lines: Vec<_> = log.lines().collect();
            for line in &lines[lines.len().saturating_sub(TAIL_LINES)..] {
                text += &format!("  {name}| {line}\n");
            }
        }
        text
    }
}

impl Shell for Guest {
    fn run(&mut self, command: &str) -> Result<Output> {
        Self::run(self, command)
    }

    fn ok(&mut self, command: &str) -> Result<String> {
        Self::ok(self, command)
    }
}

impl Machine for Guest {
    fn monitor(
        &mut self,
        command: &str,
        arguments: serde_json::Value,
    ) -> Result<serde_json::Value> {
        self.qmp.execute(command, arguments)
    }

    fn tail(&self) -> String {
        Self::tail(self)
    }
}

/// QEMU's figures of a migration that succeeded.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Migration {
    /// Number of passes over the dirty log.
    pub(crate) rounds: u64,
    /// Downtime of the guest in milliseconds.
    pub(crate) downtime_ms: u64,
}

fn arguments(image: &Image, spec: &GuestSpec, directory: &Path) -> Vec<String> {
    let file = |name: &str| directory.join(name).display().to_string();
    let memory = spec.memory_mib;
    let command_line = "console=ttyS0 quiet panic=-1 mitigations=off";
    let text = format!(
        "{QEMU} -nodefaults -no-user-config -display none -machine q35,memory-backend=memory -enable-kvm \
         -cpu host -smp {vcpus} -m {memory} \
         -object memory-backend-memfd,id=memory,size={memory}M,share=on \
         -kernel {kernel} -initrd {initramfs} \
         -drive if=none,id=root,file={root},format=raw,readonly=on \
         -device virtio-blk-pci,drive=root,num-queues={vcpus} \
         -device virtio-serial-pci \
         -chardev socket,id=commands,path={commands},server=on,wait=off \
         -device virtserialport,chardev=commands,name=agent.commands \
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
