// SPDX-License-Identifier: Apache-2.0
//! The targets that threads use, also behind the end of their mirrors: a storage that hangs keeps its thread. No
//! other mirror of a disk of this name begins meanwhile, so that such threads are few, and no upgrade, whose
//! exchange of the program would wait for the thread.

use super::WHAT;
use crate::disks::Disks;
use crate::failure::Failure;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Weak};

/// The targets in use.
#[derive(Debug, Default)]
pub(in crate::disks) struct Targets(Vec<Target>);

#[derive(Debug)]
struct Target {
    /// Name of the disk, which may have gone.
    disk: String,
    path: PathBuf,
    /// Alive as long as a thread uses the target.
    sign: Weak<()>,
}

impl Targets {
    fn is_used_for(&self, disk: &str) -> bool {
        self.0.iter().any(|target| target.disk == disk && target.sign.strong_count() > 0)
    }

    /// A target in use.
    pub(in crate::disks) fn first(&self) -> Option<&Path> {
        let target = self.0.iter().find(|target| target.sign.strong_count() > 0)?;
        Some(&target.path)
    }

    /// Notes the use of a target until the drop of the result.
    fn begin(&mut self, disk: &str, path: &Path) -> Arc<()> {
        self.0.retain(|target| target.sign.strong_count() > 0);
        let sign = Arc::new(());
        self.0.push(Target {
            disk: disk.to_owned(),
            path: path.to_owned(),
            sign: Arc::downgrade(&sign),
        });
        sign
    }
}

impl Disks {
    /// Notes that this thread, or that with the result, uses a target for a disk.
    pub(super) fn use_target(&self, name: &str, path: &Path) -> Result<Arc<()>, Failure> {
        let what = format!("{WHAT} {name}");
        let mut state = self.lock();
        state.check_free(&what)?;
        if let Some(job) = &state.entry(name)?.job {
            return Err(Failure::told(what, job.refuses(true)));
        }
        if state.targets.is_used_for(name) {
            let why = "the target of its last mirror does not answer";
            return Err(Failure::run(what, why, "check that storage, and repeat the command"));
        }
        Ok(state.targets.begin(name, path))
    }
}
