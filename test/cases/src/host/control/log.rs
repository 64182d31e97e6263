// SPDX-License-Identifier: Apache-2.0
//! The dirty log contains every page that the device wrote: memory is compared with a copy.

use super::iotlb::mapped_device;
use crate::host::disks::usual;
use crate::host::env::Env;
use crate::host::fixture::Disk;
use crate::host::integrity::disk_of;
use crate::host::target::{self, Target, options};
use anyhow::{Context, Result, ensure};
use driver::kernel::regions_of;
use driver::{Cuts, Device, DirtyLog, Layout, Options, Request};
use kit::rng::Rng;
use std::collections::BTreeSet;
use virtio_spec::blk::S_OK;

/// Bytes of a page of the log.
const PAGE: usize = 4096;
/// Bytes of the longest request.
const LONGEST: usize = 256 << 10;
/// Bytes of the shortest buffers of a request.
const SHORTEST_CUT: usize = 300;

/// The layout that takes most of the scratch memory.
fn widest(device_layout: Layout) -> Layout {
    let writable = Cuts::Every(SHORTEST_CUT);
    Layout { writable, align: PAGE, misalign: PAGE - 1, ..device_layout }
}

/// Twice the bytes of the widest request, so that a log with all pages marked is noticed.
fn scratch_bytes() -> usize {
    2 * widest(Layout::default()).scratch_bytes(&Request::read(0, LONGEST))
}

/// Runs random requests under LOG_ALL; every page whose content changed must be marked, unless only
/// the driver wrote there.
pub(crate) fn dirty_log_is_complete(env: &Env, disk: Result<Disk>, flags: u32) -> Result<()> {
    let disk = disk_of(env, disk)?;
    let kernel = driver::kernel::KernelOptions {
        options: driver::kernel::abi::BlkOptions::with_flags(flags),
        ..Default::default()
    };
    for event_idx in [false, true] {
        let options = Options { event_idx, scratch_bytes: scratch_bytes(), ..options() };
        let Target { mut device, daemon: _daemon } =
            target::serve_with(env, &disk, &options, &kernel)?;
        is_complete(env, &mut device, disk.block_bytes)?;
    }
    Ok(())
}

/// The same where the driver's addresses differ from the guest-physical ones: the log has the
/// latter, which start at 0 here.
pub(crate) fn dirty_log_with_iotlb(env: &Env) -> Result<()> {
    let disk = usual()?;
    for event_idx in [false, true] {
        let options = Options { event_idx, scratch_bytes: scratch_bytes(), ..options() };
        let (mut device, iommu) = mapped_device(&disk, options)?;
        let mut table = regions_of(device.memory());
        table[0].gpa = 0;
        iommu.set_mem_table(&table)?;
        is_complete(env, &mut device, disk.block_bytes)?;
    }
    Ok(())
}

fn is_complete(env: &Env, device: &mut Device, block: u64) -> Result<()> {
    let data = Rng::new(env.seed()).bytes(2 << 20);
    device.write(0, &data)?;
    let log = device.start_log()?;
    let mut rng = Rng::new(env.seed() ^ 1);
    let layout = widest(device.layout());
    let mut copies = Copies::of(device);
    one(device, &log, &mut copies, &Request::read(0, LONGEST), &layout)
        .context("the longest request")?;
    for n in 0..env.rounds(60) {
        random(device, &log, &mut copies, &mut rng, block)
            .with_context(|| format!("request {n} of seed {}", env.seed()))?;
    }
    ends(device, &log)
}

/// Address of queue 0's used ring in the log, which begins with the first byte of memory.
fn used_ring(device: &mut Device) -> u64 {
    let start = device.memory().regions()[0].gpa();
    device.queue(0).queue().addresses()[2] - start
}

/// Copies of guest memory before and after a request. They stay allocated: each page of a new one is a
/// page fault, which takes long on the debug kernel.
struct Copies {
    before: Vec<u8>,
    after: Vec<u8>,
}

impl Copies {
    fn of(device: &Device) -> Copies {
        let bytes = device.memory().regions()[0].size() as usize;
        Copies { before: vec![0; bytes], after: vec![0; bytes] }
    }
}

fn copy_memory(device: &Device, to: &mut [u8]) {
    device.memory().area(device.memory().regions()[0].gpa(), to.len()).read(0, to);
}

fn random(
    device: &mut Device,
    log: &DirtyLog,
    copies: &mut Copies,
    rng: &mut Rng,
    block: u64,
) -> Result<()> {
    let len = (block * (1 + rng.below(LONGEST as u64 / block))) as usize;
    let kind = rng.below(8);
    let request = match kind {
        0 => Request::get_id(),
        1 => Request::flush(),
        2 => Request::new(0x7777, 0, &[], len),
        3 => Request::read(u64::MAX - 8, len),
        _ => Request::read(rng.below(512) * (block / 512), len),
    };
    let layout = Layout {
        writable: Cuts::Every(SHORTEST_CUT + rng.below(9000) as usize),
        align: *rng.pick(&[1, 512, PAGE]),
        misalign: if rng.one_in(2) { rng.below(PAGE as u64) as usize } else { 0 },
        ..device.layout()
    };
    let marked = one(device, log, copies, &request, &layout)?;
    // The pages of the status byte and of the used ring. To mark whole buffers would cost minutes
    // for some that a hostile driver makes.
    let is_refused = [2, 3].contains(&kind);
    ensure!(!is_refused || marked <= 4, "a refused request of {len} bytes marked {marked} pages");
    Ok(())
}

/// Executes a request, checks the log, and returns the number of marked pages.
fn one(
    device: &mut Device,
    log: &DirtyLog,
    Copies { before, after }: &mut Copies,
    request: &Request,
    layout: &Layout,
) -> Result<usize> {
    // Placed before the copy, so that later changes come from the device, or from the ring.
    let placed = device.queue(0).place(request, layout)?;
    log.clear();
    copy_memory(device, before);
    device.queue(0).add_placed(placed, layout.indirect)?;
    device.queue(0).queue().publish();
    device.queue(0).queue().kick_if_asked();
    device.queue(0).collect()?;
    copy_memory(device, after);
    // Pages that the driver writes: descriptors, indirect tables, the avail ring. The device writes
    // none of them, except perhaps a page shared with the used ring, which is checked separately.
    let own: BTreeSet<usize> = driver_pages(device);
    let used = used_ring(device);
    for (page, (before, after)) in before.chunks(PAGE).zip(after.chunks(PAGE)).enumerate() {
        let changed = before != after;
        let marked = log.is_dirty((page * PAGE) as u64);
        ensure!(!changed || marked || own.contains(&page), "page {page} changed and is not marked");
    }
    ensure!(log.is_dirty(used), "the used ring at {used:#x} is not marked");
    let marked = log.dirty_pages().len();
    ensure!(marked * PAGE < after.len() / 2, "{marked} pages are marked: that says nothing");
    Ok(marked)
}

/// Pages of the ring and of later allocations from guest memory (indirect tables).
fn driver_pages(device: &mut Device) -> BTreeSet<usize> {
    let start = device.memory().regions()[0].gpa();
    let page = |gpa: u64| (gpa - start) as usize / PAGE;
    let [desc, avail, _] = device.queue(0).queue().addresses().map(page);
    let tables = page(device.memory().alloc(1, 1));
    // The scratch memory lies between the ring and the tables; tables are allocated on demand.
    (desc..=avail).chain(tables.saturating_sub(64)..=tables).collect()
}

/// Checks that nothing is marked without LOG_ALL.
fn ends(device: &mut Device, log: &DirtyLog) -> Result<()> {
    use virtio_spec::features::{VHOST_F_LOG_ALL, bit};
    let features = device.features() & !bit(VHOST_F_LOG_ALL);
    device.session().negotiate_features(features)?;
    log.clear();
    let layout = device.layout();
    let read = device.queue(0).execute(&Request::read(0, 8192), &layout)?;
    ensure!(read.status == Some(S_OK), "a read ended with {:?}", read.status);
    let used = used_ring(device) / PAGE as u64 * PAGE as u64;
    // The used ring is still logged, because it has its own flag.
    let marked: Vec<_> = log.dirty_pages().into_iter().filter(|&gpa| gpa != used).collect();
    ensure!(marked.is_empty(), "still marked without LOG_ALL: {marked:x?}");
    Ok(())
}
