// SPDX-License-Identifier: Apache-2.0
//! Bounds on the time for which chains were in the ring before the device took them, while a disk is
//! traced. The kernel module finds them in the same way (`kernel/vhost_blk/arrivals.c`).
//!
//! The driver records no times. But a chain that a look at the ring did not show came after that look. So
//! each look has a horizon: the chains beyond it came later. A thread that sleeps until a kick does not look.
//! Then the time since the kick counts, which is at most the time that the thread waited for a CPU ([`RunDelay`])
//! and ran since: an idle driver is no wait.

use crate::latency::Nanos;
use std::fs::File;
use std::os::unix::fs::FileExt;

/// The bounds of one queue. Chains have the numbers in which they are taken.
#[derive(Debug, Default)]
pub(crate) struct Arrivals {
    /// The chain that was taken last came after this time; 0: unknown.
    after: Nanos,
    /// The chains from a number on came after this time; 0: unknown.
    horizon: Nanos,
    number: u64,
}

impl Arrivals {
    /// Records that no chain was there at this time, or that the driver had not kicked for one that
    /// was.
    pub(crate) fn none_at(&mut self, at: Nanos) {
        self.horizon = self.horizon.max(at);
        self.number = 0;
    }

    /// Returns whether a time is known.
    #[inline]
    pub(crate) fn is_known(&self) -> bool {
        self.horizon > 0
    }

    /// Forgets all times.
    pub(crate) fn forget(&mut self) {
        *self = Arrivals::default();
    }

    /// Records that the chain of this number was taken, after the time `at`. `ahead` returns the most
    /// chains that the driver can have made available behind it. Returns the longest time for which
    /// the chain can have been in the ring.
    pub(crate) fn took(
        &mut self,
        number: u64,
        at: Nanos,
        ahead: impl FnOnce() -> u16,
    ) -> Option<Nanos> {
        if number >= self.number {
            self.after = self.horizon;
            self.horizon = at;
            self.number = number + 1 + u64::from(ahead());
        }
        (self.after > 0).then(|| at.saturating_sub(self.after))
    }
}

/// The time for which the calling thread was ready to run and waited for a CPU.
#[derive(Debug, Default)]
pub(crate) struct RunDelay {
    /// `None` in `Some`: the kernel does not have it.
    file: Option<Option<File>>,
}

impl RunDelay {
    /// The sum since the thread began; `None`: the kernel does not count it (`CONFIG_SCHED_INFO`).
    pub(crate) fn read(&mut self) -> Option<Nanos> {
        let open = || File::open("/proc/thread-self/schedstat").ok();
        let file = self.file.get_or_insert_with(open).as_ref()?;
        let mut text = [0; 64];
        let length = file.read_at(&mut text, 0).ok()?;
        run_delay(&text[..length])
    }
}

/// The second number of a `schedstat`.
fn run_delay(text: &[u8]) -> Option<Nanos> {
    std::str::from_utf8(text).ok()?.split_ascii_whitespace().nth(1)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_chain_is_younger_than_the_last_look_that_found_none() {
        let mut arrivals = Arrivals::default();
        assert_eq!(arrivals.took(1, 90, || 0), None, "no look was before it");
        arrivals.none_at(100);
        assert_eq!(arrivals.took(2, 130, || 3), Some(30));
        for number in 3..6 {
            assert_eq!(arrivals.took(number, 140, || 0), Some(40), "the look at 130 showed it");
        }
        assert_eq!(arrivals.took(6, 150, || 0), Some(20), "the look at 130 did not show it");
        assert_eq!(arrivals.took(7, 155, || 0), Some(5));
    }

    #[test]
    fn a_later_kick_counts_in_place_of_the_look_and_an_earlier_one_does_not() {
        let mut arrivals = Arrivals::default();
        arrivals.none_at(100);
        arrivals.none_at(5000);
        arrivals.none_at(4000);
        assert_eq!(arrivals.took(1, 5007, || 0), Some(7));
        arrivals.forget();
        assert_eq!(arrivals.took(2, 6000, || 0), None);
    }

    #[test]
    fn the_second_number_of_schedstat_is_the_delay() {
        assert_eq!(run_delay(b"81 4711 9\n"), Some(4711));
        assert_eq!(run_delay(b""), None);
        let mut delay = RunDelay::default();
        let first = delay.read().expect("Linux of a distribution");
        assert!(delay.read() >= Some(first));
        assert_eq!(RunDelay { file: Some(None) }.read(), None, "a wait of unknown length is no 0");
    }
}
