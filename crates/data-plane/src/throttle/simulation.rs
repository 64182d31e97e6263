// SPDX-License-Identifier: Apache-2.0
//! Disks of a group in simulated time, in the way in which a data-plane thread uses their
//! throttles.

use super::{AHEAD_MAX, QUANTUM, Throttle, nanos};
use crate::limits::{LEAD_MAX, Limiter, Limits, Nanos, Share};
use proptest::prelude::*;
use std::num::NonZeroU64;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

const START: Nanos = 1 << 50;
const SECOND: Nanos = 1_000_000_000;
const KIB: u64 = 1 << 10;
const SMALL: u64 = 4 * KIB;

/// A queue whose driver has one request at a time.
struct Client {
    throttle: Throttle,
    bytes: u64,
    /// Time between the start of a request and the next one.
    think: Nanos,
    /// Arrival of the next request.
    arrival: Nanos,
    taken: u64,
    longest_wait: Nanos,
}

impl Client {
    fn new(share: &Arc<Share>, bytes: u64, think: Nanos) -> Self {
        let throttle = Throttle::new(Arc::clone(share));
        Client { throttle, bytes, think, arrival: START + think, taken: 0, longest_wait: 0 }
    }

    /// The time at which the thread looks at the queue.
    fn due(&self, now: Nanos) -> Nanos {
        match self.throttle.is_open() {
            true => self.arrival.max(now),
            false => self.throttle.closed_until.max(now),
        }
    }

    fn look(&mut self, now: Nanos) {
        self.throttle.look();
        if self.throttle.is_open() && self.arrival <= now {
            self.longest_wait = self.longest_wait.max(now - self.arrival);
            self.throttle.charge(self.bytes);
            self.taken += self.bytes;
            self.arrival = now + self.think;
        }
    }
}

struct Group {
    limiter: Arc<Limiter>,
    rate: u64,
    shares: Vec<Arc<Share>>,
    clients: Vec<Client>,
}

impl Group {
    fn new(rate: u64) -> Self {
        let limiter = Limiter::new(Some("g"));
        limiter.test_time.store(START, Relaxed);
        let burst = Limits::BURST_MIN;
        limiter.set(&Limits { bytes: NonZeroU64::new(rate), burst, ..Limits::NONE });
        Group { limiter, rate, shares: Vec::new(), clients: Vec::new() }
    }

    /// Adds a disk with so many queues.
    fn add(&mut self, queues: usize, bytes: u64, think: Nanos) {
        let share = Arc::clone(self.limiter.join().share());
        self.clients.extend((0..queues).map(|_| Client::new(&share, bytes, think)));
        self.shares.push(share);
    }

    fn taken(&self) -> u64 {
        self.clients.iter().map(|client| client.taken).sum()
    }

    fn cost(&self, bytes: u64) -> Nanos {
        (u128::from(bytes) * u128::from(SECOND) / u128::from(self.rate)) as Nanos
    }

    /// Lets the next queue look, unless that is after `end`. Returns the time.
    fn run_next(&mut self, end: Nanos) -> Option<Nanos> {
        let now = self.limiter.now();
        let next = self.clients.iter_mut().min_by_key(|client| client.due(now))?;
        let now = next.due(now);
        if now > end {
            return None;
        }
        self.limiter.test_time.store(now, Relaxed);
        next.look(now);
        Some(now)
    }

    /// Lets the disks run until `end`.
    fn run_until(&mut self, end: Nanos) {
        while self.run_next(end).is_some() {}
    }

    /// Lets the disks run until `end`. Checks that all costs are in the clock or are debt, and that the
    /// clock leads by [`LEAD_MAX`] at most.
    fn run(&mut self, end: Nanos) {
        let burst = nanos(Limits::BURST_MIN);
        while let Some(now) = self.run_next(end) {
            let clock = self.limiter.opens_at();
            assert!(clock <= now + LEAD_MAX, "it leads by {} ns", clock - now);
            let costs: Nanos =
                self.clients.iter().map(|it| it.taken / it.bytes * self.cost(it.bytes)).sum();
            let debts: Nanos = self.shares.iter().map(|share| share.debt.bytes.load(Relaxed)).sum();
            assert!(costs - debts <= clock - (START - burst), "{costs} of {debts} at {clock}");
        }
    }
}

/// 64 cases, unless `PROPTEST_CASES` says otherwise.
fn config() -> ProptestConfig {
    let asked = ProptestConfig { failure_persistence: None, ..Default::default() };
    let cases = std::env::var_os("PROPTEST_CASES").map_or(64, |_| asked.cases);
    ProptestConfig { cases, ..asked }
}

proptest! {
    #![proptest_config(config())]

    #[test]
    fn large_requests_use_the_rate_and_delay_small_ones_of_others_for_milliseconds(
        rate in 1_u64 << 20..1 << 28,
        large in prop::collection::vec((1_usize..4, 1_u64..64), 1..5),
        pause in 2_u64..20,
    ) {
        let mut group = Group::new(rate);
        for &(queues, quarters) in &large {
            group.add(queues, quarters * 256 * KIB, 1000);
        }
        // Less than its share.
        let share = group.cost(SMALL) * (large.len() as u64 + 1);
        group.add(1, SMALL, share * pause);
        let span = SECOND * 20;
        group.run(START + span);
        let small = group.clients.last().unwrap();
        prop_assert!(small.taken >= 4 * SMALL);
        // One part of a cost for each other queue, and the sleeps of the queue.
        let others: usize = large.iter().map(|(queues, _)| queues).sum();
        let longest = others as u64 * LEAD_MAX + (AHEAD_MAX as u64 + 2) * nanos(QUANTUM);
        prop_assert!(small.longest_wait <= longest, "it waited {} ns", small.longest_wait);
        // One request of each queue may be debt at the end, and each queue sleeps some time too long.
        let most = group.cost(group.taken());
        prop_assert!(most >= span / 100 * 95, "only {most} of {span} ns were used");
    }

    #[test]
    fn disks_that_always_have_requests_get_the_same_bandwidth(
        // A request costs two sleeps of a queue, or more.
        rate in 1_u64 << 20..1 << 26,
        disks in prop::collection::vec((1_usize..4, 1_u64..64), 2..5),
    ) {
        let mut group = Group::new(rate);
        let mut largest = 0;
        for &(queues, eighths) in &disks {
            group.add(queues, eighths * 128 * KIB, 1000);
            largest = largest.max(queues as u64 * eighths * 128 * KIB);
        }
        // So that one request more or less is little.
        let span = group.cost(largest) * 40 * disks.len() as u64;
        group.run(START + span);
        let mut clients = group.clients.iter();
        let mut of_each = Vec::new();
        for &(queues, eighths) in &disks {
            let of_queues: Vec<u64> = clients.by_ref().take(queues).map(|it| it.taken).collect();
            let (least, most) = (of_queues.iter().min().unwrap(), of_queues.iter().max().unwrap());
            // Their order is not that of a disk: a queue may take twice of three times, and one
            // request more at the end.
            let request = eighths * 128 * KIB;
            prop_assert!(least * 4 + request >= *most, "queues of a disk: {of_queues:?}");
            of_each.push(of_queues.iter().sum::<u64>());
        }
        let (least, most) = (of_each.iter().min().unwrap(), of_each.iter().max().unwrap());
        prop_assert!(least * 100 >= most * 75, "{of_each:?}");
    }
}

#[test]
fn a_disk_that_stays_idle_pays_its_debt_and_a_new_limit_forgives_it() {
    let mut group = Group::new(1 << 20);
    group.add(1, 2 << 20, SECOND * 100);
    group.run(START + SECOND * 101);
    let debt = |group: &Group| group.shares[0].debt.bytes.load(Relaxed);
    let left = debt(&group);
    assert!(left < SECOND && left > SECOND / 2, "{left} ns of 2 s after 1 s");
    group.run(START + SECOND * 103);
    assert_eq!(debt(&group), 0);
    assert!(group.clients[0].throttle.is_open());
    group.run(START + SECOND * 201);
    assert!(debt(&group) > 0);
    group.limiter.set(&Limits { bytes: NonZeroU64::new(1), ..Limits::NONE });
    assert_eq!(debt(&group), 0);
}

#[test]
fn queues_of_a_disk_take_in_turn_also_while_one_sleeps_for_a_limit_on_requests() {
    for iops in [5, 8, 10, 12, 15, 30] {
        for queues in [2, 3, 5] {
            let mut group = Group::new(10_000_000);
            let (iops, bytes) = (NonZeroU64::new(iops), NonZeroU64::new(group.rate));
            group.limiter.set(&Limits { iops, bytes, burst: Limits::BURST_DEFAULT });
            group.add(queues, 1 << 20, 1000);
            group.add(1, 1 << 20, 1000);
            group.run_until(START + SECOND * 60);
            let taken: Vec<u64> = group.clients.iter().map(|client| client.taken >> 20).collect();
            let of_disk = &taken[..queues];
            let (least, most) = (of_disk.iter().min().unwrap(), of_disk.iter().max().unwrap());
            assert!(least * 2 >= *most, "{iops:?} a second: {taken:?}");
        }
    }
}

#[test]
fn a_disk_in_debt_has_one_turn_whatever_its_queues() {
    let mut group = Group::new(32 << 20);
    group.add(4, 4 << 20, 1000);
    group.add(1, SMALL, SECOND / 100);
    group.run(START + SECOND * 20);
    let longest = group.clients.last().unwrap().longest_wait;
    let most = LEAD_MAX + (AHEAD_MAX as u64 + 2) * nanos(QUANTUM);
    assert!(longest <= most, "a small request waited {longest} ns");
}
