// SPDX-License-Identifier: Apache-2.0
//! Tells when a load accepts a failure: while a case lets storage fail, or kills the device.

use super::Spec;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;

/// Periods in which a failure is accepted, shared by the loads of a case. None has begun at first.
///
/// The number counts their starts and ends: it is odd during a period.
#[derive(Clone, Debug, Default)]
pub(crate) struct Periods(Arc<AtomicU64>);

/// A moment of [`Periods`].
#[derive(Clone, Copy, Debug)]
pub(super) struct Moment(u64);

impl Periods {
    /// Starts a period, or ends it.
    pub(crate) fn allow(&self, allowed: bool) {
        let step = |changes: u64| ((changes % 2 == 1) != allowed).then_some(changes + 1);
        // An error: the period has begun, or ended, before.
        let _ = self.0.fetch_update(Relaxed, Relaxed, step);
    }

    pub(super) fn now(&self) -> Moment {
        Moment(self.0.load(Relaxed))
    }

    /// Failures were allowed at `since` or at any time from then on. Large requests outlive a
    /// period: one that met the failing storage may end long after the storage works again.
    pub(super) fn allowed_since(&self, since: Moment) -> bool {
        since.0 % 2 == 1 || self.0.load(Relaxed) != since.0
    }
}

/// Lets requests of the loads fail, or no request that starts from now on.
pub(crate) fn allow_errors(specs: &[Spec], allowed: bool) {
    specs.iter().for_each(|spec| spec.errors.allow(allowed));
}

/// Lets calls for the loads be lost, or no call for which a load waits from now on.
pub(crate) fn allow_lost_calls(specs: &[Spec], allowed: bool) {
    specs.iter().for_each(|spec| spec.lost_calls.allow(allowed));
}

#[cfg(test)]
mod tests {
    use super::Periods;

    #[test]
    fn requests_that_were_in_flight_during_a_period_may_fail() {
        let errors = Periods::default();
        let before = errors.now();
        assert!(!errors.allowed_since(before));
        errors.allow(false);
        assert!(!errors.allowed_since(before), "no period has begun");
        errors.allow(true);
        let within = errors.now();
        errors.allow(true);
        assert!(errors.allowed_since(before) && errors.allowed_since(within));
        errors.allow(false);
        assert!(errors.allowed_since(before) && errors.allowed_since(within));
        assert!(!errors.allowed_since(errors.now()), "the period has ended");
    }
}
