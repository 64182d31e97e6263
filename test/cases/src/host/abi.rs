// SPDX-License-Identifier: Apache-2.0
//! The user interface as its header describes it: each error, each order of set-up, and the
//! in-flight region.

use crate::case::cases;
use crate::host::disks::{holding, usual};
use crate::host::env::Env;
use crate::host::fixture::{Disk, NullBlkOptions, null_blk, wait_until};
use crate::host::integrity::disk_of;
use crate::host::target::{self, need_module, options};
use anyhow::{Context, Result, ensure};
use driver::kernel::abi::{self, BlkInflight, BlkInfo, BlkOptions, VringState};
use driver::kernel::{KernelDevice, KernelOptions, errno_of};
use driver::{Device, Options, QueueSetup, Request};
use kit::set::Set::Gating;
use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::sync::atomic::Ordering::Relaxed;
use virtio_spec::blk::S_OK;

cases! { Host;
    "abi-errors", Gating,
        "each error that the header promises",
        |env| errors(env, usual());
    "abi-sizes", Gating,
        "structures that are shorter or longer than the module's own",
        |env| sizes(env, usual());
    "abi-num-queues", Gating,
        "the number of queues is set before all else, once",
        num_queues;
    "abi-zoned", Gating,
        "a zoned block device is refused",
        |_| zoned();
    "abi-old-order", Gating,
        "the order of set-up of the series of 2022",
        |env| old_order(env, usual());
    "abi-inflight", Gating,
        "chains are marked in the in-flight region while they are in flight",
        inflight_region;
}

/// Checks that a call failed with this errno.
pub(crate) fn fails<T>(what: &str, outcome: io::Result<T>, errno: i32) -> Result<()> {
    let got = match &outcome {
        Ok(_) => None,
        Err(why) => errno_of(why),
    };
    ensure!(got == Some(errno), "{what}: {got:?} instead of errno {errno}");
    Ok(())
}

/// Checks every error that the header promises.
pub(crate) fn errors(env: &Env, disk: Result<Disk>) -> Result<()> {
    need_module()?;
    let disk = disk_of(env, disk)?;
    let backend = disk.open()?;
    before_owner(&backend)?;
    let device = KernelDevice::open()?;
    device.set_owner()?;
    fails("a second owner", device.set_owner(), libc::EBUSY)?;
    fails("unknown features", device.set_features(1 << 63), libc::EOPNOTSUPP)?;
    fails("unknown backend features", device.set_backend_features(1 << 63), libc::EOPNOTSUPP)?;
    device.set_backend_features(device.backend_features()?).context("known backend features")?;
    fails("an unknown ioctl", device.raw(0x4008_af7f, &mut 0_u64), libc::ENOTTY)?;
    backends(&device, &backend)?;
    options_and_info(&device)?;
    let null = File::open("/dev/null")?;
    fails("a closed eventfd", device.set_trace(1, Some(1_000_000)), libc::EBADF)?;
    fails("no eventfd", device.set_trace(1, Some(null.as_raw_fd())), libc::EINVAL)?;
    queues(&disk).context("queues")
}

fn before_owner(backend: &File) -> Result<()> {
    let device = KernelDevice::open()?;
    device.set_trace(1, None).context("a trace without owner")?;
    ensure!(device.traced()?.flags == 0, "a record without a request");
    fails("an age without queues", device.oldest(0), libc::ENOBUFS)?;
    let fd = Some(backend.as_raw_fd());
    fails("a backend without owner", device.set_backend(0, fd), libc::EPERM)?;
    fails("a queue without owner", device.set_queue(0, true), libc::EPERM)?;
    fails("options without owner", device.set_options(BlkOptions::with_flags(0)), libc::EPERM)?;
    fails("a reset without owner", device.reset_owner(), libc::EPERM)
}

fn backends(device: &KernelDevice, backend: &File) -> Result<()> {
    let null = File::open("/dev/null")?;
    let fd = |file: &File| Some(file.as_raw_fd());
    fails("a closed descriptor", device.set_backend(0, Some(1_000_000)), libc::EBADF)?;
    fails("a character device", device.set_backend(0, fd(&null)), libc::EINVAL)?;
    fails("queue 64", device.set_backend(64, fd(backend)), libc::ENOBUFS)?;
    fails("a queue before any backend", device.set_queue(0, true), libc::ENODEV)?;
    device.set_backend(0, fd(backend)).context("attach")?;
    device.set_backend(0, fd(backend)).context("attach once more")?;
    let other = KernelDevice::open()?;
    other.set_owner()?;
    fails("a disk that is claimed", other.set_backend(0, fd(backend)), libc::EBUSY)?;
    fails("another file for one queue", device.set_backend(1, fd(&null)), libc::EINVAL)?;
    device.set_backend(0, None).context("detach")?;
    device.set_backend(0, None).context("detach once more")?;
    other.set_backend(0, fd(backend)).context("attach to another device after that")
}

/// Options followed by eight bytes that the module does not know.
#[repr(C)]
#[derive(zerocopy::FromBytes, zerocopy::IntoBytes, zerocopy::Immutable)]
struct Longer {
    options: BlkOptions,
    more: u64,
}

fn options_and_info(device: &KernelDevice) -> Result<()> {
    let set = |options| device.set_options(options);
    fails("unknown flags", set(BlkOptions::with_flags(1 << 31)), libc::EINVAL)?;
    let batch = |flags, batch| BlkOptions { batch, ..BlkOptions::with_flags(flags) };
    fails("a batch without its flag", set(batch(0, 1)), libc::EINVAL)?;
    fails("a batch of nothing", set(batch(abi::OPT_BATCH, 0)), libc::EINVAL)?;
    for flag in [abi::OPT_READS_KEEP_FAILED, abi::OPT_READS_KEEP_NO_SPACE] {
        let others = BlkOptions::with_flags(flag | abi::OPT_KEEP_FAILED);
        fails("a policy of reads without its flag", set(others), libc::EINVAL)?;
        set(BlkOptions::with_flags(flag | abi::OPT_READS_APART)).context("a policy of reads")?;
    }
    let larger = batch(abi::OPT_BATCH, abi::BATCH_SIZE_MAX + 1);
    fails("a batch that is too large", set(larger), libc::EINVAL)?;
    set(batch(abi::OPT_BATCH, abi::BATCH_SIZE_MAX)).context("the largest batch")?;
    let burst = BlkOptions { limit_burst_ms: 3_600_001, ..BlkOptions::with_flags(0) };
    fails("a burst of more than an hour", set(burst), libc::EINVAL)?;
    let size = size_of::<Longer>() as u32;
    let options = BlkOptions { size, ..BlkOptions::with_flags(0) };
    let mut longer = Longer { options, more: 0 };
    device.raw(abi::BLK_SET_OPTIONS, &mut longer).context("zeroes behind the options")?;
    longer.more = 1;
    let outcome = device.raw(abi::BLK_SET_OPTIONS, &mut longer);
    fails("more options than are known", outcome, libc::E2BIG)?;
    let ask = |size| {
        let mut info = BlkInfo { size, queues_max: 7777, ..BlkInfo::default() };
        device.raw(abi::BLK_GET_INFO, &mut info).map(|_| info)
    };
    fails("room for 4 bytes of information", ask(4), libc::EINVAL)?;
    ensure!(ask(8)?.queues_max == 7777, "more was written than there was room for");
    let whole = ask(size_of::<BlkInfo>() as u32)?;
    let known = (whole.size as usize, whole.queues_max, whole.queue_size_max);
    let expected = (size_of::<BlkInfo>(), abi::BLK_QUEUES_MAX, abi::BLK_QUEUE_SIZE_MAX);
    ensure!(known == expected, "size, queues and descriptors are {known:?}, not {expected:?}");
    Ok(())
}

fn queues(disk: &Disk) -> Result<()> {
    let mut owner = Device::open_kernel(disk.open()?, &options(), &KernelOptions::default())?;
    let kernel = owner.session().kernel().context("a kernel device")?;
    let device = kernel.device();
    fails("queue 64", device.set_queue(64, true), libc::ENOBUFS)?;
    let three = device.raw(abi::BLK_SET_QUEUE, &mut VringState { index: 0, num: 3 });
    fails("neither start nor stop", three, libc::EINVAL)?;
    fails("a queue that is not set up", device.set_queue(5, true), libc::EFAULT)?;
    fails("the size of a running queue", device.set_vring_num(0, 64), libc::EBUSY)?;
    fails("the base of a running queue", device.set_vring_base(0, 3), libc::EBUSY)?;
    let region = |desc_num, user_addr| BlkInflight { index: 0, desc_num, user_addr };
    fails("a region under way", device.set_inflight(region(128, 0)), libc::EBUSY)?;
    device.set_queue(0, true).context("start what runs")?;
    device.set_queue(0, false).context("stop")?;
    device.set_queue(0, false).context("stop what is stopped")?;
    fails("a crooked region", device.set_inflight(region(128, 0x1001)), libc::EINVAL)?;
    device.set_vring_num(0, 2048)?;
    fails("a ring of 2048", device.set_queue(0, true), libc::EINVAL)?;
    device.set_vring_num(0, 128)?;
    let memory = owner.memory().clone();
    let kernel = owner.session().kernel().context("a kernel device")?;
    let short = region(64, memory.regions()[0].user_address() + (1 << 20));
    kernel.device().set_inflight(short)?;
    fails("a region that is too short", kernel.device().set_queue(0, true), libc::EINVAL)?;
    kernel.device().set_inflight(region(0, 0)).context("no region any more")?;
    owner.start_queue(0)?;
    Ok(owner.write(0, &vec![1; disk.block_bytes as usize])?)
}

/// The code of an ioctl with another size of its argument.
fn with_size(code: u32, size: usize) -> u32 {
    code & !(0x3fff << 16) | (size as u32) << 16
}

/// Structures longer or shorter than the module's, with the ioctl codes that result from their
/// size.
pub(crate) fn sizes(env: &Env, disk: Result<Disk>) -> Result<()> {
    need_module()?;
    let disk = disk_of(env, disk)?;
    let backend = disk.open()?;
    let device = KernelDevice::open()?;
    device.set_owner()?;
    grown_info(&device).context("information")?;
    grown_options(&device).context("options")?;
    grown_trace(&device).context("trace")?;
    grown_oldest(&device).context("age")?;
    let fd = backend.as_raw_fd() as u32;
    // All other structures with eight bytes more, and with four bytes less.
    let words: [(&str, u32, [u32; 5], usize); 6] = [
        ("SET_SERIAL", abi::BLK_SET_SERIAL, [0x41; 5], 20),
        ("SET_INFLIGHT", abi::BLK_SET_INFLIGHT, [0; 5], 16),
        ("SET_BACKEND", abi::BLK_SET_BACKEND, [0, fd, 0, 0, 0], 8),
        ("SET_QUEUE", abi::BLK_SET_QUEUE, [0; 5], 8),
        ("SHARE_LIMITS", abi::BLK_SHARE_LIMITS, [0; 5], 16),
        ("SET_FAILURE_EVENT", abi::BLK_SET_FAILURE_EVENT, [u32::MAX, 0, 0, 0, 0], 4),
    ];
    for (name, code, known, bytes) in words {
        let mut argument = [0_u32; 8];
        argument[..bytes / 4].copy_from_slice(&known[..bytes / 4]);
        let call = |argument: &mut [u32; 8], size| device.raw(with_size(code, size), argument);
        call(&mut argument, bytes + 8).with_context(|| format!("zeroes behind {name}"))?;
        fails(name, call(&mut argument, bytes - 4), libc::EINVAL)?;
        argument[bytes / 4 + 1] = 1;
        fails(name, call(&mut argument, bytes + 8), libc::E2BIG)?;
    }
    let fresh = KernelDevice::open()?;
    let set = |argument: &mut [u32; 3]| {
        fresh.raw(with_size(abi::BLK_SET_NUM_QUEUES, size_of_val(argument)), argument)
    };
    fails("SET_NUM_QUEUES", set(&mut [2, 0, 1]), libc::E2BIG)?;
    // The module never passes unknown numbers of its own range to the core, and they choose no number of queues.
    let own = [0xf0, 0xf1].map(|nr| with_size(0xc000_af00 | nr, 8));
    for unknown in own.into_iter().chain([libc::TCGETS as u32]) {
        for device in [&device, &fresh] {
            let call = device.raw(unknown, &mut [0_u64; 8]);
            fails("an unknown number", call, libc::ENOTTY)?;
        }
    }
    set(&mut [2, 0, 0]).context("zeroes behind SET_NUM_QUEUES")?;
    Ok(())
}

/// Bytes of the enlarged structures. If the core read this word as a queue index, no such queue
/// would exist.
const ROOM: u32 = 200;

fn grown_info(device: &KernelDevice) -> Result<()> {
    let code = with_size(abi::BLK_GET_INFO, ROOM as usize);
    let mut bytes = [0xee_u8; ROOM as usize];
    bytes[..4].copy_from_slice(&ROOM.to_ne_bytes());
    device.raw(code, &mut bytes).context("more room than is needed")?;
    let known = u32::from_ne_bytes(bytes[..4].try_into()?) as usize;
    ensure!(known == size_of::<BlkInfo>(), "it knows {known} bytes");
    ensure!(bytes[known..].iter().all(|&byte| byte == 0xee), "it wrote beyond what it knows");
    let mut short = [16_u32, 7, 7, 7, 7];
    device.raw(with_size(abi::BLK_GET_INFO, 16), &mut short).context("less room")?;
    ensure!(short[3] == abi::BLK_QUEUES_MAX && short[4] == 7, "{short:?}");
    let mut failure = [8_u32, 7, 7];
    device.raw(with_size(abi::BLK_GET_FAILURE, 8), &mut failure).context("failures")?;
    ensure!(failure == [size_of::<abi::BlkFailure>() as u32, 0, 7], "{failure:?}");
    Ok(())
}

fn grown_options(device: &KernelDevice) -> Result<()> {
    let mut words = [0_u32; ROOM as usize / 4];
    let code = with_size(abi::BLK_SET_OPTIONS, ROOM as usize);
    (words[0], words[1]) = (ROOM, abi::OPT_WRITE_THROUGH);
    device.raw(code, &mut words).context("zeroes behind what is known")?;
    words[ROOM as usize / 4 - 1] = 1;
    fails("what is unknown", device.raw(code, &mut words), libc::E2BIG)?;
    // Missing fields are zero, whatever memory follows the structure.
    let mut short = [8_u32, abi::OPT_READ_ONLY, 5, 5, 5, 5];
    device.raw(with_size(abi::BLK_SET_OPTIONS, 8), &mut short).context("the oldest options")?;
    short[0] = 4;
    fails("no flags", device.raw(with_size(abi::BLK_SET_OPTIONS, 4), &mut short), libc::EINVAL)
}

fn grown_trace(device: &KernelDevice) -> Result<()> {
    let mut words = [0_u32; ROOM as usize / 4];
    let code = with_size(abi::BLK_SET_TRACE, ROOM as usize);
    words[..3].copy_from_slice(&[ROOM, u32::MAX, 1]);
    device.raw(code, &mut words).context("zeroes behind what is known")?;
    words[ROOM as usize / 4 - 1] = 1;
    fails("what is unknown", device.raw(code, &mut words), libc::E2BIG)?;
    for size in [0, 12, 5000] {
        words[0] = size;
        fails("no bound, or too much", device.raw(code, &mut words), libc::EINVAL)?;
    }
    let ask = |words: &mut [u32; 6]| device.raw(with_size(abi::BLK_GET_TRACED, 24), words);
    fails("room for 12 bytes of a record", ask(&mut [12, 7, 7, 7, 7, 7]), libc::EINVAL)?;
    let mut head = [16, 7, 7, 7, 7, 7];
    ask(&mut head).context("the head of a record")?;
    let known = size_of::<abi::BlkTraced>() as u32;
    ensure!(head == [known, 0, 0, 0, 7, 7], "{head:?}");
    Ok(())
}

fn grown_oldest(device: &KernelDevice) -> Result<()> {
    let ask = |words: &mut [u32; 6]| device.raw(with_size(abi::BLK_GET_OLDEST, 24), words);
    fails("room for 12 bytes of an age", ask(&mut [12, 0, 7, 7, 7, 7]), libc::EINVAL)?;
    let mut grown = [24, 0, 7, 7, 7, 7];
    ask(&mut grown).context("more room than is needed")?;
    let known = size_of::<abi::BlkOldest>() as u32;
    ensure!(grown == [known, 0, u32::MAX, u32::MAX, 7, 7], "{grown:?}");
    Ok(())
}

/// The owner chooses the number of queues, before it takes ownership.
pub(crate) fn num_queues(env: &Env) -> Result<()> {
    need_module()?;
    let device = KernelDevice::open()?;
    ensure!(device.info()?.num_queues == abi::BLK_QUEUES_MAX, "not as many as there can be");
    for count in [0, abi::BLK_QUEUES_MAX + 1, u32::MAX] {
        fails("a number of queues", device.set_num_queues(count), libc::EINVAL)?;
    }
    device.features()?;
    device.set_num_queues(3).context("three queues")?;
    fails("another number", device.set_num_queues(3), libc::EBUSY)?;
    device.set_owner()?;
    ensure!(device.info()?.num_queues == 3, "not three queues");
    device.set_vring_num(2, 64).context("the third queue")?;
    fails("the fourth queue", device.set_vring_num(3, 64), libc::ENOBUFS)?;
    fails("the fourth queue", device.set_queue(3, false), libc::ENOBUFS)?;
    fails("the fourth queue", device.set_busyloop(3, 1), libc::ENOBUFS)?;
    let long = abi::BLK_BUSYLOOP_US_MAX + 1;
    fails("a busy loop that is too long", device.set_busyloop(0, long), libc::EINVAL)?;
    device.set_busyloop(0, abi::BLK_BUSYLOOP_US_MAX).context("the longest busy loop")?;
    device.reset_owner()?;
    ensure!(device.info()?.num_queues == 3, "a reset changed the number of queues");
    // As in 2022: the owner sets no number.
    let old = KernelDevice::open()?;
    old.set_owner()?;
    old.set_vring_num(63, 64).context("the last of all queues")?;
    fails("a number after the owner", old.set_num_queues(64), libc::EBUSY)?;
    let (disk, _) = null_blk(NullBlkOptions::USUAL)?;
    let kernel = KernelOptions { num_queues: Some(1), ..KernelOptions::default() };
    target::serve_with(env, &disk, &options(), &kernel)?.device.write(0, &[1; 4096])?;
    Ok(())
}

/// A zoned device is refused, because it accepts writes only at certain positions.
pub(crate) fn zoned() -> Result<()> {
    need_module()?;
    let (disk, _) = null_blk(NullBlkOptions { zoned: true, ..NullBlkOptions::USUAL })?;
    let device = KernelDevice::open()?;
    device.set_owner()?;
    let backend = disk.open()?;
    fails("a zoned disk", device.set_backend(0, Some(backend.as_raw_fd())), libc::EOPNOTSUPP)
}

/// The order of the series of 2022: rings first, then the backend, which starts all rings; -1 stops
/// them.
pub(crate) fn old_order(env: &Env, disk: Result<Disk>) -> Result<()> {
    need_module()?;
    let disk = disk_of(env, disk)?;
    let backend = disk.open()?;
    let fd = Some(backend.as_raw_fd());
    let options = Options { num_queues: 2, setup: QueueSetup::Untouched, ..options() };
    let mut device = Device::open_kernel(disk.open()?, &options, &KernelOptions::default())?;
    let memory = device.memory().clone();
    device.session().share_memory(&memory, false)?;
    device.set_up_queues()?;
    let layout = device.layout();
    // The first queue starts, the second one does not: nothing stays attached.
    kernel(&mut device)?.set_vring_num(1, 2 * abi::BLK_QUEUE_SIZE_MAX)?;
    fails("a queue that is too large", kernel(&mut device)?.set_backend(0, fd), libc::EINVAL)?;
    fails("a queue after that", kernel(&mut device)?.set_queue(0, true), libc::ENODEV)?;
    kernel(&mut device)?.set_vring_num(1, options.queue_size.into())?;
    for round in 0..3 {
        kernel(&mut device)?.set_backend(0, fd).context("start all")?;
        for queue in 0..2 {
            let request = Request::write(8, &[round; 4096]);
            let status = device.queue(queue).execute(&request, &layout)?.status;
            ensure!(status == Some(S_OK), "queue {queue}, round {round}: {status:?}");
        }
        kernel(&mut device)?.set_backend(1, None).context("stop one")?;
        device.write(0, &[round; 4096]).context("the queue that was not stopped")?;
        kernel(&mut device)?.set_backend(1, fd).context("start one")?;
        kernel(&mut device)?.set_backend(0, None).context("stop all")?;
    }
    Ok(())
}

fn kernel(device: &mut Device) -> Result<&KernelDevice> {
    Ok(device.session().kernel().context("a kernel device")?.device())
}

/// Offset of the first entry in a queue's in-flight region, and of its fields (vhost-user protocol,
/// "inflight split").
const FIRST: usize = 16;
const ENTRY: usize = 16;
const USED_IDX_AT: usize = 14;

/// Reads that are in flight at once.
const READS: u16 = 4;

/// The region marks chains while they are in flight, and no longer.
pub(crate) fn inflight_region(_env: &Env) -> Result<()> {
    need_module()?;
    let (disk, dm) = holding(false)?;
    let options = Options { inflight: true, ..options() };
    let mut device = Device::open_kernel(disk.open()?, &options, &KernelOptions::default())?;
    let area = device.inflight().context("no region")?.area();
    let is_marked = |id: u16| area.load_u8(FIRST + ENTRY * usize::from(id), Relaxed) == 1;
    for round in 1..=3_u16 {
        let ids = dm.hold(|| {
            let ids = submit_reads(&mut device)?;
            let are_marked = || Ok(ids.iter().all(|&id| is_marked(id)).then_some(()));
            wait_until("marks of chains in flight", are_marked)?;
            Ok(ids)
        })?;
        for _ in &ids {
            device.queue(0).collect()?;
        }
        // The mark is cleared after the used entry is visible.
        let are_cleared = || Ok((!ids.iter().any(|&id| is_marked(id))).then_some(()));
        wait_until("no marks of chains that came back", are_cleared)?;
        let used = area.load_u16(USED_IDX_AT, Relaxed);
        ensure!(used == round * READS, "the region's used index is {used} in round {round}");
    }
    a_reset_forgets_the_region(device)
}

fn submit_reads(device: &mut Device) -> Result<Vec<u16>> {
    let layout = device.layout();
    let mut submit = |n: u64| device.queue(0).submit(&Request::read(n * 8, 4096), &layout);
    (0..u64::from(READS)).map(|n| Ok(submit(n)?)).collect()
}

/// A reset forgets the region, which is an address in the memory of the previous owner.
fn a_reset_forgets_the_region(mut device: Device) -> Result<()> {
    const MINE: u16 = 0xbeef;
    let area = device.inflight().context("no region")?.area();
    device.session().reset_device()?;
    area.store_u16(USED_IDX_AT, MINE, Relaxed);
    let memory = device.memory().clone();
    device.session().share_memory(&memory, false)?;
    device.session().attach()?;
    device.start_queue(0)?;
    device.write(0, &[7; 4096])?;
    let area = device.inflight().context("no region")?.area();
    let used = area.load_u16(USED_IDX_AT, Relaxed);
    ensure!(used == MINE, "the next owner's device writes to the region of the one before");
    Ok(())
}
