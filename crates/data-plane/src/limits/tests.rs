// SPDX-License-Identifier: Apache-2.0
//! Disks of a group: order, shares, debts, and the disks of the kernel plane.

use super::*;
use std::num::NonZeroU64;

const SECOND: Nanos = 1_000_000_000;

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
    let mut waiting: Vec<(Ticket, usize)> = queues.map(wait).collect();
    let mut counts = vec![0; sizes.len()];
    while counts.iter().sum::<usize>() < all {
        limiter.test_time.store(limiter.now().max(limiter.opens_at()), Relaxed);
        let next = waiting.iter().position(|(ticket, _)| limiter.ahead(*ticket, 1) == 0);
        let (ticket, disk) = waiting.remove(next.expect("one is the first"));
        limiter.serve(ticket);
        match shares[disk].owes() {
            true => shares[disk].pay(limiter.now(), LEAD_MAX),
            false => {
                shares[disk].charge(sizes[disk].0, limiter.now(), LEAD_MAX);
                counts[disk] += 1;
            }
        }
        waiting.push(wait(disk));
    }
    waiting.iter().for_each(|(ticket, _)| limiter.leave(*ticket));
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
    assert_eq!(ahead.give_way(at, now), GIVE_WAY_MAX);
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
