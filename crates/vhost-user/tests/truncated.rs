// SPDX-License-Identifier: Apache-2.0
//! A front-end that truncates the guest's memory loses its own queues, and nothing else happens.

mod common;

use common::{Daemon, LIMIT, Setup, both_rings, mem, pool};
use driver::{Device, Options, Request};
use std::fs::File;
use std::sync::Arc;
use vhost_user::{Answer, Command};

/// Rings are in the first region, requests in the second one.
const REGIONS: [(u64, u64); 2] = [(0, 64 << 10), (1 << 30, 16 << 20)];

fn set_len(device: &Device, region: usize, bytes: u64) {
    let file = device.memory().regions()[region].fd().try_clone_to_owned().unwrap();
    File::from(file).set_len(bytes).unwrap();
}

fn is_faulted(daemon: &Daemon) -> bool {
    let Some(Answer::Status(status)) = daemon.control().ask(Command::Status) else {
        panic!("the daemon answers");
    };
    status.queues[0].running.as_ref().expect("the queue runs").faulted
}

#[test]
fn truncated_memory_stops_its_own_queues_only() {
    let setup = Setup { threads: 1, ..Setup::default() };
    let pool = pool(&setup);
    let good = Daemon::in_pool(Arc::new(mem()), &setup, &pool);
    let mut neighbour = good.connect(&Options::default());
    let daemon = Daemon::in_pool(Arc::new(mem()), &setup, &pool);
    for ring in both_rings() {
        for (region, (_, bytes)) in REGIONS.into_iter().enumerate() {
            let options = Options { regions: REGIONS.to_vec(), ..ring.clone() };
            let mut device = daemon.connect(&options);
            device.write(1, &[1; 512]).unwrap();
            let layout = device.layout();
            device.queue(0).add(&Request::read(1, 4096), &layout).unwrap();
            device.queue(0).queue().publish();
            set_len(&device, region, 0);
            device.queue(0).queue().kick();
            assert!(device.queue(0).queue().wait_err(LIMIT).unwrap(), "region {region}");
            assert!(is_faulted(&daemon));
            neighbour.write(2, &[2; 512]).unwrap();
            // The driver goes on in memory that the daemon does not see.
            set_len(&device, region, bytes);
            for sector in 0..20 {
                device.queue(0).submit(&Request::read(sector, 512), &layout).unwrap();
                device.queue(0).queue().kick();
            }
            neighbour.read(2, &mut [0; 512]).unwrap();
            drop(device);
            daemon.next_outcome().unwrap();
            daemon.connect(&ring).write(3, &[3; 512]).unwrap();
            daemon.next_outcome().unwrap();
        }
    }
}

#[test]
fn a_truncated_dirty_log_ends_nothing() {
    let daemon = Daemon::start(Arc::new(mem()), &Setup::default());
    let mut device = daemon.connect(&Options::default());
    let log = device.start_log().unwrap();
    device.write(1, &[1; 512]).unwrap();
    log.truncate().unwrap();
    device.write(2, &[2; 512]).unwrap();
    device.read(2, &mut [0; 512]).unwrap();
}
