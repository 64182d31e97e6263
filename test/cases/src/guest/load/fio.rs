// SPDX-License-Identifier: Apache-2.0
//! Loads of fio.

use std::fs;
use std::io::Read;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use kit::fio::Job;
use kit::system::run;

use crate::guest::system::wait_up_to;
use kit::outcome::skip;

/// Longest time for a background fio to end after its disk was removed.
const END_LIMIT: Duration = Duration::from_secs(120);

/// Longest time for fio to start: it took two minutes on an emulated debug kernel that shared its
/// CPUs with two more machines.
const START_LIMIT: Duration = Duration::from_secs(300);

/// Interface through which requests reach the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Engine {
    /// One system call per request.
    Sync,
    /// io_uring.
    Uring,
    /// io_uring that polls for completions.
    Hipri,
}

impl Engine {
    /// A job on a disk.
    pub(crate) fn job(self, name: &str, path: &str) -> Job {
        let engine = match self {
            Self::Sync => "--ioengine=psync",
            Self::Uring => "--ioengine=io_uring --iodepth=32",
            Self::Hipri => "--ioengine=io_uring --iodepth=32 --hipri=1",
        };
        // A file must not replace a disk that was removed.
        Job::new(name, path).with(engine).with("--direct=1 --allow_file_create=0")
    }
}

/// Arguments for jobs that write data that they can verify, in `size_mib` MiB of the disk.
pub(crate) fn verified(size_mib: u32) -> String {
    format!(
        "--size={size_mib}M --verify=crc32c --verify_fatal=1 --do_verify=1 --verify_state_save=0"
    )
}

/// Runs jobs to their end; the error is fio's.
pub(crate) fn fio(jobs: &[Job]) -> Result<()> {
    run("fio", &words(jobs).iter().map(String::as_str).collect::<Vec<_>>()).map(drop)
}

/// Jobs that run in the background; drop ends them.
pub(crate) struct Background {
    child: Child,
}

impl Background {
    /// Starts jobs.
    pub(crate) fn start(jobs: &[Job]) -> Result<Self> {
        let child = Command::new("fio")
            .args(words(jobs))
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn();
        match child {
            Err(why) if why.kind() == std::io::ErrorKind::NotFound => {
                Err(skip("fio is not installed"))
            }
            child => Ok(Self { child: child.context("cannot run fio")? }),
        }
    }

    /// Waits until fio has opened a file.
    pub(crate) fn wait_until_open(&mut self, path: &str) -> Result<()> {
        let directory = format!("/proc/{}/fd", self.child.id());
        wait_up_to(START_LIMIT, "fio to open the disk", || {
            let mut fds = fs::read_dir(&directory).ok()?.flatten();
            fds.any(|fd| fs::read_link(fd.path()).is_ok_and(|to| to == Path::new(path)))
                .then_some(())
        })
    }

    /// Waits until fio has ended by itself, with or without an error; none of its processes may
    /// remain.
    pub(crate) fn wait(mut self) -> Result<()> {
        let end = Instant::now() + END_LIMIT;
        while self.child.try_wait()?.is_none() {
            if Instant::now() > end {
                bail!("fio did not end within {} s", END_LIMIT.as_secs());
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        Ok(())
    }

    /// Waits until fio has ended, which must be a success.
    pub(crate) fn wait_for_success(mut self) -> Result<()> {
        let mut said = String::new();
        if let Some(mut stderr) = self.child.stderr.take() {
            stderr.read_to_string(&mut said)?;
        }
        let status = self.child.wait()?;
        if !status.success() {
            bail!("fio: {status}: {}", said.trim());
        }
        Ok(())
    }

    /// True while fio runs.
    pub(crate) fn is_running(&mut self) -> Result<bool> {
        Ok(self.child.try_wait()?.is_none())
    }
}

impl Drop for Background {
    fn drop(&mut self) {
        let _ = self.child.kill(); // Fails if it has ended.
        let _ = self.child.try_wait();
    }
}

fn words(jobs: &[Job]) -> Vec<String> {
    let common = ["--thread=1", "--group_reporting=1", "--output-format=terse"];
    let common = common.iter().map(|&word| word.to_owned());
    common.chain(jobs.iter().flat_map(|job| job.arguments().to_vec())).collect()
}
