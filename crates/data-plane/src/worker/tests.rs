// SPDX-License-Identifier: Apache-2.0
//! Turns of a thread, one by one, with a driver and a lane of the test.
// UNSAFETY: `EventFd` gives its descriptor as a number only.
#![expect(unsafe_code)]

use super::*;
use crate::health::Health;
use crate::limits::{Limiter, Limits};
use crate::mail::{AddDisk, Postbox};
use crate::plane::{IoPoll, QueueSetup};
use crate::stats::QueueStats;
use backend::{Disk, Engine, Info, Io, Lane, Null, Op, RangeLimits, Slot, Step};
use driver::{Layout, Queue, Request, RequestQueue};
use std::collections::HashMap;
use std::fs::File;
use std::num::NonZeroU64;
use std::os::fd::{FromRawFd, IntoRawFd};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::mpsc::Sender;
use virtio_blk::DiskView;
use virtio_spec::blk::{F_DISCARD, RangeSegment};
use virtqueue::{GuestMemory, Region, RingSetup, VirtQueue};
use vmm_sys_util::eventfd::EFD_NONBLOCK;

const QUEUE_SIZE: u16 = 64;
const CAPACITY: u64 = 1 << 20;

/// A lane whose I/O takes several operations, one after another.
struct Steps {
    operations: u32,
    /// Operations that an I/O still needs, by slot.
    left: HashMap<u32, u32>,
}

impl Steps {
    fn next(&mut self, slot: Slot, engine: &mut dyn Engine) -> Step {
        let left = self.left.entry(slot.0).or_insert(self.operations);
        if *left == 0 {
            self.left.remove(&slot.0);
            return Step::Done(Ok(()));
        }
        *left -= 1;
        engine.push(Op::Nop, Token { slot, layer: 0 });
        Step::Pending
    }
}

impl Lane for Steps {
    fn start(&mut self, _: &mut Io, slot: Slot, engine: &mut dyn Engine) -> Step {
        self.next(slot, engine)
    }

    fn event(&mut self, _: &mut Io, token: Token, _: i32, engine: &mut dyn Engine) -> Step {
        self.next(token.slot, engine)
    }
}

/// A thread with one disk and one queue; the test runs its turns.
struct Rig {
    worker: Worker,
    postbox: Postbox,
    limiter: Arc<Limiter>,
    guest: RequestQueue,
    layout: Layout,
}

impl Rig {
    /// A thread that does not poll. Each I/O takes so many operations.
    fn new(batch_size: Option<usize>, operations: u32) -> Self {
        Rig::polling(Duration::ZERO, batch_size, operations)
    }

    fn polling(poll_max: Duration, batch_size: Option<usize>, operations: u32) -> Self {
        Rig::holding(Coalesce::Off, poll_max, batch_size, operations)
    }

    /// A thread that holds calls.
    fn holding(
        coalesce: Coalesce,
        poll_max: Duration,
        batch_size: Option<usize>,
        operations: u32,
    ) -> Self {
        let [mail_fd, wake] = [(); 2].map(|()| EventFd::new(EFD_NONBLOCK).unwrap());
        let (postbox, inbox) = Postbox::new(wake);
        let uring = Uring::new().expect("an io_uring");
        let batch_size = BatchSize::new(batch_size);
        let mut worker = Worker::new(uring, poll_max, batch_size, coalesce, inbox, mail_fd);
        let lane = Box::new(Steps { operations, left: HashMap::new() });
        let limiter = Limiter::new(None);
        let share = Arc::clone(limiter.join().share());
        let disk = AddDisk { lane, share, iopoll: IoPoll::Off, force_async: false };
        let number = answer(&mut worker, &postbox, |reply| Mail::AddDisk(disk, reply)).unwrap();
        let memory = driver::GuestMemory::new(&[(0, 1 << 20)]).unwrap();
        let queue = Queue::new(&memory, QUEUE_SIZE, false, true).unwrap();
        let start = Box::new(started(&memory, &queue));
        answer(&mut worker, &postbox, |reply| Mail::Start(number, start, reply));
        let guest = RequestQueue::new(queue, 1 << 19, Duration::ZERO);
        let mut rig = Rig { worker, postbox, limiter, guest, layout: Layout::default() };
        rig.worker.turn(); // arms the poll of the kick eventfd
        rig
    }

    /// Makes requests available, and does not kick.
    fn add(&mut self, requests: u64) {
        for sector in 0..requests {
            self.guest.add(&Request::read(sector, 512), &self.layout).unwrap();
        }
        self.guest.queue().publish();
    }

    /// Kicks, and lets the kernel note it in the ring.
    fn kick(&mut self) {
        self.guest.queue().kick();
        self.worker.uring.submit();
        assert!(self.worker.uring.has_events(), "the kernel notes the kick");
    }

    fn stats(&mut self) -> QueueStats {
        self.worker.disks.queue(QueueId { disk: 0, queue: 0 }).0.stats
    }

    /// Number of requests that the driver gets back now.
    fn collected(&mut self) -> u64 {
        std::iter::from_fn(|| self.guest.try_collect().unwrap()).map(|_| 1).sum()
    }
}

/// Sends a mail, lets the thread open it, and returns the answer.
fn answer<T>(worker: &mut Worker, post: &Postbox, mail: impl FnOnce(Sender<T>) -> Mail) -> T {
    let answer = post.request(mail);
    worker.handle_mails(true);
    answer.wait()
}

/// A queue at its start.
fn started(memory: &driver::GuestMemory, queue: &Queue) -> (QueueSetup, VirtQueue) {
    let regions = memory.regions().iter().map(|region| {
        let file = File::from(region.fd().try_clone_to_owned().unwrap());
        Region::map(region.gpa(), region.user_address(), region.size(), file, 0).unwrap()
    });
    let [desc_addr, avail_addr, used_addr] = queue.addresses().map(|gpa| memory.user_address(gpa));
    let ring = RingSetup {
        memory: Arc::new(GuestMemory::new(regions.collect()).unwrap()),
        layout: virtqueue::Layout::Split,
        size: QUEUE_SIZE,
        desc_addr,
        avail_addr,
        used_addr,
        base: queue.base(),
        indirect: false,
        event_idx: true,
        keep_descriptors: false,
        log: None,
        used_log_addr: None,
    };
    // SAFETY: the copy gives its descriptor up.
    let owned = |fd: EventFd| unsafe { File::from_raw_fd(fd.into_raw_fd()) };
    let copy = |fd: &EventFd| Some(owned(fd.try_clone().unwrap()));
    let writeback = Arc::new(AtomicBool::new(true));
    let discard = Some(RangeLimits { sectors_max: 1 << 11, align_sectors: 1 });
    let info = Info { discard, ..Null::new(CAPACITY).info() };
    let setup = QueueSetup {
        index: 0,
        ring: ring.clone(),
        features: 0,
        disk: DiskView::new(&info, 1 << F_DISCARD, writeback, ""),
        kick: copy(queue.kick_fd()),
        call: copy(queue.call_fd()),
        err: None,
        region: None,
        health: Arc::new(Health::default()),
        kept: Vec::new(),
        counted: 0,
    };
    (setup, VirtQueue::start(&ring).unwrap())
}

#[test]
fn kicks_and_the_parts_of_a_request_do_not_count_as_requests() {
    const REQUESTS: u64 = 4;
    const PARTS: u32 = 3;
    let mut rig = Rig::new(None, PARTS);
    rig.add(REQUESTS);
    let mut turns = 0;
    for _ in 0..=PARTS {
        rig.kick();
        turns += u32::from(rig.worker.turn());
    }
    assert_eq!(rig.collected(), REQUESTS, "the requests have ended");
    let worked = rig.worker.batch_size.turns();
    assert!(worked > 0 && worked <= turns, "{worked} of {turns} turns");
    assert_eq!(rig.worker.batch_size.finished(), REQUESTS);
}

#[test]
fn a_turn_with_requests_that_have_no_latency_makes_the_cached_time_invalid() {
    const PAUSE: Duration = Duration::from_millis(2);
    let refused = Request::new(u32::MAX, 0, &[], 512);
    for request in [Request::get_id(), refused] {
        let mut rig = Rig::new(Some(4), 1);
        let before = rig.worker.clock.read();
        std::thread::sleep(PAUSE);
        rig.guest.add(&request, &rig.layout).unwrap();
        rig.guest.queue().publish();
        assert!(rig.worker.turn());
        assert_eq!(rig.collected(), 1, "the request has ended");
        assert!(rig.worker.clock.recent() >= before + PAUSE.as_nanos() as Nanos);
    }
}

#[test]
fn a_batch_of_one_is_not_spent_on_kicks() {
    let mut rig = Rig::new(Some(1), 1);
    rig.kick();
    rig.add(1);
    assert!(rig.worker.turn());
    assert_eq!(rig.collected(), 1, "the kick has taken the place of the request");
}

#[test]
fn a_batch_size_bounds_the_requests_that_a_turn_shows() {
    let mut rig = Rig::new(Some(2), 1);
    rig.add(5);
    let shown: Vec<u64> = (0..4)
        .map(|_| {
            rig.worker.turn();
            rig.collected()
        })
        .collect();
    assert_eq!(shown, [2, 2, 1, 0]);
}

#[test]
fn a_chain_that_waits_because_of_a_small_size_shows_a_deep_queue() {
    for (requests, is_deep) in [(1, false), (2, true)] {
        let mut rig = Rig::new(None, 1);
        rig.worker.batch_size.choose(1);
        rig.add(requests);
        rig.worker.turn();
        assert_eq!(rig.worker.batch_size.is_deep(), is_deep, "{requests} requests");
    }
}

#[test]
fn a_poll_that_finds_work_is_counted_with_its_time() {
    let mut rig = Rig::polling(Duration::from_secs(3600), None, 1);
    rig.worker.polls.slept(Duration::ZERO); // a short sleep begins a trial
    for polls in 1..=2 {
        let before = rig.stats();
        assert_eq!((before.polls, before.polls_won), (polls - 1, polls - 1), "it has not ended");
        (0..100).for_each(|_| rig.worker.turn_or_wait());
        rig.add(1);
        rig.worker.turn_or_wait();
        let after = rig.stats();
        assert_eq!((after.polls, after.polls_won), (polls, polls));
        assert!(after.poll_ns > before.poll_ns, "{after:?}");
        assert_eq!(rig.collected(), 1);
    }
}

#[test]
fn a_call_that_the_driver_does_not_want_is_counted_apart() {
    let mut rig = Rig::new(Some(4), 1);
    let mut counts_of = |requests, wanted: bool| {
        if wanted {
            assert!(rig.guest.queue().arm_calls(), "nothing is left");
        }
        let before = rig.stats();
        rig.add(requests);
        while rig.worker.turn() {}
        assert_eq!(rig.collected(), requests);
        let after = rig.stats();
        (after.calls - before.calls, after.suppressed - before.suppressed)
    };
    counts_of(1, true);
    assert_eq!(counts_of(1, false), (0, 1));
    assert_eq!(counts_of(4, false), (0, 1), "one publication");
    assert_eq!(counts_of(8, false), (0, 2));
    assert_eq!(counts_of(8, true), (1, 1), "the driver wants one for the first of them only");
}

/// Each turn publishes, and none comes between them that could end the hold: the time does not matter.
#[test]
fn a_call_that_comes_with_a_later_one_is_counted() {
    let mut rig = Rig::holding(Coalesce::On, Duration::from_secs(3600), None, 0);
    for coalesced in [0, 1] {
        assert!(rig.guest.queue().arm_calls(), "nothing is left");
        rig.add(1);
        assert!(rig.worker.turn());
        assert_eq!(rig.collected(), 1);
        assert_eq!(rig.stats().coalesced, coalesced);
    }
    assert!(rig.stats().calls <= 1, "{:?}", rig.stats());
}

#[test]
fn the_choices_of_the_thread_are_in_the_state_of_a_queue() {
    for (fixed, batch_size) in [(None, 4), (Some(7), 7)] {
        let mut rig = Rig::new(fixed, 1);
        let id = QueueId { disk: 0, queue: 0 };
        let (reply, state) = std::sync::mpsc::channel();
        rig.worker.handle_mail(Mail::State(id, reply));
        let choices = state.recv().unwrap().choices;
        assert_eq!((choices.batch_size, choices.coalescing), (batch_size, false));
    }
}

#[test]
fn a_thread_carries_out_a_part_of_its_mail_and_comes_back() {
    let mut rig = Rig::new(None, 1);
    let (reply, answers) = std::sync::mpsc::channel();
    for _ in 0..=mail::MAILS_MAX {
        rig.postbox.send(Mail::Ping(reply.clone()));
    }
    for expected in [mail::MAILS_MAX, 1] {
        rig.worker.handle_mails(true);
        assert_eq!(answers.try_iter().count(), expected);
    }
    assert_eq!(rig.worker.mail_fd.read().unwrap(), 1, "the thread has woken itself once");
}

#[test]
fn a_limit_on_the_bandwidth_counts_a_sixteenth_of_all_ranges_of_a_discard() {
    const NOW: Nanos = 1 << 40;
    const MIB: u64 = 1 << 20;
    let mut rig = Rig::new(None, 1);
    rig.limiter.test_time.store(NOW, Relaxed);
    let burst = Duration::ZERO;
    rig.limiter.set(&Limits { iops: None, bytes: NonZeroU64::new(MIB), burst });
    let range = RangeSegment { sector: 0, num_sectors: 1 << 11, flags: 0 };
    rig.guest.add(&Request::discard(&[range; 32]), &rig.layout).unwrap();
    rig.guest.queue().publish();
    while rig.worker.turn() {}
    assert_eq!((rig.collected(), rig.stats().discarded_bytes), (1, 32 * MIB));
    assert_eq!(rig.limiter.opens_at() - NOW, 2_000_000_000, "2 MiB");
}
