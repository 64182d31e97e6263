// SPDX-License-Identifier: Apache-2.0
//! Requests whose parts lie in several regions of guest memory.

mod common;

use common::{Daemon, both_rings, mem, pattern, wait_until};
use driver::{Layout, Options, Request, Segment};
use virtio_spec::blk::S_OK;

#[test]
fn requests_may_lie_in_several_memory_regions() {
    let daemon = Daemon::of(mem());
    for mem_slots in [false, true] {
        let regions = vec![(0x10_0000, 1 << 20), (0x1_0000_0000, 32 << 20)];
        let options = Options { regions, mem_slots, ..Options::default() };
        let mut device = daemon.connect(&options);
        let data = pattern(4096, 9);
        // The driver places a request in the second region, which has room for many: header and status byte move.
        let request = Request::write(0, &data);
        let mut placed = device.queue(0).place(&request, &Layout::default()).unwrap();
        let (memory, mut header) = (device.memory().clone(), [0; 16]);
        memory.read(placed.segments[0].gpa, &mut header);
        let (first, status) = (memory.alloc_in_region(0, 16, 16), memory.alloc_in_region(0, 1, 1));
        memory.write(first, &header);
        memory.write(status, &[0xff]);
        placed.segments[0].gpa = first;
        placed.segments.last_mut().unwrap().gpa = status;
        assert!(placed.segments[1].gpa > u64::from(u32::MAX), "{placed:?}");
        let queue = device.queue(0).queue();
        queue.add(&placed.segments).unwrap();
        queue.publish();
        queue.kick_if_asked();
        wait_until("the write is used", || device.queue(0).queue().take_used().unwrap().is_some());
        let mut ended = [0xff];
        memory.read(status, &mut ended);
        assert_eq!(ended, [S_OK]);
        let mut read = [0; 4096];
        device.read(0, &mut read).unwrap();
        assert!(read == *data);
    }
}

#[test]
fn a_buffer_may_cross_from_one_region_into_its_neighbour() {
    let daemon = Daemon::of(mem());
    for options in both_rings() {
        let regions = vec![(0, 32 << 20), (32 << 20, 1 << 20)];
        let mut device = daemon.connect(&Options { regions, ..options });
        let data = pattern(8192, 10);
        device.write(0, &data).unwrap();
        let border = 32 << 20;
        let mut placed =
            device.queue(0).place(&Request::read(0, 8192), &Layout::default()).unwrap();
        placed.segments[1] = Segment::writable(border - 4096, 8192);
        // The driver's own view does not cross regions: look at the two halves by hand.
        let memory = device.memory().clone();
        let queue = device.queue(0).queue();
        queue.add(&placed.segments).unwrap();
        queue.publish();
        queue.kick_if_asked();
        let mut used = None;
        wait_until("the read is used", || {
            used = device.queue(0).queue().take_used().unwrap();
            used.is_some()
        });
        assert_eq!(used.unwrap().len, 8193);
        let mut read = vec![0; 8192];
        let (first, second) = read.split_at_mut(4096);
        memory.read(border - 4096, first);
        memory.read(border, second);
        assert!(read == data);
    }
}
