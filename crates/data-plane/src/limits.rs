// SPDX-License-Identifier: Apache-2.0
//! Limits on the rate of a disk or of a group of disks, shared by all their queues.
//!
//! Each limit is a token bucket, kept as a clock: the time at which the next request may be taken. A
//! taken request advances the clock by its cost, and may advance it beyond the present time: that
//! debt delays the next request. An idle clock lags behind the present time by the burst at most.
//!
//! A queue asks before it takes a chain ([`crate::turn::Turn`]), so that no taken request waits for a
//! limit, and a stop is not delayed.
//!
//! The order of waiting queues is that of start-time fair queuing. The *tag* of a disk is the cost of
//! its requests so far. A queue that begins to wait keeps the present tag of its disk, and the waiting
//! queue with the lowest tag takes next. So each disk that always has requests gets the same share,
//! in the unit of the limit, whatever the number of its queues and the size of its requests. A disk
//! that returns after an idle time gets the tag of the queue that took last: it saves little up.

//!
//! Queues of the kernel plane use the same clocks, because the module has the page of [`Clocks`]. No
//! order is shared with them, only the tag of a disk that waits: a disk with a higher tag gives way
//! for some time. The module does the same: `kernel/vhost_blk/share.c`.

use crate::latency::monotonic;
use std::collections::BTreeSet;
use std::num::NonZeroU64;
use std::sync::atomic::Ordering::{Relaxed, Release};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

const NANOS: u128 = 1_000_000_000;
/// Maximum lead of a disk's tag, in nanoseconds of cost, over a disk that waits when no queue waits:
/// the lead comes from a time in which the limit delayed nobody.
const LEAD_MAX: u64 = 100_000_000;
/// Maximum time for which a disk gives way to one of the kernel plane, in nanoseconds: less than the
/// least burst.
const LEAD_WAIT: Nanos = 6_000_000;
/// Time after the end of its wait from which a disk does not count as waiting.
const BEHIND_AGE: Nanos = 8_000_000;

/// Limits of a disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Requests per second, of any kind.
    pub iops: Option<NonZeroU64>,
    /// Bytes per second that requests read, write or zero; 16 discarded bytes count as one.
    pub bytes: Option<NonZeroU64>,
    /// Unused time that later requests may catch up on.
    pub burst: Duration,
}

impl Limits {
    /// The burst, unless the user wants another one. QEMU has the same.
    pub const BURST_DEFAULT: Duration = Duration::from_millis(100);
    /// Minimum burst: several times the longest sleep that a queue makes up for.
    pub const BURST_MIN: Duration = Duration::from_millis(10);
    /// Maximum burst.
    pub const BURST_MAX: Duration = Duration::from_secs(3600);

    /// No limit.
    pub const NONE: Limits = Limits { iops: None, bytes: None, burst: Limits::BURST_DEFAULT };

    /// Returns whether there is a limit.
    pub fn is_set(&self) -> bool {
        self.iops.is_some() || self.bytes.is_some()
    }
}

pub(crate) use crate::latency::Nanos;

/// The buckets of a disk, or of a named group of disks. The threads use them without a lock: when two
/// of them take a request at the same time, the second one becomes debt.
#[derive(Debug)]
pub(crate) struct Limiter {
    /// Name of the group; `None`: one disk has the limits.
    group: Option<Arc<str>>,
    is_set: AtomicBool,
    clocks: Clocks,
    /// Number of [`Member`]s.
    members: AtomicUsize,
    order: Mutex<Order>,
    /// Number of [`KernelUser`]s.
    kernel_users: AtomicUsize,
}

/// `struct vhost_blk_limits` of the module, which has a page of this process for it.
#[repr(C, align(128))]
#[derive(Debug, Default)]
pub(crate) struct Clocks {
    pub(crate) version: AtomicU64,
    pub(crate) burst_ns: AtomicU64,
    pub(crate) iops: Bucket,
    pub(crate) bytes: Bucket,
    /// The highest tag of a disk.
    pub(crate) top: AtomicU64,
    /// The lowest tag of a disk that waits, told for the kernel plane.
    pub(crate) behind: AtomicU64,
    pub(crate) behind_ns: AtomicU64,
    pub(crate) behind_by: AtomicU64,
    reserved: [u64; 6],
}

/// A device of the kernel plane that uses the clocks of a limiter, and keeps them in place.
#[derive(Debug)]
pub(crate) struct KernelUser(Arc<Limiter>);

/// State for a change of the limits, and for the begin and the end of a wait.
#[derive(Debug)]
struct Order {
    limits: Limits,
    shares: Vec<Weak<Share>>,
    waiting: BTreeSet<Place>,
    /// Lowest tag of a queue that begins to wait.
    floor: u64,
    /// Number of places so far.
    places: u64,
}

/// A waiting queue: tag, and number of the place. The lowest one is the next.
pub(crate) type Place = (u64, u64);

/// The membership of one disk. A group ends with its last member; threads may hold shares longer.
#[derive(Debug)]
pub(crate) struct Member(Arc<Share>);

/// The part of one disk in the limits of its group.
#[derive(Debug)]
pub(crate) struct Share {
    limiter: Arc<Limiter>,
    /// Number of the share for the kernel plane, whose own ones have the highest bit.
    number: u64,
    tag: AtomicU64,
}

/// A number that no other share of this process has.
fn new_number() -> u64 {
    static NUMBERS: AtomicU64 = AtomicU64::new(1);
    NUMBERS.fetch_add(1, Relaxed)
}

#[repr(C)]
#[derive(Debug, Default)]
pub(crate) struct Bucket {
    /// Units per second; 0: no limit.
    pub(crate) rate: AtomicU64,
    /// The time at which the next request may be taken.
    pub(crate) clock: AtomicU64,
}

impl Bucket {
    fn set(&self, rate: Option<NonZeroU64>, now: Nanos) {
        self.rate.store(rate.map_or(0, NonZeroU64::get), Relaxed);
        self.clock.store(now, Relaxed);
    }

    /// The time at which the next request may be taken; 0 without a limit.
    fn opens_at(&self) -> Nanos {
        if self.rate.load(Relaxed) == 0 { 0 } else { self.clock.load(Relaxed) }
    }

    /// Charges for a request that may use up time from `earliest` on. Returns the cost.
    fn charge(&self, units: u64, earliest: Nanos) -> Nanos {
        let Some(rate) = NonZeroU64::new(self.rate.load(Relaxed)) else { return 0 };
        let cost = u128::from(units) * NANOS / u128::from(rate.get());
        let cost = u64::try_from(cost).unwrap_or(u64::MAX);
        let advance = |clock: u64| Some(clock.max(earliest).saturating_add(cost));
        let _ = self.clock.fetch_update(Relaxed, Relaxed, advance); // the closure never refuses
        cost
    }
}

impl Limiter {
    /// No limits, for one disk or for a group of this name.
    pub(crate) fn new(group: Option<&str>) -> Arc<Self> {
        Arc::new(Limiter {
            group: group.map(Arc::from),
            is_set: AtomicBool::new(false),
            clocks: Clocks::default(),
            members: AtomicUsize::new(0),
            kernel_users: AtomicUsize::new(0),
            order: Mutex::new(Order {
                limits: Limits::NONE,
                shares: Vec::new(),
                waiting: BTreeSet::new(),
                floor: 0,
                places: 0,
            }),
        })
    }

    /// Adds a disk.
    pub(crate) fn join(self: &Arc<Self>) -> Member {
        let share = Arc::new(Share {
            limiter: Arc::clone(self),
            number: new_number(),
            tag: AtomicU64::new(0),
        });
        let mut order = self.order();
        order.shares.retain(|share| share.strong_count() > 0);
        order.shares.push(Arc::downgrade(&share));
        self.members.fetch_add(1, Relaxed);
        Member(share)
    }

    /// Returns whether a disk has these limits.
    pub(crate) fn has_members(&self) -> bool {
        self.members.load(Relaxed) > 0
    }

    /// Replaces the limits, and forgives the debt of the old ones.
    pub(crate) fn set(&self, limits: &Limits) {
        let mut order = self.order();
        let (clocks, now) = (&self.clocks, self.now());
        order.limits = *limits;
        let burst = u64::try_from(limits.burst.as_nanos()).unwrap_or(u64::MAX);
        clocks.burst_ns.store(burst, Relaxed);
        clocks.iops.set(limits.iops, now);
        clocks.bytes.set(limits.bytes, now);
        for value in [&clocks.top, &clocks.behind, &clocks.behind_ns] {
            value.store(0, Relaxed);
        }
        order.floor = 0;
        order.shares.iter().filter_map(Weak::upgrade).for_each(|it| it.tag.store(0, Relaxed));
        self.is_set.store(limits.is_set(), Relaxed);
        // Pairs with the module's acquire: a queue that sees the version sees its limits.
        clocks.version.fetch_add(1, Release);
    }

    /// Adds a device of the kernel plane.
    pub(crate) fn add_kernel_user(self: &Arc<Self>) -> KernelUser {
        self.kernel_users.fetch_add(1, Relaxed);
        KernelUser(Arc::clone(self))
    }

    /// The present limits.
    pub(crate) fn limits(&self) -> Limits {
        self.order().limits
    }

    /// Name of the group; `None`: one disk has the limits.
    pub(crate) fn group(&self) -> Option<&Arc<str>> {
        self.group.as_ref()
    }

    #[inline]
    pub(crate) fn is_set(&self) -> bool {
        self.is_set.load(Relaxed)
    }

    pub(crate) fn now(&self) -> Nanos {
        monotonic()
    }

    /// The time at which a request may be taken.
    pub(crate) fn opens_at(&self) -> Nanos {
        self.clocks.iops.opens_at().max(self.clocks.bytes.opens_at())
    }

    /// Number of queues that are before `place`, at most `most`.
    pub(crate) fn ahead(&self, place: Place, most: usize) -> usize {
        self.order().waiting.range(..place).take(most).count()
    }

    /// Goes on with the wait of a queue, whose place [`Limiter::serve`] may have given up meanwhile.
    /// Returns as [`Limiter::ahead`].
    pub(crate) fn wait_on(&self, place: Place, most: usize) -> usize {
        let mut order = self.order();
        order.waiting.insert(place);
        order.waiting.range(..place).take(most).count()
    }

    /// Ends the wait of a queue that takes nothing.
    pub(crate) fn leave(&self, place: Place) {
        self.order().waiting.remove(&place);
    }

    /// Ends the wait of a queue that may take now, and the right of those ahead of it to go first, until
    /// they look again.
    pub(crate) fn serve(&self, place: Place) {
        let mut order = self.order();
        if order.waiting.range(..place).next().is_none() {
            order.floor = order.floor.max(place.0);
        }
        order.waiting = order.waiting.split_off(&place);
        order.waiting.remove(&place);
    }

    fn order(&self) -> MutexGuard<'_, Order> {
        self.order.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Member {
    pub(crate) fn share(&self) -> &Arc<Share> {
        &self.0
    }

    pub(crate) fn limiter(&self) -> &Arc<Limiter> {
        &self.0.limiter
    }
}

impl Drop for Member {
    fn drop(&mut self) {
        self.limiter().members.fetch_sub(1, Relaxed);
    }
}

impl KernelUser {
    /// The clocks.
    pub(crate) fn clocks(&self) -> &Clocks {
        &self.0.clocks
    }
}

impl Drop for KernelUser {
    fn drop(&mut self) {
        self.0.kernel_users.fetch_sub(1, Relaxed);
    }
}

impl Share {
    #[inline]
    pub(crate) fn limiter(&self) -> &Arc<Limiter> {
        &self.limiter
    }

    /// Charges a request that moves so many bytes.
    pub(crate) fn charge(&self, bytes: u64, now: Nanos) {
        let clocks = &self.limiter.clocks;
        let earliest = now.saturating_sub(clocks.burst_ns.load(Relaxed));
        let cost = clocks.iops.charge(1, earliest).max(clocks.bytes.charge(bytes, earliest));
        let advance = |tag: u64| Some(tag.saturating_add(cost));
        let (Ok(tag) | Err(tag)) = self.tag.fetch_update(Relaxed, Relaxed, advance);
        clocks.top.fetch_max(tag.saturating_add(cost), Relaxed);
    }

    /// Tells disks of the kernel plane that this one waits until `at`, unless one with a lower tag
    /// does. Returns the time for which this disk gives way to that one.
    pub(crate) fn give_way(&self, at: Nanos, now: Nanos) -> Nanos {
        if self.limiter.kernel_users.load(Relaxed) == 0 {
            return 0;
        }
        let clocks = &self.limiter.clocks;
        let (tag, behind) = (self.tag.load(Relaxed), clocks.behind.load(Relaxed));
        let until = clocks.behind_ns.load(Relaxed);
        // A later end is that of limits that were replaced.
        let waits = now.saturating_sub(until) < BEHIND_AGE
            && until <= at.max(now).saturating_add(LEAD_WAIT);
        if waits && clocks.behind_by.load(Relaxed) != self.number && tag >= behind {
            return (tag - behind).min(LEAD_WAIT);
        }
        clocks.behind.store(tag, Relaxed);
        clocks.behind_by.store(self.number, Relaxed);
        clocks.behind_ns.store(at, Relaxed);
        0
    }

    /// Tells disks of the kernel plane that this one waits no more.
    pub(crate) fn waits_no_more(&self) {
        let clocks = &self.limiter.clocks;
        if clocks.behind_by.load(Relaxed) == self.number {
            clocks.behind_ns.store(0, Relaxed);
        }
    }

    /// A place of a queue of the disk that begins to wait.
    pub(crate) fn wait(&self) -> Place {
        let mut order = self.limiter.order();
        if order.waiting.is_empty() {
            let least = self.limiter.clocks.top.load(Relaxed).saturating_sub(LEAD_MAX);
            order.floor = order.floor.max(least);
        }
        let tag = self.tag.fetch_max(order.floor, Relaxed).max(order.floor);
        order.places += 1;
        let place = (tag, order.places);
        order.waiting.insert(place);
        place
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Nanos = 1_000_000_000;

    fn bucket(rate: u64) -> Bucket {
        let bucket = Bucket::default();
        bucket.set(NonZeroU64::new(rate), SECOND);
        bucket
    }

    #[test]
    fn a_bucket_spaces_requests_by_their_cost() {
        let bucket = bucket(1000);
        assert_eq!(bucket.opens_at(), SECOND);
        bucket.charge(1, SECOND);
        assert_eq!(bucket.opens_at(), SECOND + SECOND / 1000);
        // A request that came late gets no credit without a burst.
        bucket.charge(500, 2 * SECOND);
        assert_eq!(bucket.opens_at(), 2 * SECOND + SECOND / 2);
        bucket.charge(u64::MAX, 2 * SECOND);
        assert_eq!(bucket.opens_at(), u64::MAX);
    }

    #[test]
    fn an_idle_bucket_saves_up_the_burst_and_no_more() {
        let bucket = bucket(1000);
        let now = 100 * SECOND;
        let free = (0..1000).take_while(|_| {
            bucket.charge(1, now - SECOND / 10);
            bucket.opens_at() <= now
        });
        assert_eq!(free.count(), 100);
    }

    fn limited(iops: u64, bytes: u64) -> Arc<Limiter> {
        let limiter = Limiter::new(Some("g"));
        let (iops, bytes) = (NonZeroU64::new(iops), NonZeroU64::new(bytes));
        limiter.set(&Limits { iops, bytes, ..Limits::NONE });
        limiter
    }

    fn shares(limiter: &Arc<Limiter>, count: usize) -> Vec<Arc<Share>> {
        (0..count).map(|_| Arc::clone(limiter.join().share())).collect()
    }

    /// Disks whose queues always wait take turns; `sizes` has the size of the requests of each disk,
    /// and the number of its queues. Returns the number of requests of each disk among `all`.
    fn served(shares: &[Arc<Share>], sizes: &[(u64, usize)], all: usize) -> Vec<usize> {
        let limiter = shares[0].limiter();
        let wait = |disk: usize| (shares[disk].wait(), disk);
        let queues = sizes.iter().enumerate().flat_map(|(disk, (_, n))| vec![disk; *n]);
        let mut waiting: Vec<(Place, usize)> = queues.map(wait).collect();
        let mut counts = vec![0; sizes.len()];
        for _ in 0..all {
            let next = waiting.iter().position(|(place, _)| limiter.ahead(*place, 1) == 0);
            let (place, disk) = waiting.remove(next.expect("one is the first"));
            limiter.serve(place);
            shares[disk].charge(sizes[disk].0, limiter.now());
            counts[disk] += 1;
            waiting.push(wait(disk));
        }
        waiting.iter().for_each(|(place, _)| limiter.leave(*place));
        counts
    }

    #[test]
    fn each_disk_of_a_group_gets_the_same_share_whatever_its_queues() {
        let counts = served(&shares(&limited(100, 0), 3), &[(512, 1), (512, 4), (512, 64)], 3000);
        assert!(counts.iter().all(|count| (930..1070).contains(count)), "{counts:?}");
    }

    #[test]
    fn disks_with_large_and_small_requests_get_the_same_bandwidth() {
        let counts = served(&shares(&limited(0, 1 << 20), 2), &[(4096, 1), (65536, 1)], 1700);
        assert!((1595..1605).contains(&counts[0]), "{counts:?}");
    }

    #[test]
    fn a_disk_that_returns_saves_little_up() {
        let shares = shares(&limited(100, 0), 2);
        assert_eq!(served(&shares[..1], &[(512, 1)], 1000), [1000]);
        let counts = served(&shares, &[(512, 1), (512, 1)], 100);
        // A lead of 100 ms, of 10 ms each.
        assert!((45..=55).contains(&counts[0]), "{counts:?}");
    }

    #[test]
    fn a_change_of_the_limits_forgives_the_lead_of_a_disk() {
        let limiter = limited(0, 1);
        let shares = shares(&limiter, 2);
        let (rich, poor) = (&shares[0], &shares[1]);
        rich.charge(1 << 40, 0);
        assert!(rich.wait() > poor.wait());
        limiter.set(&Limits { bytes: NonZeroU64::new(1 << 20), ..Limits::NONE });
        assert_eq!((rich.wait().0, limiter.opens_at() <= limiter.now()), (0, true));
    }

    #[test]
    fn a_disk_gives_way_to_one_of_the_kernel_plane_that_is_behind() {
        let limiter = limited(100, 0);
        let (ahead, now) = (shares(&limiter, 1).remove(0), limiter.now());
        ahead.charge(512, now);
        let clocks = &limiter.clocks;
        clocks.behind_by.store(1 << 63, Relaxed);
        clocks.behind_ns.store(now + SECOND, Relaxed);
        assert_eq!(ahead.give_way(now, now), 0, "no disk is on the kernel plane");
        let _user = limiter.add_kernel_user();
        let at = now + SECOND;
        assert_eq!(ahead.give_way(at, now), LEAD_WAIT);
        clocks.behind.store(SECOND / 100 - 5, Relaxed);
        assert_eq!(ahead.give_way(at, now), 5);
        ahead.waits_no_more();
        assert_eq!(clocks.behind_by.load(Relaxed), 1 << 63, "it is not the one that waits");
        assert_eq!(ahead.give_way(now, now + SECOND + BEHIND_AGE), 0, "that one waits no more");
        assert_eq!(clocks.behind.load(Relaxed), SECOND / 100, "it has not told its tag");
        ahead.waits_no_more();
        assert_eq!(clocks.behind_ns.load(Relaxed), 0);
        clocks.behind.store(0, Relaxed);
        clocks.behind_by.store(1 << 63, Relaxed);
        clocks.behind_ns.store(now + SECOND, Relaxed);
        assert_eq!(ahead.give_way(now, now), 0, "that one waits for limits that were replaced");
    }
}
