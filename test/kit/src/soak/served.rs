// SPDX-License-Identifier: Apache-2.0
//! The daemon of a run: `vhost-blk serve` with a control socket and a configuration file, which a
//! new start or an upgrade reads again.

use std::fmt;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use super::images::{Images, text};
use crate::daemon::Daemon;
use crate::process::run_to_end;
use crate::wait::wait_until_so;

/// The serial number of the disk in the guest.
pub const SERIAL: &str = "soak";

const STOP_LIMIT: Duration = Duration::from_secs(60);
const CONNECT_LIMIT: Duration = Duration::from_secs(120);
const LOG_LINES: usize = 30;

/// A successor of the daemon.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Successor {
    /// The daemon is killed.
    AfterKill,
    /// The daemon stops in order.
    AfterStop,
    /// The daemon executes the new program.
    ByUpgrade,
}

/// A block device that can be made to stall and to fail, on either data plane.
pub trait Device: fmt::Debug {
    /// Its node.
    fn path(&self) -> &Path;

    /// Keeps all requests until [`Self::resume`].
    fn suspend(&self) -> Result<()>;

    /// Lets the kept requests pass.
    fn resume(&self) -> Result<()>;

    /// Makes some reads and writes fail until [`Self::mend`], and no FLUSH: a failed one is final.
    fn fail(&self) -> Result<()>;

    /// Makes all requests succeed again.
    fn mend(&self) -> Result<()>;
}

/// Options of a device, for all of a run: its troubles need no new start.
const DEVICE_OPTIONS: &str = "on-error = 'stop'\nio-timeout = 0.3\n";

/// The running daemon.
#[derive(Debug)]
pub struct Served {
    daemon: Daemon,
    program: PathBuf,
    folder: PathBuf,
    images: Images,
    /// Options beside those of the images.
    options: String,
    /// The disk, if it is a device.
    device: Option<Box<dyn Device>>,
}

/// The bitmap of the backups.
const BITMAP: &str = "soak";

impl Served {
    /// Serves `disk`, a raw image, by `program`; both are absolute paths. Sockets, log and configuration
    /// are in `folder`, overlays and backups beside the disk.
    pub fn start(program: &Path, folder: &Path, disk: &Path) -> Result<Self> {
        Self::start_with(program, folder, disk, "", None)
    }

    /// As [`Self::start`], of a device. Its events are those that need no copy.
    pub fn start_device(program: &Path, folder: &Path, device: Box<dyn Device>) -> Result<Self> {
        let path = device.path().to_owned();
        Self::start_with(program, folder, &path, DEVICE_OPTIONS, Some(device))
    }

    fn start_with(
        program: &Path,
        folder: &Path,
        disk: &Path,
        options: &str,
        device: Option<Box<dyn Device>>,
    ) -> Result<Self> {
        let file = |name: &str| folder.join(name).display().to_string();
        let images = Images::new(disk);
        write_configuration(folder, &format!("{}{options}", images.options()))?;
        let args = [
            program.display().to_string(),
            "serve".to_owned(),
            format!("--socket-path={}", file("socket")),
            format!("--control-path={}", file("control")),
            format!("--config={}", file("soak.toml")),
            format!("--serial={SERIAL}"),
            "--num-queues=2".to_owned(),
            "--queue-size=1024".to_owned(),
        ];
        let daemon = Daemon::start(args.to_vec(), &folder.join("socket"), &folder.join("log"))?;
        let (program, folder) = (program.to_owned(), folder.to_owned());
        Ok(Self { daemon, program, folder, images, options: options.to_owned(), device })
    }

    /// QEMU's arguments for the disk; `reconnect` is the option of the socket by which QEMU connects
    /// again, such as `reconnect=1`.
    pub fn qemu_args(&self, reconnect: &str) -> Vec<String> {
        let socket = self.daemon.socket().display();
        vec![
            "-chardev".to_owned(),
            format!("socket,id={SERIAL},path={socket},{reconnect}"),
            "-device".to_owned(),
            format!("vhost-user-blk-pci,chardev={SERIAL},num-queues=2,queue-size=1024"),
        ]
    }

    /// Stops it in order and checks all qcow2 images. Returns a raw file with the content of the disk.
    pub fn stop(&mut self) -> Result<PathBuf> {
        self.daemon.stop(STOP_LIMIT)?;
        self.images.check()
    }

    /// The disk, if it is a device.
    pub(super) fn device(&self) -> Option<&dyn Device> {
        self.device.as_deref()
    }

    /// Writes the options that the next program reads, beside those of the images.
    pub(super) fn configure(&mut self, options: &str) -> Result<()> {
        options.clone_into(&mut self.options);
        self.write_configuration()
    }

    fn write_configuration(&self) -> Result<()> {
        write_configuration(&self.folder, &format!("{}{}", self.images.options(), self.options))
    }

    /// Takes a snapshot. Returns a raw copy of the old image.
    pub(super) fn snapshot(&mut self) -> Result<PathBuf> {
        let (old, overlay) = (self.images.top().to_owned(), self.images.new_path("overlay"));
        self.ctl(&["snapshot", "--to", &text(&overlay)])?;
        self.images.pushed(overlay);
        self.write_configuration()?;
        self.images.flatten(&old)
    }

    /// Merges all overlays.
    pub(super) fn commit_all(&mut self) -> Result<()> {
        while self.images.has_overlays() {
            self.ctl(&["commit"])?;
            self.images.merged()?;
            self.write_configuration()?;
        }
        Ok(())
    }

    /// Moves the disk to a new image. Returns a raw copy of the old one.
    pub(super) fn mirror(&mut self, is_qcow2: bool) -> Result<PathBuf> {
        let (old, to) = (self.images.top().to_owned(), self.images.new_path("moved"));
        let format = if is_qcow2 { "qcow2" } else { "raw" };
        let begin = ["mirror", "--to", &text(&to), "--target-format", format, "--wait"];
        self.ctl(&begin)?;
        self.ctl(&["mirror", "--complete"])?;
        let flat = self.images.flatten(&old)?;
        self.images.moved(to, is_qcow2)?;
        self.write_configuration()?;
        Ok(flat)
    }

    /// True if the disk has overlays.
    pub(super) fn has_overlays(&self) -> bool {
        self.images.has_overlays()
    }

    /// True if the disk is a raw image without an overlay.
    pub(super) fn is_raw(&self) -> bool {
        self.images.is_raw()
    }

    /// True if an incremental backup is possible.
    pub(super) fn may_back_up_more(&self) -> Result<bool> {
        Ok(self.images.may_continue() && self.has_bitmap()?)
    }

    /// True if the disk notes changes for the next backup.
    pub(super) fn has_bitmap(&self) -> Result<bool> {
        let bitmaps = self.ctl(&["bitmaps"])?;
        let bitmaps = bitmaps.as_array().with_context(|| format!("no list: {bitmaps}"))?;
        for bitmap in bitmaps {
            ensure!(bitmap["problem"].is_null(), "a bitmap of no use: {bitmap}");
        }
        Ok(!bitmaps.is_empty())
    }

    /// Ends the notes of changes.
    pub(super) fn remove_bitmap(&mut self) -> Result<()> {
        self.ctl(&["bitmaps", "--remove", BITMAP]).map(drop)
    }

    /// Makes a full backup, and notes the changes since. Returns a raw copy of it.
    pub(super) fn back_up_fully(&mut self) -> Result<PathBuf> {
        let copy = self.images.new_path("full");
        let to = text(&copy);
        self.ctl(&["backup", "--to", &to, "--format", "qcow2", "--verify", "--bitmap", BITMAP])?;
        let flat = self.images.flatten(&copy)?;
        self.images.backed_up_fully(copy)?;
        Ok(flat)
    }

    /// Makes an incremental backup. Returns a raw copy of it and those below it.
    pub(super) fn back_up_more(&mut self) -> Result<PathBuf> {
        let copy = self.images.new_path("more");
        self.ctl(&["backup", "--to", &text(&copy), "--verify", "--incremental", BITMAP])?;
        let flat = self.images.flatten(&copy)?;
        self.images.backed_up_more(copy);
        Ok(flat)
    }

    /// Starts the next program, and waits until QEMU is connected to it.
    pub(super) fn replace(&mut self, successor: Successor) -> Result<()> {
        match successor {
            Successor::AfterKill => self.daemon.replace_killed()?,
            Successor::AfterStop => self.daemon.replace_stopped(STOP_LIMIT)?,
            Successor::ByUpgrade => return self.ctl(&["upgrade"]).map(drop),
        }
        wait_until_so(CONNECT_LIMIT, "QEMU at the next daemon", || {
            Ok(self.daemon.log().contains("front-end connected"))
        })
    }

    /// Sends a command to the control socket; returns the answer.
    pub(super) fn ctl(&self, words: &[&str]) -> Result<Value> {
        let program = self.program.display().to_string();
        let control = format!("--control-path={}", self.folder.join("control").display());
        let start: [&str; 4] = [&program, "ctl", &control, "--json"];
        let text = run_to_end(&[&start[..], words].concat())?;
        serde_json::from_str(&text).with_context(|| format!("the answer to {words:?}: {text}"))
    }

    /// A member of the status.
    pub(super) fn status(&self, member: &str) -> Result<Value> {
        Ok(self.ctl(&["status"])?[member].take())
    }

    /// The end of the log, for an error.
    pub(super) fn log_tail(&self) -> String {
        let log = self.daemon.log();
        let lines: Vec<&str> = log.lines().collect();
        let tail = &lines[lines.len().saturating_sub(LOG_LINES)..];
        tail.iter().map(|line| format!("  daemon| {line}\n")).collect()
    }
}

fn write_configuration(folder: &Path, options: &str) -> Result<()> {
    let path = folder.join("soak.toml");
    fs::write(&path, options).with_context(|| format!("cannot write {}", path.display()))
}
