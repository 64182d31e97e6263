// SPDX-License-Identifier: Apache-2.0
//! Limits on the rate of a disk. The tests check that a disk is not faster than its limit; how close
//! it comes depends on the machine.

mod common;

use common::load::under_load;
use common::plane::Plain;
use common::{Daemon, Setup, mem, pool};
use data_plane::{LimitChange, Limits};
use driver::{Device, Options, Request};
use std::num::NonZeroU64;
use std::sync::Arc;
use std::time::{Duration, Instant};
use vhost_user::{Answer, Command, Status};
use virtio_spec::blk::S_OK;

const QUEUES: u16 = 2;
const MIB: u64 = 1 << 20;
/// Requests of each queue that wait for a limit.
const WAITING: u64 = 60;

fn setup(threads: usize) -> Setup {
    Setup { queues: QUEUES, threads, ..Setup::default() }
}

fn options() -> Options {
    Options { num_queues: QUEUES, ..Options::default() }
}

fn limits(iops: u64, bytes: u64) -> Limits {
    let burst = Limits::BURST_MIN;
    Limits { iops: NonZeroU64::new(iops), bytes: NonZeroU64::new(bytes), burst }
}

#[track_caller]
fn limit(daemon: &Daemon, limits: Limits) {
    let answer = daemon.control().ask(Command::Limit(None, limits.into()));
    let Some(Answer::Limited(true, now, _)) = answer else { panic!("{answer:?}") };
    assert_eq!(now, limits);
}

/// Requests that each queue has taken.
fn chains(daemon: &Daemon) -> Vec<u64> {
    daemon.status().queues.iter().map(|queue| queue.total.chains).collect()
}

/// Runs a load until each queue has done `progress` requests. Returns the requests of each queue in
/// that time, and the time.
fn rate(threads: usize, limits: Limits, progress: u64) -> (Vec<u64>, Duration) {
    let daemon = Daemon::start(Arc::new(Plain::new()), &setup(threads));
    let mut measured = None;
    let device = daemon.connect(&options());
    limit(&daemon, limits);
    under_load(device, QUEUES.into(), |loaded| {
        loaded.wait_for_progress(1);
        // The time includes both readings of the counters.
        let (start, before) = (Instant::now(), chains(&daemon));
        loaded.wait_for_progress(progress);
        let counts =
            chains(&daemon).iter().zip(&before).map(|(now, before)| now - before).collect();
        measured = Some((counts, start.elapsed()));
        let throttled: u64 = daemon.status().queues.iter().map(|q| q.total.throttled).sum();
        assert!(throttled > 0, "no queue waited");
        limit(&daemon, Limits::NONE);
    });
    measured.expect("it was measured")
}

#[test]
fn a_disk_takes_no_more_requests_than_its_limit() {
    for threads in [1, 2] {
        let (counts, took) = rate(threads, limits(500, 0), 60);
        let all: u64 = counts.iter().sum();
        // The burst, and one request of debt for each queue.
        let most = 500.0 * (took.as_secs_f64() + 0.01) + 2.0;
        assert!(all as f64 <= most, "{all} requests in {took:?}, and at most {most} were allowed");
    }
}

/// Lets requests wait in all queues of all devices, whose limit lets next to nothing pass: the speed
/// of a driver does not matter then. Returns the requests of each device (or queue, by `counts`)
/// when `limits` have let `all` of them pass.
fn shares(
    devices: &mut [(Device, u16)],
    counts: impl Fn() -> Vec<u64>,
    limits: impl FnOnce(),
    all: u64,
) -> Vec<u64> {
    for (device, queues) in &mut *devices {
        let layout = device.layout();
        for queue in 0..usize::from(*queues) {
            for _ in 0..WAITING {
                device.queue(queue).submit(&Request::read(0, 512), &layout).unwrap();
            }
        }
    }
    let before = counts();
    let since =
        || -> Vec<u64> { counts().iter().zip(&before).map(|(now, before)| now - before).collect() };
    limits();
    common::wait_until("requests pass", || since().iter().sum::<u64>() >= all);
    since()
}

/// Collects the requests of [`shares`].
fn collect(devices: Vec<(Device, u16)>) {
    for (mut device, queues) in devices {
        for queue in 0..usize::from(queues) {
            for _ in 0..WAITING {
                assert_eq!(device.queue(queue).collect().unwrap().1.status, Some(S_OK));
            }
        }
    }
}

#[track_caller]
fn each_has_one_of(parts: u64, counts: &[u64]) {
    let (least, all) = (counts.iter().min().unwrap(), counts.iter().sum::<u64>());
    assert!(least * parts >= all, "{counts:?}");
}

#[test]
fn queues_share_a_limit_so_that_none_starves() {
    for threads in [1, 2] {
        let daemon = Daemon::start(Arc::new(Plain::new()), &setup(threads));
        let mut devices = vec![(daemon.connect(&options()), QUEUES)];
        limit(&daemon, limits(1, 0));
        let counts =
            shares(&mut devices, || chains(&daemon), || limit(&daemon, limits(200, 0)), WAITING);
        each_has_one_of(5, &counts);
        limit(&daemon, Limits::NONE);
        collect(devices);
    }
}

#[test]
fn a_disk_moves_no_more_bytes_than_its_limit() {
    let daemon = Daemon::start(Arc::new(Plain::new()), &setup(1));
    let mut device = daemon.connect(&options());
    limit(&daemon, limits(0, 8 * MIB));
    let start = Instant::now();
    for part in 0..5 {
        device.write(part * 1024, &vec![1; 512 << 10]).unwrap();
    }
    // The last of the 512 KiB is debt.
    let least = Duration::from_millis(4 * 1000 / 16) - Limits::BURST_MIN;
    assert!(start.elapsed() >= least, "{:?}", start.elapsed());
}

#[test]
fn a_queue_in_debt_stops_at_once_and_a_new_limit_forgives_the_debt() {
    let daemon = Daemon::start(Arc::new(Plain::new()), &setup(1));
    let mut device = daemon.connect(&options());
    let layout = device.layout();
    // A debt of eleven days.
    limit(&daemon, limits(0, 1));
    device.write(0, &vec![7; 1 << 20]).unwrap();
    device.queue(0).submit(&Request::read(0, 512), &layout).unwrap();
    assert_eq!(daemon.control().ask(Command::Pause), Some(Answer::Changed(true)));
    assert_eq!(daemon.control().ask(Command::Resume), Some(Answer::Changed(true)));
    device.session().stop_queue(0).unwrap();
    device.start_queue(0).unwrap();
    std::thread::sleep(Duration::from_millis(50));
    assert_eq!(daemon.status().queues[0].total.chains, 1, "the debt was forgotten");
    limit(&daemon, limits(0, 100 * MIB));
    let done = device.queue(0).collect().unwrap().1;
    assert_eq!((done.status, done.data), (Some(S_OK), vec![7; 512]));
}

#[test]
fn limits_outlive_connections_and_the_status_has_them() {
    let daemon = Daemon::start(Arc::new(Plain::new()), &setup(1));
    let wanted = limits(300, 5 * MIB);
    let device = daemon.connect(&options());
    limit(&daemon, wanted);
    let again = daemon.control().ask(Command::Limit(None, wanted.into()));
    assert_eq!(again, Some(Answer::Limited(false, wanted, None)));
    drop(device);
    daemon.next_outcome().unwrap();
    let _device = daemon.connect(&options());
    assert_eq!(daemon.status().limits, wanted);
}

/// Disks that share the limits of the group `g`, with guests of so many queues.
fn group(setup: &Setup, queues: &[u16], wanted: Limits) -> (Vec<Daemon>, Vec<Device>) {
    let pool = pool(setup);
    let serve = |&num_queues: &u16| {
        let daemon = Daemon::in_pool(Arc::new(mem()), setup, &pool);
        let device = daemon.connect(&Options { num_queues, ..Options::default() });
        (daemon, device)
    };
    let (daemons, devices): (Vec<Daemon>, Vec<Device>) = queues.iter().map(serve).unzip();
    for (number, daemon) in daemons.iter().enumerate() {
        let limits = (number == 0).then_some(wanted);
        assert_eq!(join(daemon, limits), joined("g", wanted));
    }
    (daemons, devices)
}

/// Without limits the disk adopts those of the group.
fn join(daemon: &Daemon, limits: Option<Limits>) -> Answer {
    join_group(daemon, "g", limits)
}

fn join_group(daemon: &Daemon, group: &str, limits: Option<Limits>) -> Answer {
    let change = LimitChange::of_member(limits.unwrap_or(Limits::NONE));
    daemon.control().ask(Command::Limit(Some(group.into()), change)).expect("the device is there")
}

/// The answer to a change that gives a group these limits, or makes a disk share them.
fn joined(group: &str, limits: Limits) -> Answer {
    Answer::Limited(true, limits, Some(group.into()))
}

fn requests(daemon: &Daemon) -> u64 {
    chains(daemon).iter().sum()
}

/// Loads all disks of a group, the first one on several queues. Returns the requests of each disk
/// while each one did `progress` requests, and the time.
fn rates(threads: usize, limits: Limits, progress: u64) -> (Vec<u64>, Duration) {
    let setup = Setup { queues: 4, threads, ..Setup::default() };
    let queues = [4, 1, 1, 1];
    let (daemons, devices) = group(&setup, &queues, limits);
    let mut measured = None;
    std::thread::scope(|scope| {
        let (stop, stopped): (Vec<_>, Vec<_>) =
            devices.iter().map(|_| std::sync::mpsc::channel::<()>()).unzip();
        for ((device, queues), stopped) in devices.into_iter().zip(queues).zip(stopped) {
            scope.spawn(move || {
                under_load(device, queues.into(), |_| {
                    let _ = stopped.recv();
                });
            });
        }
        let counts = || -> Vec<u64> { daemons.iter().map(requests).collect() };
        let since = |before: &[u64]| -> Vec<u64> {
            counts().iter().zip(before).map(|(now, before)| now - before).collect()
        };
        common::wait_until("each disk has begun", || counts().iter().all(|count| *count > 4));
        let (start, before) = (Instant::now(), counts());
        common::wait_until("each disk goes on", || {
            since(&before).iter().all(|count| *count >= progress)
        });
        measured = Some((since(&before), start.elapsed()));
        for daemon in &daemons {
            limit(daemon, Limits::NONE);
        }
        drop(stop);
    });
    measured.expect("it was measured")
}

#[test]
fn disks_of_a_group_take_no_more_requests_together_than_its_limit() {
    let (counts, took) = rates(2, limits(500, 0), 30);
    let all: u64 = counts.iter().sum();
    // The burst, and one request of debt for each of seven queues.
    let most = 500.0 * (took.as_secs_f64() + 0.01) + 7.0;
    assert!(all as f64 <= most, "{counts:?} in {took:?}, and at most {most} were allowed");
}

#[test]
fn no_disk_of_a_group_starves_beside_one_with_more_queues() {
    for threads in [1, 2] {
        let setup = Setup { queues: 4, threads, ..Setup::default() };
        let queues = [4, 1, 1, 1];
        let (daemons, devices) = group(&setup, &queues, limits(1, 0));
        let mut devices: Vec<_> = devices.into_iter().zip(queues).collect();
        let counts = shares(
            &mut devices,
            || daemons.iter().map(requests).collect(),
            || limit(&daemons[0], limits(200, 0)),
            2 * WAITING,
        );
        each_has_one_of(8, &counts);
        daemons.iter().for_each(|daemon| limit(daemon, Limits::NONE));
        collect(devices);
    }
}

#[test]
fn a_stop_of_one_disk_of_a_group_waits_for_no_limit_and_the_others_go_on() {
    let setup = setup(1);
    let (daemons, mut devices) = group(&setup, &[1, 1], limits(0, 1));
    // A debt of six days, and one of minutes.
    devices[0].write(0, &vec![7; 512 << 10]).unwrap();
    devices[1].read(0, &mut [0; 512]).expect("it does not wait for the debt of the other disk");
    let layout = devices[1].layout();
    devices[1].queue(0).submit(&Request::read(0, 512), &layout).unwrap();
    let pause = daemons[1].control().ask(Command::Pause);
    assert_eq!(pause, Some(Answer::Changed(true)));
    assert_eq!(daemons[1].control().ask(Command::Resume), Some(Answer::Changed(true)));
    drop(devices.remove(0));
    daemons[0].next_outcome().unwrap();
    assert_eq!(requests(&daemons[1]), 1, "the debt was forgotten");
    assert_eq!(join(&daemons[1], Some(limits(0, 100 * MIB))), joined("g", limits(0, 100 * MIB)));
    assert_eq!(devices[0].queue(0).collect().unwrap().1.status, Some(S_OK));
}

#[test]
fn a_disk_that_connects_again_pays_its_debt_to_the_group() {
    let (daemons, mut devices) = group(&setup(1), &[1, 1], limits(0, 1));
    devices[0].write(0, &vec![7; 512 << 10]).unwrap();
    let socket = daemons[0].socket().to_owned();
    devices[0].reconnect(socket).unwrap();
    let layout = devices[0].layout();
    devices[0].queue(0).submit(&Request::read(0, 512), &layout).unwrap();
    devices[1].read(0, &mut [0; 512]).expect("it does not wait for the debt of the other disk");
    assert!(devices[0].queue(0).try_collect().unwrap().is_none(), "the debt was forgotten");
    assert_eq!(join(&daemons[0], Some(limits(0, 100 * MIB))), joined("g", limits(0, 100 * MIB)));
    assert_eq!(devices[0].queue(0).collect().unwrap().1.status, Some(S_OK));
}

#[test]
fn large_requests_of_a_disk_do_not_keep_small_ones_of_another_waiting() {
    const LARGE: u64 = 5;
    for threads in [1, 2] {
        // 100 s for each large request: more than the driver waits for a small one.
        let (daemons, mut devices) = group(&setup(threads), &[1, 1], limits(0, 10 << 10));
        let mut large = devices.remove(0);
        let layout = large.layout();
        for number in 0..LARGE {
            let request = Request::write(number * 2048, &vec![1; MIB as usize]);
            large.queue(0).submit(&request, &layout).unwrap();
        }
        let waits = || daemons[0].status().queues[0].total.throttled > 0;
        common::wait_until("the others wait for the debt of the first one", waits);
        let mut read = || devices[0].read(0, &mut [0; 512]).expect("it waits for no large request");
        (0..20).for_each(|_| read());
        // They go on beside small ones, too.
        let faster = limits(0, 4 * MIB);
        assert_eq!(join(&daemons[0], Some(faster)), joined("g", faster));
        let mut writes = 0;
        while writes < LARGE {
            read();
            while let Some((_, done)) = large.queue(0).try_collect().unwrap() {
                assert_eq!(done.status, Some(S_OK));
                writes += 1;
            }
        }
    }
}

#[test]
fn a_queue_that_waits_goes_on_with_the_limits_of_another_group() {
    let (daemons, mut devices) = group(&setup(1), &[1, 1], limits(0, 1));
    for device in &mut devices {
        device.write(0, &[7; 512]).unwrap();
        let layout = device.layout();
        device.queue(0).submit(&Request::read(0, 512), &layout).unwrap();
    }
    let other = limits(1000, 0);
    assert_eq!(join_group(&daemons[0], "h", Some(other)), joined("h", other));
    assert_eq!(devices[0].queue(0).collect().unwrap().1.status, Some(S_OK));
    assert!(devices[1].queue(0).try_collect().unwrap().is_none(), "that one stays in its group");
    assert_eq!(join(&daemons[1], Some(limits(0, 100 * MIB))), joined("g", limits(0, 100 * MIB)));
    assert_eq!(devices[1].queue(0).collect().unwrap().1.status, Some(S_OK));
}

#[test]
fn a_group_has_the_limits_given_last_and_ends_with_its_last_disk() {
    let setup = setup(1);
    let (daemons, _devices) = group(&setup, &[1, 1], limits(300, 0));
    let of = |daemon: &Daemon| {
        let Status { limits, limit_group, .. } = daemon.status();
        (limits, limit_group.map(|group| group.to_string()))
    };
    limit(&daemons[1], limits(400, MIB));
    assert_eq!(of(&daemons[0]), (limits(400, MIB), Some("g".into())));
    let unchanged = Answer::Limited(false, limits(400, MIB), Some("g".into()));
    assert_eq!(join(&daemons[1], None), unchanged);
    limit(&daemons[0], Limits::NONE);
    assert_eq!(of(&daemons[0]), (Limits::NONE, None));
    assert_eq!(of(&daemons[1]), (limits(400, MIB), Some("g".into())));
    assert_eq!(join(&daemons[0], None), joined("g", limits(400, MIB)));
    for daemon in &daemons {
        limit(daemon, Limits::NONE);
    }
    let Answer::Refused(why) = join(&daemons[0], None) else { panic!("a disk without limits") };
    assert_eq!(why, "the limit group g has no limits; give --iops or --bandwidth");
    assert_eq!(of(&daemons[0]), (Limits::NONE, None));
}
