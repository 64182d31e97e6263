// SPDX-License-Identifier: Apache-2.0
//! Reasons that a guest failed, in the words of its job, of its kernel and of QEMU.

use std::process::ExitStatus;

use crate::emulator::{self, EmulatorFault};
use crate::guest::GuestReport;
use crate::suite::klog;

/// Lines of a log shown when a guest fails, and the most of each.
const TAIL_LINES: usize = 25;
const TAIL_COLUMNS: usize = 160;

/// Lines of the console shown from the kernel's first complaint on.
const OOPS_LINES: usize = 60;

/// The most characters of QEMU's words in a reason.
const WORDS_MAX: usize = 400;

/// QEMU's warning at each start about features that its emulation lacks.
const HARMLESS: &str = "TCG doesn't support requested";

/// Output of QEMU and of a guest's console.
#[derive(Debug)]
pub(crate) struct Remains {
    /// QEMU's standard error.
    qemu: String,
    console: String,
}

impl Remains {
    /// Takes QEMU's standard error and the guest's console.
    pub(crate) fn new(qemu: &str, console: &str) -> Self {
        let qemu = qemu.lines().filter(|line| !line.contains(HARMLESS) && !line.trim().is_empty());
        Self { qemu: qemu.collect::<Vec<_>>().join("\n"), console: console.replace('\r', "") }
    }

    /// Reason that the job failed; `None` if it ran to a good end. `status` is QEMU's.
    pub(crate) fn failure(&self, report: &GuestReport, status: ExitStatus) -> Option<String> {
        let (fail, exit) = (report.value("fail"), report.value("exit"));
        if (fail, exit) == (None, Some("0")) {
            return None;
        }
        let job = match (fail, exit) {
            (Some(why), _) => Some(why.to_owned()),
            (None, Some(code)) => Some(format!("the script ended with code {code}")),
            (None, None) => None,
        };
        let kernel =
            self.complaint().map(|line| format!("the guest's kernel failed: {}", line.trim()));
        let reasons: Vec<String> = job.into_iter().chain(kernel).collect();
        if reasons.is_empty() { Some(self.end_of_qemu(status)) } else { Some(reasons.join("; ")) }
    }

    /// QEMU's assertion that ended it, if it is one of the emulation.
    pub(crate) fn assertion(&self) -> Option<EmulatorFault> {
        emulator::assertion(&self.qemu)
    }

    /// Describes QEMU's end if neither the job nor the kernel gave a reason.
    fn end_of_qemu(&self, status: ExitStatus) -> String {
        let words: String = self.qemu.replace('\n', "; ").chars().take(WORDS_MAX).collect();
        let how = if status.success() {
            "the guest powered off before its job had ended".to_owned()
        } else {
            format!("QEMU ended ({status})")
        };
        if words.is_empty() {
            format!("{how}, QEMU said nothing")
        } else {
            format!("{how}: {words}")
        }
    }

    /// The first line of the console in which the kernel reports a fault of its own.
    fn complaint(&self) -> Option<&str> {
        klog::findings(&self.console, &[]).into_iter().next()
    }

    /// The kernel reports a fault that a lost interrupt does not explain.
    pub(crate) fn has_complaint_beside_stalls(&self) -> bool {
        !klog::findings(&self.console, &klog::stalls()).is_empty()
    }

    /// The last lines that QEMU said, and the console's: from the kernel's complaint on, if it has
    /// one.
    pub(crate) fn log(&self) -> String {
        let console: Vec<&str> = self.console.lines().collect();
        let complaint = self.complaint();
        let from = complaint.and_then(|line| console.iter().position(|other| *other == line));
        let shown = match from {
            Some(from) => &console[from..console.len().min(from + OOPS_LINES)],
            None => tail(&console),
        };
        let qemu: Vec<&str> = self.qemu.lines().collect();
        let named = |name: &str, lines: &[&str]| -> String {
            let cut = |line: &&str| line.chars().take(TAIL_COLUMNS).collect::<String>();
            lines.iter().map(|line| format!("  {name}| {}\n", cut(line))).collect()
        };
        named("qemu", tail(&qemu)) + &named("console", shown)
    }
}

fn tail<'a, 'b>(lines: &'b [&'a str]) -> &'b [&'a str] {
    &lines[lines.len().saturating_sub(TAIL_LINES)..]
}

#[cfg(test)]
mod tests {
    use std::os::unix::process::ExitStatusExt;

    use super::*;

    const OOPS: &str = "[   47.5] Oops: int3: 0000 [#1] PREEMPT SMP NOPTI\r\n\
                        [   47.6] RIP: 0010:blk_update_request+0x3c/0x4a0\r\n";
    const ABORT: &str = "qemu-system-x86_64: warning: TCG doesn't support requested feature: x\n\
                         qemu-system-x86_64: error: failed to set MSR 0x10a to 0x0\n";

    fn why(qemu: &str, console: &str, report: &str, raw_status: i32) -> Option<String> {
        let status = ExitStatus::from_raw(raw_status);
        Remains::new(qemu, console).failure(&GuestReport::parse(report), status)
    }

    #[test]
    fn a_good_end_needs_exit_zero_and_no_failure() {
        assert_eq!(why("", "", "stage one\nexit 0\n", 0), None);
        assert_eq!(why("", "", "fail bad data\nexit 1\n", 0).unwrap(), "bad data");
        assert!(why("", "", "exit 3\n", 0).unwrap().contains("code 3"));
        assert!(why("", "", "stage one\n", 0).unwrap().contains("before its job had ended"));
    }

    #[test]
    fn a_qemu_that_dies_is_quoted_without_what_it_says_at_each_start() {
        let why = why(ABORT, "", "", 6).unwrap();
        assert!(why.contains("signal: 6") && why.contains("MSR 0x10a"), "{why}");
        assert!(!why.contains("TCG"), "{why}");
    }

    #[test]
    fn a_stall_may_be_a_result_of_a_lost_interrupt_and_an_oops_is_none() {
        let complains = |console: &str| Remains::new("", console).has_complaint_beside_stalls();
        for stall in ["detected stalls", "detected expedited stalls"] {
            let line = format!("[ 23.0] rcu: INFO: rcu_preempt {stall} on CPUs/tasks:\r\n");
            assert!(!complains(&line), "{line}");
        }
        assert!(complains(OOPS));
    }

    #[test]
    fn an_oops_is_the_reason_and_is_shown_from_its_first_line_on() {
        let reason = why("", OOPS, "stage measure\n", 0).unwrap();
        assert!(reason.contains("kernel failed: [   47.5] Oops: int3"), "{reason}");
        let both = why("", OOPS, "fail fio\nexit 1\n", 0).unwrap();
        assert!(both.contains("fio;") && both.contains("Oops"), "{both}");
        let quiet = "a line before\n".repeat(100) + OOPS + &"a line after\n".repeat(100);
        let log = Remains::new("", &quiet).log();
        assert!(log.starts_with("  console| [   47.5] Oops"), "{log}");
        assert_eq!(log.lines().count(), OOPS_LINES);
    }
}
