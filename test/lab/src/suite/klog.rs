// SPDX-License-Identifier: Apache-2.0
//! Lines that a kernel log must not hold.

use kit::outcome::EXPECT_LOG;

/// A line with any of these is a finding.
const BAD: [&str; 52] = [
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
    "detected expedited stall",
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
    "new suspected memory leaks",
    // A log with lost lines cannot be judged.
    "printk messages dropped",
    // Crashes of programs, the daemon included.
    "segfault at ",
    "traps: ",
    // Disks and file systems.
    "I/O error, dev ",
    "Buffer I/O error",
    "critical target error",
    "critical medium error",
    "lost async page write",
    "lost sync page write",
    "EXT4-fs error",
    "EXT4-fs warning",
    "JBD2: Error",
    "JBD2: Detected IO errors",
    "Aborting journal",
    "Metadata corruption",
    "Corruption detected",
    "Corruption of in-memory data",
    "Internal error xfs",
    "log I/O error",
    "metadata I/O error",
];

/// Harmless messages of the lab's kernels: the text, and the reason why it is no fault.
///
/// Only for messages that hold in every case; a case itself announces those that it provokes.
const HARMLESS: [(&str, &str); 1] =
    [("Speculative Return Stack Overflow: WARNING: See", "the emulated CPU has no new microcode")];

/// Known reports of lockdep that are not about this project: the texts that they must and must not
/// hold, and the reason why they are not ours.
const KNOWN_REPORTS: [KnownReport; 2] = [
    KnownReport {
        with: &["nvme_update_ns_info_block", "&q->limits_lock"],
        without: OUR_FUNCTIONS,
        why: "Linux before 6.14: nvme takes the lock of a queue's limits while the queue is \
              frozen, and SCSI disks the other way round; they are different queues",
    },
    KnownReport {
        with: &["nvme_start_freeze", "(wq_completion)async"],
        without: OUR_FUNCTIONS,
        why: "Linux 6.12: nvme freezes its queues in one task of a suspend and thaws them in \
              another, which lockdep takes for locks that are never given back",
    },
];

/// Prefixes of this project's functions and modules. The debug kernel's own name has `vhost-blk`.
const OUR_FUNCTIONS: &[&str] = &["vhost_", "virtblk", "virtio_blk"];

struct KnownReport {
    with: &'static [&'static str],
    without: &'static [&'static str],
    /// For readers of this list.
    #[cfg_attr(not(test), expect(dead_code))]
    why: &'static str,
}

/// Texts in the first and the last line of a lockdep report.
const LOCKDEP_REPORT: (&str, &str) = ("possible circular locking dependency", "</TASK>");

/// Maximum distance, in lines, from an expected message to its stack.
const STACK_WITHIN_LINES: usize = 30;

/// The messages that a case provokes, as its output announces.
pub fn expected_in(output: &str) -> Vec<String> {
    let said = output.lines().filter_map(|line| line.strip_prefix(EXPECT_LOG));
    said.map(str::trim).filter(|text| !text.is_empty()).map(str::to_owned).collect()
}

/// Number of lines at the start that are a known report, not about this project.
fn known_report(lines: &[&str]) -> Option<usize> {
    let (begin, end) = LOCKDEP_REPORT;
    if !lines.first()?.contains(begin) {
        return None;
    }
    let length = 1 + lines.iter().position(|line| line.contains(end))?;
    let has = |text: &str| lines[..length].iter().any(|line| line.contains(text));
    let is_known = |report: &KnownReport| {
        report.with.iter().all(|text| has(text)) && !report.without.iter().any(|text| has(text))
    };
    KNOWN_REPORTS.iter().any(is_known).then_some(length)
}

/// Parts of messages about time without progress, which a lost interrupt also brings about.
pub(crate) fn stalls() -> Vec<String> {
    [
        "detected stall",
        "detected expedited stall",
        "blocked for more than",
        "soft lockup",
        "workqueue lockup",
    ]
    .map(str::to_owned)
    .to_vec()
}

/// The lines of a log that are findings.
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

/// The part of a log between a line that ends with `begin` and the next that ends with `end`, or up
/// to its end if that one is missing. `None` if `begin` is missing.
pub fn between<'a>(log: &'a str, begin: &str, end: &str) -> Option<(&'a str, bool)> {
    let start = after_line(log, begin)?;
    let rest = &log[start..];
    Some(match after_line(rest, end) {
        Some(stop) => (&rest[..stop], true),
        None => (rest, false),
    })
}

/// Reads the kernel's log of a boot case by case. It omits no line: lines between two cases are
/// attributed to their place.
#[derive(Debug, Default)]
pub(crate) struct LogReader {
    /// Number of bytes that were judged.
    read: usize,
    /// The case before, and the messages that it provokes.
    before: Option<(String, Vec<String>)>,
}

impl LogReader {
    /// Findings up to the end of the case `name`, whose part lies between `marks`.
    ///
    /// # Errors
    /// The mark that is missing: the log has lost lines, so that it proves nothing.
    pub(crate) fn case(
        &mut self,
        log: &str,
        name: &str,
        marks: &(String, String),
        expected: Vec<String>,
    ) -> Result<Vec<String>, String> {
        let lost = |mark: &str| format!("the kernel's log lacks the line '{mark}'");
        let rest = log.get(self.read..).ok_or_else(|| lost(&marks.0))?;
        let begin = after_line(rest, &marks.0).ok_or_else(|| lost(&marks.0))?;
        let end = begin + after_line(&rest[begin..], &marks.1).ok_or_else(|| lost(&marks.1))?;
        let mut found = self.between_cases(&rest[..begin]);
        found.extend(findings(&rest[begin..end], &expected).into_iter().map(str::to_owned));
        self.read += end;
        self.before = Some((name.to_owned(), expected));
        Ok(found)
    }

    /// Findings behind the last case that was read, other than stalls and messages that this case
    /// provokes. They remain unread.
    pub(crate) fn has_findings_beside_stalls(&self, log: &str, provoked: Vec<String>) -> bool {
        let before = self.before.iter().flat_map(|(_, expected)| expected.iter().cloned());
        let expected = Vec::from_iter(before.chain(provoked).chain(stalls()));
        !findings(log.get(self.read..).unwrap_or_default(), &expected).is_empty()
    }

    /// Findings behind the last case that was read.
    pub(crate) fn rest(&mut self, log: &str) -> Vec<String> {
        let found = self.between_cases(log.get(self.read..).unwrap_or_default());
        self.read = log.len();
        found
    }

    fn between_cases(&self, part: &str) -> Vec<String> {
        let (place, expected) = match &self.before {
            Some((name, expected)) => (format!("after {name}"), expected.as_slice()),
            None => ("while booting".to_owned(), &[][..]),
        };
        findings(part, expected).into_iter().map(|line| format!("({place}) {line}")).collect()
    }
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
                   [ 2.2] vhost_blk: loaded\n";
        assert_eq!(findings(log, &[]).len(), 2);
    }

    #[test]
    fn errors_of_disks_and_file_systems_and_crashes_are_found_unless_expected() {
        for line in [
            "I/O error, dev loop0, sector 8 op 0x1:(WRITE) flags 0x800 phys_seg 1",
            "Buffer I/O error on dev nullb0, logical block 0, async page read",
            "EXT4-fs error (device vda): ext4_lookup:1855: inode #2: comm ls: iget: checksum",
            "XFS (vda): Metadata corruption detected at xfs_agf_verify+0x1/0x2",
            "XFS (vda): Internal error xfs_trans_cancel at line 1 of file fs/xfs/xfs_trans.c",
            "vhost-blk[123]: segfault at 8 ip 00007f sp 00007f error 4 in vhost-blk",
            "traps: vhost-blk[123] trap invalid opcode ip:55 sp:7f error:0",
            "** 12 printk messages dropped **",
        ] {
            assert_eq!(findings(line, &[]), [line]);
            assert!(findings(line, &[line[..12].to_owned()]).is_empty());
        }
    }

    #[test]
    fn an_expected_message_takes_its_own_stack_along_and_no_other() {
        let log = "[ 1.0] cases: page allocation failure: order:0\n\
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
        for function in ["vhost_blk_serve+0x1/0x2 [vhost_blk]", "virtblk_update_limits+0x1/0x2"] {
            let ours = report.replace("XXX", function);
            assert_eq!(findings(&ours, &[]).len(), 2, "{function}");
        }
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

    fn marks(name: &str) -> (String, String) {
        (format!("case {name} begins"), format!("case {name} ends"))
    }

    const TWO: &str = "WARNING: one\ncase a begins\nBUG: two\ncase a ends\n\
                       segfault at 3\ncase b begins\ncase b ends\nBUG: four\n";

    #[test]
    fn lines_between_cases_are_found_and_attributed() {
        let mut reader = LogReader::default();
        let a = reader.case(TWO, "a", &marks("a"), vec![]).unwrap();
        assert_eq!(a, ["(while booting) WARNING: one", "BUG: two"]);
        let b = reader.case(TWO, "b", &marks("b"), vec![]).unwrap();
        assert_eq!(b, ["(after a) segfault at 3"]);
        assert_eq!(reader.rest(TWO), ["(after b) BUG: four"]);
        assert!(reader.rest(TWO).is_empty());
    }

    #[test]
    fn what_a_case_provokes_may_come_a_little_after_it() {
        let mut reader = LogReader::default();
        reader.case(TWO, "a", &marks("a"), vec!["segfault".to_owned()]).unwrap();
        assert!(reader.case(TWO, "b", &marks("b"), vec![]).unwrap().is_empty());
    }

    #[test]
    fn findings_beside_stalls_are_seen_and_remain_unread() {
        let mut reader = LogReader::default();
        let stalled = "rcu: INFO: rcu_preempt detected stalls on CPUs/tasks:\n";
        assert!(!reader.has_findings_beside_stalls(stalled, vec![]));
        assert!(!reader.has_findings_beside_stalls(
            "WARNING: one\n",
            expected_in(&format!("{EXPECT_LOG}WARNING: one"))
        ));
        assert!(reader.has_findings_beside_stalls(TWO, vec![]));
        assert_eq!(reader.case(TWO, "a", &marks("a"), vec![]).unwrap().len(), 2);
    }

    #[test]
    fn a_lost_mark_is_an_error() {
        for lost in ["case a begins\n", "case a ends\n"] {
            let log = TWO.replace(lost, "");
            let why = LogReader::default().case(&log, "a", &marks("a"), vec![]).unwrap_err();
            assert!(why.contains(lost.trim()), "{why}");
        }
    }
}
