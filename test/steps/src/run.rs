// SPDX-License-Identifier: Apache-2.0
//! Runs steps one after another within the time of the whole run.

use std::ffi::OsString;
use std::fs::File;
use std::io::Write;
use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant, SystemTime};

use anyhow::{Context, Result};
use kit::outcome::{BOOTED_AGAIN, PARTLY_SKIPPED, SKIP};

use crate::command::{self, Console, End, Group};
use crate::junit;
use crate::tally::{Outcome, Tally, Verdict};

/// Log directories of earlier runs that are kept.
const RUNS_KEPT: usize = 5;
/// Steps listed as the longest.
const LONGEST: usize = 12;
/// JUnit file of the profile `steps` (`.config/nextest.toml`).
const CARGO_JUNIT: &str = "target/nextest/steps/junit.xml";

/// The end of a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Passed {
    /// It passed.
    Yes,
    /// It failed; later steps that need it cannot run.
    No,
    /// It was skipped, as expected.
    Skipped,
}

/// A command that was started before its step ([`Run::start_early`]). It ends with the drop.
pub struct Early {
    group: Group,
    log: PathBuf,
}

/// A run of all steps.
pub struct Run {
    root: PathBuf,
    logs: PathBuf,
    path: OsString,
    console: Console,
    time: Duration,
    deadline: Instant,
    tally: Tally,
    took: Vec<(Duration, String)>,
    booted_again: Vec<String>,
    /// The time of the run is over, and counted as a failure.
    is_over: bool,
}

impl Run {
    /// A run in the checkout `root` of at most `time`. Its output goes to `output` and to the directory
    /// `logs`.
    ///
    /// # Errors
    /// The log cannot be made.
    pub fn new(
        root: &Path,
        output: impl Write + 'static,
        logs: &Path,
        time: Duration,
    ) -> Result<Self> {
        let log = File::create(logs.join("output.log"))
            .with_context(|| format!("cannot write to {}", logs.display()))?;
        Ok(Run {
            root: root.to_owned(),
            logs: logs.to_owned(),
            path: std::env::var_os("PATH").unwrap_or_default(),
            console: Console::new(output, log),
            time,
            deadline: Instant::now() + time,
            tally: Tally::default(),
            took: Vec::new(),
            booted_again: Vec::new(),
            is_over: false,
        })
    }

    /// One test, judged by its exit code; a line `SKIP: reason` makes it skipped.
    ///
    /// # Errors
    /// The run was interrupted, or its log cannot be written.
    pub fn step(&mut self, minutes: u64, name: &str, command: &[&str]) -> Result<Passed> {
        match self.execute(minutes, name, command)? {
            Some((end, said)) => self.judge(minutes, name, end, &said),
            None => Ok(Passed::No),
        }
    }

    fn judge(&mut self, minutes: u64, name: &str, end: End, said: &[String]) -> Result<Passed> {
        let reasons =
            |prefix: &'static str| said.iter().filter_map(move |line| line.strip_prefix(prefix));
        let verdict = match (end, reasons(SKIP).next()) {
            (End::Exit(Some(0)), None) => Verdict::Passed,
            (End::Exit(Some(0)), Some(reason)) => Verdict::Skipped(reason.to_owned()),
            _ => return Ok(self.fail_step(name, end, minutes)),
        };
        let failed = self.tally.failed();
        let skipped = matches!(verdict, Verdict::Skipped(_));
        self.tally.add(&Outcome {
            place: "step".into(),
            class: String::new(),
            name: name.replace(' ', "_"), // the list of skips separates its words by spaces
            verdict,
            left_out: reasons(PARTLY_SKIPPED).map(str::to_owned).collect(),
            booted_again: Vec::new(),
        });
        Ok(match (self.tally.failed() > failed, skipped) {
            (true, _) => Passed::No,
            (false, true) => Passed::Skipped,
            (false, false) => Passed::Yes,
        })
    }

    /// Starts the command of a later step beside the steps before it, with the CPU time that no other
    /// process wants (SCHED_IDLE, sched(7)), and its output in a log of its own.
    ///
    /// # Errors
    /// The command cannot be started, or the log cannot be written.
    pub fn start_early(&mut self, log: &str, command: &[&str]) -> Result<Early> {
        self.start_beside(log, &[&["chrt", "--idle", "0"], command].concat())
    }

    /// Starts a command beside the steps before its own, with its output in a log of its own.
    fn start_beside(&mut self, log: &str, command: &[&str]) -> Result<Early> {
        let log = self.logs.join(log);
        let file = File::create(&log).with_context(|| log.display().to_string())?;
        Ok(Early { group: command::start(&mut self.command(command), file)?, log })
    }

    /// The step of a command that was started early: waits for its end.
    ///
    /// # Errors
    /// As [`Run::step`].
    pub fn early_step(&mut self, minutes: u64, name: &str, early: Early) -> Result<Passed> {
        let Early { mut group, log } = early;
        let Some(limit) = self.begin(minutes, name)? else { return Ok(Passed::No) };
        let began = Instant::now();
        let end = group.wait_idly(limit)?;
        self.took.push((began.elapsed(), name.to_owned()));
        let output = std::fs::read(&log).with_context(|| log.display().to_string())?;
        let said: Vec<_> = String::from_utf8_lossy(&output).lines().map(str::to_owned).collect();
        said.iter().try_for_each(|line| self.console.say(line))?;
        self.judge(minutes, name, end, &said)
    }

    /// The tests of cargo, each counted by itself.
    ///
    /// # Errors
    /// See [`Run::step`].
    pub fn cargo_tests(&mut self, minutes: u64) -> Result<()> {
        let name = "cargo nextest run --workspace";
        // Many tests wait, for a hang or a time-out.
        let cpus = std::thread::available_parallelism().map_or(1, NonZeroUsize::get);
        let threads = (cpus + cpus.div_ceil(2)).to_string();
        let mut command = vec!["cargo", "nextest", "run", "--workspace", "--profile", "steps"];
        command.extend(["--test-threads", &threads]);
        self.counted(minutes, name, &command, Path::new(CARGO_JUNIT), Some("cargo"))
    }

    /// Cases in VMs, each counted by itself. `report` names their directory of logs. A VM that does
    /// not come up is booted again; the last lines of the run say so.
    ///
    /// # Errors
    /// See [`Run::step`].
    pub fn lab_cases(
        &mut self,
        minutes: u64,
        name: &str,
        report: &str,
        arguments: &[&str],
    ) -> Result<()> {
        let directory = format!("target/lab/{report}");
        let mut command = vec!["target/release/lab", "run", "--report", &directory];
        command.extend(arguments);
        self.counted(minutes, name, &command, &Path::new(&directory).join("junit.xml"), None)
    }

    /// A step whose tests are counted by its JUnit file.
    fn counted(
        &mut self,
        minutes: u64,
        name: &str,
        command: &[&str],
        junit: &Path,
        place: Option<&str>,
    ) -> Result<()> {
        let junit = self.root.join(junit);
        // The file of an earlier run must not be counted again.
        if junit.exists() {
            std::fs::remove_file(&junit).with_context(|| junit.display().to_string())?;
        }
        let Some((end, said)) = self.execute(minutes, name, command)? else { return Ok(()) };
        let failed = self.tally.failed();
        match junit::read(&junit, place) {
            Ok(outcomes) => outcomes.iter().for_each(|outcome| {
                self.tally.add(outcome);
                self.booted_again.extend(outcome.booted_again.iter().cloned());
            }),
            Err(why) => self.tally.fail(&format!("{name}: no outcomes: {why:#}")),
        }
        if end != End::Exit(Some(0)) && (self.tally.failed() == failed || end == End::TimedOut) {
            self.fail_step(name, end, minutes);
        }
        self.booted_again
            .extend(said.iter().filter(|line| line.starts_with(BOOTED_AGAIN)).cloned());
        for log in said.iter().filter_map(|line| line.strip_prefix("  | all of it: ")) {
            let from = self.root.join(log);
            if let Some(file) = from.file_name() {
                std::fs::copy(&from, self.logs.join(file)).with_context(|| log.to_owned())?;
            }
        }
        Ok(())
    }

    /// Appends the directory that `command` prints to `PATH`, for later steps.
    ///
    /// # Errors
    /// The command cannot be started.
    pub fn add_to_path(&mut self, command: &[&str]) -> Result<()> {
        let output = self.command(command).stderr(std::process::Stdio::inherit()).output()?;
        let directory = String::from_utf8_lossy(&output.stdout).trim().to_owned();
        if !directory.is_empty() {
            self.path.push(":");
            self.path.push(directory);
        }
        Ok(())
    }

    /// Prints the skips with their reasons, the failures and the closing line. Returns whether
    /// nothing failed.
    ///
    /// # Errors
    /// The output cannot be written.
    pub fn finish(mut self) -> Result<bool> {
        self.took.sort();
        let longest = self.took.iter().rev().take(LONGEST);
        let mut lines = vec![String::new()];
        lines.extend(self.tally.details());
        lines.append(&mut self.booted_again);
        lines.push("the longest:".to_owned());
        lines.extend(longest.map(|(took, name)| format!("{:6} s  {name}", took.as_secs())));
        lines.push(format!("all of this output: {}", self.logs.display()));
        lines.push(self.tally.closing_line());
        lines.iter().try_for_each(|line| self.console.say(line))?;
        Ok(self.tally.failed() == 0)
    }

    /// Runs the command of a step; `None` if the run has no time left.
    fn execute(
        &mut self,
        minutes: u64,
        name: &str,
        command: &[&str],
    ) -> Result<Option<(End, Vec<String>)>> {
        let Some(limit) = self.begin(minutes, name)? else { return Ok(None) };
        let began = Instant::now();
        let mut program = self.command(command);
        let outcome = command::run(&mut program, limit, &mut self.console)?;
        self.took.push((began.elapsed(), name.to_owned()));
        Ok(Some(outcome))
    }

    /// Begins a step. Returns its limit; `None` if the run has no time left.
    fn begin(&mut self, minutes: u64, name: &str) -> Result<Option<Duration>> {
        let left = self.deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            if !std::mem::replace(&mut self.is_over, true) {
                let seconds = self.time.as_secs();
                let why = format!(
                    "{name} and all after it did not run: the {seconds} s of the run are over"
                );
                self.tally.fail(&why);
            }
            return Ok(None);
        }
        self.console.say(&format!("\n== {name} (after {} s)", (self.time - left).as_secs()))?;
        Ok(Some(left.min(Duration::from_secs(minutes * 60))))
    }

    fn command(&self, command: &[&str]) -> Command {
        let target = std::env::var_os("CARGO_TARGET_DIR").unwrap_or("target".into());
        let mut program = Command::new(match command[0].strip_prefix("target/") {
            Some(built) => self.root.join(target).join(built),
            None => PathBuf::from(command[0]),
        });
        program.args(&command[1..]).current_dir(&self.root).env("PATH", &self.path);
        program.env("CARGO_TERM_COLOR", "never");
        // With one thread, libtest begins a line before the test, and no line of the test begins with SKIP.
        program.env("RUST_TEST_THREADS", "2");
        program
    }

    fn fail_step(&mut self, name: &str, end: End, minutes: u64) -> Passed {
        let why = match end {
            End::Exit(Some(code)) => format!("{name}: exit code {code}"),
            End::Exit(None) => format!("{name}: ended by a signal"),
            End::TimedOut if Instant::now() >= self.deadline => {
                self.is_over = true;
                let seconds = self.time.as_secs();
                format!("{name}: it took more than the {seconds} s of the whole run and was ended")
            }
            End::TimedOut => format!("{name}: it took more than {minutes} minutes and was ended"),
        };
        self.tally.fail(&why);
        Passed::No
    }
}

/// Makes a directory for the logs of a run in the cache: a clean checkout is often deleted after its
/// tests. Removes the oldest ones.
///
/// # Errors
/// The directory cannot be made.
pub fn new_log_directory() -> Result<PathBuf> {
    let all = kit::system::cache_directory()?.join("test-logs");
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH)?.as_secs();
    // Names sort by time.
    let logs = all.join(format!("{now}-{}", std::process::id()));
    std::fs::create_dir_all(&logs).with_context(|| format!("cannot make {}", logs.display()))?;
    let entries = std::fs::read_dir(&all)?.collect::<std::io::Result<Vec<_>>>()?;
    let mut directories: Vec<PathBuf> = entries.iter().map(|entry| entry.path()).collect();
    directories.sort();
    for old in directories.iter().rev().skip(RUNS_KEPT) {
        std::fs::remove_dir_all(old).with_context(|| format!("cannot remove {}", old.display()))?;
    }
    Ok(logs)
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Rig {
        _directory: tempfile::TempDir,
        log: PathBuf,
        run: Run,
    }

    /// A run of at most `time`.
    fn rig_for(time: Duration) -> Rig {
        let directory = tempfile::tempdir().unwrap();
        let run = Run::new(directory.path(), std::io::sink(), directory.path(), time).unwrap();
        Rig { log: directory.path().join("output.log"), run, _directory: directory }
    }

    /// A run whose time does not end.
    fn rig() -> Rig {
        rig_for(Duration::from_secs(24 * 3600))
    }

    /// Ends the run; returns its result and its output.
    fn finish(rig: Rig) -> (bool, String) {
        let good = rig.run.finish().unwrap();
        (good, std::fs::read_to_string(rig.log).unwrap())
    }

    #[test]
    fn a_run_without_time_left_ends_its_step_and_counts_one_failure() {
        let mut rig = rig();
        assert_eq!(rig.run.step(20, "first", &["true"]).unwrap(), Passed::Yes);
        let minutes = 48 * 60;
        let limit = rig.run.begin(minutes, "hangs").unwrap().unwrap();
        assert!(limit < rig.run.time, "the first step has taken a part");
        rig.run.deadline = Instant::now(); // as at the end of this limit
        assert_eq!(rig.run.judge(minutes, "hangs", End::TimedOut, &[]).unwrap(), Passed::No);
        assert_eq!(rig.run.step(5, "never", &["echo", "reached"]).unwrap(), Passed::No);
        let (good, output) = finish(rig);
        assert!(!good);
        assert!(output.ends_with("1 passed, 1 failed, 0 skipped\n"), "{output}");
        let why = "FAILED: hangs: it took more than the 86400 s of the whole run and was ended";
        assert!(output.contains(why) && !output.contains("reached"), "{output}");
    }

    #[test]
    fn a_run_whose_time_ends_between_steps_counts_one_failure() {
        let mut rig = rig_for(Duration::ZERO);
        rig.run.step(5, "never", &["true"]).unwrap();
        rig.run.step(5, "nor_this", &["true"]).unwrap();
        let (good, output) = finish(rig);
        assert!(!good && output.contains("FAILED: never and all after it did not run"), "{output}");
        assert!(output.ends_with("0 passed, 1 failed, 0 skipped\n"), "{output}");
    }

    #[test]
    fn a_command_that_starts_early_gets_no_time_that_others_want_and_ends_with_its_owner() {
        let mut rig = rig();
        let script = "echo early $$ $CARGO_TERM_COLOR; exec sleep 600";
        let early = rig.run.start_early("early.log", &["sh", "-c", script]).unwrap();
        let log = rig.run.logs.join("early.log");
        let said = || std::fs::read_to_string(&log).unwrap();
        // It may take as long as the other processes want the CPUs.
        while !said().ends_with('\n') {
            std::thread::sleep(Duration::from_millis(50));
        }
        let said = said();
        let words: Vec<_> = said.split_whitespace().collect();
        let ["early", pid, "never"] = words[..] else { panic!("{said}") };
        let scheduling = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
        // Field 41 of proc_pid_stat(5); 5 is SCHED_IDLE.
        let after_name = scheduling.rsplit_once(") ").unwrap().1;
        assert_eq!(after_name.split(' ').nth(41 - 3), Some("5"), "{scheduling}");
        drop(early);
        let (_, output) = finish(rig);
        assert!(!output.contains("early"), "{output}");
        assert!(!Path::new(&format!("/proc/{pid}")).exists());
    }

    #[test]
    fn the_step_of_an_early_command_has_its_output_and_its_verdict() {
        let mut rig = rig();
        for (script, passed) in [
            ("sleep 1; echo good", Passed::Yes),
            ("echo bad; exit 7", Passed::No),
            ("echo 'SKIP: no reason of the list'", Passed::No),
        ] {
            let early = rig.run.start_beside("early.log", &["sh", "-c", script]).unwrap();
            assert_eq!(rig.run.early_step(20, "early", early).unwrap(), passed, "{script}");
        }
        let hangs = rig.run.start_beside("early.log", &["sleep", "600"]).unwrap();
        assert_eq!(rig.run.early_step(0, "hangs", hangs).unwrap(), Passed::No);
        let (good, output) = finish(rig);
        assert!(!good && output.contains("good\n") && output.contains("bad\n"), "{output}");
        assert!(output.contains("FAILED: hangs: it took more than 0 minutes"), "{output}");
        assert!(output.ends_with("1 passed, 3 failed, 0 skipped\n"), "{output}");
    }

    #[test]
    fn failed_steps_and_skips_are_told_apart() {
        let mut rig = rig();
        let mut step = |name, script| rig.run.step(20, name, &["sh", "-c", script]).unwrap();
        assert_eq!(step("good", "true"), Passed::Yes);
        assert_eq!(step("bad", "exit 7"), Passed::No);
        assert_eq!(step("odd", "echo 'SKIP: no reason of the list'"), Passed::No);
        let sid = step("set-up: sid's kernel", "echo 'SKIP: sid is not to be had today'");
        assert_eq!(sid, Passed::Skipped);
        assert_eq!(rig.run.step(0, "hangs", &["sleep", "600"]).unwrap(), Passed::No);
        let (good, output) = finish(rig);
        assert!(!good && output.contains("FAILED: bad: exit code 7"), "{output}");
        assert!(output.contains("FAILED: hangs: it took more than 0 minutes"), "{output}");
        assert!(output.ends_with("1 passed, 3 failed, 1 skipped\n"), "{output}");
    }

    #[test]
    fn tests_without_outcomes_are_a_failure_and_old_outcomes_are_not_counted() {
        let mut rig = rig();
        let junit = rig.run.root.join("junit.xml");
        std::fs::write(&junit, "<testsuites/>").unwrap();
        rig.run.counted(1, "tests", &["true"], &junit, None).unwrap();
        let (good, output) = finish(rig);
        assert!(!good && output.contains("FAILED: tests: no outcomes"), "{output}");
    }
}
