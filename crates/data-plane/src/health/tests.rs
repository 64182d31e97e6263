// SPDX-License-Identifier: Apache-2.0
//! Tests of the health.

use super::*;
use std::sync::Arc;

const WRITE: Kind = Kind::Write { sector: 8, bytes: 512, durable: false };
const NO_SPACE: IoError = IoError::Errno(libc::ENOSPC);
const BROKEN: IoError = IoError::Errno(libc::EIO);

#[test]
fn the_policy_decides_which_errors_halt() {
    use ErrorPolicy::{Enospc, Report, Stop};
    for (policy, error, verdict) in [
        (Report, NO_SPACE, Verdict::Report),
        (Enospc, NO_SPACE, Verdict::Keep),
        (Enospc, IoError::Errno(libc::EDQUOT), Verdict::Keep),
        (Enospc, BROKEN, Verdict::Report),
        (Enospc, IoError::EndOfStorage, Verdict::Report),
        (Stop, NO_SPACE, Verdict::Keep),
        (Stop, BROKEN, Verdict::Keep),
        (Stop, IoError::EndOfStorage, Verdict::Keep),
        (Stop, IoError::Unsupported, Verdict::Report),
    ] {
        assert_eq!(Health::new(policy, None).judge(WRITE, error), verdict, "{policy:?} {error}");
    }
}

#[test]
fn reads_have_a_policy_of_their_own_which_the_operator_changes() {
    use ErrorPolicy::{Report, Stop};
    let read = Kind::Read { sector: 8, bytes: 512 };
    let health = Health::new(ErrorPolicies { reads: Report, others: Stop }, None);
    let verdicts = |health: &Health| [read, WRITE].map(|kind| health.judge(kind, BROKEN));
    assert_eq!(verdicts(&health), [Verdict::Report, Verdict::Keep]);
    assert!(health.can_halt() && health.can_flush_halt());
    let policies = ErrorPolicies { reads: Stop, others: Report };
    health.set_rules(ErrorRules { policies, io_timeout: None });
    assert_eq!(verdicts(&health), [Verdict::Keep, Verdict::Report]);
    assert!(health.can_halt() && !health.can_flush_halt());
    health.set_rules(ErrorRules::default());
    assert_eq!(verdicts(&health), [Verdict::Report; 2]);
    assert!(!health.can_halt());
}

#[test]
fn a_failed_flush_reaches_the_guest_and_halts_once() {
    let health = Health::new(ErrorPolicy::Stop, None);
    for _ in 0..2 {
        assert_eq!(health.judge(Kind::Flush, BROKEN), Verdict::ReportAndHalt);
    }
    health.halt(Kind::Flush, BROKEN);
    for _ in 0..2 {
        assert_eq!(health.judge(Kind::Flush, BROKEN), Verdict::Report);
        assert!(!health.can_flush_halt());
        health.resume();
    }
    assert!(health.take_failed_flush() && !health.take_failed_flush());
    assert_eq!(health.judge(Kind::Flush, BROKEN), Verdict::ReportAndHalt);
}

#[test]
fn numbers_of_an_earlier_program_are_added_and_counted_on() {
    let failed = |health: &Health| {
        let failure = StorageFailure::of_io(WRITE, 0, NO_SPACE).unwrap();
        health.record_failure(failure);
        health.halt(WRITE, NO_SPACE);
        health.record_stall(0, Duration::from_secs(9));
    };
    let (earlier, later) = (Health::default(), Health::default());
    failed(&earlier);
    later.add_totals(&earlier.totals());
    assert_eq!(later.totals(), earlier.totals());
    assert!(!later.is_halted() && later.report().stalled.is_empty());
    failed(&later);
    let expected = HealthTotals { halts: 2, stalls: 2, failures: [0, 2, 0, 0, 0] };
    assert_eq!(later.totals(), expected);
    assert_eq!(later.report().failures, expected.failures);
}

#[test]
fn each_change_is_told_once() {
    let health = Health::new(ErrorPolicy::Stop, None);
    let told = Arc::new(Mutex::new(Vec::new()));
    let events = Arc::clone(&told);
    health.set_hook(Box::new(move |event| events.lock().unwrap().push(event.clone())));
    for _ in 0..3 {
        health.halt(WRITE, BROKEN);
    }
    assert!(health.is_halted());
    assert!(health.report().halt.unwrap().reason.contains("sector 8"));
    assert!(health.resume() && !health.resume() && !health.is_halted());
    health.record_stall(3, Duration::from_secs(9));
    assert_eq!(health.report().stalled.len(), 1);
    health.record_recovery(3);
    let HealthReport { halt, halts, stalled, stalls, .. } = health.report();
    assert_eq!((halt, halts, stalled.len(), stalls), (None, 1, 0, 1));
    let told = told.lock().unwrap();
    assert!(matches!(told[0], HealthEvent::Halted(_)), "{told:?}");
    let rest = [HealthEvent::Resumed, HealthEvent::Stalled(3), HealthEvent::Recovered(3)];
    assert_eq!(told[1..], rest);
}
