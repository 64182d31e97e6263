// SPDX-License-Identifier: Apache-2.0
//! Limits of pinned guest memory (`VHOST_BLK_OPT_PIN_MEMORY`).

use std::fs;
use std::io;

use anyhow::{Context, Result, ensure};
use driver::GuestMemory;
use driver::kernel::abi::{self, BlkOptions, BlkShare, MemoryRegion, SharedDebt, SharedLimits};
use driver::kernel::{KernelDevice, errno_of, regions_of};
use kit::set::Set::Gating;
use rustix::process::{Resource, Rlimit, setrlimit};
use rustix::thread::{CapabilitySet, capabilities, set_capabilities};

use crate::case::cases;
use crate::host::env::Env;
use crate::host::target::need_module;

cases! { Host;
    "pin-memory-limits", Gating,
        "a memory table larger than its owner's memory, or above RLIMIT_MEMLOCK, is not pinned",
        limits;
    "limits-shared-locked", Gating,
        "the pages of shared limits count as locked memory of the owner, until the device is closed",
        |_| shared();
}

/// A region whose array of pages alone, of 8 bytes each, has four times the memory of the VM.
const HUGE: MemoryRegion = MemoryRegion { gpa: 0, size: 6 << 40, user: 1 << 40, flags_padding: 0 };
/// Bytes of a table that is pinned within the limit, and is not within half of it.
const BYTES: u64 = 1 << 20;
/// Bytes that a device with shared limits pins: a page of limits and a page of debt.
const SHARED_BYTES: u64 = 2 * 4096;

fn limits(_env: &Env) -> Result<()> {
    let kills = oom_kills()?;
    let refused = errno_of_pinning(&[HUGE])?;
    ensure!(refused == Some(libc::EFAULT), "a table of 6 TiB ended with {refused:?}");
    ensure!(oom_kills()? == kills, "the table of 6 TiB brought the OOM killer");

    let memory = GuestMemory::new(&[(0, BYTES)])?;
    give_up_ipc_lock()?;
    limit_locked_bytes(BYTES)?;
    let refused = errno_of_pinning(&regions_of(&memory))?;
    ensure!(refused.is_none(), "a table within RLIMIT_MEMLOCK ended with {refused:?}");
    limit_locked_bytes(BYTES / 2)?;
    let refused = errno_of_pinning(&regions_of(&memory))?;
    ensure!(refused == Some(libc::ENOMEM), "a table above RLIMIT_MEMLOCK ended with {refused:?}");
    limit_locked_bytes(BYTES)?;
    let refused = errno_of_pinning(&regions_of(&memory))?;
    ensure!(refused.is_none(), "what was refused stayed charged: {refused:?}");
    Ok(())
}

fn shared() -> Result<()> {
    need_module()?;
    let (limits, debt) = (Box::<SharedLimits>::default(), Box::<SharedDebt>::default());
    let share = || -> Result<(KernelDevice, Option<i32>)> {
        let device = KernelDevice::open()?;
        device.set_owner()?;
        let errno = match device.share_limits(limits.share(&debt)) {
            Ok(()) => None,
            Err(error) => Some(errno_of(&error).context("an error without a number")?),
        };
        Ok((device, errno))
    };
    give_up_ipc_lock()?;
    limit_locked_bytes(SHARED_BYTES - 4096)?;
    let (device, refused) = share()?;
    ensure!(refused == Some(libc::ENOMEM), "shared above RLIMIT_MEMLOCK: {refused:?}");
    limit_locked_bytes(SHARED_BYTES)?;
    device.share_limits(limits.share(&debt)).context("what was refused stayed charged")?;
    let (_other, refused) = share()?;
    ensure!(refused == Some(libc::ENOMEM), "nothing was charged: {refused:?}");
    device.share_limits(BlkShare::default())?;
    let (another, refused) = share()?;
    ensure!(refused.is_none(), "what was given back stayed charged: {refused:?}");
    drop(another);
    device.share_limits(limits.share(&debt)).context("a closed device stayed charged")
}

/// The errno of pinning a table on a new device, or `None` if it is pinned.
fn errno_of_pinning(table: &[MemoryRegion]) -> Result<Option<i32>> {
    let device = KernelDevice::open()?;
    device.set_num_queues(1)?;
    device.set_owner()?;
    device.set_mem_table(table)?;
    match device.set_options(BlkOptions::with_flags(abi::OPT_PIN_MEMORY)) {
        Ok(()) => Ok(None),
        Err(error) => errno_of(&error).map(Some).context("an error without a number"),
    }
}

/// With this capability no limit of locked memory holds.
fn give_up_ipc_lock() -> io::Result<()> {
    let mut sets = capabilities(None)?;
    sets.effective.remove(CapabilitySet::IPC_LOCK);
    Ok(set_capabilities(None, sets)?)
}

fn limit_locked_bytes(bytes: u64) -> io::Result<()> {
    Ok(setrlimit(Resource::Memlock, Rlimit { current: Some(bytes), maximum: None })?)
}

/// Processes that the OOM killer has killed.
fn oom_kills() -> Result<u64> {
    let stat = fs::read_to_string("/proc/vmstat")?;
    let count = stat.lines().find_map(|line| line.strip_prefix("oom_kill "));
    Ok(count.context("no line oom_kill")?.parse()?)
}
