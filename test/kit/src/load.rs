// SPDX-License-Identifier: Apache-2.0
//! A load in a guest that writes to `/run/disk`, reads back and compares, until it is stopped.

use std::time::Duration;

use anyhow::{Context as _, Result, bail};

use crate::agent::Shell;
use crate::wait::wait_until_so;

/// The size of a round.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Round {
    /// 8 MiB, by 16 requests at a time.
    Usual,
    /// 1 MiB, by 4 small requests at a time: for storage, or a guest, that takes long for each.
    Light,
}

impl Round {
    /// fio: writes, then reads everything back and compares checksums.
    fn command(self) -> String {
        let (mib, most, depth) = match self {
            Self::Usual => (8, "64k", 16),
            Self::Light => (1, "16k", 4),
        };
        format!(
            "fio --name=verify --filename=/run/disk/verify --size={mib}M --rw=randwrite \
             --bsrange=4k-{most} --ioengine=io_uring --iodepth={depth} --direct=1 --randrepeat=0 \
             --verify=crc32c --verify_fatal=1 --do_verify=1 --output-format=terse"
        )
    }
}

/// Longest time for a round; emulation needs only a part of it.
const ROUND_LIMIT: Duration = Duration::from_secs(240);

/// Makes a file system on the disk and mounts it.
pub fn format(guest: &mut impl Shell, disk: &str) -> Result<()> {
    guest.ok(&format!("mke2fs -q -t ext4 -F {disk} && mount {disk} /run/disk")).map(drop)
}

/// Writes and verifies once.
pub fn verify_once(guest: &mut impl Shell) -> Result<()> {
    verify_round(guest, Round::Usual)
}

/// Writes and verifies a round.
pub fn verify_round(guest: &mut impl Shell, round: Round) -> Result<()> {
    guest.ok(&round.command()).map(drop)
}

/// Starts to write and verify repeatedly.
pub fn start(guest: &mut impl Shell) -> Result<()> {
    start_rounds(guest, Round::Usual)
}

/// Starts to write and verify rounds.
pub fn start_rounds(guest: &mut impl Shell, round: Round) -> Result<()> {
    let fio = round.command();
    let rounds = format!("while [ ! -e /run/stop ]; do {fio} || exit 1; echo round; done");
    guest.ok("rm -f /run/stop /run/load.code")?;
    guest
        .ok(&format!("(sh -c '{rounds}'; echo $? >/run/load.code) >/run/load.log 2>&1 &"))
        .map(drop)
}

/// Waits until a running load has verified a round and continues.
pub fn wait_for_round(guest: &mut impl Shell) -> Result<()> {
    wait_until_so(ROUND_LIMIT, "a verified round of the load", || {
        check_running(guest)?;
        Ok(rounds(guest)? > 0)
    })
}

/// Waits until a running load has verified a round that began after this call.
pub fn wait_for_another_round(guest: &mut impl Shell) -> Result<()> {
    let before = rounds(guest)?;
    wait_until_so(ROUND_LIMIT, "another verified round of the load", || {
        check_running(guest)?;
        // The first of the two may have begun before.
        Ok(rounds(guest)? >= before + 2)
    })
}

/// Waits until the guest's disk `node` (`/dev/NAME`) has completed requests after this call.
pub fn wait_for_requests(guest: &mut impl Shell, node: &str) -> Result<()> {
    let name = node.trim_start_matches("/dev/");
    let completed = |guest: &mut _| -> Result<u64> {
        let stat = Shell::ok(guest, &format!("cat /sys/block/{name}/stat"))?;
        completed_in(&stat).with_context(|| format!("statistics of {node}: {stat}"))
    };
    let before = completed(guest)?;
    wait_until_so(ROUND_LIMIT, "completed requests of the load", || {
        check_running(guest)?;
        Ok(completed(guest)? > before)
    })
}

/// Completed reads and writes in the `stat` of a block device.
fn completed_in(stat: &str) -> Option<u64> {
    let fields: Vec<u64> = stat.split_whitespace().map_while(|it| it.parse().ok()).collect();
    Some(fields.first()? + fields.get(4)?)
}

/// Fails if the load has ended, which only an error makes it do.
pub fn check_running(guest: &mut impl Shell) -> Result<()> {
    if guest.run("cat /run/load.code")?.code == 0 {
        bail!("the load has ended: {}", guest.ok("tail -n 30 /run/load.log")?);
    }
    Ok(())
}

/// Number of verified rounds since the start.
pub fn rounds(guest: &mut impl Shell) -> Result<u64> {
    let text = guest.run("grep -c ^round /run/load.log")?.text;
    Ok(text.trim().parse().unwrap_or(0))
}

/// Stops the load, which must have verified at least one round without an error.
pub fn finish(guest: &mut impl Shell) -> Result<()> {
    guest.ok("touch /run/stop")?;
    wait_until_so(
        ROUND_LIMIT,
        "the load's end",
        || Ok(guest.run("cat /run/load.code")?.code == 0),
    )?;
    let code = guest.ok("cat /run/load.code")?;
    let log = guest.ok("tail -n 30 /run/load.log")?;
    if code.trim() != "0" || !log.contains("round") {
        let kernel = guest.ok("dmesg | tail -n 30")?;
        bail!("the load in the guest ended with {}: {log}\n{kernel}", code.trim());
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_and_writes_are_completed_requests() {
        assert_eq!(completed_in("  7 1 56 9 30 2 240 8 0 12 17 1 0 8 0 4 5\n"), Some(37));
        assert_eq!(completed_in("7 1 56"), None);
    }
}
