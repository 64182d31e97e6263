// SPDX-License-Identifier: Apache-2.0
//! libblkio's drivers, which share no code with this project, against the daemon's core.
// UNSAFETY: their requests name shared memory by raw pointers.
#![expect(unsafe_code)]

mod common;

use backend::{Disk, FileOptions};
use common::{Daemon, LIMIT, Setup, TMPFS, file, mem, pattern};
use driver::{GuestMemory, RawChannel};
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;
use virtio_driver::{
    VhostUser, VirtioBlkFeatureFlags, VirtioBlkQueue, VirtioBlkTransport, VirtioFeatureFlags,
};

const MEMORY_BYTES: u64 = 4 << 20;
/// Requests of 32 KiB in each batch.
const BATCH: usize = 32;
const LEN: usize = 32 << 10;

/// libblkio's low-level driver with shared memory for data.
struct VirtioDriver {
    transport: Box<VirtioBlkTransport>,
    queues: Vec<VirtioBlkQueue<'static, usize>>,
    memory: Arc<GuestMemory>,
}

impl VirtioDriver {
    fn connect(socket: &Path, features: VirtioFeatureFlags, num_queues: usize) -> Self {
        let blk = VirtioBlkFeatureFlags::FLUSH
            | VirtioBlkFeatureFlags::MQ
            | VirtioBlkFeatureFlags::DISCARD
            | VirtioBlkFeatureFlags::WRITE_ZEROES;
        let wanted = (features | VirtioFeatureFlags::VERSION_1).bits() | blk.bits();
        let socket = socket.to_str().expect("a path of plain characters");
        let transport = VhostUser::new(socket, wanted).expect("the driver connects");
        let mut transport: Box<VirtioBlkTransport> = Box::new(transport);
        assert_eq!(transport.get_features() & features.bits(), features.bits(), "all negotiated");
        let queues = VirtioBlkQueue::setup_queues(&mut *transport, num_queues, 128);
        let queues = queues.expect("the queues start");
        let memory = GuestMemory::new(&[(0, MEMORY_BYTES)]).unwrap();
        let region = &memory.regions()[0];
        let (address, fd) = (region.user_address() as usize, region.fd().as_raw_fd());
        transport.map_mem_region(address, MEMORY_BYTES as usize, fd, 0).expect("memory is shared");
        VirtioDriver { transport, queues, memory }
    }

    fn buffer(&self, number: usize) -> *mut u8 {
        (self.memory.regions()[0].user_address() as usize + number * LEN) as *mut u8
    }

    /// Kicks queue `index` and waits for `count` requests, all of which have to succeed.
    fn finish(&mut self, index: usize, count: usize) {
        if self.queues[index].avail_notif_needed() {
            self.transport.get_submission_notifier(index).notify().expect("a kick");
        }
        let end = Instant::now() + LIMIT;
        let mut done = 0;
        while done < count {
            for completion in self.queues[index].completions() {
                assert_eq!(completion.ret, 0, "request {}", completion.context);
                done += 1;
            }
            assert!(Instant::now() < end, "{done} of {count} requests completed");
            std::thread::yield_now();
        }
    }

    /// Writes, flushes, reads back, zeroes and discards; more than once around the ring.
    fn verify(&mut self) {
        for round in 0..12_u64 {
            let index = round as usize % self.queues.len();
            for n in 0..BATCH {
                let data = pattern(LEN, round * 100 + n as u64);
                self.memory.write((n * LEN) as u64, &data);
                let (at, buffer) = ((n * LEN) as u64, self.buffer(n));
                // SAFETY: the buffer lies in the shared memory, which `self` keeps.
                unsafe { self.queues[index].write_raw(at, buffer, LEN, n) }.expect("room");
            }
            self.finish(index, BATCH);
            self.queues[index].flush(0).expect("room");
            self.finish(index, 1);
            self.memory.write(0, &vec![0; BATCH * LEN]);
            for n in 0..BATCH {
                let (at, buffer) = ((n * LEN) as u64, self.buffer(n));
                // SAFETY: as above.
                unsafe { self.queues[index].read_raw(at, buffer, LEN, n) }.expect("room");
            }
            self.finish(index, BATCH);
            for n in 0..BATCH {
                let mut data = vec![0; LEN];
                self.memory.read((n * LEN) as u64, &mut data);
                assert!(data == pattern(LEN, round * 100 + n as u64), "round {round}, buffer {n}");
            }
        }
        self.queues[0].write_zeroes(0, LEN as u64, true, 0).expect("room");
        self.finish(0, 1);
        self.queues[0].discard(LEN as u64, LEN as u64, 1).expect("room");
        self.finish(0, 1);
        let buffer = self.buffer(0);
        // SAFETY: as above.
        unsafe { self.queues[0].read_raw(0, buffer, LEN, 2) }.expect("room");
        self.finish(0, 1);
        let mut data = vec![1; LEN];
        self.memory.read(0, &mut data);
        assert!(data == vec![0; LEN], "zeroed");
    }
}

fn two_queues(disk: Arc<dyn Disk>) -> Daemon {
    Daemon::start(disk, &Setup { queues: 2, threads: 2, ..Setup::default() })
}

/// Split rings, with and without what may be negotiated.
fn split_features() -> [VirtioFeatureFlags; 3] {
    let (indirect, event) =
        (VirtioFeatureFlags::RING_INDIRECT_DESC, VirtioFeatureFlags::RING_EVENT_IDX);
    [VirtioFeatureFlags::empty(), event, indirect | event]
}

#[test]
fn virtio_driver_moves_data_through_split_rings() {
    let daemon = two_queues(Arc::new(mem()));
    for features in split_features() {
        VirtioDriver::connect(daemon.socket(), features, 2).verify();
        daemon.next_outcome().expect("it leaves well");
    }
}

#[test]
fn virtio_driver_moves_data_to_a_direct_file() {
    let (disk, _directory) = file(TMPFS, FileOptions::default());
    let daemon = two_queues(Arc::new(disk));
    VirtioDriver::connect(daemon.socket(), VirtioFeatureFlags::RING_EVENT_IDX, 2).verify();
}

const SET_VRING_BASE: u32 = 10;
/// Both positions at the start of a packed ring, with their wrap counters.
const PACKED_START: u32 = 0x8000_8000;

/// Stands between `virtio-driver` and the daemon: that driver says 0 as the base of a packed ring,
/// which means wrap counters of 0, but starts with wrap counters of 1 as the specification has it.
fn mending_socket(daemon: &Path, directory: &Path) -> std::path::PathBuf {
    let socket = directory.join("mended");
    let listener = UnixListener::bind(&socket).unwrap();
    let daemon = daemon.to_owned();
    std::thread::spawn(move || {
        for front in listener.incoming() {
            let (front, back) = (front.unwrap(), UnixStream::connect(&daemon).unwrap());
            let (front_out, back_out) = (front.try_clone().unwrap(), back.try_clone().unwrap());
            std::thread::spawn(move || pass(back, front_out, |_, _| {}));
            pass(front, back_out, |code, payload| {
                if code == SET_VRING_BASE {
                    assert_eq!(payload[4..], [0; 4], "the driver has changed: mend no more");
                    payload[4..].copy_from_slice(&PACKED_START.to_le_bytes());
                }
            });
        }
    });
    socket
}

/// Passes messages on until one side leaves.
fn pass(from: UnixStream, to: UnixStream, mend: impl Fn(u32, &mut [u8])) {
    let (from, to) = (RawChannel::from_stream(from), RawChannel::from_stream(to));
    while let Ok(mut message) = from.reply(10 * LIMIT) {
        mend(message.code, &mut message.payload);
        let fds: Vec<_> = message.fds.iter().map(|fd| fd.as_fd()).collect();
        let size = message.payload.len() as u32;
        if to.send(message.code, message.flags, size, &message.payload, &fds).is_err() {
            break;
        }
    }
    let _ = to.stream().shutdown(std::net::Shutdown::Both);
}

#[test]
fn virtio_driver_moves_data_through_packed_rings() {
    let daemon = two_queues(Arc::new(mem()));
    let directory = tempfile::tempdir().unwrap();
    let socket = mending_socket(daemon.socket(), directory.path());
    for features in split_features() {
        let features = features | VirtioFeatureFlags::RING_PACKED;
        VirtioDriver::connect(&socket, features, 2).verify();
        daemon.next_outcome().expect("it leaves well");
    }
}

#[test]
fn blkio_moves_data_and_finds_the_capacity() {
    let (disk, _directory) = file(TMPFS, FileOptions::default());
    let daemon = two_queues(Arc::new(disk));
    let mut blkio = blkio::Blkio::new("virtio-blk-vhost-user").unwrap();
    blkio.set_str("path", daemon.socket().to_str().unwrap()).unwrap();
    blkio.connect().expect("it connects");
    assert_eq!(blkio.get_u64("capacity").unwrap(), common::DISK_BYTES);
    blkio.set_i32("num-queues", 2).unwrap();
    let mut queues = blkio.start().expect("it starts").queues;
    let region = blkio.alloc_mem_region(BATCH * LEN).expect("memory");
    blkio.map_mem_region(&region).expect("memory is shared");
    let none = blkio::ReqFlags::empty();
    for round in 0..6 {
        let queue = &mut queues[round % 2];
        let content = pattern(BATCH * LEN, round as u64);
        let memory = region.addr as *mut u8;
        // SAFETY: the region has this length, and no request is in flight.
        unsafe { memory.copy_from_nonoverlapping(content.as_ptr(), content.len()) };
        for n in 0..BATCH {
            queue.write((n * LEN) as u64, memory.wrapping_add(n * LEN), LEN, n, none);
        }
        finish_blkio(queue, BATCH);
        queue.flush(0, none);
        finish_blkio(queue, 1);
        // SAFETY: as above.
        unsafe { memory.write_bytes(0, content.len()) };
        for n in 0..BATCH {
            queue.read((n * LEN) as u64, memory.wrapping_add(n * LEN), LEN, n, none);
        }
        finish_blkio(queue, BATCH);
        let mut back = vec![0; content.len()];
        // SAFETY: as above.
        unsafe { memory.copy_to_nonoverlapping(back.as_mut_ptr(), back.len()) };
        assert!(back == content, "round {round}");
        queue.write_zeroes(0, LEN as u64, 0, none);
        queue.discard(LEN as u64, LEN as u64, 1, none);
        finish_blkio(queue, 2);
    }
}

fn finish_blkio(queue: &mut blkio::Blkioq, count: usize) {
    let mut completions: Vec<_> =
        std::iter::repeat_with(std::mem::MaybeUninit::uninit).take(count).collect();
    let mut limit = LIMIT;
    let got = queue.do_io(&mut completions, count, Some(&mut limit), None).expect("all complete");
    assert_eq!(got, count);
    for completion in &completions {
        // SAFETY: `do_io` filled as many as it returned, which are all.
        let completion: &blkio::Completion = unsafe { completion.assume_init_ref() };
        assert_eq!(completion.ret, 0, "request {}", completion.user_data);
    }
}
