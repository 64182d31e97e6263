// SPDX-License-Identifier: Apache-2.0
//! ACCESS_PLATFORM: the device translates every address by its IOTLB, which starts empty and loses
//! entries repeatedly.

use super::specs_for;
use crate::host::abi::fails;
use crate::host::disks::holding;
use crate::host::env::Env;
use crate::host::fixture::{Disk, Dm, wait_until};
use crate::host::integrity::{Setup, disk_of, tell};
use crate::host::load::under_load;
use crate::host::target::{LIMIT, need_module, options};
use crate::host::visibility::counters;
use anyhow::{Context, Result, anyhow, ensure};
use driver::kernel::{KernelDevice, KernelOptions, abi};
use driver::{Device, GuestMemory, Layout, Options, QueueSetup, Request};
use kit::rng::Rng;
use kit::sched::{this_task, waits_in};
use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::atomic::{AtomicBool, AtomicU64};
use std::sync::mpsc::channel;
use std::thread::JoinHandle;
use std::time::Duration;
use virtio_spec::blk::S_OK;
use virtio_spec::features::{F_ACCESS_PLATFORM, bit};

/// Guest-physical address of the start of guest memory.
const GPA: u64 = 1 << 20;

/// The VMM's IOMMU, which answers misses.
struct Iommu {
    stop: Arc<AtomicBool>,
    misses: Arc<AtomicU64>,
    thread: JoinHandle<Result<()>>,
}

impl Iommu {
    fn start(device: KernelDevice, memory: Arc<GuestMemory>, seed: u64) -> Self {
        let (stop, misses) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
        let (stopped, count) = (stop.clone(), misses.clone());
        let thread = std::thread::spawn(move || {
            let mut rng = Rng::new(seed);
            while !stopped.load(Relaxed) {
                let Some(miss) = device.next_miss(Duration::from_millis(20))? else { continue };
                ensure!(miss.what == abi::IOTLB_MISS, "an IOTLB message of type {}", miss.what);
                count.fetch_add(1, Relaxed);
                answer(&device, &memory, &mut rng, miss.iova)?;
            }
            Ok(())
        });
        Self { stop, misses, thread }
    }

    fn end(self) -> Result<u64> {
        self.stop.store(true, Relaxed);
        self.thread.join().map_err(|_| anyhow!("the IOMMU panicked"))??;
        Ok(self.misses.load(Relaxed))
    }
}

/// Maps a range of random size around the address.
fn answer(device: &KernelDevice, memory: &GuestMemory, rng: &mut Rng, iova: u64) -> Result<()> {
    let region = &memory.regions()[0];
    let piece = 4096_u64 << rng.below(9);
    let start = (iova / piece * piece).max(region.gpa());
    let end = (start + piece).min(region.gpa() + region.size());
    ensure!((start..end).contains(&iova), "a miss at {iova:#x}, where there is no memory");
    let user = memory.user_address(start);
    device.map_iotlb(start, end - start, user, abi::ACCESS_RW).context("IOTLB update")
}

/// Runs a load whose addresses are translated, while entries are removed.
pub(crate) fn iotlb_with_misses(env: &Env, disk: Result<Disk>, setup: Setup) -> Result<()> {
    need_module()?;
    let disk = disk_of(env, disk)?;
    println!("on {disk}, {setup:?}");
    let (specs, options) = specs_for(env, &disk, setup);
    let features = options.features | bit(F_ACCESS_PLATFORM);
    // A ring at address 0 looks like a ring without an address.
    let regions = vec![(GPA, options.regions[0].1)];
    let options = Options { features, regions, setup: QueueSetup::Untouched, ..options };
    // The core locks all queues at once for a message, and lockdep knows of eight such locks.
    let kernel = KernelOptions { num_queues: Some(setup.queues.into()), ..setup.kernel() };
    let mut device = Device::open_kernel(disk.open()?, &options, &kernel)?;
    ensure!(device.features() & bit(F_ACCESS_PLATFORM) != 0, "ACCESS_PLATFORM is not offered");
    let memory = device.memory().clone();
    let clone = |device: &mut Device| -> Result<KernelDevice> {
        let kernel = device.session().kernel().context("no kernel device")?;
        Ok(kernel.device().try_clone()?)
    };
    let iommu = Iommu::start(clone(&mut device)?, memory.clone(), env.seed());
    let invalidations = clone(&mut device)?;
    // The vhost core reads the used rings at the start, and does not wait for their entries.
    for queue in 0..usize::from(setup.queues) {
        let [.., used] = device.queue(queue).queue().addresses();
        let page = used / 4096 * 4096;
        invalidations.map_iotlb(page, 4096, memory.user_address(page), abi::ACCESS_RW)?;
    }
    device.start()?;
    let mut rng = Rng::new(env.seed() ^ 2);
    let count = env.rounds(setup.requests);
    let done = under_load(device, specs, |handles| {
        for round in 0..count {
            let size = 4096_u64 << rng.below(11);
            let iova = GPA + rng.below(memory.regions()[0].size() / 4096) * 4096;
            invalidations.unmap_iotlb(iova, size)?;
            handles.wait_for_progress(1).with_context(|| format!("after {round} invalidations"))?;
        }
        Ok(())
    });
    let misses = iommu.end()?;
    tell(&done?);
    println!("{misses} misses");
    ensure!(misses > 2, "there were no misses: the IOTLB was not used");
    Ok(())
}

/// Bytes of each request of the cases that invalidate entries.
const READ_BYTES: usize = 64 << 10;

/// A disk that can hold requests, a device whose addresses are translated and mapped, its IOMMU, and
/// the data at the start of the disk.
fn holding_device(env: &Env) -> Result<(Disk, Dm, Device, KernelDevice, Vec<u8>)> {
    need_module()?;
    let (disk, dm) = holding(false)?;
    let data = Rng::new(env.seed()).bytes(READ_BYTES);
    std::fs::write(&disk.path, &data).context("filling the disk")?;
    let (device, iommu) = mapped_device(&disk, Options { scratch_bytes: 1 << 20, ..options() })?;
    Ok((disk, dm, device, iommu, data))
}

/// A device whose addresses are translated and mapped, and its IOMMU.
pub(super) fn mapped_device(disk: &Disk, options: Options) -> Result<(Device, KernelDevice)> {
    let options = Options {
        features: options.features | bit(F_ACCESS_PLATFORM),
        regions: vec![(GPA, 16 << 20)],
        setup: QueueSetup::Untouched,
        ..options
    };
    let kernel = KernelOptions { num_queues: Some(1), ..KernelOptions::default() };
    let mut device = Device::open_kernel(disk.open()?, &options, &kernel)?;
    let iommu = device.session().kernel().context("no kernel device")?.device().try_clone()?;
    map_all(&iommu, device.memory())?;
    device.start()?;
    Ok((device, iommu))
}

/// An invalidation returns when no request in flight uses the old addresses, even if it removes the
/// rings' addresses too. The used entries follow when the rings' addresses are back.
pub(crate) fn invalidation_waits(env: &Env) -> Result<()> {
    let (_disk, dm, mut device, iommu, data) = holding_device(env)?;
    for round in 0..3 {
        invalidated(&mut device, &iommu, &dm, &data, round)?;
        asks_for_rings(&iommu)?;
        if round == 2 {
            fails("a stop without rings", iommu.set_queue(0, false), libc::EAGAIN)?;
        }
        map_all(&iommu, device.memory())?;
        ends_well(&mut device, &data).with_context(|| format!("round {round}"))?;
    }
    stops(&mut device, &iommu)
}

/// A stop succeeds once the rings are mapped again, even if the owner has not read that the device asked
/// for them: the core then wakes no worker.
pub(crate) fn stop_after_update(env: &Env) -> Result<()> {
    let (_disk, dm, mut device, iommu, data) = holding_device(env)?;
    invalidated(&mut device, &iommu, &dm, &data, 0)?;
    fails("a stop without rings", iommu.set_queue(0, false), libc::EAGAIN)?;
    map_all(&iommu, device.memory())?;
    stops(&mut device, &iommu)?;
    ends_well(&mut device, &data)
}

const PAGE_BYTES: u64 = 4096;
/// Kicks that find no IOTLB entry.
const BLIND_KICKS: u32 = 50;

/// A driver that kicks without an entry for its rings, or for its buffers, makes the device ask once.
pub(crate) fn one_question(env: &Env) -> Result<()> {
    let (_disk, _, mut device, iommu, data) = holding_device(env)?;
    let layout = device.layout();
    let region = device.memory().regions()[0].clone();
    for lost in ["rings", "buffer"] {
        let placed = device.queue(0).place(&Request::read(0, data.len()), &layout)?;
        let buffer = placed.segments[1].gpa;
        let (at, size) = match lost {
            "rings" => (region.gpa(), region.size()),
            _ => ((buffer + 2 * PAGE_BYTES) / PAGE_BYTES * PAGE_BYTES, PAGE_BYTES),
        };
        iommu.unmap_iotlb(at, size)?;
        device.queue(0).add_placed(placed, layout.indirect)?;
        device.queue(0).queue().publish();
        for _ in 0..BLIND_KICKS {
            device.queue(0).queue().kick();
            std::thread::sleep(Duration::from_millis(2));
        }
        asks_for_rings(&iommu).context(lost)?;
        let more = iommu.next_miss(Duration::from_millis(100))?;
        ensure!(more.is_none(), "{lost}: the device asks again: {more:?}");
        map_all(&iommu, device.memory())?;
        ends_well(&mut device, &data).context(lost)?;
    }
    Ok(())
}

/// Time in which a worker would run.
const QUIET: Duration = Duration::from_millis(100);

/// A queue that has asked for its rings stops. An IOTLB update runs it no more: nothing waits for such a run, so that
/// its worker could be gone.
pub(crate) fn stopped_after_question(env: &Env) -> Result<()> {
    let (_disk, _, mut device, iommu, data) = holding_device(env)?;
    let layout = device.layout();
    let region = device.memory().regions()[0].clone();
    let placed = device.queue(0).place(&Request::read(0, data.len()), &layout)?;
    iommu.unmap_iotlb(region.gpa(), region.size())?;
    device.queue(0).add_placed(placed, layout.indirect)?;
    device.queue(0).queue().publish();
    device.queue(0).queue().kick();
    // The core itself runs a queue whose question was read.
    wait_until("the question", || Ok((counters(&mut device)?["kicks"] > 0).then_some(())))?;
    iommu.set_queue(0, false).context("a stop")?;
    let before = counters(&mut device)?["kicks"];
    map_all(&iommu, device.memory())?;
    std::thread::sleep(QUIET);
    let after = counters(&mut device)?["kicks"];
    ensure!(before == after, "a stopped queue ran {} times", after - before);
    iommu.set_queue(0, true).context("a start")?;
    ends_well(&mut device, &data)
}

/// An address of the owner at which nothing is.
const NOTHING: u64 = 4096;

/// A used entry that cannot be written counts as dropped, not as completed.
pub(crate) fn used_ring_lost(env: &Env) -> Result<()> {
    let (_disk, dm, mut device, iommu, data) = holding_device(env)?;
    invalidated(&mut device, &iommu, &dm, &data, 0)?;
    asks_for_rings(&iommu)?;
    let region = device.memory().regions()[0].clone();
    iommu.map_iotlb(region.gpa(), region.size(), NOTHING, abi::ACCESS_RW)?;
    let (completed, dropped) = wait_until("the request to be counted", || {
        let counters = counters(&mut device)?;
        let (completed, dropped) = (counters["completed"], counters["dropped"]);
        Ok((completed + dropped > 0).then_some((completed, dropped)))
    })?;
    ensure!((completed, dropped) == (0, 1), "{completed} completed, {dropped} dropped");
    iommu.set_queue(0, false).context("a stop")?;
    Ok(())
}

/// The queue stops, at the position of its used ring.
fn stops(device: &mut Device, iommu: &KernelDevice) -> Result<()> {
    iommu.set_queue(0, false).context("a stop with rings")?;
    let (base, used) = (iommu.vring_base(0)?, device.queue(0).queue().split().used_idx());
    ensure!(base as u16 == used, "the queue stopped at {base}, its used index is {used}");
    Ok(())
}

fn ends_well(device: &mut Device, data: &[u8]) -> Result<()> {
    let (_, read) = device.queue(0).collect()?;
    ensure!(read.status == Some(S_OK) && read.data == data, "status {:?}", read.status);
    Ok(())
}

fn asks_for_rings(iommu: &KernelDevice) -> Result<()> {
    let miss = iommu.next_miss(LIMIT)?.context("the device does not ask for its rings")?;
    ensure!(miss.what == abi::IOTLB_MISS, "an IOTLB message of type {}", miss.what);
    Ok(())
}

/// Removes all addresses while the disk holds a read, after `earlier` other reads. The removal returns after the end
/// of the read.
fn invalidated(
    device: &mut Device,
    iommu: &KernelDevice,
    dm: &Dm,
    data: &[u8],
    earlier: u64,
) -> Result<()> {
    // The misalignment makes the device copy the data to the guest at the end, by address.
    let layout = Layout { misalign: 64, ..device.layout() };
    let placed = device.queue(0).place(&Request::read(0, data.len()), &layout)?;
    let [.., buffer, status] = &placed.segments[..] else { unreachable!("data and status") };
    let memory = device.memory().clone();
    let buffer = memory.area(buffer.gpa, data.len());
    let status = memory.area(status.gpa, 1);
    let (removal, before) = dm.hold(|| {
        device.queue(0).add_placed(placed, layout.indirect)?;
        device.queue(0).queue().publish();
        device.queue(0).queue().kick_if_asked();
        let removal = begin_removal(device, iommu, earlier)?;
        Ok((removal, status.to_vec(0, 1)[0]))
    })?;
    removal.join().map_err(|_| anyhow!("the removal panicked"))??;
    let after = status.to_vec(0, 1)[0];
    ensure!(before != S_OK, "the read ended while the disk held it");
    ensure!(after == S_OK, "the status byte is {after:#x} after the invalidation");
    ensure!(buffer.to_vec(0, data.len()) == data, "the data is not there after the invalidation");
    Ok(())
}

/// Waits until the device has taken a read. Removes all addresses, and waits until the removal waits for the read.
fn begin_removal(
    device: &mut Device,
    iommu: &KernelDevice,
    earlier: u64,
) -> Result<JoinHandle<io::Result<()>>> {
    let taken = || Ok((counters(device)?["chains"] > earlier).then_some(()));
    wait_until("the read to be taken", taken)?;
    let region = device.memory().regions()[0].clone();
    let (iommu, (tell, told)) = (iommu.try_clone()?, channel());
    let removal = std::thread::spawn(move || {
        // The receiver waits for it.
        let _ = tell.send(this_task());
        iommu.unmap_iotlb(region.gpa(), region.size())
    });
    let task = told.recv()?;
    wait_until("the removal to wait", || Ok(waits_in(task, "vhost_blk_drain_all").then_some(())))?;
    Ok(removal)
}

fn map_all(iommu: &KernelDevice, memory: &GuestMemory) -> Result<()> {
    let region = &memory.regions()[0];
    let (gpa, size) = (region.gpa(), region.size());
    Ok(iommu.map_iotlb(gpa, size, memory.user_address(gpa), abi::ACCESS_RW)?)
}
