// SPDX-License-Identifier: Apache-2.0
//! A front-end that truncates memory that it shares loses its own queues, and nothing else happens.

mod common;

use common::plane::skip_on_kernel;
use common::{LIMIT, OneThread, TMPFS, both_rings};
use driver::{Device, Options, Request};
use std::fs::File;
use std::os::fd::AsFd;

/// Rings are in the first region, requests in the second one.
const REGIONS: [(u64, u64); 2] = [(0, 64 << 10), (1 << 30, 16 << 20)];

const SET_INFLIGHT_FD: u32 = 32;
/// Room for a queue of either layout.
const REGION_BYTES: u64 = 8192;

fn set_len(device: &Device, region: usize, bytes: u64) {
    let file = device.memory().regions()[region].fd().try_clone_to_owned().unwrap();
    File::from(file).set_len(bytes).unwrap();
}

#[test]
fn truncated_memory_stops_its_own_queues_only() {
    let thread = OneThread::new();
    let mut neighbour = thread.first.connect(&Options::default());
    let daemon = thread.another();
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
            assert!(daemon.is_faulted());
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

/// Connects a guest, truncates the file that `share` passes to the daemon, and requires a fault of its queue and
/// of no other one.
fn faults(ring: &Options, share: impl Fn(&mut Device) -> File) {
    let thread = OneThread::new();
    let mut neighbour = thread.first.connect(&Options { inflight: true, ..Options::default() });
    let _log = neighbour.start_log().unwrap();
    let daemon = thread.another();
    let mut device = daemon.connect(ring);
    let file = share(&mut device);
    device.session().config().unwrap(); // the daemon has had all messages
    file.set_len(0).unwrap();
    let layout = device.layout();
    // The daemon finds the loss by the mark of the first request.
    for sector in [1, 2] {
        device.queue(0).submit(&Request::write(sector, &[1; 512]), &layout).unwrap();
        neighbour.write(sector, &[1; 512]).unwrap();
        while device.queue(0).try_collect().unwrap().is_none() && !daemon.is_faulted() {}
    }
    assert!(device.queue(0).queue().wait_err(LIMIT).unwrap());
    assert!(daemon.is_faulted() && !thread.first.is_faulted());
    neighbour.write(3, &[3; 512]).unwrap();
    drop(device);
    daemon.next_outcome().unwrap();
    daemon.connect(ring).write(4, &[4; 512]).unwrap();
}

#[test]
fn a_truncated_dirty_log_or_in_flight_region_stops_its_own_queues_only() {
    if skip_on_kernel("the kernel signals the err eventfd, and the queue goes on") {
        return;
    }
    for ring in both_rings() {
        faults(&ring, |device| {
            let log = device.start_log().unwrap();
            log.file().unwrap()
        });
        // The daemon seals a region that it makes itself.
        faults(&ring, |device| {
            let region = tempfile::tempfile_in(TMPFS).unwrap();
            region.set_len(REGION_BYTES).unwrap();
            let size_and_offset = [REGION_BYTES, 0].map(u64::to_ne_bytes).concat();
            let queues_and_size = [1_u16, 128, 0, 0].map(u16::to_ne_bytes).concat();
            let message = [size_and_offset, queues_and_size].concat();
            device.session().raw().message(SET_INFLIGHT_FD, &message, &[region.as_fd()]).unwrap();
            region
        });
    }
}
