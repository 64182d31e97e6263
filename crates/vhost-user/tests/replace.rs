// SPDX-License-Identifier: Apache-2.0
//! Another storage for a device that serves.

mod common;

use backend::wrap::Record;
use backend::{Disk, File, FileOptions, Info, Lane, Mem};
use common::gate::Gate;
use common::load::under_load;
use common::plane::{Plain, kernel_or_skip, skip_on_kernel};
use common::{DISK, DISK_BYTES, Daemon, LIMIT, Setup, wait_until};
use data_plane::PlaneKind;
use driver::{Device, Options, Request};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::channel;
use std::time::Duration;
use vhost_user::{Answer, Command, Replace, Replacement};
use virtio_spec::blk::S_OK;

const QUEUES: u16 = 2;
const ROUNDS: usize = 10;

fn setup() -> Setup {
    Setup { queues: QUEUES, threads: 2, pin_memory: true, ..Setup::default() }
}

fn options() -> Options {
    Options { num_queues: QUEUES, ..Options::default() }
}

/// Replaces the storage and waits for the answer.
fn replace(daemon: &Daemon, replace: Replace) -> Result<Duration, String> {
    daemon.control().replace_storage(replace).wait(LIMIT).expect("the device answers")
}

/// A storage without a step that may fail.
fn replacement(disk: impl Disk + 'static) -> Replacement {
    Replacement { disk: Arc::new(disk), keeps_lock: false, lock: None, commit: Box::new(|| Ok(())) }
}

/// A new image of zeroes.
fn image(path: &Path) {
    std::fs::File::create(path).unwrap().set_len(DISK_BYTES).unwrap();
}

fn locked(path: &Path) -> File {
    let options = FileOptions { lock: Some(Duration::ZERO), ..FileOptions::default() };
    File::open(path, options).expect("the image opens, and nobody has it locked")
}

/// Writes a sector and reads it and the one before.
#[track_caller]
fn write_and_read(device: &mut Device, n: u64) {
    device.write(n, &[n as u8; 512]).unwrap();
    let mut data = [0; 512];
    for sector in [n.saturating_sub(1), n] {
        device.read(sector, &mut data).unwrap();
        assert_eq!(data, [sector as u8; 512], "sector {sector}");
    }
}

/// The copy has each write that was completed, so that the queues were drained.
#[test]
fn a_copy_takes_the_place_of_the_storage_again_and_again_under_load() {
    if skip_on_kernel("its images are on the disk of the build") {
        return;
    }
    let directory = tempfile::tempdir_in(DISK).unwrap();
    let path = |n: usize| directory.path().join(format!("{n}.img"));
    for packed in common::layouts() {
        image(&path(0));
        let daemon = Daemon::start(Arc::new(locked(&path(0))), &setup());
        let device = daemon.connect(&Options { packed, ..options() });
        let (done, session) = under_load(device, QUEUES.into(), |loaded| {
            for round in 0..ROUNDS {
                loaded.wait_for_progress(5);
                let (old, new) = (path(round), path(round + 1));
                let copy = Box::new(move |_: &Arc<dyn Disk>| {
                    std::fs::copy(&old, &new).unwrap();
                    Ok(replacement(locked(&new)))
                });
                replace(&daemon, copy).unwrap();
                // Nothing holds the old one, whose content does not matter any more.
                drop(locked(&path(round)));
                image(&path(round));
                let told = daemon.status();
                assert!(told.disk.contains(&format!("{}.img", round + 1)), "{}", told.disk);
            }
            loaded.wait_for_progress(5);
        });
        assert!(done.iter().all(|done| done.reads + done.writes >= 5 * ROUNDS as u64));
        drop(session);
        daemon.next_outcome().expect("the connection ends well");
    }
}

#[test]
fn a_wrapper_is_put_around_the_storage_and_taken_off_under_load() {
    let plain: Arc<dyn Disk> = Arc::new(Plain::new());
    let daemon = Daemon::start(Arc::clone(&plain), &setup());
    let device = daemon.connect(&options());
    let (_, session) = under_load(device, QUEUES.into(), |loaded| {
        for _ in 0..ROUNDS {
            let (sender, log) = channel();
            let wrap = move |old: &Arc<dyn Disk>| {
                let record = Record::in_memory(Arc::clone(old));
                sender.send(record.log()).unwrap();
                Ok(Replacement::around(Arc::new(record)))
            };
            replace(&daemon, Box::new(wrap)).unwrap();
            let log = log.recv().unwrap();
            wait_until("requests in the wrapper", || log.entries().len() >= 10);
            let inner = Arc::clone(&plain);
            let unwrap = move |_: &Arc<dyn Disk>| Ok(Replacement::around(inner));
            replace(&daemon, Box::new(unwrap)).unwrap();
            let recorded = log.entries().len();
            loaded.wait_for_progress(5);
            assert_eq!(log.entries().len(), recorded, "the wrapper is still there");
        }
    });
    drop(session);
    daemon.next_outcome().expect("the connection ends well");
}

/// A storage with some other property.
struct Other {
    inner: Arc<dyn Disk>,
    info: Info,
    /// Lanes that can be opened.
    lanes: AtomicUsize,
}

impl Disk for Other {
    fn info(&self) -> Info {
        self.info.clone()
    }

    fn sync(&self) -> std::io::Result<()> {
        Ok(())
    }

    fn open_lane(&self) -> std::io::Result<Box<dyn Lane>> {
        let fewer = |left: usize| left.checked_sub(1);
        match self.lanes.fetch_update(Ordering::Relaxed, Ordering::Relaxed, fewer) {
            Ok(_) => self.inner.open_lane(),
            Err(_) => Err(std::io::Error::from_raw_os_error(libc::EMFILE)),
        }
    }
}

#[test]
fn a_storage_that_does_not_suit_is_refused_and_the_old_one_serves_on() {
    if skip_on_kernel("its images are on the disk of the build") {
        return;
    }
    let directory = tempfile::tempdir_in(DISK).unwrap();
    let path = directory.path().join("a.img");
    image(&path);
    let disk: Arc<dyn Disk> = Arc::new(locked(&path));
    let daemon = Daemon::start(Arc::clone(&disk), &setup());
    let mut device = daemon.connect(&options());
    type Change = fn(&mut Info);
    let refused: [(&str, Change, usize); 8] = [
        ("sectors, and the new storage", |info| info.capacity_sectors += 8, 9),
        ("sectors, and the new storage", |info| info.capacity_sectors -= 8, 9),
        ("512 bytes in a block, and", |info| info.logical_block_bytes = 4096, 9),
        ("read-write access, and the new storage read-only", |info| info.read_only = true, 9),
        ("DISCARD, and", |info| info.discard = None, 9),
        (
            "sectors, and the new storage takes 1;",
            |info| {
                info.write_zeroes.as_mut().unwrap().sectors_max = 1;
            },
            9,
        ),
        ("limit on open files", |_| {}, 0),
        ("limit on open files", |_| {}, 1),
    ];
    let before = daemon.status().disk;
    for (n, (why, change, lanes)) in (1..).zip(refused) {
        let committed = Arc::new(AtomicBool::new(false));
        let commit = Arc::clone(&committed);
        let make = move |old: &Arc<dyn Disk>| {
            let mut info = old.info();
            change(&mut info);
            let inner: Arc<dyn Disk> = Arc::new(Mem::new(DISK_BYTES).unwrap());
            let other = Other { inner, info, lanes: AtomicUsize::new(lanes) };
            let commit = Box::new(move || -> Result<(), String> {
                commit.store(true, Ordering::Relaxed);
                Ok(())
            });
            Ok(Replacement { commit, ..replacement(other) })
        };
        let told = replace(&daemon, Box::new(make)).unwrap_err();
        assert!(told.contains(why) && told.contains("; "), "{told}");
        assert!(!committed.load(Ordering::Relaxed), "{why}");
        assert_eq!(daemon.status().disk, before);
        write_and_read(&mut device, n);
    }
    let told = replace(&daemon, Box::new(|_| Err("no luck; try again".into()))).unwrap_err();
    assert_eq!(told, "no luck; try again");
    let make = |_: &Arc<dyn Disk>| {
        let commit = Box::new(|| -> Result<(), String> { Err("no room; make some".into()) });
        Ok(Replacement { commit, ..replacement(Mem::new(DISK_BYTES).unwrap()) })
    };
    assert_eq!(replace(&daemon, Box::new(make)).unwrap_err(), "no room; make some");
    write_and_read(&mut device, 9);
    let again = File::open(&path, FileOptions { lock: Some(Duration::ZERO), ..Default::default() });
    assert!(again.unwrap_err().to_string().contains("in use by"), "the lock is held");
}

#[test]
fn an_order_is_withdrawn_until_it_begins() {
    if skip_on_kernel("no disk has wrappers") {
        return;
    }
    let (gate, permits) = Gate::new(Arc::new(Plain::new()));
    let daemon = Daemon::start(Arc::new(gate), &setup());
    let mut device = daemon.connect(&options());
    let layout = device.layout();
    device.queue(0).submit(&Request::write(0, &[1; 512]), &layout).unwrap();
    wait_until("the request is taken", || {
        let queues = daemon.status().queues;
        queues[0].running.as_ref().is_some_and(|queue| queue.inflight == 1)
    });
    let called = Arc::new(AtomicBool::new(false));
    let calls = Arc::clone(&called);
    let order = daemon.control().replace_storage(Box::new(move |_| {
        calls.store(true, Ordering::Relaxed);
        Err("called; never".into())
    }));
    assert!(order.withdraw(), "it waits for the request");
    permits.open();
    let told = order.wait(LIMIT).expect("an answer").unwrap_err();
    assert!(told.contains("withdrawn") && !called.load(Ordering::Relaxed), "{told}");
    assert_eq!(device.queue(0).collect().unwrap().1.status, Some(S_OK));

    let ((begun, has_begun), (go, may_go)) = (channel(), channel::<()>());
    let order = daemon.control().replace_storage(Box::new(move |old| {
        begun.send(()).unwrap();
        may_go.recv().unwrap();
        Ok(Replacement::around(Arc::clone(old)))
    }));
    has_begun.recv_timeout(LIMIT).expect("the order begins");
    assert!(!order.withdraw());
    go.send(()).unwrap();
    order.wait(LIMIT).expect("an answer").expect("it is carried out");
    device.write(1, &[1; 512]).unwrap();
}

#[test]
fn a_paused_device_gets_another_storage_and_so_does_one_between_two_front_ends() {
    if skip_on_kernel("its images are on the disk of the build") {
        return;
    }
    let daemon = Daemon::start(Arc::new(Plain::new()), &setup());
    let filled = |byte: u8| -> Replace {
        Box::new(move |old| {
            let directory = tempfile::tempdir_in(DISK).unwrap();
            let path = directory.path().join("a.img");
            std::fs::write(&path, vec![byte; DISK_BYTES as usize]).unwrap();
            let info = old.info();
            let lanes = AtomicUsize::new(usize::MAX);
            // The view of memory and the file differ in advice only.
            let inner: Arc<dyn Disk> = Arc::new(File::open(&path, FileOptions::default()).unwrap());
            Ok(replacement(Other { inner, info, lanes }))
        })
    };
    let mut device = daemon.connect(&options());
    let mut data = [0; 512];
    device.read(5, &mut data).unwrap();
    assert_eq!(data, [0; 512]);
    assert_eq!(daemon.control().ask(Command::Pause), Some(Answer::Changed(true)));
    replace(&daemon, filled(7)).unwrap();
    let told = daemon.status();
    assert!(told.paused && told.queues.iter().all(|queue| queue.plane.is_none()));
    let layout = device.layout();
    device.queue(0).submit(&Request::read(5, 512), &layout).unwrap();
    assert_eq!(daemon.control().ask(Command::Resume), Some(Answer::Changed(true)));
    assert_eq!(device.queue(0).collect().unwrap().1.data, [7; 512]);
    drop(device);
    daemon.next_outcome().unwrap();
    // The next front-end finds it: this daemon carries orders out while it serves one.
    let order = daemon.control().replace_storage(filled(9));
    let mut device = daemon.connect(&options());
    order.wait(LIMIT).expect("an answer").unwrap();
    device.read(5, &mut data).unwrap();
    assert_eq!(data, [9; 512]);
}

#[test]
fn queues_leave_the_kernel_for_a_storage_that_it_does_not_serve() {
    if !kernel_or_skip() {
        return;
    }
    let plain: Arc<dyn Disk> = Arc::new(Plain::for_kernel());
    let daemon = Daemon::start(Arc::clone(&plain), &Setup { packed: false, ..setup() });
    let mut device = daemon.connect(&options());
    write_and_read(&mut device, 1);
    daemon.control().ask(Command::Switch(PlaneKind::Kernel));
    assert_eq!(daemon.status().plane, PlaneKind::Kernel);
    let wrap = |old: &Arc<dyn Disk>| {
        let record = Record::in_memory(Arc::clone(old));
        Ok(Replacement::around(Arc::new(record)))
    };
    replace(&daemon, Box::new(wrap)).unwrap();
    let told = daemon.status();
    assert_eq!(told.plane, PlaneKind::Uring);
    assert!(told.why.contains("--wrap"), "{}", told.why);
    assert!(told.why.ends_with("the disk then returns to the kernel plane"), "{}", told.why);
    write_and_read(&mut device, 2);
    // The kernel serves the next one.
    replace(&daemon, Box::new(move |_| Ok(Replacement::around(plain)))).unwrap();
    let told = daemon.status();
    assert_eq!((told.plane, &*told.why), (PlaneKind::Kernel, "the control socket says so"));
    write_and_read(&mut device, 3);
}

#[test]
fn queues_that_the_operator_has_moved_do_not_return_to_the_kernel() {
    if !kernel_or_skip() {
        return;
    }
    let plain: Arc<dyn Disk> = Arc::new(Plain::for_kernel());
    let daemon = Daemon::start(Arc::clone(&plain), &Setup { packed: false, ..setup() });
    let mut device = daemon.connect(&options());
    daemon.control().ask(Command::Switch(PlaneKind::Kernel));
    let wrap = |old: &Arc<dyn Disk>| {
        let record = Record::in_memory(Arc::clone(old));
        Ok(Replacement::around(Arc::new(record)))
    };
    replace(&daemon, Box::new(wrap)).unwrap();
    daemon.control().ask(Command::Switch(PlaneKind::Uring));
    replace(&daemon, Box::new(move |_| Ok(Replacement::around(plain)))).unwrap();
    assert_eq!(daemon.status().plane, PlaneKind::Uring);
    write_and_read(&mut device, 1);
}
