// SPDX-License-Identifier: Apache-2.0
//! Limits that several disks share: devices of the module, and disks of a daemon on both planes.

use crate::case::cases;
use crate::host::abi::fails;
use crate::host::env::{Env, Plane};
use crate::host::fixture::{Disk, NullBlkOptions, null_blk, wait_until};
use crate::host::groups::Daemon;
use crate::host::integrity::{Setup, tell};
use crate::host::load::{Done, Handles, Spec, under_load};
use crate::host::target::{need_module, options};
use anyhow::{Context, Result, ensure};
use driver::kernel::abi::{BlkShare, SharedDebt, SharedLimits};
use driver::kernel::{KernelDevice, KernelOptions};
use driver::{Device, Options, Request};
use kit::set::Set::Plain;
use std::io;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};
use virtio_spec::blk::S_OK;

cases! { Host;
    "limits-shared", Plain,
        "three devices share a limit, each with the same share; it changes under load, and devices leave",
        shared;
    "limits-shared-debt", Plain,
        "a device in debt takes nothing, stops at once, and pays, also when idle; limits forgive; bad addresses",
        |_| debt();
    "limits-shared-large", Plain,
        "large requests of a disk delay small ones of another one for milliseconds, on each plane and on both",
        large;
    "limits-shared-queues", Plain,
        "each queue of a device in debt takes its part of large requests",
        |_| queues();
    "daemon-limit-group", Plain,
        "three disks of a group on the kernel plane, after an upgrade, and on both planes share its limit under load",
        group;
}

/// Requests a second: much less than an emulated debug kernel can do, so that all disks always wait. A worker that is
/// late, as on a busy machine, seldom is for the time of a request.
const IOPS: u64 = 30;
/// The least burst, in nanoseconds.
const BURST_NS: u64 = 10_000_000;
/// Requests of each disk that are measured.
const MEASURED: u64 = 30;
/// Each disk gets a third, and at least a fourth. By queues it would be a sixth for disks with one.
const PARTS: u64 = 4;
/// Queues of each disk.
const QUEUES: [u16; 3] = [4, 1, 1];

/// A disk, its driver, and its load.
type Loaded = (Device, Vec<Spec>);

fn setup(queues: u16) -> Setup {
    Setup { queues, ..Setup::usual(1) }
}

fn kernel(device: &mut Device) -> Result<KernelDevice> {
    Ok(device.session().kernel().context("a kernel device")?.device().try_clone()?)
}

/// Loads three devices while `act` runs; then the last one ends, then the second one, while `rest` sees
/// the others go on.
fn load_three(
    devices: [Loaded; 3],
    act: impl FnOnce([&Handles; 3]) -> Result<()>,
    rest: impl Fn(&Handles) -> Result<()>,
) -> Result<Vec<Done>> {
    let [(one, of_one), (two, of_two), (three, of_three)] = devices;
    let mut all = Vec::new();
    let done = under_load(one, of_one, |first| {
        let done = under_load(two, of_two, |second| {
            let done = under_load(three, of_three, |third| act([first, second, third]))?;
            all.extend(done);
            rest(first).and_then(|()| rest(second)).context("after the end of the third one")
        })?;
        all.extend(done);
        rest(first).context("after the end of the second one")
    })?;
    all.extend(done);
    Ok(all)
}

/// Waits until each disk has written all of its sectors once.
fn begin(handles: [&Handles; 3]) -> Result<()> {
    handles.iter().try_for_each(|handle| handle.wait_for_progress(1)).context("without a limit")
}

/// Checks that disks are not faster together than their limit, and that each has at least one of so
/// many parts.
fn keep_rate(handles: [&Handles; 3], parts: u64) -> Result<()> {
    let counts = || handles.map(Handles::completed);
    for handle in handles {
        handle.wait_for_progress(1)?;
    }
    let (start, before) = (Instant::now(), counts());
    for handle in handles {
        let begun = handle.completed();
        while handle.completed() < begun + MEASURED {
            handle.wait_for_progress(1)?;
        }
    }
    let (after, took) = (counts(), start.elapsed());
    let of_each: Vec<u64> =
        after.iter().zip(before).map(|(after, before)| after - before).collect();
    let all: u64 = of_each.iter().sum();
    // The burst, and one request of debt for each queue.
    let most = IOPS as f64 * (took.as_secs_f64() + 0.01) + f64::from(QUEUES.iter().sum::<u16>());
    println!("{of_each:?} requests in {took:?}, at most {most:.0} allowed");
    ensure!(all as f64 <= most, "{of_each:?} in {took:?} at {IOPS} a second");
    let least = of_each.iter().min().context("three disks")?;
    ensure!(least * parts >= all, "{of_each:?}: a disk has not got its share");
    Ok(())
}

fn shared(env: &Env) -> Result<()> {
    need_module()?;
    let env = &env.on(Plane::Direct);
    let limits = Box::new(SharedLimits::default());
    let debts: [Box<SharedDebt>; QUEUES.len()] = Default::default();
    let forgive = || debts.iter().for_each(|debt| debt.forgive());
    let (mut disks, mut devices) = (Vec::new(), Vec::new());
    for (queues, debt) in QUEUES.into_iter().zip(&debts) {
        let (disk, instance) = null_blk(NullBlkOptions::USUAL)?;
        let setup = setup(queues);
        let specs = setup.specs(env, &disk);
        let mut device =
            Device::open_kernel(disk.open()?, &setup.options(&specs), &setup.kernel())?;
        kernel(&mut device)?.share_limits(limits.share(debt))?;
        devices.push((device, specs));
        disks.push((disk, instance));
    }
    let devices = devices.try_into().ok().context("three devices")?;
    let done = load_three(
        devices,
        |handles| {
            begin(handles)?;
            limits.set(IOPS, 0, BURST_NS);
            keep_rate(handles, PARTS)?;
            // Debts of hours, which a new limit forgives.
            limits.set(0, 1, BURST_NS);
            while debts.iter().any(|debt| debt.bytes_ns.load(Relaxed) == 0) {
                std::thread::yield_now();
            }
            limits.set(1_000_000, 0, BURST_NS);
            forgive();
            handles.iter().try_for_each(|handle| handle.wait_for_progress(20))
        },
        |handles| handles.wait_for_progress(20),
    )?;
    tell(&done);
    ensure!(limits.iops_clock.load(Relaxed) > 0, "no device has charged a request");
    Ok(())
}

/// A device with its disk and its part in shared limits.
struct Part {
    device: Device,
    // Used by the device.
    debt: Box<SharedDebt>,
    disk: Disk,
}

impl Part {
    fn new(limits: &SharedLimits) -> Result<Self> {
        let (disk, _) = null_blk(NullBlkOptions::USUAL)?;
        let debt = Box::default();
        Ok(Part { device: Self::open(&disk, limits, &debt)?, debt, disk })
    }

    fn open(disk: &Disk, limits: &SharedLimits, debt: &SharedDebt) -> Result<Device> {
        let mut device = Device::open_kernel(disk.open()?, &options(), &KernelOptions::default())?;
        kernel(&mut device)?.share_limits(limits.share(debt))?;
        Ok(device)
    }

    /// Closes the device, and opens another one with its debt.
    fn again(self, limits: &SharedLimits) -> Result<Self> {
        let Part { device, debt, disk } = self;
        drop(device);
        Ok(Part { device: Self::open(&disk, limits, &debt)?, debt, disk })
    }

    fn owes(&self) -> bool {
        self.debt.bytes_ns.load(Relaxed) > 0
    }

    fn submit_read(&mut self) -> Result<()> {
        let layout = self.device.layout();
        self.device.queue(0).submit(&Request::read(0, 4096), &layout)?;
        Ok(())
    }

    fn collect(&mut self) -> Result<()> {
        let (_, done) = self.device.queue(0).collect()?;
        ensure!(done.status == Some(S_OK), "status {:?}", done.status);
        Ok(())
    }

    /// Stops and starts the queue, whose read does not pass.
    fn stops(&mut self) -> Result<()> {
        let own = kernel(&mut self.device)?;
        for run in [false, true] {
            own.set_queue(0, run)?;
            ensure!(self.device.queue(0).try_collect()?.is_none(), "a request passed in debt");
        }
        Ok(())
    }
}

fn debt() -> Result<()> {
    need_module()?;
    let limits = Box::new(SharedLimits::default());
    let (mut spender, mut waiter) = (Part::new(&limits)?, Part::new(&limits)?);
    bad_addresses(&kernel(&mut spender.device)?, limits.share(&spender.debt))?;
    // Debts of a week and of an hour, each of its device alone.
    limits.set(0, 1, BURST_NS);
    spender.device.write(0, &vec![1; 1 << 20])?;
    waiter.device.read(0, &mut [0; 4096]).context("beside a device in debt")?;
    ensure!(spender.owes() && waiter.owes(), "no debt");
    for part in [&mut spender, &mut waiter] {
        part.submit_read()?;
        part.stops()?;
    }
    // It outlives its device.
    let mut spender = spender.again(&limits)?;
    spender.submit_read()?;
    spender.stops().context("after a close")?;
    changes_group(&mut waiter, &limits).context("another group")?;
    // Without an event: the queues notice the new version.
    limits.set(0, 1 << 30, BURST_NS);
    spender.debt.forgive();
    waiter.debt.forgive();
    spender.collect().context("after new limits")?;
    waiter.collect().context("after new limits")?;
    // A clock that no owner would write.
    limits.bytes_clock.store(u64::MAX, Relaxed);
    waiter.submit_read()?;
    waiter.stops().context("at the end of time")?;
    kernel(&mut waiter.device)?.share_limits(BlkShare::default())?;
    waiter.collect().context("after the leave")?;
    drop(spender);
    waiter.device.write(0, &[2; 4096])?;
    pays(&mut waiter, &limits)
}

/// A device whose read waits goes to other limits, and waits for these.
fn changes_group(part: &mut Part, old: &SharedLimits) -> Result<()> {
    // Never freed: after an error the device may go on with them.
    let (fast, debt): (&SharedLimits, &SharedDebt) =
        (Box::leak(Box::default()), Box::leak(Box::default()));
    fast.set(1_000_000, 0, BURST_NS);
    let own = kernel(&mut part.device)?;
    own.share_limits(fast.share(debt))?;
    part.collect()?;
    ensure!(fast.iops_clock.load(Relaxed) > 0, "the other limits were not charged");
    // And back, with the debt that it left there.
    own.share_limits(old.share(&part.debt))?;
    part.submit_read()?;
    part.stops()
}

/// A device pays its debt although its driver has no request.
fn pays(part: &mut Part, limits: &SharedLimits) -> Result<()> {
    kernel(&mut part.device)?.share_limits(limits.share(&part.debt))?;
    limits.set(0, 4 << 20, BURST_NS);
    part.debt.forgive();
    let start = Instant::now();
    part.device.write(0, &vec![1; 1 << 20])?;
    ensure!(part.owes(), "the request is no debt");
    wait_until("the end of the debt", || Ok((!part.owes()).then_some(())))?;
    // A quarter of a second, less the burst and the lead of the clock.
    let took = start.elapsed();
    ensure!(took >= Duration::from_millis(230), "a quarter of a second was paid in {took:?}");
    Ok(())
}

fn bad_addresses(device: &KernelDevice, good: BlkShare) -> Result<()> {
    let limits = |limits_addr| device.share_limits(BlkShare { limits_addr, ..good });
    let debt = |debt_addr| device.share_limits(BlkShare { debt_addr, ..good });
    fails("limits that are not aligned", limits(good.limits_addr + 64), libc::EINVAL)?;
    fails("a debt that is not aligned", debt(good.debt_addr + 8), libc::EINVAL)?;
    fails("a debt without limits", limits(0), libc::EINVAL)?;
    fails("limits without a debt", debt(0), libc::EINVAL)?;
    // The page of a program is not written.
    let program = bad_addresses as fn(&KernelDevice, BlkShare) -> Result<()> as usize as u64;
    for (of_limits, call) in [(true, &limits as &dyn Fn(u64) -> io::Result<()>), (false, &debt)] {
        let about = |what: &str| format!("{what}, limits {of_limits}");
        fails(&about("no memory"), call(1 << 12), libc::EFAULT)?;
        fails(&about("an address of the kernel"), call(0xffff_8880_0000_0000), libc::EFAULT)?;
        let outcome = call(program & !127);
        ensure!(outcome.is_err(), "memory that is read only was shared, limits {of_limits}");
    }
    let stranger = KernelDevice::open()?;
    fails("a device without an owner", stranger.share_limits(good), libc::EPERM)
}

/// Large requests.
const LARGE: usize = 4;
/// Bytes of each large request, for which the limit needs half a second.
const LARGE_BYTES: usize = 1 << 20;

/// Checks that many small requests pass for each large one of another disk. If they waited for it, one
/// or two would.
fn small_beside_large(small: &mut Device, large: &mut Device) -> Result<()> {
    let layout = large.layout();
    for number in 0..LARGE {
        let sector = (number * LARGE_BYTES / 512) as u64;
        large.queue(0).submit(&Request::write(sector, &vec![1; LARGE_BYTES]), &layout)?;
    }
    let (mut reads, mut writes) = (0, 0);
    while writes < LARGE {
        small.read(0, &mut [0; 4096])?;
        reads += 1;
        while let Some((_, done)) = large.queue(0).try_collect()? {
            ensure!(done.status == Some(S_OK), "status {:?}", done.status);
            writes += 1;
        }
    }
    println!("{reads} small requests beside {writes} large ones");
    ensure!(reads >= 5 * LARGE, "{reads} small requests beside {writes} large ones");
    Ok(())
}

fn large(env: &Env) -> Result<()> {
    need_module()?;
    let limits = Box::new(SharedLimits::default());
    limits.set(0, 2 * LARGE_BYTES as u64, BURST_NS);
    let (mut small, mut sender) = (Part::new(&limits)?, Part::new(&limits)?);
    small_beside_large(&mut small.device, &mut sender.device).context("devices")?;
    drop((small, sender));
    let mut daemon = Daemon::start(env, &[])?;
    let open = |name| -> Result<(Device, Disk)> {
        let (disk, _) = null_blk(NullBlkOptions::USUAL)?;
        daemon.add(name, &disk, 1, (name == "a").then_some(1_000_000))?;
        Ok((Device::from_stream(daemon.connect(name)?, &options())?, disk))
    };
    let ((mut small, _a), (mut sender, _b)) = (open("a")?, open("b")?);
    let bytes = (2 * LARGE_BYTES).to_string();
    let limit = ["limit", "b", "--iops", "off", "--bandwidth", &bytes, "--burst-seconds", "0.01"];
    daemon.control(&limit)?;
    for (disk, plane) in [("", ""), ("a", "uring"), ("b", "uring"), ("a", "kernel")] {
        if !disk.is_empty() {
            daemon.control(&["switch", disk, plane])?;
        }
        let planes = daemon.planes(&["a", "b"])?;
        small_beside_large(&mut small, &mut sender)
            .with_context(|| format!("on the planes {planes:?}"))?;
    }
    drop((small, sender));
    daemon.end()
}

/// Queues of a device, each always with a request.
const FULL: usize = 3;
/// Large requests that all queues complete together.
const TAKEN: u64 = 30;

/// Each large request is debt of the device, which any of its queues pays. They take in turn; a worker
/// that is late loses a turn.
fn queues() -> Result<()> {
    need_module()?;
    let (limits, debt) = (Box::new(SharedLimits::default()), Box::new(SharedDebt::default()));
    limits.set(0, 8 * LARGE_BYTES as u64, BURST_NS);
    let (disk, _) = null_blk(NullBlkOptions::USUAL)?;
    let options = Options { num_queues: FULL as u16, ..options() };
    let mut device = Device::open_kernel(disk.open()?, &options, &KernelOptions::default())?;
    kernel(&mut device)?.share_limits(limits.share(&debt))?;
    let layout = device.layout();
    let large = Request::write(0, &vec![1; LARGE_BYTES]);
    let mut done = [0; FULL];
    for queue in 0..FULL {
        device.queue(queue).submit(&large, &layout)?;
    }
    while done.iter().sum::<u64>() < TAKEN {
        for (queue, done) in done.iter_mut().enumerate() {
            let Some((_, completion)) = device.queue(queue).try_collect()? else { continue };
            ensure!(completion.status == Some(S_OK), "status {:?}", completion.status);
            *done += 1;
            device.queue(queue).submit(&large, &layout)?;
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    println!("large requests of each queue: {done:?}");
    let [least, most] = [done.iter().min(), done.iter().max()].map(|n| n.copied().unwrap_or(0));
    ensure!(least * 2 >= most, "large requests of each queue: {done:?}");
    Ok(())
}

fn group(env: &Env) -> Result<()> {
    let mut daemon = Daemon::start(env, &[])?;
    let (mut disks, mut devices) = (Vec::new(), Vec::new());
    for (name, queues) in ["a", "b", "c"].into_iter().zip(QUEUES) {
        let (disk, instance) = null_blk(NullBlkOptions::USUAL)?;
        let setup = setup(queues);
        let specs = setup.specs(env, &disk);
        let limit = if name == "a" { Some(1_000_000) } else { None };
        daemon.add(name, &disk, queues, limit)?;
        let options: Options = setup.options(&specs);
        devices.push((Device::from_stream(daemon.connect(name)?, &options)?, specs));
        disks.push((disk, instance));
    }
    let devices = devices.try_into().ok().context("three devices")?;
    let done = load_three(
        devices,
        |handles| {
            begin(handles)?;
            let iops = IOPS.to_string();
            daemon.control(&["limit", "b", "--iops", &iops, "--burst-seconds", "0.01"])?;
            let orders: [&[&str]; 5] = [
                &["switch", "c", "kernel"],
                &["upgrade"],
                &["switch", "c", "uring"],
                &["switch", "a", "uring"],
                &["switch", "c", "kernel"],
            ];
            for order in orders {
                daemon.control(order)?;
                let planes = daemon.planes(&["a", "b", "c"])?;
                println!("on the planes {planes:?}");
                // Beside disks of the other plane, shares are less exact.
                let parts = if planes.contains(&"uring".into()) { 4 * PARTS } else { PARTS };
                keep_rate(handles, parts).with_context(|| format!("on the planes {planes:?}"))?;
            }
            daemon.control(&["limit", "b", "--none"])?;
            handles[1].wait_for_progress(MEASURED).context("after the leave")?;
            daemon.control(&["limit", "b", "--group", "g", "--iops", "100000"])?;
            handles.iter().try_for_each(|handle| handle.wait_for_progress(MEASURED))
        },
        |handles| handles.wait_for_progress(20),
    )?;
    tell(&done);
    daemon.end()
}
