// SPDX-License-Identifier: Apache-2.0
//! Logs failures of the storage of the kernel's queues, whose requests the daemon does not see: at
//! most one line and one event per second, for all failures since the previous line. Tells the disk of a
//! failed sync, so that the daemon's own queues fail every FLUSH, too, and its health of a halt.

use super::abi;
use super::device::VhostBlk;
use crate::error::KernelError;
use crate::failure::{FailureKind, StorageFailure};
use crate::health::Health;
use crate::latency::Operation;
use backend::{Disk, IoError};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;
use virtio_blk::Kind;
use virtio_spec::blk;
use vmm_sys_util::eventfd::EventFd;

/// Minimum time between two lines.
const INTERVAL: Duration = Duration::from_secs(1);

/// The thread that waits for failures; dropping this value ends it.
pub(super) struct FailureWatch {
    event: EventFd,
    /// Dropped to end the thread.
    running: Option<mpsc::Sender<()>>,
    thread: Option<JoinHandle<()>>,
    reporter: Arc<Reporter>,
}

/// Fetches failures and reports them.
struct Reporter {
    device: VhostBlk,
    disk: Arc<dyn Disk>,
    health: Arc<Health>,
    /// Held from the fetch of failures until their events are sent: when `report` returns, all
    /// earlier failures have been reported.
    reporting: Mutex<()>,
}

impl Reporter {
    fn report(&self) {
        let _reporting = self.reporting.lock().unwrap_or_else(PoisonError::into_inner);
        report(self.device.failure(), (&*self.disk, &self.health));
    }
}

impl FailureWatch {
    pub(super) fn start(
        device: &VhostBlk,
        disk: Arc<dyn Disk>,
        health: Arc<Health>,
    ) -> Result<Self, KernelError> {
        let failed = |source| KernelError::call("watching for failures", source);
        let event = EventFd::new(libc::EFD_CLOEXEC).map_err(failed)?;
        device.set_failure_event(&event)?;
        let (running, ended) = mpsc::channel();
        let (waited, device) =
            (event.try_clone().map_err(failed)?, device.try_clone().map_err(failed)?);
        // Without an interval, so that a halt is reported at once. Each failure that does not halt costs an ioctl.
        let interval = if health.can_halt() { Duration::ZERO } else { INTERVAL };
        let reporter = Arc::new(Reporter { device, disk, health, reporting: Mutex::default() });
        let of_thread = Arc::clone(&reporter);
        let thread = std::thread::Builder::new()
            .name("kernel-failures".into())
            .spawn(move || watch(|| of_thread.report(), interval, &waited, &ended))
            .map_err(failed)?;
        Ok(FailureWatch { event, running: Some(running), thread: Some(thread), reporter })
    }

    /// Reports all failures so far.
    pub(super) fn report_now(&self) {
        self.reporter.report();
    }
}

impl Drop for FailureWatch {
    fn drop(&mut self) {
        drop(self.running.take());
        let woken = self.event.write(1);
        if let (Ok(()), Some(thread)) = (woken, self.thread.take()) {
            let _ended = thread.join();
        }
    }
}

/// Waits for a signal of the module or of this process. `false`: the eventfd cannot be read.
pub(super) fn wait_for(event: &EventFd) -> bool {
    loop {
        match event.read() {
            Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
            read => return read.is_ok(),
        }
    }
}

/// Reports failures until the sender of `ended` is dropped. Asks once more after that, when the
/// queues have drained: a sync that failed since the last line must not be forgotten.
fn watch(report: impl Fn(), interval: Duration, event: &EventFd, ended: &mpsc::Receiver<()>) {
    while wait_for(event) {
        report();
        if ended.recv_timeout(interval) == Err(RecvTimeoutError::Disconnected) {
            return report();
        }
    }
}

fn report(failures: Result<abi::Failure, KernelError>, (disk, health): (&dyn Disk, &Health)) {
    match failures {
        Ok(failure) => {
            if failure.kinds & !abi::FAILURE_HALTED != 0 {
                count(failure_of(&failure), health);
            }
            if failure.kinds & abi::FAILURE_SYNC != 0 {
                disk.sync_failed(failure.error as i32);
            }
            if failure.kinds & abi::FAILURE_HALTED != 0 {
                let error = IoError::Errno(failure.halt_error as i32);
                health.halt(halting_kind(&failure), error);
            }
        }
        Err(error) => {
            tracing::error!(%error, "the storage failed, and the kernel gives no details")
        }
    }
}

/// Counts and logs failures: at most one line a second. If no error can halt the disk, the watch has
/// waited, or ends, and the line is due.
fn count(failure: StorageFailure, health: &Health) {
    let told = health.count(failure.clone());
    let line = told.or_else(|| (!health.can_halt()).then_some(failure));
    if let Some(line) = line {
        tracing::error!("{}", line_of(&line));
    }
}

/// The request that has halted the disk.
fn halting_kind(failure: &abi::Failure) -> Kind {
    let (sector, bytes, durable) = (failure.halt_sector, failure.halt_bytes, false);
    match failure.halt_type {
        blk::T_IN => Kind::Read { sector, bytes },
        blk::T_OUT => Kind::Write { sector, bytes, durable },
        blk::T_FLUSH => Kind::Flush,
        blk::T_WRITE_ZEROES => Kind::WriteZeroes { bytes, durable },
        blk::T_SECURE_ERASE => Kind::SecureErase { bytes },
        _ => Kind::Discard { bytes, longest_bytes: bytes, durable },
    }
}

/// The failures as those of the other plane: the most serious kind stands for all of them.
fn failure_of(failure: &abi::Failure) -> StorageFailure {
    let kinds = [
        (abi::FAILURE_REMOVED, FailureKind::Removed),
        (abi::FAILURE_NO_SPACE, FailureKind::NoSpace),
        (abi::FAILURE_TIMEOUT, FailureKind::Timeout),
        (abi::FAILURE_READ_ONLY, FailureKind::ReadOnly),
        (abi::FAILURE_IO, FailureKind::Io),
    ];
    let kind = kinds.iter().find(|(bit, _)| failure.kinds & bit != 0);
    let is_sync = failure.kinds & abi::FAILURE_SYNC != 0 && failure.sector == u64::MAX;
    StorageFailure {
        kind: kind.map_or(FailureKind::Io, |(_, kind)| *kind),
        operation: is_sync.then_some(Operation::Flush),
        sector: (failure.sector != u64::MAX).then_some(failure.sector),
        reason: std::io::Error::from_raw_os_error(failure.error as i32).to_string(),
        requests: failure.count,
    }
}

/// The log line of failures: the most serious kind, and the first failed sector.
fn line_of(failure: &StorageFailure) -> String {
    let what = match failure.kind {
        FailureKind::Removed => "the block device was removed; serve another one",
        FailureKind::NoSpace => "no space is left for the image; make some",
        FailureKind::Timeout => "the storage does not answer",
        FailureKind::ReadOnly => "the storage became read-only",
        FailureKind::Io => "I/O errors; see the kernel log (dmesg)",
    };
    let StorageFailure { requests, reason, .. } = failure;
    let first = match (failure.sector, failure.operation) {
        (Some(sector), _) => format!(", the first at sector {sector}: {reason}"),
        (None, Some(Operation::Flush)) => format!(", the first a flush: {reason}"),
        (None, _) if *requests > 0 => format!(": {reason}"),
        (None, _) => String::new(),
    };
    format!("the disk fails: {what} ({requests} requests failed{first})")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error_rules::ErrorPolicy;
    use backend::Null;
    use std::sync::Mutex;
    use std::sync::atomic::{AtomicU32, Ordering};

    fn failure(kinds: u32, error: i32, sector: u64) -> abi::Failure {
        abi::Failure { kinds, count: 3, sector, error: error as u32, ..abi::Failure::default() }
    }

    /// A disk that counts the reports of failed syncs.
    #[derive(Default)]
    struct Told(AtomicU32);

    impl Disk for Told {
        fn info(&self) -> backend::Info {
            Null::new(1 << 20).info()
        }

        fn sync(&self) -> std::io::Result<()> {
            Ok(())
        }

        fn open_lane(&self) -> std::io::Result<Box<dyn backend::Lane>> {
            Null::new(1 << 20).open_lane()
        }

        fn sync_failed(&self, _errno: i32) {
            self.0.fetch_add(1, Ordering::Relaxed);
        }
    }

    #[test]
    fn a_sync_that_fails_right_before_the_end_is_not_forgotten() {
        let (disk, event) = (Told::default(), EventFd::new(libc::EFD_CLOEXEC).unwrap());
        let (running, ended) = mpsc::channel();
        // The first answer ends the wait for the next line; the sync fails after it.
        let answers = Mutex::new(vec![
            failure(abi::FAILURE_IO | abi::FAILURE_SYNC, libc::EIO, 8),
            failure(abi::FAILURE_IO, libc::EIO, 0),
        ]);
        let running = Mutex::new(Some(running));
        let next = || {
            drop(running.lock().unwrap().take());
            Ok(answers.lock().unwrap().pop().expect("it asks twice"))
        };
        event.write(1).unwrap();
        let health = Health::default();
        watch(|| report(next(), (&disk, &health)), INTERVAL, &event, &ended);
        assert_eq!(disk.0.load(Ordering::Relaxed), 1);
        assert_eq!(health.report().failures, [6, 0, 0, 0, 0]);
    }

    #[test]
    fn a_halt_has_the_request_that_failed_and_is_no_failure_by_itself() {
        let (disk, health) = (Told::default(), Health::new(ErrorPolicy::Stop, None));
        let (halt_type, halt_error) = (blk::T_OUT, libc::EIO as u32);
        let request = abi::Failure { halt_type, halt_error, halt_sector: 77, ..failure(0, 0, 0) };
        let halted = abi::Failure { kinds: abi::FAILURE_HALTED, halt_bytes: 4096, ..request };
        report(Ok(halted), (&disk, &health));
        let shown = health.report();
        let reason = shown.halt.expect("it is halted").reason;
        assert!(reason.starts_with("a write of 4096 bytes at sector 77 failed"), "{reason}");
        assert_eq!(shown.failures, [0; 5]);
        health.resume();
        assert!(health.can_flush_halt());
        report(Ok(abi::Failure { halt_type: blk::T_FLUSH, ..halted }), (&disk, &health));
        assert!(health.is_halted() && !health.can_flush_halt());
    }

    #[test]
    fn an_event_has_the_gravest_kind_the_count_and_the_first_sector() {
        let told = failure_of(&failure(abi::FAILURE_IO | abi::FAILURE_NO_SPACE, libc::ENOSPC, 7));
        assert_eq!((told.kind, told.sector, told.requests), (FailureKind::NoSpace, Some(7), 3));
        assert!(told.operation.is_none() && told.reason.contains("No space"), "{told:?}");
        let told = failure_of(&failure(abi::FAILURE_IO | abi::FAILURE_SYNC, libc::EIO, u64::MAX));
        assert_eq!((told.operation, told.sector), (Some(Operation::Flush), None));
    }

    #[test]
    fn a_line_tells_the_gravest_kind_the_count_and_the_first_failure() {
        let text = line_of(&failure_of(&failure(abi::FAILURE_IO, libc::EIO, 77)));
        assert!(text.starts_with("the disk fails: I/O errors; see the kernel log"), "{text}");
        assert!(
            text.contains("(3 requests failed, the first at sector 77: Input/output"),
            "{text}"
        );
        let text = line_of(&failure_of(&failure(
            abi::FAILURE_IO | abi::FAILURE_NO_SPACE,
            libc::ENOSPC,
            0,
        )));
        assert!(text.contains("no space is left") && text.contains("sector 0: No space"), "{text}");
        let flush = failure(abi::FAILURE_IO | abi::FAILURE_SYNC, libc::EIO, u64::MAX);
        let text = line_of(&failure_of(&flush));
        assert!(text.contains("(3 requests failed, the first a flush: Input/output"), "{text}");
        let removed = abi::FAILURE_IO | abi::FAILURE_NO_SPACE | abi::FAILURE_REMOVED;
        let text = line_of(&failure_of(&failure(removed, libc::ENODEV, u64::MAX)));
        assert!(
            text.contains("was removed")
                && text.ends_with("(3 requests failed: No such device (os error 19))"),
            "{text}"
        );
        let text = line_of(&StorageFailure {
            requests: 0,
            ..failure_of(&failure(removed, libc::ENODEV, u64::MAX))
        });
        assert!(text.ends_with("(0 requests failed)"), "{text}");
        assert!(
            line_of(&failure_of(&failure(abi::FAILURE_TIMEOUT, libc::ETIMEDOUT, 1)))
                .contains("answer")
        );
        assert!(
            line_of(&failure_of(&failure(abi::FAILURE_READ_ONLY, libc::EROFS, 1)))
                .contains("read-only")
        );
    }
}
