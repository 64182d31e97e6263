// SPDX-License-Identifier: Apache-2.0
//! Many disks on few threads. Alone in its program, because it looks at the threads of the process.

mod common;

use common::{Daemon, Setup, mem, pool, wait_until};
use driver::{Device, Options};
use std::fs;
use std::sync::Arc;
use std::time::Duration;

const DISKS: u8 = 64;
const THREADS: usize = 2;

/// Sleeps so far of each data-plane thread.
fn sleeps() -> Vec<u64> {
    let tasks = fs::read_dir("/proc/self/task").expect("/proc is mounted").flatten();
    let statuses = tasks.filter_map(|task| fs::read_to_string(task.path().join("status")).ok());
    let field = |text: &str, name: &str| {
        text.lines().find_map(|line| line.strip_prefix(name)).unwrap_or_default().trim().to_owned()
    };
    let plane = statuses.filter(|text| field(text, "Name:").starts_with("vhost-blk-"));
    let mut sleeps: Vec<(String, u64)> = plane
        .map(|text| {
            let count = field(&text, "voluntary_ctxt_switches:").parse().expect("a number");
            (field(&text, "Name:"), count)
        })
        .collect();
    sleeps.sort();
    sleeps.into_iter().map(|(_, count)| count).collect()
}

#[test]
fn sixty_four_disks_on_two_threads_are_served_and_cost_nothing_when_idle() {
    let setup = Setup { threads: THREADS, ..Setup::default() };
    let pool = pool(&setup);
    let daemons: Vec<Daemon> =
        (0..DISKS).map(|_| Daemon::in_pool(Arc::new(mem()), &setup, &pool)).collect();
    let options = Options { scratch_bytes: 1 << 20, ..Options::default() };
    let mut devices: Vec<Device> = daemons.iter().map(|daemon| daemon.connect(&options)).collect();
    let before = sleeps();
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
    let after = sleeps();
    assert!(
        before.iter().zip(&after).all(|(before, after)| after > before),
        "{before:?} {after:?}"
    );
    wait_until("the idle threads do not wake up", || {
        let before = sleeps();
        std::thread::sleep(Duration::from_millis(300));
        sleeps() == before
    });
}
