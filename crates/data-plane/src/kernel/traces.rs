// SPDX-License-Identifier: Apache-2.0
//! Tells the slow requests of the kernel's queues, which the module records while a trace is on.
//!
//! A thread fetches the records. It starts with the first trace and ends with the run.

use super::abi;
use super::device::VhostBlk;
use crate::error::KernelError;
use crate::health::Health;
use crate::latency::{Nanos, Operation};
use crate::trace::{SlowRequest, Traced, Tracer};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;
use virtio_spec::blk;
use vmm_sys_util::eventfd::EventFd;

/// The records of a module.
trait Records: Send + Sync {
    /// Records requests that take this long; 0: none. The event is signalled after a record.
    fn set_trace(&self, slower_than: Nanos, event: &EventFd) -> Result<(), KernelError>;

    /// Takes the oldest record.
    fn traced(&self) -> Result<abi::Traced, KernelError>;
}

impl Records for VhostBlk {
    fn set_trace(&self, slower_than: Nanos, event: &EventFd) -> Result<(), KernelError> {
        VhostBlk::set_trace(self, slower_than, event)
    }

    fn traced(&self) -> Result<abi::Traced, KernelError> {
        VhostBlk::traced(self)
    }
}

/// The trace of a run. Dropping it tells the last requests, so the queues must have stopped.
pub(super) struct TraceWatch {
    module: Arc<Module>,
}

struct Module {
    records: Box<dyn Records>,
    /// The module is not too old.
    can_trace: bool,
    event: EventFd,
    health: Arc<Health>,
    is_ending: AtomicBool,
    /// The thread, after the first trace.
    thread: Mutex<Option<JoinHandle<()>>>,
}

impl TraceWatch {
    /// Traces the queues of a device as the operator asks for it.
    pub(super) fn start(device: &VhostBlk, health: Arc<Health>) -> Result<Self, KernelError> {
        let failed = |source| KernelError::call("tracing requests", source);
        Self::of(Box::new(device.try_clone().map_err(failed)?), health)
    }

    fn of(records: Box<dyn Records>, health: Arc<Health>) -> Result<Self, KernelError> {
        let failed = |source| KernelError::call("tracing requests", source);
        let event = EventFd::new(libc::EFD_CLOEXEC).map_err(failed)?;
        let can_trace = match records.set_trace(0, &event) {
            Ok(()) => true,
            Err(error) if error.errno() == Some(libc::ENOTTY) => false,
            Err(error) => return Err(error),
        };
        if !can_trace && health.slower_than() > 0 {
            tracing::warn!(
                "the kernel module is too old to trace requests, and the trace shows none of this \
                 disk; load the one that belongs to this program, or switch the disk to uring"
            );
        }
        let (is_ending, thread) = (AtomicBool::new(false), Mutex::new(None));
        let module = Arc::new(Module { records, can_trace, event, health, is_ending, thread });
        module.health.set_tracer(Some(Box::new(Arc::clone(&module))));
        Ok(TraceWatch { module })
    }
}

impl Drop for TraceWatch {
    fn drop(&mut self) {
        let module = &self.module;
        module.health.set_tracer(None);
        // Records of all requests exist by now. Pairs with the Acquire in `Module::follow`.
        module.is_ending.store(true, Ordering::Release);
        let woken = module.event.write(1);
        let thread = module.thread.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let (Ok(()), Some(thread)) = (woken, thread) {
            let _ended = thread.join();
        }
    }
}

impl Tracer for Arc<Module> {
    fn can_trace(&self) -> bool {
        self.can_trace
    }

    fn set_bound(&self, slower_than: Nanos) {
        if self.can_trace
            && let Err(error) = self.begin(slower_than)
        {
            tracing::warn!(%error, "the trace shows no requests of the kernel's queues");
        }
    }
}

impl Module {
    fn begin(self: &Arc<Self>, slower_than: Nanos) -> Result<(), KernelError> {
        let mut thread = self.thread.lock().unwrap_or_else(PoisonError::into_inner);
        if slower_than > 0 && thread.is_none() {
            let module = Arc::clone(self);
            let body = move || module.follow();
            let started = std::thread::Builder::new().name("kernel-trace".into()).spawn(body);
            *thread =
                Some(started.map_err(|source| KernelError::call("tracing requests", source))?);
        }
        self.records.set_trace(slower_than, &self.event)
    }

    /// Reports records until the end of the run, and the ones of its last requests.
    fn follow(&self) {
        while super::failures::wait_for(&self.event) {
            // Pairs with the Release in the drop: all records are there.
            let is_last = self.is_ending.load(Ordering::Acquire);
            self.report_all();
            if is_last {
                return;
            }
        }
    }

    fn report_all(&self) {
        loop {
            let record = match self.records.traced() {
                Ok(record) => record,
                Err(error) => {
                    tracing::warn!(%error, "the kernel does not report a slow request");
                    return;
                }
            };
            if record.lost > 0 {
                self.health.report_traced(Traced::Lost(record.lost));
            }
            if record.flags & abi::TRACED_VALID == 0 {
                return;
            }
            self.health.report_traced(Traced::Slow(&request_of(&record)));
        }
    }
}

fn request_of(record: &abi::Traced) -> SlowRequest {
    SlowRequest {
        queue: record.queue as u16,
        operation: match record.kind {
            blk::T_IN => Operation::Read,
            blk::T_OUT => Operation::Write,
            blk::T_FLUSH => Operation::Flush,
            _ => Operation::Discard,
        },
        sector: (record.sector != u64::MAX).then_some(record.sector),
        bytes: record.bytes,
        failed: record.flags & abi::TRACED_FAILED != 0,
        ring: (record.ring_ns != u64::MAX).then(|| Duration::from_nanos(record.ring_ns)),
        limit: Duration::from_nanos(record.limit_ns),
        submit: Duration::from_nanos(record.submit_ns),
        storage: Duration::from_nanos(record.storage_ns),
        used: Duration::from_nanos(record.used_ns),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error_rules::ErrorPolicy;
    use std::collections::VecDeque;
    use std::sync::mpsc::{Receiver, channel};

    /// A module with these records, or one that is too old.
    #[derive(Clone, Default)]
    struct Fake {
        is_old: bool,
        bounds: Arc<Mutex<Vec<Nanos>>>,
        records: Arc<Mutex<VecDeque<abi::Traced>>>,
        /// It was asked for a record and had none.
        ran_dry: Arc<AtomicBool>,
    }

    impl Records for Fake {
        fn set_trace(&self, slower_than: Nanos, _: &EventFd) -> Result<(), KernelError> {
            if self.is_old {
                let source = std::io::Error::from_raw_os_error(libc::ENOTTY);
                return Err(KernelError::call("VHOST_BLK_SET_TRACE", source));
            }
            self.bounds.lock().unwrap().push(slower_than);
            Ok(())
        }

        fn traced(&self) -> Result<abi::Traced, KernelError> {
            let record = self.records.lock().unwrap().pop_front();
            self.ran_dry.fetch_or(record.is_none(), Ordering::Relaxed);
            Ok(record.unwrap_or_default())
        }
    }

    #[derive(Debug, PartialEq)]
    enum Told {
        Slow(SlowRequest),
        Lost(u64),
    }

    fn health() -> (Arc<Health>, Receiver<Told>) {
        let health = Arc::new(Health::new(ErrorPolicy::Report, None));
        let (sender, told) = channel();
        let sender = Mutex::new(sender);
        health.set_trace_hook(Box::new(move |traced| {
            let told = match traced {
                Traced::Slow(slow) => Told::Slow(slow.clone()),
                Traced::Lost(count) => Told::Lost(count),
            };
            sender.lock().unwrap().send(told).unwrap();
        }));
        (health, told)
    }

    fn record(sector: u64) -> abi::Traced {
        let flags = abi::TRACED_VALID | abi::TRACED_FAILED;
        let (queue, kind, bytes) = (3, blk::T_OUT, 512);
        let (limit_ns, submit_ns, storage_ns, used_ns, ring_ns) = (1, 20, 300, 4000, 50_000);
        let rest = abi::Traced { limit_ns, submit_ns, storage_ns, used_ns, ..Default::default() };
        abi::Traced { flags, queue, kind, sector, bytes, ring_ns, ..rest }
    }

    #[test]
    fn records_are_told_in_order_and_those_of_the_end_too() {
        let ((health, told), module) = (health(), Fake::default());
        health.trace(Some(Duration::from_nanos(70)));
        let watch = TraceWatch::of(Box::new(module.clone()), Arc::clone(&health)).unwrap();
        assert!(health.is_traceable());
        let lost = abi::Traced { lost: 5, ..record(8) };
        module.records.lock().unwrap().extend([record(7), lost]);
        watch.module.event.write(1).unwrap();
        let nanos = Duration::from_nanos;
        let slow = |sector| {
            Told::Slow(SlowRequest {
                queue: 3,
                operation: Operation::Write,
                sector: Some(sector),
                bytes: 512,
                failed: true,
                ring: Some(nanos(50_000)),
                limit: nanos(1),
                submit: nanos(20),
                storage: nanos(300),
                used: nanos(4000),
            })
        };
        let first: Vec<Told> = told.iter().take(3).collect();
        assert_eq!(first, [slow(7), Told::Lost(5), slow(8)]);
        health.trace(None);
        health.trace(None);
        while !module.ran_dry.load(Ordering::Relaxed) {
            std::thread::yield_now();
        }
        // There is no event for this one.
        module.records.lock().unwrap().push_back(record(9));
        drop(watch);
        assert_eq!(told.try_iter().collect::<Vec<_>>(), [slow(9)]);
        health.trace(Some(nanos(1)));
        assert_eq!(*module.bounds.lock().unwrap(), [0, 70, 0], "it hears of changes in its time");
    }

    #[test]
    fn an_old_module_traces_nothing_and_the_operator_can_know() {
        let ((health, _told), module) = (health(), Fake { is_old: true, ..Fake::default() });
        let watch = TraceWatch::of(Box::new(module), Arc::clone(&health)).unwrap();
        health.trace(Some(Duration::from_nanos(70)));
        assert!(!health.is_traceable() && watch.module.thread.lock().unwrap().is_none());
        drop(watch);
        assert!(health.is_traceable(), "its queues do not run in the kernel any more");
    }

    #[test]
    fn each_type_has_its_operation_and_only_transfers_have_a_sector() {
        for (kind, sector, operation) in [
            (blk::T_IN, 5, Operation::Read),
            (blk::T_FLUSH, u64::MAX, Operation::Flush),
            (blk::T_DISCARD, u64::MAX, Operation::Discard),
            (blk::T_WRITE_ZEROES, u64::MAX, Operation::Discard),
        ] {
            let ring_ns = u64::MAX;
            let slow = request_of(&abi::Traced { kind, sector, ring_ns, ..Default::default() });
            assert_eq!(slow.ring, None);
            assert_eq!((slow.operation, slow.failed), (operation, false));
            assert_eq!(slow.sector, (sector != u64::MAX).then_some(sector));
        }
    }
}
