// SPDX-License-Identifier: Apache-2.0
//! Many disks on few threads. Alone in its program, because it looks at the threads of the process.

mod common;

use common::{Daemon, Setup, mem, pool, wait_until};
use driver::{Device, Options};
use std::collections::BTreeMap;
use std::fs;
use std::sync::Arc;
use std::time::Duration;

const DISKS: u8 = 64;
const THREADS: usize = 2;
/// A thread that has used nothing for this time sleeps.
const SETTLED: Duration = Duration::from_millis(100);
/// An idle thread may not run once in this time.
const IDLE: Duration = Duration::from_secs(2);

/// Use of the CPU by a data-plane thread so far.
#[derive(Debug, Default, PartialEq)]
struct Usage {
    /// It waits; a thread without a CPU does not.
    is_asleep: bool,
    /// Clock ticks on a CPU, in user space and in the kernel.
    ticks: u64,
    sleeps: u64,
    /// Switches to another thread that this thread did not ask for.
    preemptions: u64,
}

/// The value of a line of `/proc/PID/status`.
fn field<'a>(status: &'a str, name: &str) -> &'a str {
    status.lines().find_map(|line| line.strip_prefix(name)).unwrap_or_default().trim()
}

/// The usage of each data-plane thread, in the order of the names.
fn usage() -> Vec<Usage> {
    let tasks = fs::read_dir("/proc/self/task").expect("/proc is mounted").flatten();
    let mut found = BTreeMap::new();
    for task in tasks {
        let text = |name| fs::read_to_string(task.path().join(name)).unwrap_or_default();
        let (status, stat) = (text("status"), text("stat"));
        let name = field(&status, "Name:");
        if !name.starts_with("vhost-blk-") {
            continue;
        }
        let (_, after_name) = stat.rsplit_once(") ").expect("a name in brackets");
        // `utime` and `stime` are the fields 14 and 15; the first one after the name is 3.
        let times = after_name.split(' ').skip(11).take(2);
        let usage = Usage {
            is_asleep: after_name.starts_with('S'),
            ticks: times.map(|time| time.parse::<u64>().expect("a number")).sum(),
            sleeps: field(&status, "voluntary_ctxt_switches:").parse().expect("a number"),
            preemptions: field(&status, "nonvoluntary_ctxt_switches:").parse().expect("a number"),
        };
        found.insert(name.to_owned(), usage);
    }
    found.into_values().collect()
}

#[test]
fn sixty_four_disks_on_two_threads_are_served_and_cost_nothing_when_idle() {
    let setup = Setup { threads: THREADS, ..Setup::default() };
    let pool = pool(&setup);
    let daemons: Vec<Daemon> =
        (0..DISKS).map(|_| Daemon::in_pool(Arc::new(mem()), &setup, &pool)).collect();
    let options = Options { scratch_bytes: 1 << 20, ..Options::default() };
    let mut devices: Vec<Device> = daemons.iter().map(|daemon| daemon.connect(&options)).collect();
    let before = usage();
    assert_eq!(before.len(), THREADS);
    for round in 0..20 {
        for (number, device) in (0..).zip(&mut devices) {
            device.write(round, &[number; 512]).unwrap();
        }
    }
    for (number, device) in (0..).zip(&mut devices) {
        let mut data = [0; 512];
        device.read(19, &mut data).unwrap();
        assert_eq!(data, [number; 512]);
    }
    let after = usage();
    assert!(
        before.iter().zip(&after).all(|(before, after)| after.sleeps > before.sleeps),
        "{before:?} {after:?}"
    );
    wait_until("the threads have polled their last time", || {
        let before = usage();
        std::thread::sleep(SETTLED);
        before.iter().all(|usage| usage.is_asleep) && usage() == before
    });
    let before = usage();
    std::thread::sleep(IDLE);
    assert_eq!(before, usage(), "an idle thread has run");
}
