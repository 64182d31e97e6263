// SPDX-License-Identifier: Apache-2.0
//! A guest writes as fast as the brake lets it, and the copy is slower.

use super::*;
use backend::conformance::ManualEngine;
use backend::wrap::{Braked, Growth, Track};
use backend::{BufList, Io, IoKind, Mem, Slot, Step};
use std::convert::Infallible;
use std::sync::atomic::AtomicU64;
use std::sync::mpsc::{Sender, channel};
use std::thread;

const SIZE: u64 = 8 << 20;
const PART: u64 = 64 << 10;
/// The bound of a copier that has told no pace.
const FEW: u64 = REST_MIN;

/// Copies nothing, in 16 ms per MiB.
struct Slow(Rate, Arc<AtomicU64>);

impl TargetUser for Slow {
    const WORDS: Words =
        Words { thread: "slow-target", target: "target", cancelled: "it was cancelled" };
    type Error = Infallible;
}

impl Exchanged for Slow {
    const UNMOVED: &'static str = "the test has failed";
}

impl Copier for Slow {
    const SLOW: &'static str = "it hangs";

    fn again(&mut self, range: Range<u64>) -> Result<(), Infallible> {
        let bytes = range.end - range.start;
        thread::sleep(Duration::from_millis(bytes / PART));
        self.1.fetch_add(bytes, Ordering::Relaxed);
        Ok(())
    }

    fn sync(&mut self) -> Result<(), Infallible> {
        Ok(())
    }

    fn rate(&self) -> &Rate {
        &self.0
    }
}

/// A disk with a brake, and a guest that rewrites all of its parts until this is dropped.
struct Guest {
    brake: Arc<Brake>,
    writes: Arc<AtomicU64>,
    stop: Arc<AtomicBool>,
}

impl Guest {
    fn start() -> Guest {
        let written = Arc::new(Written::new(SIZE));
        let brake = Arc::new(Brake::new(Arc::clone(&written)));
        let mem = Arc::new(Mem::new(SIZE).unwrap());
        let track = Track::new(mem, vec![written], Growth::Mirroring);
        let disk = Braked::new(Arc::new(track), Arc::clone(&brake));
        let (writes, stop) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicBool::new(false)));
        let guest = Guest { brake, writes: Arc::clone(&writes), stop: Arc::clone(&stop) };
        thread::spawn(move || {
            let (mut lane, mut engine) = (disk.open_lane().unwrap(), ManualEngine::new());
            while !stop.load(Ordering::Relaxed) {
                let at = writes.load(Ordering::Relaxed) * PART % SIZE;
                let kind = IoKind::WriteZeroes { unmap: false };
                let mut io = Io::new(kind, at, PART, BufList::EMPTY);
                let mut step = lane.start(&mut io, Slot(0), &mut engine);
                while step == Step::Pending && !stop.load(Ordering::Relaxed) {
                    match engine.delivered.poll() {
                        Some((token, told)) => step = lane.event(&mut io, token, told, &mut engine),
                        None => thread::sleep(Duration::from_micros(50)),
                    }
                }
                writes.fetch_add(1, Ordering::Relaxed);
            }
        });
        guest.waits_for_all();
        guest
    }

    fn writes(&self) -> u64 {
        self.writes.load(Ordering::Relaxed)
    }

    /// Waits until the guest has rewritten each part, which nothing slows.
    #[track_caller]
    fn waits_for_all(&self) {
        let (end, limit) =
            (self.writes() + SIZE / PART + 1, Instant::now() + Duration::from_secs(20));
        while self.writes() < end {
            assert!(Instant::now() < limit, "{} writes wait", self.brake.waiting());
            thread::sleep(Duration::from_millis(1));
        }
        assert_eq!(self.brake.written().bytes(), SIZE);
    }
}

impl Drop for Guest {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
    }
}

fn thread(copied: &Arc<AtomicU64>) -> TargetThread<Slow> {
    let copier = Slow(Rate::default(), Arc::clone(copied));
    TargetThread::start("copy".to_owned(), Arc::new(()), || Ok(copier), || true).unwrap()
}

#[test]
fn few_changes_are_left_to_the_drained_disk_and_the_guest_writes_meanwhile_and_freely_after_it() {
    let (guest, copied) = (Guest::start(), Arc::new(AtomicU64::new(0)));
    let thread = thread(&copied);
    let end = Convergence { acts: thread.acts(), brake: &guest.brake, check: &|| Ok(()) };
    let before = guest.writes();
    end.converge().map_err(Unfinished::told).unwrap();
    for _ in 0..100 {
        let left = guest.brake.written().bytes();
        assert!(left <= FEW, "{left} bytes are left to the drained disk");
        thread::sleep(Duration::from_micros(100));
    }
    let copied = copied.load(Ordering::Relaxed);
    // Until the bound is the least one, and two passes: each copies a part once, also if the guest writes ahead.
    assert!(copied <= (2 + PASSES as u64) * SIZE + FEW, "{copied} bytes were copied");
    let writes = guest.writes() - before;
    assert!(writes >= SIZE / PART / 2, "{writes} writes in the time of {copied} bytes");
    drop(end);
    guest.waits_for_all();
}

#[test]
fn a_cancel_in_the_middle_lets_the_writes_go_on() {
    let (guest, copied) = (Guest::start(), Arc::new(AtomicU64::new(0)));
    let thread = thread(&copied);
    let check = || match copied.load(Ordering::Relaxed) < SIZE / 2 {
        true => Ok(()),
        false => Err(Unfinished::Ended("cancelled".to_owned())),
    };
    let end = Convergence { acts: thread.acts(), brake: &guest.brake, check: &check };
    assert_eq!(end.converge().map_err(Unfinished::told), Err("cancelled".to_owned()));
    assert!(guest.brake.is_on());
    drop(end);
    guest.waits_for_all();
}

/// Tells the thread of its drop.
struct Tells(Sender<Option<String>>);

impl Drop for Tells {
    fn drop(&mut self) {
        self.0.send(thread::current().name().map(str::to_owned)).unwrap();
    }
}

/// The thread hangs, and the owner of the values waits for none of them, or as long as it likes.
#[test]
fn what_was_made_with_the_target_has_its_end_in_the_thread_of_the_target() {
    let thread = thread(&Arc::default());
    let ((tell, told), (open, gate)) = (channel(), channel::<()>());
    let made = || thread.acts().own_on_target(Tells(tell.clone()));
    let there = |made: OwnedByTarget<Tells>| made.act(move |_| gate.recv().is_ok(), Duration::ZERO);
    assert_eq!(there(made()), None);
    drop(made());
    assert!(told.try_recv().is_err());
    open.send(()).unwrap();
    for _ in 0..2 {
        assert_eq!(told.recv().unwrap().as_deref(), Some("slow-target"));
    }
    let last = made().act(|_| 5, Duration::from_secs(60));
    assert_eq!(last, Some(5));
    told.recv().unwrap();
    drop(made().into_inner());
    assert_ne!(told.recv().unwrap().as_deref(), Some("slow-target"));
    assert!(thread.close());
}

/// The target hangs when the disk is drained, and answers when no thread waits any more.
#[test]
fn a_last_act_that_comes_too_late_opens_nothing() {
    let thread = thread(&Arc::default());
    let (release, hangs) = channel::<()>();
    let is_opened = thread::scope(|scope| {
        let acts = thread.acts();
        let (told, begun) = channel();
        scope.spawn(move || {
            let act = move |_: &mut Slow| {
                told.send(()).unwrap();
                let _ = hangs.recv(); // the end of the sender is the answer
                Ok(())
            };
            drop(acts.ask(act, || Ok(())));
        });
        begun.recv().unwrap();
        let is_opened = Arc::new(AtomicBool::new(false));
        let opened = Arc::clone(&is_opened);
        let brake = Arc::new(Brake::new(Arc::new(Written::new(SIZE))));
        let open = move |_: Slow| {
            opened.store(true, Ordering::Relaxed);
            Err::<(Opened, ()), _>("it was opened".to_owned())
        };
        let last = Convergence::last(acts, brake, open);
        let last = Last { deadline: Instant::now(), ..last };
        let told = last.wait("a").err().expect("it hangs");
        assert!(told.contains("did not take the rest"), "{told}");
        drop(release);
        is_opened
    });
    assert!(thread.close());
    assert!(!is_opened.load(Ordering::Relaxed));
}

#[test]
fn old_storage_that_hangs_does_not_hold_the_drained_disk_and_is_not_changed_later() {
    let open = || Ok(Slow(Rate::default(), Arc::default()));
    let thread = TargetThread::start(String::new(), Arc::new(()), open, || true).unwrap();
    let (answers, storage) = channel::<()>();
    let (changes, changed) = channel();
    let told = thread.acts().on_old("the sync of the image", move |is_wanted| {
        storage.recv().unwrap();
        is_wanted()?;
        changes.send(()).unwrap();
        Ok(())
    });
    assert!(
        told.unwrap_err().starts_with("the sync of the image took more than 5 s, and the guest")
    );
    answers.send(()).unwrap();
    assert_eq!(thread.acts().on_old("the next act", |is_wanted| is_wanted().map(|()| 7)), Ok(7));
    assert!(changed.recv().is_err(), "the storage was changed");
}
