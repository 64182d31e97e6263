// SPDX-License-Identifier: Apache-2.0
//! The load in the guest: fio with many requests at a time, and a writer with one, which measures
//! pauses. Both compare all that they read.

use std::fmt::Write as _;
use std::time::Duration;

use anyhow::{Context, Result, bail};

use super::report::Verified;
use crate::agent::Shell;
use crate::load::{self, Round};
use crate::wait::wait_until_so;

const PROGRAM: &str = include_str!("writer.py");

/// Bytes of a block of the writer's file, and their number.
pub(super) const BLOCK_BYTES: usize = 4096;
pub(super) const BLOCKS: u64 = 512;
/// Blocks from one write to the next one. It is odd, so that each block has its turn.
const STEP: u64 = 37;

/// The block of a write. Writes are numbered from 1.
pub(super) fn slot_of(number: u64) -> u64 {
    number * STEP % BLOCKS
}

/// Milliseconds between two turns of a writer on another disk of the daemon: it leaves an emulated guest time for
/// the disk with the events.
const REST_MS: u64 = 100;

/// Longest time without a request of the writer, after which the disk counts as hanging. An
/// emulated guest on a busy machine needs a part of it.
const HANG_LIMIT: Duration = Duration::from_secs(180);

/// Messages of the guest's kernel that mean an I/O error, damaged data or a hang.
const COMPLAINTS: &str = "I/O error|EXT4-fs error|EXT4-fs warning|Buffer I/O|blocked for more than|\
    BUG:|WARNING:|Call Trace|Remounting filesystem read-only";

/// The running writer of a disk, which is mounted on `/run/NAME`.
#[derive(Debug)]
pub(super) struct Writer {
    name: String,
    /// The rounds of fio beside it.
    round: Round,
}

/// The name of the writer beside fio.
const NAME: &str = "disk";

impl Writer {
    /// Makes a file system on the disk and starts the load on it: a writer, and fio with such rounds.
    pub(super) fn start(guest: &mut impl Shell, node: &str, round: Round) -> Result<Self> {
        load::format(guest, node)?;
        guest.ok("dmesg -C")?;
        let writer = Self::run(guest, NAME, round, 0)?;
        load::start_rounds(guest, round)?;
        Ok(writer)
    }

    /// Makes a file system on another disk and starts a writer on it.
    pub(super) fn beside(guest: &mut impl Shell, name: &str, node: &str) -> Result<Self> {
        let directory = format!("/run/{name}");
        guest.ok(&format!(
            "mkdir {directory} && mke2fs -q -t ext4 -F {node} && mount {node} {directory}"
        ))?;
        Self::run(guest, name, Round::Light, REST_MS)
    }

    fn run(guest: &mut impl Shell, name: &str, round: Round, rest_ms: u64) -> Result<Self> {
        let bytes = PROGRAM.bytes().fold(String::new(), |mut text, byte| {
            write!(text, "{byte:02x}").expect("a string grows");
            text
        });
        guest.ok(&format!(
            "python3 -c 'open(\"/run/writer.py\",\"wb\").write(bytes.fromhex(\"{bytes}\"))'"
        ))?;
        let writer = Self { name: name.to_owned(), round };
        let [pauses, code, log] = ["pauses", "code", "log"].map(|file| writer.file(file));
        guest.ok(&format!(": >{pauses}"))?;
        let directory = format!("/run/{name}");
        let program = format!(
            "python3 /run/writer.py {BLOCK_BYTES} {BLOCKS} {STEP} {rest_ms} {directory} /run/writer-{name}"
        );
        guest.ok(&format!("({program}; echo $? >{code}) >{log} 2>&1 &"))?;
        Ok(writer)
    }

    /// A file of the writer in the guest.
    fn file(&self, what: &str) -> String {
        format!("/run/writer-{}.{what}", self.name)
    }

    /// The name of its disk.
    pub(super) fn name(&self) -> &str {
        &self.name
    }

    /// Number of turns of the writer so far: its writes that have ended, or one less.
    pub(super) fn count(&self, guest: &mut impl Shell) -> Result<u64> {
        guest
            .ok(&format!("wc -l <{}", self.file("pauses")))?
            .trim()
            .parse()
            .context("the number of the writer's turns")
    }

    /// Waits until the writer has made more turns; a hang or the end of the load is an error.
    pub(super) fn wait_for_more(&self, guest: &mut impl Shell, turns: u64) -> Result<()> {
        let goal = self.count(guest)? + turns;
        let what = format!("a request to /run/{}: the disk HANGS", self.name);
        wait_until_so(HANG_LIMIT, &what, || {
            load::check_running(guest)?;
            if guest.run(&format!("cat {}", self.file("code")))?.code == 0 {
                let log = guest.ok(&format!("tail -n 30 {}", self.file("log")))?;
                bail!("the writer of /run/{} has ended: {log}", self.name);
            }
            Ok(self.count(guest)? >= goal)
        })
    }

    /// The longest request since the writer had made `turns`.
    pub(super) fn longest_since(&self, guest: &mut impl Shell, turns: u64) -> Result<Duration> {
        let first = turns + 1;
        let text =
            guest.ok(&format!("tail -n +{first} {} | sort -n | tail -n 1", self.file("pauses")))?;
        let micros = text.trim().parse().with_context(|| format!("the longest request: {text}"))?;
        Ok(Duration::from_micros(micros))
    }

    /// Ends the load, which compares all data once more.
    pub(super) fn finish(self, guest: &mut impl Shell) -> Result<Verified> {
        let rounds = load::rounds(guest)?;
        load::finish(guest)?;
        load::verify_round(guest, self.round)?;
        Ok(Verified { rounds, requests: self.end(guest)? })
    }

    /// Ends the writer, which compares its data once more, and unmounts the disk. Returns the number of
    /// requests.
    pub(super) fn end(self, guest: &mut impl Shell) -> Result<u64> {
        let [stop, code, log] = ["stop", "code", "log"].map(|file| self.file(file));
        guest.ok(&format!("touch {stop}"))?;
        wait_until_so(HANG_LIMIT, "the end of the writer: the disk HANGS", || {
            Ok(guest.run(&format!("cat {code}"))?.code == 0)
        })?;
        let log = guest.ok(&format!("cat {log}"))?;
        let requests = log.trim().strip_prefix("requests ").and_then(|text| text.parse().ok());
        let requests = requests.with_context(|| format!("the writer: {log}"))?;
        guest.ok(&format!("umount /run/{}", self.name))?;
        Ok(requests)
    }
}

/// The messages of the guest's kernel that a good run does not have.
pub(super) fn complaints(guest: &mut impl Shell) -> Result<String> {
    Ok(guest.run(&format!("dmesg | grep -E '{COMPLAINTS}' | head -n 30"))?.text)
}
