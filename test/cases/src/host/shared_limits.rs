// SPDX-License-Identifier: Apache-2.0
//! Limits that several disks share: devices of the module, and disks of a daemon on both planes.

use crate::case::cases;
use crate::host::abi::fails;
use crate::host::env::{Env, Plane};
use crate::host::fixture::{Disk, NullBlkOptions, null_blk};
use crate::host::groups::Daemon;
use crate::host::integrity::{Setup, tell};
use crate::host::load::{Done, Handles, Spec, under_load};
use crate::host::target::{need_module, options};
use anyhow::{Context, Result, ensure};
use driver::kernel::abi::SharedLimits;
use driver::kernel::{KernelDevice, KernelOptions};
use driver::{Device, Options, Request};
use kit::set::Set::Gating;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Instant;
use virtio_spec::blk::S_OK;

cases! { Host;
    "limits-shared", Gating,
        "three devices share a limit, each with the same share; it changes under load, and devices leave",
        shared;
    "limits-shared-debt", Gating,
        "a device in debt by another one stops at once; a change and a leave forgive the debt; bad addresses",
        |_| debt();
    "daemon-limit-group", Gating,
        "three disks of a group on the kernel plane, and on both planes, share its limit under load",
        group;
}

/// Requests a second: much less than an emulated debug kernel can do, so that all disks always wait.
const IOPS: u64 = 60;
/// The least burst, in nanoseconds.
const BURST_NS: u64 = 10_000_000;
/// Requests of each disk that are measured.
const MEASURED: u64 = 40;
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
    let (mut disks, mut devices) = (Vec::new(), Vec::new());
    for queues in QUEUES {
        let (disk, instance) = null_blk(NullBlkOptions::USUAL)?;
        let setup = setup(queues);
        let specs = setup.specs(env, &disk);
        let mut device =
            Device::open_kernel(disk.open()?, &setup.options(&specs), &setup.kernel())?;
        kernel(&mut device)?.share_limits(limits.address())?;
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
            // A debt of years, which a new limit forgives.
            limits.set(0, 1, BURST_NS);
            while limits.bytes_clock.load(Relaxed) == 0 {
                std::thread::yield_now();
            }
            limits.set(1_000_000, 0, BURST_NS);
            handles.iter().try_for_each(|handle| handle.wait_for_progress(20))
        },
        |handles| handles.wait_for_progress(20),
    )?;
    tell(&done);
    ensure!(limits.iops_clock.load(Relaxed) > 0, "no device has charged a request");
    Ok(())
}

fn debt() -> Result<()> {
    need_module()?;
    let limits = Box::new(SharedLimits::default());
    let open = || -> Result<(Disk, Device, KernelDevice)> {
        let (disk, _) = null_blk(NullBlkOptions::USUAL)?;
        let mut device = Device::open_kernel(disk.open()?, &options(), &KernelOptions::default())?;
        let own = kernel(&mut device)?;
        Ok((disk, device, own))
    };
    let (_one, mut spender, own) = open()?;
    let (_two, mut waiter, other) = open()?;
    bad_addresses(&own, limits.address())?;
    own.share_limits(limits.address())?;
    other.share_limits(limits.address())?;
    // A debt of a week for both.
    limits.set(0, 1, BURST_NS);
    spender.write(0, &vec![1; 1 << 20])?;
    let layout = waiter.layout();
    let reads = |device: &mut Device, queue: usize| -> Result<()> {
        let (_, done) = device.queue(queue).collect()?;
        ensure!(done.status == Some(S_OK), "status {:?}", done.status);
        Ok(())
    };
    waiter.queue(0).submit(&Request::read(0, 4096), &layout)?;
    other.set_queue(0, false).context("a stop in debt")?;
    ensure!(waiter.queue(0).try_collect()?.is_none(), "a request passed in debt");
    other.set_queue(0, true)?;
    ensure!(waiter.queue(0).try_collect()?.is_none(), "a request passed in debt");
    // Without an event: the queue notices the new version.
    limits.set(0, 1 << 30, BURST_NS);
    reads(&mut waiter, 0).context("after new limits")?;
    // A clock that no owner would write.
    limits.bytes_clock.store(u64::MAX, Relaxed);
    waiter.queue(0).submit(&Request::read(0, 4096), &layout)?;
    other.set_queue(0, false).context("a stop at the end of time")?;
    other.set_queue(0, true)?;
    other.share_limits(0)?;
    reads(&mut waiter, 0).context("after the leave")?;
    drop(spender);
    drop(own);
    waiter.write(0, &[2; 4096])?;
    Ok(())
}

fn bad_addresses(device: &KernelDevice, good: u64) -> Result<()> {
    fails("an address that is not aligned", device.share_limits(good + 64), libc::EINVAL)?;
    fails("no memory", device.share_limits(1 << 12), libc::EFAULT)?;
    fails("an address of the kernel", device.share_limits(0xffff_8880_0000_0000), libc::EFAULT)?;
    // The page of a program is not written.
    let program = bad_addresses as fn(&KernelDevice, u64) -> Result<()> as usize as u64;
    let code = program & !127;
    let outcome = device.share_limits(code);
    ensure!(outcome.is_err(), "memory that is read only was shared");
    let stranger = KernelDevice::open()?;
    fails("a device without an owner", stranger.share_limits(good), libc::EPERM)
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
            for (disk, plane) in [("", ""), ("c", "uring"), ("a", "uring"), ("c", "kernel")] {
                if !disk.is_empty() {
                    daemon.control(&["switch", disk, plane])?;
                }
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
