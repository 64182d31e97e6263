// SPDX-License-Identifier: Apache-2.0
//! A disk with a limited rate.
//!
//! Each rate has a clock: the time at which the next I/O may start. An I/O advances the clock by
//! its cost and waits for the previous time of the clock. I/Os of all lanes therefore start in the
//! order of their arrival. An idle clock is behind the time by the burst at most.

use super::wrapped_info;
use crate::{Disk, Engine, Info, Io, IoKind, Lane, Op, ResizeError, Slot, Step, Token};
use std::num::NonZeroU64;
use std::os::fd::RawFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

const NANOS: u128 = 1_000_000_000;

/// The rates of a [`Limit`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rates {
    /// I/Os per second, of any kind.
    pub ios: Option<NonZeroU64>,
    /// Bytes read or written per second.
    pub bytes: Option<NonZeroU64>,
    /// Unused time that later I/Os may catch up on.
    pub burst: Duration,
}

/// Delays the start of I/Os so that all lanes together keep the rates.
pub struct Limit {
    inner: Arc<dyn Disk>,
    shared: Arc<Shared>,
}

struct Shared {
    rates: Rates,
    /// Origin of the clocks.
    epoch: Instant,
    ios: Clock,
    bytes: Clock,
}

impl Limit {
    /// A disk around `inner` that keeps `rates`.
    pub fn new(inner: Arc<dyn Disk>, rates: Rates) -> Self {
        let shared =
            Shared { rates, epoch: Instant::now(), ios: Clock::default(), bytes: Clock::default() };
        Limit { inner, shared: Arc::new(shared) }
    }
}

impl Disk for Limit {
    fn info(&self) -> Info {
        wrapped_info(&*self.inner, "limited")
    }

    fn resize(&self, bytes: Option<u64>) -> Result<(), ResizeError> {
        self.inner.resize(bytes)
    }

    fn sync(&self) -> std::io::Result<()> {
        self.inner.sync()
    }

    fn open_lane(&self) -> std::io::Result<Box<dyn Lane>> {
        Ok(Box::new(LimitLane {
            inner: self.inner.open_lane()?,
            layer: self.inner.layers(),
            capacity_bytes: self.inner.info().capacity_sectors * 512,
            shared: Arc::clone(&self.shared),
        }))
    }

    fn layers(&self) -> u8 {
        self.inner.layers() + 1
    }
}

/// The time at which the next I/O may start, in nanoseconds since `Shared::epoch`.
#[derive(Default)]
struct Clock(AtomicU64);

impl Clock {
    /// Advances the clock by the time that `count` units take at `rate` units per second. Returns
    /// the time to wait in nanoseconds.
    fn reserve(&self, now: u64, burst: u64, count: u64, rate: NonZeroU64) -> u64 {
        let cost = u128::from(count) * NANOS / u128::from(rate.get());
        let cost = u64::try_from(cost).unwrap_or(u64::MAX);
        let start_of = |clock: u64| clock.max(now.saturating_sub(burst));
        let before = self.0.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |clock| {
            Some(start_of(clock).saturating_add(cost))
        });
        // The closure always returns a value: both arms are the previous value.
        start_of(before.unwrap_or_else(|clock| clock)).saturating_sub(now)
    }
}

impl Shared {
    /// The time that `io`, an I/O of a disk of `capacity_bytes`, has to wait.
    fn reserve(&self, io: &Io, capacity_bytes: u64) -> Duration {
        let now = self.epoch.elapsed().as_nanos() as u64;
        let burst = self.rates.burst.as_nanos() as u64;
        let moved = match io.kind {
            // The disk refuses an I/O outside its capacity: no byte moves.
            IoKind::Read | IoKind::Write if io.fits(capacity_bytes) => io.len_bytes,
            _ => 0,
        };
        let ios = self.rates.ios.map_or(0, |rate| self.ios.reserve(now, burst, 1, rate));
        let bytes = self.rates.bytes.map_or(0, |rate| self.bytes.reserve(now, burst, moved, rate));
        Duration::from_nanos(ios.max(bytes))
    }
}

struct LimitLane {
    inner: Box<dyn Lane>,
    layer: u8,
    capacity_bytes: u64,
    shared: Arc<Shared>,
}

impl LimitLane {
    fn wait(&self, delay: Duration, slot: Slot, engine: &mut dyn Engine) -> Step {
        engine.push(Op::Timer { delay }, Token { slot, layer: self.layer });
        Step::Pending
    }
}

impl Lane for LimitLane {
    fn files(&self) -> Vec<RawFd> {
        self.inner.files()
    }

    fn start(&mut self, io: &mut Io, slot: Slot, engine: &mut dyn Engine) -> Step {
        let delay = self.shared.reserve(io, self.capacity_bytes);
        match delay.is_zero() {
            true => self.inner.start(io, slot, engine),
            false => self.wait(delay, slot, engine),
        }
    }

    fn event(&mut self, io: &mut Io, token: Token, result: i32, engine: &mut dyn Engine) -> Step {
        match token.layer == self.layer {
            true => self.inner.start(io, token.slot, engine),
            false => self.inner.event(io, token, result, engine),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: u64 = 1_000_000_000;

    fn rate(per_second: u64) -> NonZeroU64 {
        NonZeroU64::new(per_second).expect("not 0")
    }

    #[test]
    fn a_clock_spaces_ios_evenly() {
        let clock = Clock::default();
        let waits: Vec<u64> = (0..4).map(|_| clock.reserve(SECOND, 0, 1, rate(10))).collect();
        assert_eq!(waits, [0, SECOND / 10, SECOND / 5, SECOND * 3 / 10]);
        assert_eq!(clock.reserve(SECOND + SECOND / 5, 0, 1, rate(10)), SECOND / 5);
    }

    #[test]
    fn an_idle_clock_gives_the_burst_and_no_more() {
        let clock = Clock::default();
        let now = 100 * SECOND;
        let free = (0..100).take_while(|_| clock.reserve(now, SECOND, 1, rate(10)) == 0).count();
        // Ten for the second that was missed, and one that starts now.
        assert_eq!(free, 11);
    }

    #[test]
    fn a_clock_of_bytes_charges_by_length_and_does_not_overflow() {
        let clock = Clock::default();
        assert_eq!(clock.reserve(0, 0, 500, rate(1000)), 0);
        assert_eq!(clock.reserve(0, 0, u64::MAX, rate(1)), SECOND / 2);
        assert_eq!(clock.reserve(0, 0, u64::MAX, rate(1)), u64::MAX);
        assert_eq!(clock.reserve(0, 0, 1, rate(1)), u64::MAX);
    }
}
