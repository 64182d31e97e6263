// SPDX-License-Identifier: Apache-2.0
//! Call descriptors that come faster than the thread of the queue takes them.

use crate::common::{Daemon, LIMIT, Setup};
use crate::mischief::*;
use backend::{Disk, Engine, Info, Io, Lane, Null, Slot, Step, Token};
use driver::{Options, Request};
use std::io::{self, Read};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Mutex};
use virtio_spec::blk::S_OK;

const MESSAGES: usize = 10_000;
/// Copies of a call descriptor: that of the test, of the control plane, of the queue, and the next one of it.
const COPIES_MAX: usize = 4;

/// A disk that blocks its thread: it tells that an I/O has started, and waits for the lock.
struct Blocked {
    inner: Null,
    started: Sender<()>,
    lock: Arc<Mutex<()>>,
}

impl Disk for Blocked {
    fn info(&self) -> Info {
        self.inner.info()
    }

    fn sync(&self) -> io::Result<()> {
        self.inner.sync()
    }

    fn open_lane(&self) -> io::Result<Box<dyn Lane>> {
        let (started, lock) = (self.started.clone(), Arc::clone(&self.lock));
        Ok(Box::new(BlockedLane { inner: self.inner.open_lane()?, started, lock }))
    }
}

struct BlockedLane {
    inner: Box<dyn Lane>,
    started: Sender<()>,
    lock: Arc<Mutex<()>>,
}

impl Lane for BlockedLane {
    fn start(&mut self, io: &mut Io, slot: Slot, engine: &mut dyn Engine) -> Step {
        self.started.send(()).unwrap();
        drop(self.lock.lock()); // poisoned if the test has failed
        self.inner.start(io, slot, engine)
    }

    fn event(&mut self, io: &mut Io, token: Token, result: i32, engine: &mut dyn Engine) -> Step {
        self.inner.event(io, token, result, engine)
    }
}

/// Descriptors of this process for the same socket as `socket`.
fn copies(socket: &UnixStream) -> usize {
    let stat = rustix::fs::fstat(socket).unwrap();
    let name = format!("socket:[{}]", stat.st_ino);
    let open = std::fs::read_dir("/proc/self/fd").unwrap().flatten();
    open.filter_map(|entry| std::fs::read_link(entry.path()).ok())
        .filter(|link| link.as_os_str() == name.as_str())
        .count()
}

#[test]
fn call_descriptors_do_not_pile_up_before_a_thread_that_is_busy() {
    let (started, has_started) = channel();
    let lock = Arc::new(Mutex::new(()));
    let disk = Blocked { inner: Null::new(1 << 20), started, lock: Arc::clone(&lock) };
    let daemon = Daemon::start(Arc::new(disk), &Setup::default());
    let mut device = daemon.connect(&Options::default());
    let layout = device.layout();
    let (call, mut called) = UnixStream::pair().unwrap();

    let blocks = lock.lock().unwrap();
    device.queue(0).submit(&Request::read(0, 512), &layout).unwrap();
    has_started.recv_timeout(LIMIT).unwrap();
    let channel = device.session().raw();
    for _ in 0..MESSAGES {
        channel.message(SET_VRING_CALL, &longs(&[0]), &[call.as_fd()]).unwrap();
    }
    // The answer comes after these messages.
    channel.message(GET_FEATURES, &[], &[]).unwrap();
    channel.reply(LIMIT).unwrap();
    let most = copies(&call);
    assert!(most <= COPIES_MAX, "{most} copies");
    drop(blocks);

    // The last one calls: at the latest when the request has completed, and perhaps before that, as each new one.
    called.set_read_timeout(Some(LIMIT)).unwrap();
    let completion = loop {
        called.read_exact(&mut [0; 8]).unwrap();
        if let Some((_, completion)) = device.queue(0).try_collect().unwrap() {
            break completion;
        }
    };
    assert_eq!(completion.status, Some(S_OK));
}
