// SPDX-License-Identifier: Apache-2.0
//! Limits on the rate of a disk or of a group of disks, shared by all their queues.
//!
//! Each limit is a token bucket, kept as a clock: the time at which the next request may be taken. A
//! taken request advances the clock by its cost, and may advance it beyond the present time: that
//! debt delays the next request. An idle clock lags behind the present time by the burst at most.
//!
//! A queue asks before it takes a chain ([`crate::throttle::Throttle`]), so that no taken request
//! waits for a limit, and a stop is not delayed.
//!
//! In a group, a request advances a clock to [`LEAD_MAX`] after the present time at most, or by the
//! cost of one request with a limit on requests. The rest of its cost is debt of its disk alone.
//! The disk takes no request meanwhile: its queues wait in order as usual, and when the limit opens
//! for them, they pay a part of the debt, again up to that time. So the others wait for a large
//! request no longer than for a small one, and all costs reach the clocks.
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

mod bucket;
mod waits;

#[cfg(test)]
pub(crate) use bucket::Bucket;
pub(crate) use bucket::{Clocks, Debt};
pub(crate) use waits::{Duty, Wait};

use crate::latency::monotonic;
pub(crate) use crate::limit_change::Limits;
use crate::limit_change::{LimitChange, LimitError, Source};
use bucket::{Page, Span, add};
use std::collections::BTreeSet;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use waits::Waits;

/// Maximum time by which a request of a group advances a clock beyond the present time. The kernel
/// plane has the same.
pub(crate) const LEAD_MAX: Nanos = 10_000_000;
/// Maximum lead of a disk's tag, in nanoseconds of cost, over a disk that waits when no queue waits:
/// the lead comes from a time in which the limit delayed no request. The kernel plane has the same.
pub(crate) const TAG_LEAD_MAX: u64 = 100_000_000;
/// Maximum time for which a disk gives way to one of the kernel plane, in nanoseconds: less than the
/// least burst. The kernel plane has the same.
pub(crate) const GIVE_WAY_MAX: Nanos = 6_000_000;
/// Time after the end of its wait from which a disk does not count as waiting. The kernel plane has the same.
pub(crate) const BEHIND_AGE: Nanos = 8_000_000;

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
    /// Held from the check of a change to its end; before `order`, for which threads with requests wait.
    changes: Mutex<()>,
    /// Number of [`KernelUser`]s.
    kernel_users: AtomicUsize,
    #[cfg(test)]
    pub(crate) test_time: AtomicU64,
}

/// A device of the kernel plane that uses the clocks of a limiter and the debt of its disk, and keeps
/// them in place.
#[derive(Debug)]
pub(crate) struct KernelUser(Arc<Share>);

/// State for a change of the limits, and for the begin and the end of a wait.
#[derive(Debug)]
struct Order {
    limits: Limits,
    source: Source,
    shares: Vec<Weak<Share>>,
    waiting: BTreeSet<Ticket>,
    /// Lowest tag of a queue that begins to wait.
    floor: u64,
    /// Number of tickets so far.
    tickets: u64,
}

/// The ticket of a waiting queue: tag and number. The lowest one is the next.
pub(crate) type Ticket = (u64, u64);

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
    waits: Waits,
}

/// A number that no other share of this process has.
fn new_number() -> u64 {
    static NUMBERS: AtomicU64 = AtomicU64::new(1);
    NUMBERS.fetch_add(1, Relaxed)
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
            changes: Mutex::new(()),
            #[cfg(test)]
            test_time: AtomicU64::new(0),
            order: Mutex::new(Order {
                limits: Limits::NONE,
                source: Source::Nobody,
                shares: Vec::new(),
                waiting: BTreeSet::new(),
                floor: 0,
                tickets: 0,
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
            waits: Waits::default(),
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
        let _changes = self.changes();
        self.set_in(&mut self.order(), limits);
    }

    /// Changes the limits, and forgives the debt of the old ones. Returns whether they differ. The lock `changes`
    /// makes changes of different parts by different disks hold together.
    ///
    /// # Errors
    /// [`LimitError::Last`] if a group would have no limit: the old ones hold.
    pub(crate) fn change(&self, change: LimitChange) -> Result<bool, LimitError> {
        self.change_with(change, || Ok(()))
    }

    /// As [`Limiter::change`], with an act between the check and the change. The act must not change these limits.
    ///
    /// # Errors
    /// As there, and those of the act: the old limits hold.
    pub(crate) fn change_with(
        &self,
        change: LimitChange,
        act: impl FnOnce() -> Result<(), LimitError>,
    ) -> Result<bool, LimitError> {
        let _changes = self.changes();
        let old = self.limits();
        let new = change.of(old);
        let differs = new != old;
        if let Some(group) = self.group.as_ref().filter(|_| differs && !new.is_set()) {
            return Err(LimitError::Last(Arc::clone(group)));
        }
        act()?;
        let mut order = self.order();
        if !change.is_empty() {
            order.source = Source::Command;
        }
        if differs {
            self.set_in(&mut order, &new);
        }
        Ok(differs)
    }

    /// Adopts the limits of the file of `disk`, which has this share, if the present ones give way. Returns whether
    /// they differ.
    pub(crate) fn set_of_file(&self, share: &Arc<Share>, disk: &str, limits: &Limits) -> bool {
        let _changes = self.changes();
        let mut order = self.order();
        if !order.source.gives_way_to(disk) {
            return false;
        }
        order.source = Source::File(disk.to_owned(), Arc::downgrade(share));
        let differs = *limits != order.limits;
        if differs {
            self.set_in(&mut order, limits);
        }
        differs
    }

    fn set_in(&self, order: &mut Order, limits: &Limits) {
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

    /// Number of queues that are before `ticket`, at most `most`.
    pub(crate) fn ahead(&self, ticket: Ticket, most: usize) -> usize {
        self.order().waiting.range(..ticket).take(most).count()
    }

    /// Goes on with the wait of a queue, whose ticket [`Limiter::serve`] may have given up
    /// meanwhile. Returns as [`Limiter::ahead`].
    pub(crate) fn wait_on(&self, ticket: Ticket, most: usize) -> usize {
        let mut order = self.order();
        order.waiting.insert(ticket);
        order.waiting.range(..ticket).take(most).count()
    }

    /// Ends the wait of a queue that takes nothing.
    pub(crate) fn leave(&self, ticket: Ticket) {
        self.order().waiting.remove(&ticket);
    }

    /// Ends the wait of a queue that may take now, and the right of those ahead of it to go first, until
    /// they look again. Returns whether none was ahead.
    pub(crate) fn serve(&self, ticket: Ticket) -> bool {
        let mut order = self.order();
        let is_first = order.waiting.range(..ticket).next().is_none();
        if is_first {
            order.floor = order.floor.max(ticket.0);
        }
        order.waiting = order.waiting.split_off(&ticket);
        order.waiting.remove(&ticket);
        is_first
    }

    fn changes(&self) -> MutexGuard<'_, ()> {
        self.changes.lock().unwrap_or_else(PoisonError::into_inner)
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

    /// The waiting queues of the disk.
    pub(crate) fn waits(&self) -> &Waits {
        &self.waits
    }

    /// Returns whether the disk has debt of its own.
    pub(crate) fn owes(&self) -> bool {
        self.debt.iops.load(Relaxed) > 0 || self.debt.bytes.load(Relaxed) > 0
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
            && until <= at.max(now).saturating_add(GIVE_WAY_MAX);
        if waits && clocks.behind_by.load(Relaxed) != self.number && tag >= behind {
            return (tag - behind).min(GIVE_WAY_MAX);
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

    /// A ticket of a queue of the disk that begins to wait.
    pub(crate) fn wait(&self) -> Ticket {
        let mut order = self.limiter.order();
        if order.waiting.is_empty() {
            let least = self.limiter.clocks.top.load(Relaxed).saturating_sub(TAG_LEAD_MAX);
            order.floor = order.floor.max(least);
        }
        let tag = self.tag.fetch_max(order.floor, Relaxed).max(order.floor);
        order.tickets += 1;
        let ticket = (tag, order.tickets);
        order.waiting.insert(ticket);
        ticket
    }
}

#[cfg(test)]
mod tests;
