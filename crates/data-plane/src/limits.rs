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
//! In a group, a request advances a clock to [`LEAD_MAX`] after the present time at most, or by the
//! cost of one request with a limit on requests. The rest of its cost is debt of its disk alone. The
//! disk takes no request meanwhile: its queues wait their turn as usual, and when they have it, they
//! pay a part of the debt, again up to that time. So the others wait for a large request no longer than
//! for a small one, and all costs reach the clocks.
//!
//! The order of waiting queues is that of start-time fair queuing. The *tag* of a disk is the cost of
//! its requests so far. A queue that begins to wait keeps the present tag of its disk, and the waiting
//! queue with the lowest tag takes next. So each disk that always has requests gets the same share,
//! in the unit of the limit, whatever the number of its queues and the size of its requests. A disk
//! that returns after an idle time gets the tag of the queue that took last: it saves little up.
//!
//! Queues of the kernel plane use the same clocks and debts, because the module has the pages of
//! [`Clocks`] and [`Debt`], which it pins: they have nothing else in them ([`Page`]). No
//! order is shared with them, only the tag of a disk that waits: a disk with a higher tag gives way
//! for some time. The module does the same: `kernel/vhost_blk/share.c`.

use crate::latency::monotonic;
use std::collections::BTreeSet;
use std::num::NonZeroU64;
use std::ops::Deref;
use std::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

const NANOS: u128 = 1_000_000_000;
/// Maximum time by which a request of a group advances a clock beyond the present time. The kernel
/// plane has the same.
pub(crate) const LEAD_MAX: Nanos = 10_000_000;
/// Maximum lead of a disk's tag, in nanoseconds of cost, over a disk that waits when no queue waits:
/// the lead comes from a time in which the limit delayed nobody.
const TAG_LEAD_MAX: u64 = 100_000_000;
/// Time after which another queue of a disk pays its debt, because the one whose turn it is has not
/// looked.
const PAYER_PATIENCE: Nanos = 5 * LEAD_MAX;
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
    clocks: Box<Page<Clocks>>,
    /// Number of [`Member`]s.
    members: AtomicUsize,
    order: Mutex<Order>,
    /// Number of [`KernelUser`]s.
    kernel_users: AtomicUsize,
    #[cfg(test)]
    pub(crate) test_time: AtomicU64,
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

/// `struct vhost_blk_debt` of the module: cost of the requests of a disk for which no clock was
/// advanced yet.
#[repr(C, align(16))]
#[derive(Debug, Default)]
pub(crate) struct Debt {
    pub(crate) iops: AtomicU64,
    pub(crate) bytes: AtomicU64,
}

/// A page of its own: the module pins it, and writes to it.
#[repr(C, align(4096))]
#[derive(Debug, Default)]
pub(crate) struct Page<T>(T);

impl<T> Deref for Page<T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.0
    }
}

/// A device of the kernel plane that uses the clocks of a limiter and the debt of its disk, and keeps
/// them in place.
#[derive(Debug)]
pub(crate) struct KernelUser(Arc<Share>);

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
    pub(crate) debt: Box<Page<Debt>>,
    waits: Mutex<Waits>,
}

/// The queues of a disk that wait, and the one that pays its debt in the name of the disk: with a place
/// of each queue, the disk would have more turns than the others. The payer takes the next request, so it
/// is the queue that has waited longest.
#[derive(Debug, Default)]
struct Waits {
    /// Number of waits so far, also the last [`Wait`].
    begun: Wait,
    waiting: BTreeSet<Wait>,
    payer: Option<Wait>,
    /// The time at which the payer looks next, or that of the end of the last payment.
    payer_due: Nanos,
}

/// Duty of a waiting queue of a disk in debt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Duty {
    /// Another queue pays.
    Wait,
    /// It pays from now on.
    BeginToPay,
    Pay,
}

/// The wait of a queue: a number that is higher than those of earlier waits of its disk.
pub(crate) type Wait = u64;

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

    /// The cost of a request.
    fn cost(&self, units: u64) -> Nanos {
        let Some(rate) = NonZeroU64::new(self.rate.load(Relaxed)) else { return 0 };
        let cost = u128::from(units) * NANOS / u128::from(rate.get());
        u64::try_from(cost).unwrap_or(u64::MAX)
    }

    /// Advances the clock. Returns the part of the cost by which it has advanced.
    fn advance(&self, cost: Nanos, span: Span) -> Nanos {
        if cost == 0 {
            return 0;
        }
        let advance = |clock: u64| Some(span.after(clock, cost));
        let (Ok(before) | Err(before)) = self.clock.fetch_update(Relaxed, Relaxed, advance);
        span.part(before, cost)
    }

    /// Pays a part of the debt. Returns that part.
    fn pay(&self, debt: &AtomicU64, span: Span) -> Nanos {
        let owed = debt.load(Relaxed);
        let part = span.part(self.clock.load(Relaxed), owed);
        // Taken off first: two queues never pay the same debt.
        if part == 0 || debt.compare_exchange(owed, owed - part, Relaxed, Relaxed).is_err() {
            return 0;
        }
        let paid = self.advance(part, span);
        add(debt, part - paid);
        paid
    }
}

/// Adds to a debt.
fn add(debt: &AtomicU64, more: Nanos) {
    let more = |debt: u64| Some(debt.saturating_add(more));
    let _ = debt.fetch_update(AcqRel, Relaxed, more); // the closure never refuses
}

/// The span of time in which a clock advances.
#[derive(Clone, Copy)]
struct Span {
    earliest: Nanos,
    latest: Nanos,
}

impl Span {
    /// The part of the cost that a clock has room for.
    fn part(self, clock: Nanos, cost: Nanos) -> Nanos {
        cost.min(self.latest.saturating_sub(clock.max(self.earliest)))
    }

    /// The clock after its advance.
    fn after(self, clock: Nanos, cost: Nanos) -> Nanos {
        clock.max(self.earliest) + self.part(clock, cost)
    }
}

impl Limiter {
    /// No limits, for one disk or for a group of this name.
    pub(crate) fn new(group: Option<&str>) -> Arc<Self> {
        Arc::new(Limiter {
            group: group.map(Arc::from),
            is_set: AtomicBool::new(false),
            clocks: Box::default(),
            members: AtomicUsize::new(0),
            kernel_users: AtomicUsize::new(0),
            #[cfg(test)]
            test_time: AtomicU64::new(0),
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
            debt: Box::default(),
            waits: Mutex::default(),
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
        let shares: Vec<Arc<Share>> = order.shares.iter().filter_map(Weak::upgrade).collect();
        shares.iter().for_each(|share| share.tag.store(0, Relaxed));
        self.is_set.store(limits.is_set(), Relaxed);
        // Pairs with the acquire in `Share::charge` and that of the module: a queue that sees the
        // version sees its limits.
        clocks.version.fetch_add(1, Release);
        shares.iter().for_each(|share| share.forgive());
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

    #[cfg(not(test))]
    pub(crate) fn now(&self) -> Nanos {
        monotonic()
    }

    /// The time of the test, if it has one.
    #[cfg(test)]
    pub(crate) fn now(&self) -> Nanos {
        match self.test_time.load(Relaxed) {
            0 => monotonic(),
            time => time,
        }
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
    /// they look again. Returns whether none was ahead.
    pub(crate) fn serve(&self, place: Place) -> bool {
        let mut order = self.order();
        let is_first = order.waiting.range(..place).next().is_none();
        if is_first {
            order.floor = order.floor.max(place.0);
        }
        order.waiting = order.waiting.split_off(&place);
        order.waiting.remove(&place);
        is_first
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
        &self.0.limiter.clocks
    }

    /// The debt of the disk.
    pub(crate) fn debt(&self) -> &Debt {
        &self.0.debt
    }
}

impl Drop for KernelUser {
    fn drop(&mut self) {
        self.0.limiter.kernel_users.fetch_sub(1, Relaxed);
    }
}

impl Share {
    #[inline]
    pub(crate) fn limiter(&self) -> &Arc<Limiter> {
        &self.limiter
    }

    /// Adds a device of the kernel plane that serves the disk.
    pub(crate) fn add_kernel_user(self: &Arc<Self>) -> KernelUser {
        self.limiter.kernel_users.fetch_add(1, Relaxed);
        KernelUser(Arc::clone(self))
    }

    /// Charges a request that moves so many bytes. In a group, the clocks advance until `lead` after the
    /// present time at most, and the rest is debt.
    pub(crate) fn charge(&self, bytes: u64, now: Nanos, lead: Nanos) {
        let clocks = &self.limiter.clocks;
        // Pairs with the release in `Limiter::set`: the costs are those of this version or a later one.
        let version = clocks.version.load(Acquire);
        let (iops, bytes) = (clocks.iops.cost(1), clocks.bytes.cost(bytes));
        // One request is the least part of a limit on requests.
        let lead_of_iops = if lead < LEAD_MAX { lead } else { lead.max(iops) };
        let of_iops = clocks.iops.advance(iops, self.span(now, lead_of_iops));
        let of_bytes = clocks.bytes.advance(bytes, self.span(now, lead));
        self.add_to_tag(of_iops.max(of_bytes));
        if self.limiter.group.is_some() && (of_iops < iops || of_bytes < bytes) {
            self.owe(iops - of_iops, bytes - of_bytes, version);
        }
    }

    /// The span in which the clocks advance. Limits of one disk have its debt in their clocks.
    fn span(&self, now: Nanos, lead: Nanos) -> Span {
        let burst = self.limiter.clocks.burst_ns.load(Relaxed);
        let is_group = self.limiter.group.is_some();
        let latest = if is_group { now.saturating_add(lead) } else { Nanos::MAX };
        Span { earliest: now.saturating_sub(burst), latest }
    }

    fn add_to_tag(&self, cost: Nanos) {
        let advance = |tag: u64| Some(tag.saturating_add(cost));
        let (Ok(tag) | Err(tag)) = self.tag.fetch_update(Relaxed, Relaxed, advance);
        self.limiter.clocks.top.fetch_max(tag.saturating_add(cost), Relaxed);
    }

    /// Adds the rest of the cost of a request to the debt.
    fn owe(&self, iops: Nanos, bytes: Nanos, version: u64) {
        for (debt, more) in [(&self.debt.iops, iops), (&self.debt.bytes, bytes)] {
            add(debt, more);
        }
        self.forgive_debt_of_other(version);
    }

    /// Forgives debt that was added for limits of `version`, if they were replaced. An addition that
    /// comes after `forgive` of the newer limits sees their version: `add` is an acquire of that release.
    fn forgive_debt_of_other(&self, version: u64) {
        if self.limiter.clocks.version.load(Relaxed) != version {
            self.forgive();
        }
    }

    /// Forgives the debt. Limits that end it have their version before.
    fn forgive(&self) {
        self.debt.iops.store(0, Release);
        self.debt.bytes.store(0, Release);
    }

    /// Returns whether the disk has debt of its own.
    pub(crate) fn owes(&self) -> bool {
        self.debt.iops.load(Relaxed) > 0 || self.debt.bytes.load(Relaxed) > 0
    }

    /// A queue of the disk begins to wait.
    pub(crate) fn begin_wait(&self) -> Wait {
        let mut waits = self.waits();
        waits.begun += 1;
        let wait = waits.begun;
        waits.waiting.insert(wait);
        wait
    }

    /// A queue waits no more, and pays no more.
    pub(crate) fn end_wait(&self, wait: Wait) {
        let mut waits = self.waits();
        waits.waiting.remove(&wait);
        if waits.payer == Some(wait) {
            waits.payer = None;
            waits.payer_due = self.limiter.now();
        }
    }

    /// A waiting queue of a disk in debt asks for its duty. The queue that has waited longest pays when no
    /// other one does, or any one if that one stays away for [`PAYER_PATIENCE`].
    pub(crate) fn duty(&self, wait: Wait, now: Nanos) -> Duty {
        let mut waits = self.waits();
        // Another one may have given its turn up.
        waits.waiting.insert(wait);
        let is_next = waits.payer.is_none() && waits.waiting.first() == Some(&wait);
        let is_left = now.saturating_sub(waits.payer_due) >= PAYER_PATIENCE;
        let duty = match waits.payer == Some(wait) {
            true => Duty::Pay,
            false if is_next || is_left => Duty::BeginToPay,
            false => return Duty::Wait,
        };
        if is_left {
            // Those before it have their turn again when they look.
            waits.waiting = waits.waiting.split_off(&wait);
        }
        waits.payer = Some(wait);
        waits.payer_due = now;
        duty
    }

    /// Returns whether another queue of the disk pays, and so takes next.
    pub(crate) fn has_other_payer(&self, wait: Option<Wait>) -> bool {
        self.waits().payer.is_some_and(|payer| Some(payer) != wait)
    }

    /// A queue sleeps until `due`. If it pays, no other one does before.
    pub(crate) fn sleeps(&self, wait: Wait, due: Nanos) {
        let mut waits = self.waits();
        if waits.payer == Some(wait) {
            waits.payer_due = due;
        }
    }

    fn waits(&self) -> MutexGuard<'_, Waits> {
        self.waits.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Pays a part of the debt: as much as the clocks have room for until `lead` after the present time.
    pub(crate) fn pay(&self, now: Nanos, lead: Nanos) {
        let (clocks, span) = (&self.limiter.clocks, self.span(now, lead));
        // Pairs with the release in `Limiter::set`, as in `charge`.
        let version = clocks.version.load(Acquire);
        let iops = clocks.iops.pay(&self.debt.iops, span);
        let bytes = clocks.bytes.pay(&self.debt.bytes, span);
        self.add_to_tag(iops.max(bytes));
        self.forgive_debt_of_other(version);
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
            let least = self.limiter.clocks.top.load(Relaxed).saturating_sub(TAG_LEAD_MAX);
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

    fn charge(bucket: &Bucket, units: u64, earliest: Nanos) {
        let span = Span { earliest, latest: Nanos::MAX };
        bucket.advance(bucket.cost(units), span);
    }

    fn bucket(rate: u64) -> Bucket {
        let bucket = Bucket::default();
        bucket.set(NonZeroU64::new(rate), SECOND);
        bucket
    }

    #[test]
    fn a_bucket_spaces_requests_by_their_cost() {
        let bucket = bucket(1000);
        assert_eq!(bucket.opens_at(), SECOND);
        charge(&bucket, 1, SECOND);
        assert_eq!(bucket.opens_at(), SECOND + SECOND / 1000);
        // A request that came late gets no credit without a burst.
        charge(&bucket, 500, 2 * SECOND);
        assert_eq!(bucket.opens_at(), 2 * SECOND + SECOND / 2);
        charge(&bucket, u64::MAX, 2 * SECOND);
        assert_eq!(bucket.opens_at(), u64::MAX);
    }

    #[test]
    fn an_idle_bucket_saves_up_the_burst_and_no_more() {
        let bucket = bucket(1000);
        let now = 100 * SECOND;
        let free = (0..1000).take_while(|_| {
            charge(&bucket, 1, now - SECOND / 10);
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

    /// Disks whose queues always wait take turns, or pay; `sizes` has the size of the requests of each
    /// disk, and the number of its queues. Returns the number of requests of each disk among `all`.
    fn served(shares: &[Arc<Share>], sizes: &[(u64, usize)], all: usize) -> Vec<usize> {
        let limiter = shares[0].limiter();
        let wait = |disk: usize| (shares[disk].wait(), disk);
        let queues = sizes.iter().enumerate().flat_map(|(disk, (_, n))| vec![disk; *n]);
        let mut waiting: Vec<(Place, usize)> = queues.map(wait).collect();
        let mut counts = vec![0; sizes.len()];
        while counts.iter().sum::<usize>() < all {
            limiter.test_time.store(limiter.now().max(limiter.opens_at()), Relaxed);
            let next = waiting.iter().position(|(place, _)| limiter.ahead(*place, 1) == 0);
            let (place, disk) = waiting.remove(next.expect("one is the first"));
            limiter.serve(place);
            match shares[disk].owes() {
                true => shares[disk].pay(limiter.now(), LEAD_MAX),
                false => {
                    shares[disk].charge(sizes[disk].0, limiter.now(), LEAD_MAX);
                    counts[disk] += 1;
                }
            }
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
        rich.charge(1 << 40, limiter.now(), LEAD_MAX);
        assert!(rich.wait() > poor.wait());
        limiter.set(&Limits { bytes: NonZeroU64::new(1 << 20), ..Limits::NONE });
        assert_eq!((rich.wait().0, limiter.opens_at() <= limiter.now()), (0, true));
    }

    #[test]
    fn a_limit_on_requests_charges_whole_ones() {
        let (slow, large) = (limited(10, 0), limited(0, 10));
        for (limiter, owes) in [(slow, false), (large, true)] {
            let share = shares(&limiter, 1).remove(0);
            share.charge(1, limiter.now(), LEAD_MAX);
            assert_eq!(share.owes(), owes);
        }
    }

    #[test]
    fn a_cost_of_limits_that_were_replaced_does_not_become_debt() {
        let limiter = limited(0, 1);
        let share = shares(&limiter, 1).remove(0);
        let version = limiter.clocks.version.load(Relaxed);
        share.owe(0, SECOND, version);
        assert!(share.owes());
        limiter.set(&Limits { bytes: NonZeroU64::new(1 << 20), ..Limits::NONE });
        assert!(!share.owes());
        share.owe(0, SECOND, version);
        assert!(!share.owes());
    }

    #[test]
    fn the_module_gets_pages_with_nothing_else_in_them() {
        let share = shares(&limited(0, 1), 1).remove(0);
        let user = share.add_kernel_user();
        for address in [&raw const *user.clocks() as usize, &raw const *user.debt() as usize] {
            assert_eq!(address % 4096, 0);
        }
        assert_eq!((size_of::<Page<Clocks>>(), size_of::<Page<Debt>>()), (4096, 4096));
    }

    #[test]
    fn a_disk_gives_way_to_one_of_the_kernel_plane_that_is_behind() {
        let limiter = limited(100, 0);
        let (ahead, now) = (shares(&limiter, 1).remove(0), limiter.now());
        ahead.charge(512, now, LEAD_MAX);
        let clocks = &limiter.clocks;
        clocks.behind_by.store(1 << 63, Relaxed);
        clocks.behind_ns.store(now + SECOND, Relaxed);
        assert_eq!(ahead.give_way(now, now), 0, "no disk is on the kernel plane");
        let _user = ahead.add_kernel_user();
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
