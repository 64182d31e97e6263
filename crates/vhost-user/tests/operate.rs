// SPDX-License-Identifier: Apache-2.0
//! Commands to a device that serves: pause, resume and resize under load.

mod common;

use backend::{Disk, FileOptions, Mem};
use common::gate::Gate;
use common::load::under_load;
use common::plane::Plain;
use common::{DISK, DISK_BYTES, Daemon, Setup, file, mem, wait_until};
use data_plane::Limits;
use driver::{Device, Options, Request};
use std::io::Read;
use std::num::NonZeroU64;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::atomic::{AtomicBool, AtomicUsize};
use std::time::Duration;
use vhost::vhost_user::message::VhostUserProtocolFeatures;
use vhost_user::{Answer, Command, Notice};
use virtio_spec::blk::{S_IOERR, S_OK};

const QUEUES: u16 = 2;
const ROUNDS: u64 = 10;
const SET_BACKEND_REQ_FD: u32 = 21;
/// VHOST_USER_BACKEND_CONFIG_CHANGE_MSG, version 1, no payload.
const CONFIG_CHANGE: [u8; 12] = [2, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0];

fn setup() -> Setup {
    Setup { queues: QUEUES, threads: 2, ..Setup::default() }
}

fn options() -> Options {
    let protocol_features =
        Options::default().protocol_features | VhostUserProtocolFeatures::BACKEND_REQ.bits();
    Options { num_queues: QUEUES, protocol_features, ..Options::default() }
}

fn ask(daemon: &Daemon, command: Command) -> Answer {
    daemon.control().ask(command).expect("the device is there")
}

fn chains(daemon: &Daemon) -> u64 {
    daemon.status().queues.iter().map(|queue| queue.total.chains).sum()
}

/// Gives the daemon a channel for its own messages.
fn give_channel(device: &mut Device) -> UnixStream {
    let (ours, theirs) = UnixStream::pair().unwrap();
    let raw = device.session().raw();
    raw.message(SET_BACKEND_REQ_FD, &[], &[theirs.as_fd()]).unwrap();
    ours.set_read_timeout(Some(common::LIMIT)).unwrap();
    ours
}

/// The next message of the daemon.
fn next_message(channel: &mut UnixStream) -> [u8; 12] {
    let mut message = [0; 12];
    channel.read_exact(&mut message).expect("a message");
    message
}

#[track_caller]
fn stays_silent(channel: &mut UnixStream) {
    channel.set_read_timeout(Some(Duration::from_millis(300))).unwrap();
    let read = channel.read(&mut [0; 12]);
    assert!(
        read.as_ref().is_err_and(|error| error.kind() == std::io::ErrorKind::WouldBlock),
        "{read:?}"
    );
    channel.set_read_timeout(Some(common::LIMIT)).unwrap();
}

fn capacity_read(device: &mut Device) -> u64 {
    u64::from_le(device.session().config().unwrap().capacity) * 512
}

fn execute(device: &mut Device, request: &Request) -> Option<u8> {
    let layout = device.layout();
    device.queue(0).execute(request, &layout).unwrap().status
}

#[test]
fn a_paused_device_takes_no_request_and_a_resumed_one_goes_on() {
    for packed in common::layouts() {
        let daemon = Daemon::start(Arc::new(Plain::new()), &setup());
        let device = daemon.connect(&Options { packed, ..options() });
        let (done, session) = under_load(device, QUEUES.into(), |loaded| {
            for round in 0..ROUNDS {
                loaded.wait_for_progress(3);
                assert_eq!(ask(&daemon, Command::Pause), Answer::Changed(true), "{round}");
                assert_eq!(ask(&daemon, Command::Pause), Answer::Changed(false));
                let told = daemon.status();
                assert!(told.paused && told.queues.iter().all(|queue| queue.plane.is_none()));
                let before = chains(&daemon);
                std::thread::sleep(Duration::from_millis(5));
                assert_eq!(chains(&daemon), before);
                assert_eq!(ask(&daemon, Command::Resume), Answer::Changed(true));
                assert_eq!(ask(&daemon, Command::Resume), Answer::Changed(false));
            }
            loaded.wait_for_progress(3);
        });
        assert!(done.iter().all(|done| done.reads + done.writes >= 3 * ROUNDS));
        drop(session);
        daemon.next_outcome().expect("the connection ends well");
    }
}

#[test]
fn a_pause_outlives_connections_and_changes_of_the_queues() {
    let daemon = Daemon::start(Arc::new(mem()), &setup());
    let mut device = daemon.connect(&options());
    device.write(1, &[1; 512]).unwrap();
    ask(&daemon, Command::Pause);
    // Messages change a paused queue and start none.
    device.session().enable(0, false).unwrap();
    device.session().enable(0, true).unwrap();
    assert_eq!(device.session().stop_queue(1).unwrap(), 0);
    assert!(daemon.status().queues.iter().all(|queue| queue.plane.is_none()));
    drop(device);
    daemon.next_outcome().unwrap();
    let mut device = daemon.connect(&options());
    let layout = device.layout();
    device.queue(0).submit(&Request::read(1, 512), &layout).unwrap();
    std::thread::sleep(Duration::from_millis(20));
    assert_eq!(daemon.status().queues[0].plane, None);
    ask(&daemon, Command::Resume);
    assert_eq!(device.queue(0).collect().unwrap().1.data, [1; 512]);
    assert!(daemon.status().queues.iter().all(|queue| queue.plane.is_some()));
}

#[test]
fn a_disk_grows_under_load_and_the_front_end_is_told() {
    for place in [DISK, common::TMPFS] {
        let (disk, _directory) = file(place, FileOptions::default());
        let daemon = Daemon::start(Arc::new(disk), &setup());
        let mut device = daemon.connect(&options());
        assert_eq!(capacity_read(&mut device), DISK_BYTES);
        let mut channel = give_channel(&mut device);
        stays_silent(&mut channel);
        let (_, mut session) = under_load(device, QUEUES.into(), |loaded| {
            for round in 1..=ROUNDS {
                let bytes = DISK_BYTES + round * 4096;
                loaded.wait_for_progress(3);
                assert_eq!(ask(&daemon, Command::Resize(Some(bytes))), Answer::Resized(bytes));
                assert_eq!(daemon.status().capacity_bytes, bytes);
                assert_eq!(next_message(&mut channel), CONFIG_CHANGE);
            }
            loaded.wait_for_progress(3);
        });
        let read = u64::from_le(session.config().unwrap().capacity) * 512;
        assert_eq!(read, DISK_BYTES + ROUNDS * 4096);
        stays_silent(&mut channel);
        drop(session);
        daemon.next_outcome().expect("the connection ends well");
    }
}

#[test]
fn requests_reach_the_new_end_and_not_beyond() {
    let (disk, _directory) = file(DISK, FileOptions::default());
    let daemon = Daemon::start(Arc::new(disk), &setup());
    let mut device = daemon.connect(&options());
    let beyond = Request::write(DISK_BYTES / 512, &[3; 4096]);
    assert_eq!(execute(&mut device, &beyond), Some(S_IOERR));
    ask(&daemon, Command::Resize(Some(DISK_BYTES + 4096)));
    assert_eq!(execute(&mut device, &beyond), Some(S_OK));
    let past = Request::read(DISK_BYTES / 512 + 8, 512);
    assert_eq!(execute(&mut device, &past), Some(S_IOERR));
    let mut data = [0; 4096];
    device.read(DISK_BYTES / 512, &mut data).unwrap();
    assert_eq!(data, [3; 4096]);
}

#[test]
fn a_front_end_that_starts_its_queues_after_the_growth_is_told_then() {
    let (disk, _directory) = file(DISK, FileOptions::default());
    let daemon = Daemon::start(Arc::new(disk), &setup());
    let options = Options { setup: driver::QueueSetup::Untouched, ..options() };
    let mut device = daemon.connect(&options);
    let mut channel = give_channel(&mut device);
    ask(&daemon, Command::Resize(Some(DISK_BYTES * 2)));
    stays_silent(&mut channel);
    let memory = device.memory().clone();
    device.session().share_memory(&memory, false).unwrap();
    device.start_queue(0).unwrap();
    assert_eq!(next_message(&mut channel), CONFIG_CHANGE);
    stays_silent(&mut channel);
}

#[test]
fn a_paused_device_grows_and_the_front_end_is_told_after_the_resume() {
    let (disk, _directory) = file(DISK, FileOptions::default());
    let daemon = Daemon::start(Arc::new(disk), &setup());
    let mut device = daemon.connect(&options());
    capacity_read(&mut device);
    let mut channel = give_channel(&mut device);
    ask(&daemon, Command::Pause);
    let grown = DISK_BYTES + (1 << 20);
    assert_eq!(ask(&daemon, Command::Resize(Some(grown))), Answer::Resized(grown));
    stays_silent(&mut channel);
    ask(&daemon, Command::Resume);
    assert_eq!(next_message(&mut channel), CONFIG_CHANGE);
    assert_eq!(execute(&mut device, &Request::write(grown / 512 - 1, &[1; 512])), Some(S_OK));
}

#[test]
fn write_through_holds_at_once_and_the_front_end_is_told_and_write_back_is_refused() {
    let (notices, told) = std::sync::mpsc::channel();
    let setup = Setup { notices: Some(notices), ..setup() };
    let daemon = Daemon::start(Arc::new(mem()), &setup);
    let mut device = daemon.connect(&options());
    assert_eq!(device.session().config().unwrap().writeback, 1);
    let mut channel = give_channel(&mut device);
    assert_eq!(ask(&daemon, Command::SetCache(true)), Answer::Changed(false));
    assert_eq!(ask(&daemon, Command::SetCache(false)), Answer::Changed(true));
    assert_eq!(next_message(&mut channel), CONFIG_CHANGE);
    assert_eq!(device.session().config().unwrap().writeback, 0);
    let Answer::Refused(why) = ask(&daemon, Command::SetCache(true)) else { panic!("changed") };
    assert!(why.contains("sends no FLUSH"), "{why}");
    assert!(!daemon.status().writeback);
    let notices: Vec<_> = told.try_iter().collect();
    assert_eq!(notices, [Notice::CacheSet(false)]);
}

#[test]
fn changes_are_told_once_and_commands_without_effect_are_not() {
    let (notices, told) = std::sync::mpsc::channel();
    let setup = Setup { notices: Some(notices), ..setup() };
    let (disk, _directory) = file(DISK, FileOptions::default());
    let daemon = Daemon::start(Arc::new(disk), &setup);
    let _device = daemon.connect(&options());
    let limits = Limits { iops: NonZeroU64::new(5), ..Limits::NONE };
    for _ in 0..2 {
        ask(&daemon, Command::Pause);
        ask(&daemon, Command::Pause);
        ask(&daemon, Command::Resume);
        ask(&daemon, Command::Resize(Some(2 * DISK_BYTES)));
        ask(&daemon, Command::Limit(None, limits.into()));
    }
    let expected = [
        Notice::Paused,
        Notice::Resumed,
        Notice::Resized(2 * DISK_BYTES),
        Notice::Limited(limits, None),
        Notice::Paused,
        Notice::Resumed,
    ];
    assert_eq!(told.try_iter().collect::<Vec<_>>(), expected);
}

#[test]
fn a_channel_that_is_not_read_delays_no_growth() {
    let (disk, _directory) = file(DISK, FileOptions::default());
    let daemon = Daemon::start(Arc::new(disk), &setup());
    let mut device = daemon.connect(&options());
    let (unread, given) = UnixStream::pair().unwrap();
    given.set_nonblocking(true).unwrap();
    while rustix::io::write(&given, &[0; 4096]).is_ok() {}
    let raw = device.session().raw();
    raw.message_with_ack(SET_BACKEND_REQ_FD, &[], &[given.as_fd()], common::LIMIT).unwrap();
    // The daemon's descriptor has the same flags.
    given.set_nonblocking(false).unwrap();
    for round in 1..=3 {
        ask(&daemon, Command::Resize(Some(DISK_BYTES + round * 4096)));
        std::thread::sleep(Duration::from_millis(100));
        device.write(DISK_BYTES / 512 + round * 8 - 1, &[1; 512]).unwrap();
    }
    drop(unread);
    ask(&daemon, Command::Resize(Some(DISK_BYTES * 2)));
    wait_until("it grows", || daemon.status().capacity_bytes == DISK_BYTES * 2);
    device.write(0, &[1; 512]).unwrap();
}

#[test]
fn a_growth_that_fails_changes_nothing_for_the_guest() {
    let disk = Arc::new(backend::Null::new(DISK_BYTES));
    let daemon = Daemon::start(disk, &setup());
    let mut device = daemon.connect(&options());
    match ask(&daemon, Command::Resize(Some(DISK_BYTES * 2))) {
        Answer::Refused(why) => assert!(why.contains("--size"), "{why}"),
        other => panic!("{other:?}"),
    }
    device.write(0, &[1; 512]).unwrap();
    assert_eq!(daemon.status().capacity_bytes, DISK_BYTES);
    // It never stopped: the counts go on.
    assert_eq!(chains(&daemon), 1);
}

#[test]
fn front_ends_that_connect_in_a_loop_delay_no_announcement_of_the_capacity() {
    let (disk, _directory) = file(DISK, FileOptions::default());
    let daemon = Daemon::start(Arc::new(disk), &setup());
    let mut device = daemon.connect(&options());
    let mut channel = give_channel(&mut device);
    device.write(0, &[1; 512]).unwrap();
    let (done, socket) = (AtomicBool::new(false), daemon.socket());
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !done.load(Relaxed) {
                drop(UnixStream::connect(socket));
                std::thread::sleep(Duration::from_millis(5));
            }
        });
        assert_eq!(
            ask(&daemon, Command::Resize(Some(2 * DISK_BYTES))),
            Answer::Resized(2 * DISK_BYTES)
        );
        let message = channel.read_exact(&mut [0; 12]);
        done.store(true, Relaxed);
        message.expect("CONFIG_CHANGE");
    });
}

/// A disk that counts its resizes, and refuses them.
struct Counting {
    inner: Gate,
    grows_in_block: bool,
    resizes: Arc<AtomicUsize>,
}

impl Disk for Counting {
    fn info(&self) -> backend::Info {
        backend::Info { grows_in_block: self.grows_in_block, ..self.inner.info() }
    }

    fn resize(&self, _bytes: Option<u64>) -> Result<(), backend::ResizeError> {
        self.resizes.fetch_add(1, Relaxed);
        Err(backend::ResizeError::Fixed)
    }

    fn sync(&self) -> std::io::Result<()> {
        self.inner.sync()
    }

    fn open_lane(&self) -> std::io::Result<Box<dyn backend::Lane>> {
        self.inner.open_lane()
    }

    fn layers(&self) -> u8 {
        self.inner.layers()
    }
}

/// A write of a part of a block of O_DIRECT reads all of it first, and would write the old end of the disk back.
#[test]
fn a_disk_that_grows_within_a_block_has_no_request_in_flight_then() {
    let grown = Some(2 * DISK_BYTES);
    // Without a new size, as at each message of the kernel about a device, no queue stops before the look at it.
    for (grows_in_block, bytes, is_drained) in
        [(false, grown, false), (true, grown, true), (true, None, false)]
    {
        let (inner, permits) = Gate::new(Arc::new(Mem::new(DISK_BYTES).unwrap()));
        let resizes = Arc::new(AtomicUsize::new(0));
        let disk = Counting { inner, grows_in_block, resizes: Arc::clone(&resizes) };
        let daemon = Daemon::of(disk);
        let mut device = daemon.connect(&Options::default());
        let layout = device.layout();
        device.queue(0).submit(&Request::write(0, &[1; 512]), &layout).unwrap();
        wait_until("the request is taken", || chains(&daemon) == 1);
        let answer = daemon.control().post(Command::Resize(bytes));
        match is_drained {
            // With too little time the test passes, too.
            true => std::thread::sleep(Duration::from_millis(50)),
            false => wait_until("the resize", || resizes.load(Relaxed) == 1),
        }
        assert_eq!(resizes.load(Relaxed), usize::from(!is_drained));
        permits.open();
        assert!(matches!(answer.receive(common::LIMIT), Ok(Answer::Refused(_))));
        assert_eq!(resizes.load(Relaxed), 1);
        wait_until("the request is done", || device.queue(0).try_collect().unwrap().is_some());
        device.write(1, &[2; 512]).unwrap();
    }
}

/// A disk whose lanes cannot be opened any more.
struct Closed {
    disk: backend::File,
    closed: std::sync::atomic::AtomicBool,
}

impl Disk for Closed {
    fn info(&self) -> backend::Info {
        self.disk.info()
    }

    fn resize(&self, bytes: Option<u64>) -> Result<(), backend::ResizeError> {
        self.disk.resize(bytes)
    }

    fn sync(&self) -> std::io::Result<()> {
        Ok(())
    }

    fn open_lane(&self) -> std::io::Result<Box<dyn backend::Lane>> {
        match self.closed.load(std::sync::atomic::Ordering::Relaxed) {
            true => Err(std::io::Error::from_raw_os_error(libc::EMFILE)),
            false => self.disk.open_lane(),
        }
    }
}

#[test]
fn without_descriptors_the_guest_keeps_the_old_size_and_a_repetition_succeeds() {
    let (disk, _directory) = file(DISK, FileOptions::default());
    let disk = Arc::new(Closed { disk, closed: false.into() });
    let daemon = Daemon::start(disk.clone(), &setup());
    let mut device = daemon.connect(&options());
    disk.closed.store(true, std::sync::atomic::Ordering::Relaxed);
    let grown = DISK_BYTES * 2;
    match ask(&daemon, Command::Resize(Some(grown))) {
        Answer::Refused(why) => assert!(why.contains("repeat the command"), "{why}"),
        other => panic!("{other:?}"),
    }
    assert_eq!(capacity_read(&mut device), DISK_BYTES);
    device.write(0, &[1; 512]).unwrap();
    disk.closed.store(false, std::sync::atomic::Ordering::Relaxed);
    assert_eq!(ask(&daemon, Command::Resize(Some(grown))), Answer::Resized(grown));
    assert_eq!(capacity_read(&mut device), grown);
    device.write(grown / 512 - 1, &[1; 512]).unwrap();
}
