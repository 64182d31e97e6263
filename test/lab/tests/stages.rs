// SPDX-License-Identifier: Apache-2.0
//! `scripts/stages.sh`: limits, skips and counts of the stages of `make test`.

use std::path::Path;
use std::process::Command;

/// Runs a script of stages, and returns its exit code and output.
fn run(stages: &str) -> (Option<i32>, String) {
    let cache = tempfile::tempdir().unwrap();
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let script = format!("set -u; . scripts/stages.sh; {stages}; finish");
    let output = Command::new("sh")
        .args(["-c", &script])
        .current_dir(root)
        .env("XDG_CACHE_HOME", cache.path())
        .output()
        .unwrap();
    (output.status.code(), String::from_utf8(output.stdout).unwrap())
}

fn last_line(output: &str) -> &str {
    output.lines().last().unwrap_or_default()
}

#[test]
fn a_run_without_time_left_ends_its_stage_and_counts_one_failure() {
    let (code, output) =
        run("limit_run 2; stage 5 first true; stage 5 hangs sleep 60; stage 5 never echo reached");
    assert_eq!((code, last_line(&output)), (Some(1), "1 passed, 1 failed, 0 skipped"), "{output}");
    let why = "FAILED: hangs: it took more than the 2 seconds of the whole run and was ended";
    assert!(output.contains(why), "{output}");
    assert!(!output.contains("reached"), "{output}");
}

#[test]
fn a_run_whose_time_ends_between_stages_counts_one_failure() {
    let (code, output) = run("limit_run 0; stage 5 never echo reached; stage 5 nor_this true");
    assert_eq!((code, last_line(&output)), (Some(1), "0 passed, 1 failed, 0 skipped"), "{output}");
    assert!(output.contains("FAILED: never and all after it did not run"), "{output}");
    assert!(!output.contains("reached"), "{output}");
}

#[test]
fn failed_stages_and_unexpected_skips_count_as_failed() {
    let (code, output) = run("limit_run 60; stage 1 good true; stage 1 bad false; \
        stage 1 odd echo 'SKIP: no reason of the list'; \
        stage 1 \"set-up: sid's kernel\" echo 'SKIP: sid is not to be had, as today'");
    assert_eq!((code, last_line(&output)), (Some(1), "1 passed, 2 failed, 1 skipped"), "{output}");
    assert!(output.contains("FAILED: bad: exit code 1"), "{output}");
    assert!(output.contains("does not have: odd: no reason of the list"), "{output}");
}
