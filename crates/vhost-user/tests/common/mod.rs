// SPDX-License-Identifier: Apache-2.0
//! The daemon's core on a thread of the test: a device with its data plane behind a socket.
#![allow(dead_code, unreachable_pub)] // Not every test program uses all of this.

pub mod broken;
pub mod gate;
pub mod load;
pub mod plane;

use backend::{Disk, FileOptions};
use data_plane::{
    Coalesce, ErrorPolicy, Health, IoPoll, KernelOptions, Limits, PlaneChoice, PlaneKind,
    PlaneSelector, UringOptions, UringPlane, UringPool,
};
use driver::{Device, Options, RawChannel};
use std::os::fd::AsFd;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use tempfile::TempDir;
use vhost_user::{Answer, Command, Control, DeviceOptions, Next, Notice, Status};

/// Bound of every wait; a passing test never reaches it.
pub const LIMIT: Duration = Duration::from_secs(60);
/// A directory of this build on a real file system.
pub const DISK: &str = env!("CARGO_TARGET_TMPDIR");
/// A directory in memory. Every Linux has it.
pub const TMPFS: &str = "/dev/shm";
/// Size of most disks in these tests.
pub const DISK_BYTES: u64 = 16 << 20;

/// Set-up of the daemon.
#[derive(Clone, Debug)]
pub struct Setup {
    pub queues: u16,
    pub threads: usize,
    pub queue_size_max: u16,
    pub packed: bool,
    pub writeback: bool,
    pub pin_memory: bool,
    pub cpus: Vec<usize>,
    pub poll_max: Duration,
    pub coalesce: Coalesce,
    pub batch_size: Option<usize>,
    /// Time that a front-end may be silent while another one waits.
    pub patience: Duration,
    pub on_error: ErrorPolicy,
    pub io_timeout: Option<Duration>,
    /// Receives notices of changes.
    pub notices: Option<Sender<Notice>>,
}

impl Default for Setup {
    fn default() -> Self {
        Setup {
            queues: 1,
            threads: 1,
            queue_size_max: 1024,
            packed: true,
            writeback: true,
            pin_memory: false,
            cpus: Vec::new(),
            poll_max: Duration::from_micros(20),
            coalesce: Coalesce::Auto,
            batch_size: None,
            patience: LIMIT,
            on_error: ErrorPolicy::Report,
            io_timeout: None,
            notices: None,
        }
    }
}

/// A daemon that serves one front-end after another until it is dropped.
pub struct Daemon {
    socket: PathBuf,
    stop: Arc<AtomicBool>,
    outcomes: Receiver<Result<(), String>>,
    control: Control,
    thread: Option<JoinHandle<()>>,
    _directory: TempDir,
}

impl Daemon {
    /// Serves `disk` by threads of its own.
    pub fn start(disk: Arc<dyn Disk>, setup: &Setup) -> Self {
        Self::in_pool(disk, setup, &pool(setup))
    }

    /// Serves `disk` by the threads of `pool`.
    pub fn in_pool(disk: Arc<dyn Disk>, setup: &Setup, pool: &UringPool) -> Self {
        let plane = pool.add_disk(Arc::clone(&disk)).expect("the data plane takes the disk");
        let directory = tempfile::tempdir().expect("a directory for the socket");
        let socket = directory.path().join("socket");
        let listener = UnixListener::bind(&socket).expect("the socket is bound");
        let stop = Arc::new(AtomicBool::new(false));
        let (told, outcomes) = channel();
        let (made, control) = channel();
        let (setup, stopped) = (setup.clone(), Arc::clone(&stop));
        let body = move || {
            let mut device = make_device(disk, &setup, plane);
            let _ = made.send(device.control().expect("a descriptor"));
            let next = Next { listener: listener.as_fd(), patience: setup.patience };
            for stream in listener.incoming() {
                if stopped.load(Ordering::Acquire) {
                    return;
                }
                let Ok(stream) = stream else {
                    std::thread::sleep(Duration::from_millis(1)); // no free descriptor right now
                    continue;
                };
                let mut front_end = Some(stream);
                while let Some(stream) = front_end {
                    let outcome = device.serve(stream, Some(next));
                    let _ = told.send(outcome.map_err(|why| why.to_string()));
                    front_end = device.take_waiting();
                    // The connection that wakes this thread for its end may have come meanwhile.
                    if stopped.load(Ordering::Acquire) {
                        return;
                    }
                }
            }
        };
        let thread = std::thread::Builder::new().name("daemon".into()).spawn(body);
        let thread = Some(thread.expect("a thread"));
        let control = control.recv().expect("the device is made");
        Daemon { socket, stop, outcomes, control, thread, _directory: directory }
    }

    /// Serves `disk` with the default set-up.
    pub fn of(disk: impl Disk + 'static) -> Self {
        Self::start(Arc::new(disk), &Setup::default())
    }

    /// The daemon's socket.
    pub fn socket(&self) -> &Path {
        &self.socket
    }

    /// A driver, set up and started.
    pub fn connect(&self, options: &Options) -> Device {
        Device::connect(&self.socket, options).expect("the device comes up")
    }

    /// A front-end that sends arbitrary messages.
    pub fn raw(&self) -> RawChannel {
        RawChannel::connect(&self.socket).expect("the daemon listens")
    }

    /// The status of the device.
    pub fn status(&self) -> Status {
        match self.control().ask(Command::Status).expect("the device is there") {
            Answer::Status(status) => *status,
            other => panic!("{other:?}"),
        }
    }

    /// Returns whether the first queue, which runs, has faulted.
    pub fn is_faulted(&self) -> bool {
        self.status().queues[0].running.as_ref().expect("the queue runs").faulted
    }

    /// Control handle of the device, usable while a front-end is connected.
    pub fn control(&self) -> &Control {
        &self.control
    }

    /// Outcome of the next connection, in the order of connections.
    pub fn next_outcome(&self) -> Result<(), String> {
        self.outcomes.recv_timeout(LIMIT).expect("the connection ends")
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Release);
        // Wakes the accept; the connection is refused if the thread has ended.
        drop(std::os::unix::net::UnixStream::connect(&self.socket));
        let ended = self.thread.take().expect("joined once").join();
        if !std::thread::panicking() {
            ended.expect("the daemon did not panic");
        }
    }
}

/// Data-plane threads for any number of disks.
pub fn pool(setup: &Setup) -> UringPool {
    let options = UringOptions {
        threads: setup.threads,
        cpus: setup.cpus.clone(),
        poll_max: setup.poll_max,
        batch_size: setup.batch_size,
        pin_memory: setup.pin_memory,
        coalesce: setup.coalesce,
        iopoll: IoPoll::Off,
    };
    UringPool::new(&options).expect("the data plane starts")
}

/// A disk, and others on the same thread.
pub struct OneThread {
    pub first: Daemon,
    setup: Setup,
    pool: UringPool,
}

impl OneThread {
    pub fn new() -> Self {
        let setup = Setup { threads: 1, ..Setup::default() };
        let pool = pool(&setup);
        OneThread { first: Daemon::in_pool(Arc::new(mem()), &setup, &pool), setup, pool }
    }

    /// Serves another disk.
    pub fn another(&self) -> Daemon {
        Daemon::in_pool(Arc::new(mem()), &self.setup, &self.pool)
    }
}

/// A device of `disk` with these data planes.
pub fn make_device(disk: Arc<dyn Disk>, setup: &Setup, plane: UringPlane) -> vhost_user::Device {
    let kernel = KernelOptions {
        batch_size: None,
        path: data_plane::DEVICE_PATH.into(),
        workers: setup.threads,
        cpus: setup.cpus.clone(),
        poll_max: setup.poll_max,
        pin_memory: setup.pin_memory,
        coalesce: setup.coalesce,
        iopoll: IoPoll::Off,
        seg_max: vhost_user::seg_max(setup.queue_size_max),
        num_queues: setup.queues,
        queue_size_max: setup.queue_size_max,
        limits: Limits::NONE,
        watches_time: setup.io_timeout.is_some(),
        errors: setup.on_error.into(),
    };
    let choice = match plane::is_kernel() {
        true => PlaneChoice::Auto,
        false => PlaneChoice::Only(PlaneKind::Uring),
    };
    let planes =
        PlaneSelector::new(Arc::clone(&disk), plane, kernel, choice).expect("a data plane");
    if plane::is_kernel() && planes.current() != PlaneKind::Kernel {
        println!("PARTLY SKIPPED: not on the kernel's data plane: {}", planes.why());
    }
    let options = DeviceOptions {
        num_queues: setup.queues,
        queue_size_max: setup.queue_size_max,
        serial: "a serial number".into(),
        packed: setup.packed,
        writeback: setup.writeback,
    };
    let mut device = vhost_user::Device::new(disk, planes, options).expect("a descriptor");
    device.set_health(Arc::new(Health::new(setup.on_error, setup.io_timeout)));
    if let Some(notices) = &setup.notices {
        let notices = notices.clone();
        let tell = move |notice| {
            let _ = notices.send(notice); // the test may have ended
        };
        device.observe(tell);
    }
    device
}

/// A disk in memory; for the kernel's plane see [`plane::Plain`].
pub fn mem() -> plane::Plain {
    plane::Plain::new()
}

/// A disk in a new file below `place`; keep the directory as long as the disk.
pub fn file(place: &str, options: FileOptions) -> (backend::File, TempDir) {
    // A virtual machine has no build directory.
    let elsewhere = plane::is_kernel() && !Path::new(place).exists();
    let place = if elsewhere { std::env::temp_dir() } else { place.into() };
    let directory = TempDir::new_in(place).expect("a directory for the image");
    let path = directory.path().join("image.raw");
    std::fs::File::create(&path).expect("an image").set_len(DISK_BYTES).expect("its size");
    (backend::File::open(&path, options).expect("the image opens"), directory)
}

/// The options of a driver for every kind of ring: split and packed, with and without event index
/// and indirect tables.
pub fn every_ring() -> Vec<Options> {
    let mut all = Vec::new();
    for packed in layouts() {
        for event_idx in [false, true] {
            for indirect in [false, true] {
                all.push(Options { packed, event_idx, indirect, ..Options::default() });
            }
        }
    }
    all
}

/// Options of a driver with split and with packed rings.
pub fn both_rings() -> Vec<Options> {
    layouts().iter().map(|&packed| Options { packed, ..Options::default() }).collect()
}

/// Values of `packed` to test: split and packed rings; the kernel has only split ones.
pub fn layouts() -> Vec<bool> {
    if plane::is_kernel() { vec![false] } else { vec![false, true] }
}

/// Bytes that differ from offset to offset and from seed to seed.
pub fn pattern(len: usize, seed: u64) -> Vec<u8> {
    let mut bytes = vec![0; len];
    fastrand::Rng::with_seed(seed).fill(&mut bytes);
    bytes
}

/// Waits until `condition` holds.
pub fn wait_until(what: &str, mut condition: impl FnMut() -> bool) {
    let end = Instant::now() + LIMIT;
    while !condition() {
        assert!(Instant::now() < end, "waited in vain: {what}");
        std::thread::sleep(Duration::from_micros(200));
    }
}
