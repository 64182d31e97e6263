// SPDX-License-Identifier: Apache-2.0
//! The driver against qemu-storage-daemon, a server that shares nothing with this project. It has
//! no packed rings; those have a model in `packed_model.rs`.

use std::fs;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::thread::sleep;
use std::time::Duration;

use driver::{Cuts, Device, Error, Layout, Options, Request};
use tempfile::TempDir;
use virtio_spec::blk::{S_IOERR, S_OK, S_UNSUPP};

const DISK_BYTES: usize = 8 << 20;

/// A daemon with a disk of 8 MiB of zeroes; killed on drop.
struct Daemon {
    child: Child,
    directory: TempDir,
}

impl Daemon {
    /// `None`, and the reason printed, where qemu-storage-daemon is not installed.
    fn start() -> Option<Self> {
        let version =
            Command::new("qemu-storage-daemon").arg("--version").stdout(Stdio::null()).status();
        if version.is_err() {
            println!("SKIP: qemu-storage-daemon is not installed");
            return None;
        }
        let directory = tempfile::tempdir().unwrap();
        fs::write(directory.path().join("disk"), vec![0; DISK_BYTES]).unwrap();
        Some(Self { child: Self::spawn(&directory), directory })
    }

    fn spawn(directory: &TempDir) -> Child {
        let (disk, socket) = (directory.path().join("disk"), directory.path().join("socket"));
        let blockdev =
            format!("driver=file,node-name=disk,filename={},discard=unmap", disk.display());
        let export = format!(
            "type=vhost-user-blk,id=export,node-name=disk,writable=on,num-queues=2,\
             addr.type=unix,addr.path={}",
            socket.display()
        );
        let mut child = Command::new("qemu-storage-daemon")
            .args(["--blockdev", &blockdev, "--export", &export])
            .spawn()
            .unwrap();
        while UnixStream::connect(&socket).is_err() {
            let ended = child.try_wait().unwrap();
            assert!(ended.is_none(), "qemu-storage-daemon has ended without a socket: {ended:?}");
            sleep(Duration::from_millis(10));
        }
        child
    }

    /// Kills the daemon and starts another one on the same disk and socket.
    fn restart(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
        fs::remove_file(self.socket()).unwrap();
        self.child = Self::spawn(&self.directory);
    }

    fn socket(&self) -> PathBuf {
        self.directory.path().join("socket")
    }

    fn disk(&self) -> Vec<u8> {
        fs::read(self.directory.path().join("disk")).unwrap()
    }

    fn connect(&self, options: &Options) -> Device {
        Device::connect(self.socket(), options).unwrap()
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn pattern(len: usize, seed: u8) -> Vec<u8> {
    (0..len).map(|i| (i as u8).wrapping_mul(7).wrapping_add(seed) ^ (i >> 8) as u8).collect()
}

/// Writes with a layout, looks at the file, reads with the same layout.
fn round_trip(layout: &Layout) {
    let Some(daemon) = Daemon::start() else { return };
    let mut device = daemon.connect(&Options::default());
    let data = pattern(4096, 3);
    let written = device.queue(0).execute(&Request::write(16, &data), layout).unwrap();
    assert_eq!((written.status, written.written), (Some(S_OK), 1));
    assert!(daemon.disk()[16 * 512..][..4096] == data, "other bytes lie in the file");
    let read = device.queue(0).execute(&Request::read(16, 4096), layout).unwrap();
    assert_eq!((read.status, read.written), (Some(S_OK), 4097));
    assert!(read.data == data, "other bytes were read");
}

#[test]
fn data_makes_the_round_trip_in_the_usual_layout() {
    round_trip(&Layout::default());
}

#[test]
fn data_makes_the_round_trip_through_an_indirect_table() {
    round_trip(&Layout::indirect());
}

#[test]
fn data_makes_the_round_trip_with_header_and_status_joined_to_the_data() {
    round_trip(&Layout { readable: Cuts::Joined, writable: Cuts::Joined, ..Layout::default() });
}

#[test]
fn data_makes_the_round_trip_with_the_header_split_over_five_descriptors() {
    let readable = Cuts::Lengths(vec![1, 2, 3, 4, 6]);
    round_trip(&Layout { readable, ..Layout::indirect() });
}

#[test]
fn data_makes_the_round_trip_in_odd_unaligned_pieces() {
    let cuts = Cuts::Every(515);
    let (readable, writable) = (cuts.clone(), cuts);
    round_trip(&Layout { readable, writable, misalign: 3, ..Layout::default() });
}

#[test]
fn data_makes_the_round_trip_without_event_index_and_indirect_tables() {
    let Some(daemon) = Daemon::start() else { return };
    let options = Options { event_idx: false, indirect: false, ..Options::default() };
    let mut device = daemon.connect(&options);
    let (data, mut read) = (pattern(8192, 9), vec![0; 8192]);
    device.write(0, &data).unwrap();
    device.read(0, &mut read).unwrap();
    assert!(read == data, "other bytes were read");
}

#[test]
fn data_makes_the_round_trip_in_memory_added_region_by_region() {
    let Some(daemon) = Daemon::start() else { return };
    let regions = vec![(0x10_0000, 1 << 20), (0x1_0000_0000, 32 << 20)];
    let mut device = daemon.connect(&Options { regions, mem_slots: true, ..Options::default() });
    let (data, mut read) = (pattern(4096, 5), vec![0; 4096]);
    device.write(8, &data).unwrap();
    device.read(8, &mut read).unwrap();
    assert!(read == data, "other bytes were read");
}

#[test]
fn the_second_queue_works_beside_the_first() {
    let Some(daemon) = Daemon::start() else { return };
    let mut device = daemon.connect(&Options { num_queues: 2, ..Options::default() });
    let layout = device.layout();
    let data = pattern(512, 1);
    let write = device.queue(1).execute(&Request::write(1, &data), &layout).unwrap();
    let read = device.queue(0).execute(&Request::read(1, 512), &layout).unwrap();
    assert_eq!(write.status, Some(S_OK));
    assert!(read.data == data, "other bytes were read");
}

#[test]
fn indices_wrap_around_on_a_small_ring() {
    let Some(daemon) = Daemon::start() else { return };
    let options = Options { queue_size: 16, ..Options::default() };
    let mut device = daemon.connect(&options);
    let layout = device.layout();
    let mut returned = 0_u32;
    while returned < 70_000 {
        let queue = device.queue(0);
        for sector in 0..16 {
            queue.add(&Request::read(sector, 512), &layout).unwrap();
        }
        queue.queue().publish();
        queue.queue().kick_if_asked();
        for _ in 0..16 {
            assert_eq!(queue.collect().unwrap().1.status, Some(S_OK));
            returned += 1;
        }
    }
    let base = device.session().stop_queue(0).unwrap();
    assert_eq!(base, returned % 0x1_0000);
}

#[test]
fn a_stopped_queue_goes_on_where_it_stood() {
    let Some(daemon) = Daemon::start() else { return };
    let mut device = daemon.connect(&Options::default());
    device.flush().unwrap();
    assert_eq!(device.session().stop_queue(0).unwrap(), 1);
    device.start_queue(0).unwrap();
    device.flush().unwrap();
    assert_eq!(device.session().stop_queue(0).unwrap(), 2);
}

#[test]
fn the_driver_goes_on_with_a_daemon_that_was_started_anew() {
    let Some(mut daemon) = Daemon::start() else { return };
    let mut device = daemon.connect(&Options { inflight: true, ..Options::default() });
    let (data, mut read) = (pattern(4096, 2), vec![0; 4096]);
    device.write(0, &data).unwrap();
    daemon.restart();
    device.reconnect(daemon.socket()).unwrap();
    device.read(0, &mut read).unwrap();
    assert!(read == data, "other bytes were read");
    assert_eq!(device.session().stop_queue(0).unwrap(), 2);
}

#[test]
fn zeroes_and_discards_reach_the_disk() {
    let Some(daemon) = Daemon::start() else { return };
    let mut device = daemon.connect(&Options::default());
    device.write(0, &[0xff; 16 << 10]).unwrap();
    device.write_zeroes(0, 16, 0).unwrap();
    device.discard(16, 16).unwrap();
    device.flush().unwrap();
    assert!(daemon.disk().iter().all(|&byte| byte == 0));
}

#[test]
fn requests_out_of_range_and_of_unknown_kind_are_refused() {
    let Some(daemon) = Daemon::start() else { return };
    let mut device = daemon.connect(&Options::default());
    let end = device.capacity_sectors().unwrap();
    assert_eq!(end as usize * 512, DISK_BYTES);
    let mut sector = [0; 512];
    let outside = device.read(end, &mut sector);
    assert!(matches!(outside, Err(Error::Status(Some(S_IOERR)))), "{outside:?}");
    let unknown = device.request(&Request::new(0x7777, 0, &[], 0));
    assert!(matches!(unknown, Err(Error::Status(Some(S_UNSUPP)))), "{unknown:?}");
    assert_eq!(device.get_id().unwrap().len(), 20);
}

#[test]
fn options_that_the_daemon_lacks_are_named() {
    let Some(daemon) = Daemon::start() else { return };
    let packed = Device::connect(daemon.socket(), &Options { packed: true, ..Options::default() });
    assert_eq!(packed.err().unwrap().to_string(), "the daemon does not offer RING_PACKED");
}

#[test]
fn more_queues_than_the_daemon_has_are_refused() {
    let Some(daemon) = Daemon::start() else { return };
    let options = Options { num_queues: 3, ..Options::default() };
    let refused = Device::connect(daemon.socket(), &options).err().unwrap();
    assert_eq!(refused.to_string(), "the daemon has 2 queues, 3 are wanted");
}

#[test]
fn the_dirty_log_marks_the_pages_that_a_read_fills() {
    let Some(daemon) = Daemon::start() else { return };
    let mut device = daemon.connect(&Options::default());
    let log = device.start_log().unwrap();
    let layout = Layout { align: 4096, ..Layout::default() };
    let placed = device.queue(0).place(&Request::read(0, 8192), &layout).unwrap();
    let buffers = placed.segments.clone();
    device.queue(0).add_placed(placed, false).unwrap();
    device.queue(0).queue().publish();
    device.queue(0).queue().kick();
    device.queue(0).collect().unwrap();
    let dirty = buffers.iter().map(|b| log.is_dirty(b.gpa)).collect::<Vec<_>>();
    assert_eq!(dirty, [false, true, true], "header, data, status");
    assert!(log.is_dirty(buffers[1].gpa + 4096), "the second page of the data");
    let used_ring = device.queue(0).queue().addresses()[2];
    assert!(log.is_dirty(used_ring), "the used ring");
}
