// SPDX-License-Identifier: Apache-2.0
//! The health of a disk's storage, as its queues find it: halted by an error, or stalled.
//!
//! All threads of a disk share one [`Health`]. A request whose error halts the disk stays in flight
//! ([`Verdict::Keep`]), and no queue takes a chain until [`Health::resume`]. The queues then carry
//! the kept requests out before any other.
//!
//! | Halted | A FLUSH has failed | A request fails | A FLUSH fails |
//! |---|---|---|---|
//! | no | no | halts, is kept | halts, is reported: a FLUSH has failed |
//! | yes | no | is kept | is reported: a FLUSH has failed |
//! | yes | yes | is kept | is reported |
//! | no | yes | halts, is kept | is reported |
//!
//! [`Health::resume`] ends a halt, and [`Health::take_failed_flush`] forgets the FLUSH: the disk has other storage.

use crate::error_rules::{ErrorPolicies, ErrorPolicy, ErrorRules};
use crate::failure::{FailureKind, Failures, StorageFailure};
use crate::latency::{Nanos, Operation};
use crate::trace::{TraceBound, Traced, Tracer};
use backend::IoError;
use std::collections::BTreeMap;
use std::fmt;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant, SystemTime};
use virtio_blk::Kind;

/// A halt of the disk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Halt {
    /// The request that failed, and its error.
    pub reason: String,
    /// Time of the halt.
    pub since: SystemTime,
}

/// A change of the health.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum HealthEvent {
    /// The disk halts for this reason.
    Halted(String),
    /// The operator has ended the halt.
    Resumed,
    /// A request of this queue has exceeded the time limit.
    Stalled(u16),
    /// No request of this queue exceeds the time limit any more.
    Recovered(u16),
    /// Requests have failed: the first one of a second, and the number of those since the last event.
    Failed(StorageFailure),
}

/// A function that gets each change, on a thread of the data plane or of the control plane. It must
/// not wait.
pub type HealthHook = Box<dyn Fn(&HealthEvent) + Send + Sync>;

/// A function that gets each slow request, on a thread of the data plane. It must not wait.
pub type TraceHook = Box<dyn Fn(Traced<'_>) + Send + Sync>;

/// A copy of the state for the operator.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct HealthReport {
    /// The present halt.
    pub halt: Option<Halt>,
    /// Number of halts so far.
    pub halts: u64,
    /// Queues with a request beyond the time limit, and the time at which it was found.
    pub stalled: BTreeMap<u16, SystemTime>,
    /// Number of stalls so far.
    pub stalls: u64,
    /// Number of failed requests, by the number of their [`FailureKind`].
    pub failures: [u64; FailureKind::ALL.len()],
    /// The failure that was reported last, and its time.
    pub last_failure: Option<(StorageFailure, SystemTime)>,
}

/// Numbers that a later program takes over.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct HealthTotals {
    /// Number of halts.
    pub halts: u64,
    /// Number of stalls.
    pub stalls: u64,
    /// Number of failed requests, by the number of their [`FailureKind`].
    pub failures: [u64; FailureKind::ALL.len()],
}

/// The health of a disk.
#[derive(Default)]
pub struct Health {
    /// Changes while no queue runs. The threads read it at the start of a queue and after an error only.
    rules: Mutex<ErrorRules>,
    /// Copy of `report.halt.is_some()` for the threads.
    halted: AtomicBool,
    /// A failed FLUSH has halted the disk. Later ones fail by the same loss.
    flush_failed: AtomicBool,
    /// A front-end has blocked an eventfd: no queue of the io_uring plane calls it any more.
    blocked: AtomicBool,
    report: Mutex<HealthReport>,
    failures: Mutex<Failures>,
    hook: OnceLock<HealthHook>,
    trace_hook: OnceLock<TraceHook>,
    slower_than: TraceBound,
    /// The kernel plane while it runs queues. `slower_than` changes under this lock.
    tracer: Mutex<Option<Box<dyn Tracer>>>,
}

impl fmt::Debug for Health {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (rules, report) = (&self.rules, &self.report);
        let mut shown = f.debug_struct("Health");
        shown.field("rules", rules).field("report", report).finish_non_exhaustive()
    }
}

/// The end of a failed request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Verdict {
    /// It completes with the error.
    Report,
    /// It completes with the error, and the disk halts.
    ReportAndHalt,
    /// It stays in flight, and the disk halts.
    Keep,
}

impl Health {
    /// The health of a disk. `io_timeout` is the time after which a request in flight is a stall;
    /// `None`: never.
    pub fn new(policies: impl Into<ErrorPolicies>, io_timeout: Option<Duration>) -> Self {
        let rules = ErrorRules { policies: policies.into(), io_timeout };
        Health { rules: Mutex::new(rules), ..Health::default() }
    }

    /// The present rules.
    pub fn rules(&self) -> ErrorRules {
        *self.rules.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Replaces the rules. No queue may run.
    pub fn set_rules(&self, rules: ErrorRules) {
        *self.rules.lock().unwrap_or_else(PoisonError::into_inner) = rules;
    }

    /// Sets the function that gets each change. Only the first one is used.
    pub fn set_hook(&self, hook: HealthHook) {
        let _ = self.hook.set(hook);
    }

    /// Sets the function that gets each slow request. Only the first one is used.
    pub fn set_trace_hook(&self, hook: TraceHook) {
        let _ = self.trace_hook.set(hook);
    }

    /// The state for the operator.
    pub fn report(&self) -> HealthReport {
        self.lock().clone()
    }

    /// The numbers for a later program.
    pub fn totals(&self) -> HealthTotals {
        let HealthReport { halts, stalls, failures, .. } = *self.lock();
        HealthTotals { halts, stalls, failures }
    }

    /// Adds the numbers of an earlier program.
    pub fn add_totals(&self, earlier: &HealthTotals) {
        // In the order of `count`.
        let mut failures = self.failures.lock().unwrap_or_else(PoisonError::into_inner);
        let mut report = self.lock();
        report.halts += earlier.halts;
        report.stalls += earlier.stalls;
        failures.counts.iter_mut().zip(earlier.failures).for_each(|(own, more)| *own += more);
        report.failures = failures.counts;
    }

    /// Returns whether the disk is halted.
    #[inline]
    pub fn is_halted(&self) -> bool {
        self.halted.load(Relaxed)
    }

    /// Notes that a front-end has blocked an eventfd.
    pub(crate) fn block(&self) {
        self.blocked.store(true, Relaxed);
    }

    /// Returns whether a front-end has blocked an eventfd.
    #[inline]
    pub(crate) fn is_blocked(&self) -> bool {
        self.blocked.load(Relaxed)
    }

    /// Returns whether an error can halt the disk.
    pub fn can_halt(&self) -> bool {
        self.policies().can_halt()
    }

    /// Ends a halt. Returns whether there was one.
    pub fn resume(&self) -> bool {
        let resumed = {
            let mut report = self.lock();
            self.halted.store(false, Relaxed);
            report.halt.take().is_some()
        };
        if resumed {
            tracing::info!("the halt has ended: the requests that failed are tried again");
            self.report_event(&HealthEvent::Resumed);
        }
        resumed
    }

    /// Reports each later request that takes at least `slower_than`, with the time of each stage.
    /// `None` ends the trace. Each report costs a call of the hook, and each other request some
    /// readings of the clock.
    pub fn trace(&self, slower_than: Option<Duration>) {
        let nanos = slower_than.map_or(0, |time| (time.as_nanos() as Nanos).max(1));
        let tracer = self.lock_tracer();
        let is_new = self.slower_than.swap(nanos) != nanos;
        if let Some(tracer) = tracer.as_ref().filter(|_| is_new) {
            tracer.set_bound(nanos);
        }
    }

    /// Returns whether the disk is traced.
    #[inline]
    pub(crate) fn is_traced(&self) -> bool {
        self.slower_than() > 0
    }

    /// Returns whether the present data plane can trace requests. An older kernel module cannot.
    pub fn is_traceable(&self) -> bool {
        self.lock_tracer().as_ref().is_none_or(|tracer| tracer.can_trace())
    }

    /// Makes a plane outside this process adopt the bound, now and at each change. `None`: queues
    /// run in this process from now on.
    pub(crate) fn set_tracer(&self, tracer: Option<Box<dyn Tracer>>) {
        let mut own = self.lock_tracer();
        if let Some(tracer) = tracer.as_ref().filter(|_| self.slower_than() > 0) {
            tracer.set_bound(self.slower_than());
        }
        *own = tracer;
    }

    fn lock_tracer(&self) -> MutexGuard<'_, Option<Box<dyn Tracer>>> {
        self.tracer.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The bound of [`Health::trace`]; 0: none.
    #[inline]
    pub(crate) fn slower_than(&self) -> Nanos {
        self.slower_than.nanos()
    }

    /// Reports a message of the trace.
    pub(crate) fn report_traced(&self, message: Traced<'_>) {
        if let Some(hook) = self.trace_hook.get() {
            hook(message);
        }
    }

    pub(crate) fn io_timeout(&self) -> Option<Duration> {
        self.rules().io_timeout
    }

    /// Judges the failed I/O of a request.
    ///
    /// A FLUSH is never kept: the loss of a completed write cannot be made good by another sync,
    /// and a daemon that carries it out after a restart would report success.
    pub(crate) fn judge(&self, kind: Kind, error: IoError) -> Verdict {
        let policies = self.policies();
        let policy = match kind {
            Kind::Read { .. } => policies.reads,
            _ => policies.others,
        };
        let halts = match (policy, error) {
            (ErrorPolicy::Report, _) | (_, IoError::Unsupported) => false,
            (ErrorPolicy::Stop, _) => true,
            (ErrorPolicy::Enospc, error) => {
                matches!(error, IoError::Errno(libc::ENOSPC | libc::EDQUOT))
            }
        };
        match (halts, kind) {
            (false, _) => Verdict::Report,
            (true, Kind::Flush) => match self.flush_failed.load(Relaxed) {
                false => Verdict::ReportAndHalt,
                true => Verdict::Report,
            },
            (true, _) => Verdict::Keep,
        }
    }

    /// Returns whether a failed FLUSH has halted the disk, and forgets it: the disk has other storage.
    pub fn take_failed_flush(&self) -> bool {
        self.flush_failed.swap(false, Relaxed)
    }

    /// The errors that halt the disk.
    pub(crate) fn policies(&self) -> ErrorPolicies {
        self.rules().policies
    }

    /// Returns whether a FLUSH that fails can halt the disk.
    pub(crate) fn can_flush_halt(&self) -> bool {
        self.policies().others != ErrorPolicy::Report && !self.flush_failed.load(Relaxed)
    }

    /// Halts the disk because a request of this kind has failed. Only the first failure is reported.
    pub(crate) fn halt(&self, kind: Kind, error: IoError) {
        let reason = {
            let mut report = self.lock();
            if kind == Kind::Flush {
                self.flush_failed.store(true, Relaxed);
            }
            if report.halt.is_some() {
                return;
            }
            let reason = format!("{} failed: {error}", name(kind));
            report.halt = Some(Halt { reason: reason.clone(), since: SystemTime::now() });
            report.halts += 1;
            self.halted.store(true, Relaxed);
            reason
        };
        tracing::error!(
            reason,
            "the disk is halted: the guest's requests wait; repair the storage, then resume the disk"
        );
        self.report_event(&HealthEvent::Halted(reason));
    }

    /// Takes note that the storage has failed requests, and logs the first one of a second.
    pub(crate) fn record_failure(&self, failure: StorageFailure) {
        if let Some(StorageFailure { operation, sector, requests, reason, .. }) =
            self.count(failure)
        {
            let operation = operation.map(Operation::name);
            tracing::error!(operation, sector, requests, "the disk fails: {reason}");
        }
    }

    /// Counts failed requests, and reports the first one of a second, which it returns.
    pub(crate) fn count(&self, failure: StorageFailure) -> Option<StorageFailure> {
        let told = {
            let mut failures = self.failures.lock().unwrap_or_else(PoisonError::into_inner);
            let told = failures.add(failure, Instant::now());
            let mut report = self.lock();
            report.failures = failures.counts;
            if let Some(failure) = &told {
                report.last_failure = Some((failure.clone(), SystemTime::now()));
            }
            told
        };
        if let Some(failure) = &told {
            self.report_event(&HealthEvent::Failed(failure.clone()));
        }
        told
    }

    /// Takes note that a request of a queue is in flight for longer than the time limit.
    pub(crate) fn record_stall(&self, queue: u16, age: Duration) {
        {
            let mut report = self.lock();
            report.stalled.insert(queue, SystemTime::now());
            report.stalls += 1;
        }
        let seconds = age.as_secs();
        tracing::error!(queue, seconds, "the storage does not answer: a request is in flight");
        self.report_event(&HealthEvent::Stalled(queue));
    }

    /// Takes note that no request of a queue is beyond the time limit any more.
    pub(crate) fn record_recovery(&self, queue: u16) {
        self.lock().stalled.remove(&queue);
        tracing::info!(queue, "the storage answers again");
        self.report_event(&HealthEvent::Recovered(queue));
    }

    fn lock(&self) -> MutexGuard<'_, HealthReport> {
        self.report.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn report_event(&self, event: &HealthEvent) {
        if let Some(hook) = self.hook.get() {
            hook(event);
        }
    }
}

fn name(kind: Kind) -> String {
    match kind {
        Kind::Read { sector, bytes } => format!("a read of {bytes} bytes at sector {sector}"),
        Kind::Write { sector, bytes, .. } => format!("a write of {bytes} bytes at sector {sector}"),
        Kind::Flush => "a flush".to_owned(),
        Kind::Discard { .. } => "a discard".to_owned(),
        Kind::WriteZeroes { .. } => "a write of zeroes".to_owned(),
        Kind::SecureErase { .. } => "a secure erase".to_owned(),
        Kind::GetId => "a request for the id".to_owned(),
    }
}

#[cfg(test)]
mod tests;
