// SPDX-License-Identifier: Apache-2.0
//! Operations of a VMM on a device whose queues are loaded: no request is lost, all data is
//! verified.

mod iotlb;
mod log;
mod race;
mod swap;
mod tune;

pub(crate) use iotlb::{
    invalidation_waits, iotlb_with_misses, one_question, stop_after_update, stopped_after_question,
    used_ring_lost,
};
pub(crate) use log::{dirty_log_is_complete, dirty_log_with_iotlb};
pub(crate) use swap::{swap_files, swap_mapped};
pub(crate) use tune::tune;

use crate::case::cases;
use crate::host::disks::{BLOCKS_4096, POLLED, disk_like, usual};
use crate::host::env::Env;
use crate::host::fixture::{Disk, FileSystem, image};
use crate::host::integrity::{Setup, disk_of, tell, with_flags};
use crate::host::load::{Handles, Spec, under_load};
use crate::host::target::{self, Target};
use anyhow::{Context, Result, bail};
use driver::kernel::{KernelSession, abi};
use kit::set::Set::{Full, Gating, Plain};
use virtio_spec::features::{VHOST_F_LOG_ALL, bit};

cases! { Host;
    "control-stop-start", Plain,
        "queues stop with their exact index and start again under load",
        |env| stop_and_start(env, usual(), Setup::usual(60));
    "control-memory-table", Gating,
        "the memory table is exchanged under load",
        |env| memory_table(env, usual(), Setup::usual(40));
    "control-memory-table-pinned", Full,
        "the memory table is exchanged under load while guest memory is pinned",
        |env| memory_table(env, usual(), with_flags(abi::OPT_PIN_MEMORY, 40));
    "control-reset-owner", Gating,
        "RESET_OWNER and everything anew under load",
        |env| reset_owner(env, usual(), Setup::usual(20));
    "control-features", Plain,
        "LOG_ALL on and off under load",
        |env| features(env, usual(), Setup::usual(40));
    "control-calls", Plain,
        "call eventfds are exchanged under load",
        |env| replace_calls(env, usual(), Setup::usual(60));
    "control-tune", Plain,
        "options, workers, busy-loop time and serial change under load",
        |env| tune(env, usual(), Setup { workers: 0, ..Setup::usual(60) });
    "control-tune-poll-queues", Full,
        "the same on a disk with poll queues",
        |env| tune(env, disk_like(POLLED), Setup { workers: 0, ..Setup::usual(400) });
    "control-swap-mapped", Plain,
        "the backend is exchanged for another name of the same disk under load",
        |env| swap_mapped(env, Setup::usual(30));
    "control-swap-files", Plain,
        "an image is swapped between O_DIRECT and the page cache under load",
        |env| swap_files(env, Setup::usual(30));
    "control-iotlb", Plain,
        "addresses go through the IOTLB, which misses and loses entries under load",
        |env| iotlb_with_misses(env, usual(), Setup::usual(100));
    "iotlb-invalidation", Gating,
        "an IOTLB invalidation waits for the requests that use the old addresses",
        invalidation_waits;
    "iotlb-stop", Gating,
        "a queue stops after an IOTLB update that answers no question of the device",
        stop_after_update;
    "iotlb-used-ring-lost", Gating,
        "used entries that cannot be written do not count as completed",
        used_ring_lost;
    "iotlb-question", Gating,
        "a driver that kicks without an IOTLB entry makes the device ask for it once",
        one_question;
    "iotlb-stopped", Gating,
        "an IOTLB update does not run a stopped queue that has asked for its rings",
        stopped_after_question;
    "dirty-log", Plain,
        "every page that the device wrote is in the dirty log",
        |env| dirty_log_is_complete(env, usual(), 0);
    "dirty-log-iotlb", Plain,
        "every page that the device wrote is in the dirty log, where addresses are translated",
        dirty_log_with_iotlb;
    "dirty-log-pinned", Full,
        "every page that the device wrote is in the dirty log, with pinned memory",
        |env| dirty_log_is_complete(env, usual(), abi::OPT_PIN_MEMORY);
    "dirty-log-4096", Full,
        "every page that the device wrote is in the dirty log, with blocks of 4096 bytes",
        |env| dirty_log_is_complete(env, disk_like(BLOCKS_4096), 0);
    "dirty-log-ext4-cached", Full,
        "every page that the device wrote is in the dirty log, on an image",
        |env| dirty_log_is_complete(env, image(FileSystem::Ext4, false), 0);
}

/// Requests on each queue between two changes.
const STEP: u64 = 5;

/// Loads a disk, and calls `act` on the device repeatedly.
fn rounds(
    env: &Env,
    disk: Result<Disk>,
    setup: Setup,
    mut act: impl FnMut(&mut Handles, u64) -> Result<()>,
) -> Result<()> {
    let disk = disk_of(env, disk)?;
    println!("on {disk}, {setup:?}");
    let specs = setup.specs(env, &disk);
    let options = setup.options(&specs);
    let Target { device, daemon: _daemon } =
        target::serve_with(env, &disk, &options, &setup.kernel())?;
    let count = env.rounds(setup.requests);
    let done = under_load(device, specs, |handles| {
        for round in 0..count {
            handles.wait_for_progress(STEP).with_context(|| format!("before round {round}"))?;
            act(handles, round).with_context(|| format!("round {round}"))?;
        }
        handles.wait_for_progress(STEP).context("after the last round")
    })?;
    tell(&done);
    Ok(())
}

/// The kernel device of the session.
fn kernel(handles: &mut Handles) -> Result<&mut KernelSession> {
    match handles.session.kernel() {
        Some(kernel) => Ok(kernel),
        None => bail!("this case is for the kernel's device without a daemon"),
    }
}

/// Queues stop and start; a stop reports the exact position to continue from.
pub(crate) fn stop_and_start(env: &Env, disk: Result<Disk>, setup: Setup) -> Result<()> {
    rounds(env, disk, setup, |handles, round| {
        let queue = (round % u64::from(setup.queues)) as usize;
        let base = handles.session.stop_queue(queue)?;
        let used = handles.used_idx(queue);
        // All chains that were taken are used, so the next one to take is the next one to use.
        if base as u16 != used {
            bail!("queue {queue} stopped at {base}, its used index is {used}");
        }
        if round % 3 == 0 {
            std::thread::sleep(std::time::Duration::from_millis(2));
        }
        handles.session.set_vring_base(queue, base)?;
        Ok(handles.session.enable(queue, true)?)
    })
}

/// The memory table is replaced: the same memory in other regions, and at other addresses.
pub(crate) fn memory_table(env: &Env, disk: Result<Disk>, setup: Setup) -> Result<()> {
    rounds(env, disk, setup, |handles, round| {
        let mut table = driver::kernel::regions_of(&handles.memory);
        if round % 2 == 0 {
            // Two adjacent regions, whose border lies inside some request's buffers.
            let whole = table[0];
            let half = whole.size / 4096 * (1 + round % 7) / 8 * 4096;
            table[0].size = half;
            let (gpa, user) = (whole.gpa + half, whole.user + half);
            table.push(driver::kernel::abi::MemoryRegion {
                gpa,
                user,
                size: whole.size - half,
                flags_padding: 0,
            });
        }
        Ok(kernel(handles)?.device().set_mem_table(&table)?)
    })
}

/// RESET_OWNER, then a new set-up; requests that were not taken are found in the ring.
pub(crate) fn reset_owner(env: &Env, disk: Result<Disk>, setup: Setup) -> Result<()> {
    rounds(env, disk, setup, |handles, _| {
        handles.session.reset_device()?;
        handles.set_up_again()
    })
}

/// Logging is switched on and off by the features, as in a migration that is cancelled.
pub(crate) fn features(env: &Env, disk: Result<Disk>, setup: Setup) -> Result<()> {
    let mut log = None;
    rounds(env, disk, setup, |handles, round| {
        let memory = handles.memory.clone();
        if log.is_none() {
            log = Some(handles.session.set_log(&memory)?);
        }
        let features = handles.session.features();
        let wanted = if round % 2 == 0 {
            features | bit(VHOST_F_LOG_ALL)
        } else {
            features & !bit(VHOST_F_LOG_ALL)
        };
        handles.session.negotiate_features(wanted)?;
        for queue in 0..handles.used.len() {
            handles.set_addresses(queue, round % 2 == 0)?;
        }
        Ok(())
    })
}

/// Call eventfds are replaced, as QEMU does at every change of the interrupt mask.
pub(crate) fn replace_calls(env: &Env, disk: Result<Disk>, setup: Setup) -> Result<()> {
    rounds(env, disk, setup, |handles, round| {
        let queue = (round % u64::from(setup.queues)) as usize;
        let masked = vmm_sys_util::eventfd::EventFd::new(0)?;
        handles.session.replace_call(queue, &masked)?;
        std::thread::sleep(std::time::Duration::from_micros(500));
        let call = handles.calls[queue].try_clone()?;
        handles.session.replace_call(queue, &call)?;
        // A VMM passes on calls that came while the interrupt was masked.
        Ok(call.write(1)?)
    })
}

/// A load for each queue, for cases that bring devices up themselves.
fn specs_for(env: &Env, disk: &Disk, setup: Setup) -> (Vec<Spec>, driver::Options) {
    let specs = setup.specs(env, disk);
    let options = setup.options(&specs);
    (specs, options)
}
