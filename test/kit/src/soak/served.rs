// SPDX-License-Identifier: Apache-2.0
//! The daemon of a run, with a control socket: `vhost-blk serve` with a configuration file, which a new
//! start or an upgrade reads again, or `vhost-blk daemon` with a directory of them.

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

/// Another disk of the daemon, whose guest must notice nothing.
#[derive(Debug)]
pub struct Beside {
    /// Its serial number in the guest, and its name.
    pub serial: &'static str,
    /// A raw image or a device.
    pub path: PathBuf,
    /// Its further options, as lines of a configuration file.
    pub options: &'static str,
}

/// Options of a device, for all of a run: its troubles need no new start.
const DEVICE_OPTIONS: &str = "on-error = 'stop'\nio-timeout = 0.3\n";

/// The running daemon.
#[derive(Debug)]
pub struct Served {
    daemon: Daemon,
    program: PathBuf,
    directory: PathBuf,
    images: Images,
    /// Options beside those of the images.
    options: String,
    /// The disk, if it is a device.
    device: Option<Box<dyn Device>>,
    /// The other disks. If there is one, the program is `vhost-blk daemon`.
    beside: Vec<Beside>,
}

/// The bitmap of the backups.
const BITMAP: &str = "soak";

impl Served {
    /// Serves `disk`, a raw image, by `program`; both are absolute paths. Sockets, log and configuration
    /// are in `directory`, overlays and backups beside the disk.
    pub fn start(program: &Path, directory: &Path, disk: &Path) -> Result<Self> {
        let images = Images::new(disk);
        write(&directory.join("soak.toml"), &images.options())?;
        let daemon = start(program, directory, &serve(directory))?;
        let (program, directory) = (program.to_owned(), directory.to_owned());
        let (options, device, beside) = (String::new(), None, Vec::new());
        Ok(Self { daemon, program, directory, images, options, device, beside })
    }

    /// As [`Self::start`], of a device. Its events are those that need no copy.
    pub fn start_device(program: &Path, directory: &Path, device: Box<dyn Device>) -> Result<Self> {
        let path = device.path().to_owned();
        let images = Images::new(&path);
        write(&directory.join("soak.toml"), &format!("{}{DEVICE_OPTIONS}", images.options()))?;
        let daemon = start(program, directory, &serve(directory))?;
        let (program, directory) = (program.to_owned(), directory.to_owned());
        let (options, device, beside) = (DEVICE_OPTIONS.to_owned(), Some(device), Vec::new());
        Ok(Self { daemon, program, directory, images, options, device, beside })
    }

    /// As [`Self::start_device`], with other disks in the same daemon: `vhost-blk daemon` serves all of
    /// them from a directory.
    pub fn start_daemon(
        program: &Path,
        directory: &Path,
        device: Box<dyn Device>,
        beside: Vec<Beside>,
    ) -> Result<Self> {
        let path = device.path().to_owned();
        let images = Images::new(&path);
        let disks = directory.join("disks");
        fs::create_dir(&disks)?;
        let file = |serial: &str, path: &Path, options: &str| {
            let socket = socket_of(directory, serial);
            let text = format!(
                "blk-file = '{}'\nsocket-path = '{}'\nserial = '{serial}'\nnum-queues = 2\n\
                 queue-size = 1024\n{options}",
                path.display(),
                socket.display()
            );
            write(&disks.join(format!("{serial}.toml")), &text)
        };
        file(SERIAL, &path, DEVICE_OPTIONS)?;
        for other in &beside {
            file(other.serial, &other.path, other.options)?;
        }
        let words = ["daemon".to_owned(), format!("--config-dir={}", disks.display())];
        let mut daemon = start(program, directory, &words)?;
        for other in &beside {
            daemon.wait_until_it_listens(&socket_of(directory, other.serial))?;
        }
        let (program, directory) = (program.to_owned(), directory.to_owned());
        let (options, device) = (DEVICE_OPTIONS.to_owned(), Some(device));
        Ok(Self { daemon, program, directory, images, options, device, beside })
    }

    /// QEMU's arguments for all disks; `reconnect` is the option of the socket by which QEMU connects
    /// again, such as `reconnect=1`.
    pub fn qemu_args(&self, reconnect: &str) -> Vec<String> {
        let args = |serial: &str| {
            let socket = socket_of(&self.directory, serial);
            [
                "-chardev".to_owned(),
                format!("socket,id={serial},path={},{reconnect}", socket.display()),
                "-device".to_owned(),
                format!("vhost-user-blk-pci,chardev={serial},num-queues=2,queue-size=1024"),
            ]
        };
        self.serials().flat_map(args).collect()
    }

    /// The serial numbers of all disks; the first one is that of the disk with the events.
    pub fn serials(&self) -> impl Iterator<Item = &str> {
        [SERIAL].into_iter().chain(self.beside.iter().map(|other| other.serial))
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

    /// Only for a program that serves one disk.
    fn write_configuration(&self) -> Result<()> {
        let text = format!("{}{}", self.images.options(), self.options);
        write(&self.directory.join("soak.toml"), &text)
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
        let begin = ["mirror", "--to", &text(&to), "--format", format, "--wait"];
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

    /// Starts the next program, and waits until QEMU is connected to all of its disks.
    pub(super) fn replace(&mut self, successor: Successor) -> Result<()> {
        match successor {
            Successor::AfterKill => self.daemon.replace_killed()?,
            Successor::AfterStop => self.daemon.replace_stopped(STOP_LIMIT)?,
            Successor::ByUpgrade => return self.ctl(&["upgrade"]).map(drop),
        }
        wait_until_so(CONNECT_LIMIT, "QEMU at the next daemon", || {
            let connected = self.daemon.log().matches("front-end connected").count();
            Ok(connected > self.beside.len())
        })
    }

    /// Sends a command about the disk to the control socket; returns the answer.
    pub(super) fn ctl(&self, words: &[&str]) -> Result<Value> {
        let named = match words {
            // An upgrade is that of the whole program.
            [verb, rest @ ..] if !self.beside.is_empty() && *verb != "upgrade" => {
                [&[*verb, SERIAL], rest].concat()
            }
            words => words.to_vec(),
        };
        let program = self.program.display().to_string();
        let control = format!("--control-path={}", self.directory.join("control").display());
        let start: [&str; 4] = [&program, "ctl", &control, "--json"];
        let text = run_to_end(&[&start[..], &named].concat())?;
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

/// The words for one disk with the configuration in the directory.
fn serve(directory: &Path) -> [String; 6] {
    [
        "serve".to_owned(),
        format!("--socket-path={}", socket_of(directory, SERIAL).display()),
        format!("--config={}", directory.join("soak.toml").display()),
        format!("--serial={SERIAL}"),
        "--num-queues=2".to_owned(),
        "--queue-size=1024".to_owned(),
    ]
}

fn start(program: &Path, directory: &Path, words: &[String]) -> Result<Daemon> {
    let mut args = vec![program.display().to_string()];
    args.extend_from_slice(words);
    args.push(format!("--control-path={}", directory.join("control").display()));
    Daemon::start(args, &socket_of(directory, SERIAL), &directory.join("log"))
}

fn socket_of(directory: &Path, serial: &str) -> PathBuf {
    directory.join(format!("{serial}.socket"))
}

fn write(path: &Path, text: &str) -> Result<()> {
    fs::write(path, text).with_context(|| format!("cannot write {}", path.display()))
}
