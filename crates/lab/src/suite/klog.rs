// SPDX-License-Identifier: Apache-2.0
//! What a kernel log must not hold.

use lab_case::outcome::EXPECT_LOG;

/// Any of these in a line is a finding.
const BAD: [&str; 31] = [
    "BUG:",
    "WARNING:",
    "INFO: task ",
    "KASAN",
    "KCSAN",
    "UBSAN",
    "ODEBUG",
    "Oops",
    "general protection fault",
    "kernel BUG at",
    "Kernel panic",
    "Call Trace:",
    "blocked for more than",
    "soft lockup",
    "hard LOCKUP",
    "detected stall",
    "self-detected stall",
    "workqueue lockup",
    "sleeping function called",
    "scheduling while atomic",
    "circular locking dependency",
    "inconsistent lock state",
    "suspicious RCU usage",
    "held lock freed",
    "lock held when returning",
    "list_add corruption",
    "list_del corruption",
    "refcount_t:",
    "Bad page state",
    "page allocation failure",
    "unreferenced object",
];

/// What the kernels of the lab say without having a fault: the text, and why it is none.
///
/// Only for what holds in every case; a case says itself what it provokes.
const HARMLESS: [(&str, &str); 1] =
    [("Speculative Return Stack Overflow: WARNING: See", "the emulated CPU has no new microcode")];

/// Reports of lockdep that are known and not about this project: what they must and what they must
/// not hold, and why they are none of ours.
const KNOWN_REPORTS: [KnownReport; 2] = [
    KnownReport {
        with: &["nvme_update_ns_info_block", "&q->limits_lock"],
        // Our functions and modules; the debug kernel's own name has the word, too.
        without: "vhost_",
        why: "Linux before 6.14: nvme takes the lock of a queue's limits while the queue is \
              frozen, and SCSI disks the other way round; they are different queues",
    },
    KnownReport {
        with: &["nvme_start_freeze", "(wq_completion)async"],
        without: "virtblk",
        why: "Linux 6.12: nvme freezes its queues in one task of a suspend and thaws them in \
              another, which lockdep takes for locks that are never given back",
    },
];

struct KnownReport {
    with: &'static [&'static str],
    without: &'static str,
    /// For readers of the list.
    #[cfg_attr(not(test), expect(dead_code))]
    why: &'static str,
}

/// Where a report of lockdep begins and ends.
const LOCKDEP_REPORT: (&str, &str) = ("possible circular locking dependency", "</TASK>");

/// After one of these lockdep looks at nothing any more, whoever was to blame.
const LOCKDEP_IS_OFF: [&str; 7] = [
    "possible circular locking dependency",
    "possible recursive locking",
    "inconsistent lock state",
    "suspicious RCU usage",
    "turning off the locking correctness validator",
    "Disabling lock debugging",
    "DEBUG_LOCKS_WARN_ON",
];

/// How far the stack of an expected message may begin behind it.
const STACK_WITHIN_LINES: usize = 30;

/// The messages that a case's output says it provokes.
pub fn expected_in(output: &str) -> Vec<String> {
    let said = output.lines().filter_map(|line| line.strip_prefix(EXPECT_LOG));
    said.map(str::trim).filter(|text| !text.is_empty()).map(str::to_owned).collect()
}

/// Whether the kernel checks less after what it said here, forgiven or not.
pub fn spoils_the_kernel(log: &str) -> bool {
    LOCKDEP_IS_OFF.iter().any(|text| log.contains(text))
}

/// How many of the first lines are a known report that is not about this project.
fn known_report(lines: &[&str]) -> Option<usize> {
    let (begin, end) = LOCKDEP_REPORT;
    if !lines.first()?.contains(begin) {
        return None;
    }
    let length = 1 + lines.iter().position(|line| line.contains(end))?;
    let has = |text: &str| lines[..length].iter().any(|line| line.contains(text));
    let is_known =
        |report: &KnownReport| report.with.iter().all(|text| has(text)) && !has(report.without);
    KNOWN_REPORTS.iter().any(is_known).then_some(length)
}

/// The lines of a log that must not be there.
pub fn findings<'a>(log: &'a str, expected: &[String]) -> Vec<&'a str> {
    let mut found = Vec::new();
    let mut expected_at = None;
    let mut forgiven_to = 0;
    let lines: Vec<&str> = log.lines().collect();
    for (number, &line) in lines.iter().enumerate() {
        if let Some(length) = known_report(&lines[number..]) {
            forgiven_to = number + length;
        }
        if number < forgiven_to {
            continue;
        }
        if expected.iter().any(|text| line.contains(text.as_str())) {
            expected_at = Some(number);
            continue;
        }
        let is_bad = BAD.iter().any(|text| line.contains(text))
            && !HARMLESS.iter().any(|(text, _)| line.contains(text));
        let is_its_stack = line.contains("Call Trace:")
            && expected_at.is_some_and(|at| number - at <= STACK_WITHIN_LINES);
        if is_bad && !is_its_stack {
            found.push(line);
        }
    }
    found
}

/// The part of a log between a line that ends with `begin` and the next that ends with `end`; to
/// its end if that one is missing. `None` if it has not begun.
pub fn between<'a>(log: &'a str, begin: &str, end: &str) -> Option<(&'a str, bool)> {
    let start = after_line(log, begin)?;
    let rest = &log[start..];
    Some(match after_line(rest, end) {
        Some(stop) => (&rest[..stop], true),
        None => (rest, false),
    })
}

fn after_line(text: &str, ending: &str) -> Option<usize> {
    let mut offset = 0;
    for line in text.split_inclusive('\n') {
        offset += line.len();
        if line.trim_end().ends_with(ending) && line.ends_with('\n') {
            return Some(offset);
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn splats_are_found_and_ordinary_lines_are_not() {
        let log = "[ 1.0] nvme nvme0: 2/0/0 queues\n\
                   [ 2.0] BUG: KASAN: slab-out-of-bounds in f+0x1/0x2\n\
                   [ 2.1] WARNING: possible circular locking dependency detected\n\
                   [ 2.2] blk_update_request: I/O error, dev loop0\n";
        assert_eq!(findings(log, &[]).len(), 2);
    }

    #[test]
    fn an_expected_message_takes_its_own_stack_along_and_no_other() {
        let log = "[ 1.0] torture: page allocation failure: order:0\n\
                   [ 1.0] CPU: 0\n\
                   [ 1.0] Call Trace:\n\
                   [ 9.0] WARNING: CPU: 0 at something\n";
        let expected = expected_in("x\nEXPECT-LOG: page allocation failure\n");
        assert_eq!(findings(log, &expected), ["[ 9.0] WARNING: CPU: 0 at something"]);
        assert_eq!(findings(log, &[]).len(), 3);
        let far = format!("{}{}[ 2.0] Call Trace:\n", &log[..46], "[ 1.5] other\n".repeat(40));
        assert_eq!(findings(&far, &expected), ["[ 2.0] Call Trace:"]);
    }

    #[test]
    fn a_known_report_is_forgiven_unless_it_names_this_module() {
        let report = "[1] WARNING: possible circular locking dependency detected\n\
                      [1] 6.12.117-vhost-blk-debug #1 Tainted: G           O\n\
                      [1] -> #2 (&q->limits_lock){+.+.}-{3:3}:\n\
                      [1]        nvme_update_ns_info_block+0x4ea/0x26c0\n\
                      [1]        XXX\n\
                      [1] Call Trace:\n\
                      [1]  </TASK>\n";
        assert!(findings(report, &[]).is_empty());
        assert!(spoils_the_kernel(report));
        let ours = report.replace("XXX", "vhost_blk_serve+0x1/0x2 [vhost_blk]");
        assert_eq!(findings(&ours, &[]).len(), 2);
        let after = format!("{report}[2] BUG: something\n");
        assert_eq!(findings(&after, &[]), ["[2] BUG: something"]);
        assert!(KNOWN_REPORTS.iter().all(|report| !report.why.is_empty()));
    }

    #[test]
    fn a_case_is_what_lies_between_its_marks() {
        let log = "boot\n[1] lab: case a begins\nx\ny\n[2] lab: case a ends\nz\n";
        let (part, ended) = between(log, "lab: case a begins", "lab: case a ends").unwrap();
        assert_eq!((part, ended), ("x\ny\n[2] lab: case a ends\n", true));
        let (part, ended) = between("m\nx\n", "m", "n").unwrap();
        assert_eq!((part, ended), ("x\n", false));
        assert!(between(log, "lab: case b begins", "lab: case b ends").is_none());
    }
}
