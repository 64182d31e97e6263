// SPDX-License-Identifier: Apache-2.0
//! The throttle of one queue: its view on the limits of its disk, and its wait for them.
//!
//! A queue that may take no chain waits. Its thread sleeps until then, for [`QUANTUM`] at least,
//! and the queue makes up for it by the burst. Queues with a lower ticket are ahead: it sleeps for
//! another quantum for each, and lets them go first once more when the limit opens. Then it takes,
//! so that a queue that is ahead and does not come (its lane or its thread is busy) delays the
//! others by a few milliseconds only.

use crate::limits::{Duty, LEAD_MAX, Limiter, Nanos, Share, Ticket, Wait};
use std::sync::Arc;
use std::time::Duration;

/// Minimum sleep of a queue that waits for a limit; bounds the wake-ups for a high limit.
const QUANTUM: Duration = Duration::from_millis(1);
/// Maximum quanta that a queue sleeps longer because others are ahead: less than the least burst.
const AHEAD_MAX: usize = 6;

/// The state of one queue for the limits of its disk.
#[derive(Debug)]
pub(crate) struct Throttle {
    share: Arc<Share>,
    /// There is a limit.
    limited: bool,
    /// The queue takes no chain before; 0: it may take one.
    closed_until: Nanos,
    /// The wait of a waiting queue.
    wait: Option<Wait>,
    /// Its ticket; `None`: another queue pays the debt of the disk.
    ticket: Option<Ticket>,
    /// The beginning of the present or the last wait, and the length of the last one; 0 if the queue
    /// did not wait before the present chains.
    closed_at: Nanos,
    waited: Nanos,
    /// The limit was open, and the queue has let others go first.
    has_yielded: bool,
    /// Time by which a request may advance the clocks beyond the present time.
    lead: Nanos,
}

impl Throttle {
    pub(crate) fn new(share: Arc<Share>) -> Self {
        Throttle {
            share,
            limited: false,
            closed_until: 0,
            wait: None,
            ticket: None,
            closed_at: 0,
            waited: 0,
            has_yielded: false,
            lead: LEAD_MAX,
        }
    }

    /// Looks at the limits, before chains are taken. Returns whether a wait begins.
    #[inline]
    pub(crate) fn look(&mut self) -> bool {
        let limited = self.share.limiter().is_set();
        if !limited && !self.limited {
            return false;
        }
        self.limited = limited;
        self.look_at_clock()
    }

    fn look_at_clock(&mut self) -> bool {
        let limiter = self.share.limiter();
        let now = limiter.now();
        if !self.limited {
            self.waited = 0;
            self.reset();
        } else if now >= self.closed_until {
            let was_open = self.is_open();
            match limiter.opens_at() {
                at if at > now => self.close(at, now),
                _ => self.open(now),
            }
            return was_open && !self.is_open();
        }
        false
    }

    /// Ends the wait, unless other queues are ahead, or the disk has debt: then the queue pays, if it
    /// is the one that does, and waits again.
    fn open(&mut self, now: Nanos) {
        let owes = self.share.owes();
        if self.wait.is_none() && !owes {
            self.waited = 0;
            self.lead = LEAD_MAX;
            return;
        }
        if !self.claim_ticket(owes, now) {
            return;
        }
        let ticket = self.take_ticket(now);
        let share = &self.share;
        if !self.has_yielded && share.limiter().ahead(ticket, 1) > 0 {
            self.has_yielded = true;
            self.closed_until = now + nanos(QUANTUM);
            return;
        }
        // Those ahead may come now: the limit must not be closed for long.
        self.lead = if share.limiter().serve(ticket) { LEAD_MAX } else { nanos(QUANTUM) };
        self.ticket = None;
        if owes {
            share.pay(now, self.lead);
            let at = share.limiter().opens_at();
            if at > now || share.owes() {
                let ticket = *self.ticket.insert(share.wait());
                return self.sleep(ticket, at, now);
            }
        }
        share.waits_no_more();
        self.waited = now.saturating_sub(self.closed_at);
        self.reset();
    }

    /// Begins or goes on with a wait until `at`.
    fn close(&mut self, at: Nanos, now: Nanos) {
        if self.claim_ticket(self.share.owes(), now) {
            let ticket = self.take_ticket(now);
            self.sleep(ticket, at, now);
        }
    }

    /// Claims the right to a ticket, which a queue has if its disk has no debt, or if it pays it. Otherwise the queue
    /// gives an old ticket back, and looks again soon: it may be the next payer.
    fn claim_ticket(&mut self, owes: bool, now: Nanos) -> bool {
        // Another queue that has paid all of the debt takes next.
        if !owes && !self.share.waits().has_other_payer(self.wait) {
            return true;
        }
        let wait = self.begin(now);
        let duty = self.share.waits().duty(wait, now);
        // A ticket from before the last request of the disk would let it take twice.
        if duty != Duty::Pay
            && let Some(ticket) = self.ticket.take()
        {
            self.share.limiter().leave(ticket);
        }
        if duty == Duty::Wait {
            self.closed_until = now + LEAD_MAX;
        }
        duty != Duty::Wait
    }

    /// Begins a wait, unless the queue waits.
    fn begin(&mut self, now: Nanos) -> Wait {
        if self.wait.is_none() {
            self.closed_at = now;
        }
        let share = &self.share;
        *self.wait.get_or_insert_with(|| share.waits().begin())
    }

    /// Takes a ticket, unless the queue has one.
    fn take_ticket(&mut self, now: Nanos) -> Ticket {
        self.begin(now);
        let share = &self.share;
        *self.ticket.get_or_insert_with(|| share.wait())
    }

    /// Waits with a ticket until `at`, and longer if others are ahead.
    fn sleep(&mut self, ticket: Ticket, at: Nanos, now: Nanos) {
        let share = &self.share;
        let ahead = share.limiter().wait_on(ticket, AHEAD_MAX) as u64;
        let at = at.max(now + nanos(QUANTUM));
        let lead = share.give_way(at, now);
        self.closed_until = at.saturating_add(lead.max(ahead * nanos(QUANTUM)));
        self.has_yielded = false;
        if let Some(wait) = self.wait {
            share.waits().sleeps(wait, self.closed_until);
        }
    }

    /// Returns whether the queue may take a chain.
    #[inline]
    pub(crate) fn is_open(&self) -> bool {
        self.closed_until == 0
    }

    /// The length of the wait that has ended right before the present chains; 0: there was none.
    #[inline]
    pub(crate) fn waited(&self) -> Nanos {
        self.waited
    }

    /// Charges a taken request. Returns whether a wait begins.
    #[inline]
    pub(crate) fn charge(&mut self, bytes: u64) -> bool {
        self.limited && self.charge_limited(bytes)
    }

    fn charge_limited(&mut self, bytes: u64) -> bool {
        let limiter = self.share.limiter();
        let now = limiter.now();
        self.share.charge(bytes, now, self.lead);
        let at = limiter.opens_at();
        if at <= now && !self.share.owes() {
            return false;
        }
        self.close(at, now);
        true
    }

    /// The rest of the wait; `None`: there is none.
    pub(crate) fn wait(&self) -> Option<Duration> {
        let now = || self.share.limiter().now();
        let left = || Duration::from_nanos(self.closed_until.saturating_sub(now()));
        (self.closed_until > 0).then(left)
    }

    /// Ends the wait, because the limits of `changed` have changed.
    pub(crate) fn limits_changed(&mut self, changed: &Arc<Limiter>) {
        if Arc::ptr_eq(self.share.limiter(), changed) {
            self.reset();
        }
    }

    fn reset(&mut self) {
        self.closed_until = 0;
        self.has_yielded = false;
        if let Some(wait) = self.wait.take() {
            self.share.waits().end(wait, self.share.limiter().now());
        }
        if let Some(ticket) = self.ticket.take() {
            self.share.limiter().leave(ticket);
            self.share.waits_no_more();
        }
    }
}

/// A queue that stops waits no longer.
impl Drop for Throttle {
    fn drop(&mut self) {
        self.reset();
    }
}

fn nanos(duration: Duration) -> Nanos {
    duration.as_nanos() as u64
}

#[cfg(test)]
mod simulation;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::limits::Limits;
    use std::num::NonZeroU64;
    use std::sync::atomic::Ordering::Relaxed;

    fn bytes(rate: u64) -> Limits {
        Limits { bytes: NonZeroU64::new(rate), ..Limits::NONE }
    }

    fn share(limiter: &Arc<Limiter>) -> Arc<Share> {
        Arc::clone(limiter.join().share())
    }

    #[test]
    fn a_disk_without_limits_never_closes() {
        let limiter = Limiter::new(None);
        let mut throttle = Throttle::new(share(&limiter));
        for _ in 0..10 {
            assert!(!throttle.look() && throttle.is_open());
            assert!(!throttle.charge(u64::MAX) && throttle.is_open());
        }
        assert_eq!(throttle.wait(), None);
    }

    #[test]
    fn a_debt_closes_the_queues_of_its_disk_and_a_new_limit_forgives_it() {
        let limiter = Limiter::new(Some("g"));
        limiter.test_time.store(1 << 40, Relaxed);
        limiter.set(&bytes(1000));
        let disk = share(&limiter);
        let (mut one, mut same) =
            (Throttle::new(Arc::clone(&disk)), Throttle::new(Arc::clone(&disk)));
        let mut other = Throttle::new(share(&limiter));
        assert!(!one.look() && one.is_open());
        assert!(one.charge(60_000));
        for throttle in [&mut same, &mut other] {
            assert!(throttle.look() && !throttle.is_open());
            assert!(!throttle.look(), "one wait begins once");
            let wait = throttle.wait().unwrap();
            assert!(wait <= Duration::from_millis(12), "{wait:?}");
        }
        // Long enough for the clock, not for the debt.
        limiter.test_time.fetch_add(nanos(Duration::from_millis(20)), Relaxed);
        same.look();
        other.look();
        assert!(!same.is_open(), "the disk is in debt");
        limiter.test_time.fetch_add(nanos(Duration::from_millis(20)), Relaxed);
        other.look();
        assert!(other.is_open(), "another disk waits for the debt");
        limiter.set(&bytes(1000));
        one.limits_changed(&Limiter::new(None));
        assert!(!one.is_open(), "the limits of others have changed");
        one.limits_changed(&limiter);
        assert!(!one.look() && one.is_open());
        assert!(one.charge(60_000));
        limiter.set(&Limits::NONE);
        one.limits_changed(&limiter);
        assert!(!one.look() && one.is_open(), "it waits for a limit that is gone");
    }

    #[test]
    fn a_wait_is_known_until_the_queue_looks_again() {
        let limiter = Limiter::new(None);
        limiter.set(&bytes(1000));
        let mut throttle = Throttle::new(share(&limiter));
        assert!(!throttle.look());
        assert!(throttle.charge(60_000));
        assert_eq!(throttle.waited(), 0, "the wait has not ended");
        let end = throttle.closed_at + 5 * nanos(QUANTUM);
        throttle.open(end);
        assert_eq!(throttle.waited(), 5 * nanos(QUANTUM));
        throttle.open(end);
        assert_eq!(throttle.waited(), 0, "no wait precedes the chains of this turn");
    }

    #[test]
    fn a_queue_lets_those_ahead_go_first_but_does_not_wait_for_one_that_stays_away() {
        let limiter = Limiter::new(Some("g"));
        limiter.set(&bytes(1000));
        let (ahead, behind) = (share(&limiter), share(&limiter));
        behind.charge(1, limiter.now(), LEAD_MAX);
        let (first, mut throttle) = (ahead.wait(), Throttle::new(behind));
        throttle.limited = true;
        let now = limiter.now();
        throttle.close(now, now);
        throttle.open(now);
        assert_eq!(throttle.closed_until, now + nanos(QUANTUM), "it was not let go first");
        throttle.open(now + nanos(QUANTUM));
        assert!(throttle.is_open() && throttle.ticket.is_none());
        assert_eq!(limiter.ahead((first.0, first.1 + 1), 9), 0, "it delays the next one again");
    }

    #[test]
    fn a_queue_that_was_overtaken_is_ahead_again_when_it_looks() {
        let limiter = Limiter::new(Some("g"));
        limiter.set(&bytes(1000));
        let (late, early) = (share(&limiter), share(&limiter));
        early.charge(1, limiter.now(), LEAD_MAX);
        let (mut overtaken, mut throttle) = (Throttle::new(late), Throttle::new(early));
        let now = limiter.now();
        overtaken.close(now, now);
        throttle.close(now, now);
        throttle.open(now);
        throttle.open(now + nanos(QUANTUM));
        assert!(throttle.is_open(), "it waits for one that stays away");
        overtaken.close(now, now);
        let (ticket, next) = (overtaken.ticket.expect("it waits"), throttle.share.wait());
        assert_eq!(limiter.ahead(next, 9), 1, "it starves");
        assert_eq!(
            overtaken.share.wait().0,
            ticket.0,
            "its next wait is behind the one that overtook"
        );
    }

    #[test]
    fn a_queue_that_stops_gives_its_ticket_back() {
        let limiter = Limiter::new(Some("g"));
        limiter.set(&bytes(1));
        let mut throttle = Throttle::new(share(&limiter));
        throttle.look();
        assert!(throttle.charge(1000));
        assert_eq!(limiter.ahead((u64::MAX, 0), 9), 1);
        drop(throttle);
        assert_eq!(limiter.ahead((u64::MAX, 0), 9), 0);
    }
}
