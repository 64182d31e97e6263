// SPDX-License-Identifier: Apache-2.0
//! What a VMM does to a device whose queues are loaded: nothing may be lost, everything verified.

mod iotlb;
mod log;
mod swap;
mod tune;

pub(crate) use iotlb::iotlb_with_misses;
pub(crate) use log::dirty_log_is_complete;
pub(crate) use swap::{swap_files, swap_mapped};
pub(crate) use tune::tune;

use crate::env::Env;
use crate::fixture::Disk;
use crate::integrity::{Setup, disk_of, tell};
use crate::load::{Handles, Spec, under_load};
use crate::target::{self, Target};
use anyhow::{Context, Result, bail};
use driver::kernel::KernelSession;
use virtio_spec::features::{VHOST_F_LOG_ALL, bit};

/// Requests on each queue between two changes.
const STEP: u64 = 5;

/// Loads a disk, and does `act` to the device again and again.
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

/// The kernel's device below a session.
fn kernel(handles: &mut Handles) -> Result<&mut KernelSession> {
    match handles.session.kernel() {
        Some(kernel) => Ok(kernel),
        None => bail!("this case is for the kernel's device without a daemon"),
    }
}

/// Queues stop and start; where they go on is exact.
pub(crate) fn stop_and_start(env: &Env, disk: Result<Disk>, setup: Setup) -> Result<()> {
    rounds(env, disk, setup, |handles, round| {
        let queue = (round % u64::from(setup.queues)) as usize;
        let base = handles.session.stop_queue(queue)?;
        let used = handles.used_idx(queue);
        // All that was taken is used: the next chain to take is the next one to use.
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

/// The memory table is exchanged: the same memory in other pieces, and by other addresses.
pub(crate) fn memory_table(env: &Env, disk: Result<Disk>, setup: Setup) -> Result<()> {
    rounds(env, disk, setup, |handles, round| {
        let mut table = driver::kernel::regions_of(&handles.memory);
        if round % 2 == 0 {
            // Two pieces that touch, the border in the middle of somebody's buffers.
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

/// RESET_OWNER, then everything anew; requests that were not taken are found in the ring.
pub(crate) fn reset_owner(env: &Env, disk: Result<Disk>, setup: Setup) -> Result<()> {
    rounds(env, disk, setup, |handles, _| {
        handles.session.reset_device()?;
        handles.set_up_again()
    })
}

/// Logging is switched on and off, with the features, as a migration that is given up does.
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

/// Call eventfds are exchanged, as QEMU does at every change of the interrupt mask.
pub(crate) fn replace_calls(env: &Env, disk: Result<Disk>, setup: Setup) -> Result<()> {
    rounds(env, disk, setup, |handles, round| {
        let queue = (round % u64::from(setup.queues)) as usize;
        let masked = vmm_sys_util::eventfd::EventFd::new(0)?;
        handles.session.replace_call(queue, &masked)?;
        std::thread::sleep(std::time::Duration::from_micros(500));
        let call = handles.calls[queue].try_clone()?;
        handles.session.replace_call(queue, &call)?;
        // A VMM passes on what came while the interrupt was masked.
        Ok(call.write(1)?)
    })
}

/// A load's parts of the disk, for cases that bring devices up themselves.
fn specs_for(env: &Env, disk: &Disk, setup: Setup) -> (Vec<Spec>, driver::Options) {
    let specs = setup.specs(env, disk);
    let options = setup.options(&specs);
    (specs, options)
}
