// SPDX-License-Identifier: Apache-2.0
//! A daemon and what is done to its first disk by `ctl`.

use std::fmt;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result};
use clap::ValueEnum;
use driver::Device;
use kit::process::run_to_end;
use serde_json::Value;
use tempfile::TempDir;

use crate::one_daemon::{OneDaemon, light_driver};

/// Size of each image.
const SIZE_BYTES: u64 = 64 << 20;
/// Growth of a disk in each round.
const GROWTH_BYTES: u64 = 1 << 20;

/// An operation on a running disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(super) enum Operation {
    /// The program is replaced by itself.
    Upgrade,
    /// The image becomes the backing file of a new qcow2 image.
    Snapshot,
    /// A qcow2 image is merged into its backing file.
    Commit,
    /// The disk moves to another file.
    Mirror,
    /// The disk is copied to a new file.
    Backup,
    /// The disk grows.
    Resize,
}

impl fmt::Display for Operation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Upgrade => "upgrade",
            Self::Snapshot => "snapshot",
            Self::Commit => "commit",
            Self::Mirror => "mirror",
            Self::Backup => "backup",
            Self::Resize => "resize",
        })
    }
}

/// A daemon whose disks all have drivers, but the first one.
pub(super) struct Rig {
    served: OneDaemon,
    /// Counts the operations, for names of files.
    round: u64,
    _idle: Vec<Device>,
    /// Images, sockets and the log; removed after the daemon has ended.
    directory: TempDir,
}

impl Rig {
    pub(super) fn start(program: &Path, disks: u16) -> Result<Self> {
        let directory = tempfile::Builder::new().prefix("bench-operations-").tempdir()?;
        let image = |disk| {
            let image = directory.path().join(format!("{disk}.img"));
            File::create(&image)?.set_len(SIZE_BYTES)?;
            Ok(format!("blk-file = \"{}\"\nnum-queues = 1\n", image.display()))
        };
        let images = (0..disks).map(image).collect::<Result<Vec<_>>>()?;
        let served = OneDaemon::start(program, directory.path(), &images, &[])?;
        let others = served.sockets.iter().skip(1);
        let idle = others.map(|socket| light_driver(socket)).collect::<Result<_>>()?;
        Ok(Self { served, round: 0, _idle: idle, directory })
    }

    pub(super) fn disks(&self) -> usize {
        self.served.sockets.len()
    }

    /// The socket of the first disk.
    pub(super) fn socket(&self) -> String {
        self.served.sockets[0].display().to_string()
    }

    /// The file that the operation of this round makes.
    fn new_file(&self) -> PathBuf {
        self.directory.path().join(format!("new-{}", self.round))
    }

    /// Prepares an operation; `load` loads the disk for a while.
    pub(super) fn prepare(
        &mut self,
        operation: Operation,
        load: impl FnOnce() -> Result<()>,
    ) -> Result<()> {
        self.round += 1;
        if operation == Operation::Commit {
            self.snapshot()?;
            load()?;
        }
        Ok(())
    }

    /// Operates the disk; returns the pause that `ctl` tells, if the operation has one.
    pub(super) fn operate(&self, operation: Operation) -> Result<Option<Duration>> {
        let new = self.new_file().display().to_string();
        let reply = match operation {
            Operation::Upgrade => self.ctl(&["upgrade"])?,
            Operation::Snapshot => self.snapshot()?,
            Operation::Commit => self.commit()?,
            Operation::Mirror => {
                self.ctl(&["mirror", "disk0", "--to", &new, "--wait"])?;
                self.ctl(&["mirror", "disk0", "--complete", "--update-config"])?
            }
            Operation::Backup => self.ctl(&["backup", "disk0", "--to", &new])?,
            Operation::Resize => {
                let size = SIZE_BYTES + self.round * GROWTH_BYTES;
                self.ctl(&["resize", "disk0", &size.to_string()])?
            }
        };
        Ok(reply["pause_us"].as_u64().map(Duration::from_micros))
    }

    /// Leaves the disk as it was before the operation, but for its size and the name of its file.
    pub(super) fn undo(&self, operation: Operation) -> Result<()> {
        let unused = match operation {
            Operation::Upgrade | Operation::Resize => return Ok(()),
            Operation::Snapshot => {
                self.commit()?;
                self.new_file()
            }
            Operation::Commit | Operation::Backup => self.new_file(),
            Operation::Mirror if self.round == 1 => self.directory.path().join("0.img"),
            Operation::Mirror => self.directory.path().join(format!("new-{}", self.round - 1)),
        };
        fs::remove_file(&unused).with_context(|| unused.display().to_string())
    }

    fn snapshot(&self) -> Result<Value> {
        let overlay = self.new_file().display().to_string();
        self.ctl(&["snapshot", "disk0", "--to", &overlay, "--update-config"])
    }

    fn commit(&self) -> Result<Value> {
        self.ctl(&["commit", "disk0", "--update-config"])
    }

    /// The daemon's answer.
    fn ctl(&self, words: &[&str]) -> Result<Value> {
        let program = self.served.program.display().to_string();
        let control = format!("--control-path={}", self.served.control.display());
        let start: [&str; 4] = [&program, "ctl", &control, "--json"];
        let text = run_to_end(&[&start[..], words].concat())?;
        serde_json::from_str(&text).with_context(|| format!("the answer to {words:?}: {text}"))
    }
}
