#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
#
# Every test of the project but the lab's sets full, nested and guest-full (`make lab` runs them),
# from a clean checkout, without anyone to ask. The last line of the output is `N passed, N failed,
# N skipped`, summed over all stages; the exit code is 0 only if nothing failed.

set -u
cd "$(dirname "$0")/.." || exit 1
PATH=$PATH:$HOME/.cargo/bin
export PATH
export CARGO_TERM_COLOR=never

work=$(mktemp -d)
trap 'exec >&3 2>&3; wait; rm -rf "$work"' EXIT
trap 'exit 130' INT TERM HUP

# All output is kept, with what failed cases of the lab wrote: a clean checkout is often thrown away
# after its tests. The newest five stay; their names are times.
all_logs=${XDG_CACHE_HOME:-${HOME:-/root}/.cache}/vhost-blk/test-logs
logs=$all_logs/$(date -u +%Y%m%d-%H%M%S)-$$
exec 3>&1
mkdir -p "$logs" && mkfifo "$work/output" || exit 1
(trap '' INT TERM HUP && exec tee "$logs/output.log" <"$work/output") & # ends after all others
exec >"$work/output" 2>&1
find "$all_logs" -mindepth 1 -maxdepth 1 | sort -r | tail -n +6 | xargs -r rm -rf

passed=0
failed=0
skipped=0
: >"$work/skips"
: >"$work/failures"

title() { printf '\n== %s (%s)\n' "$1" "$(date -u +%H:%M:%S)"; }

# Ends everything: what was skipped and why, what failed, the closing line.
finish() {
    echo
    [ ! -s "$work/skips" ] || sort -u "$work/skips"
    [ ! -s "$work/failures" ] || cat "$work/failures"
    echo "all of this output: $logs"
    echo "$passed passed, $failed failed, $skipped skipped"
    [ "$failed" -eq 0 ]
    exit
}

fail() {
    failed=$((failed + 1))
    echo "FAILED: $*" >>"$work/failures"
}

# stage NAME COMMAND...: one test, judged by its exit code; a line `SKIP: reason` makes it skipped,
# a line `PARTLY SKIPPED: reason` is told with the skips.
stage() {
    name=$1
    shift
    title "$name"
    { "$@" </dev/null 2>&1; echo $? >"$work/code"; } | tee "$work/log"
    if [ "$(cat "$work/code")" -ne 0 ]; then
        fail "$name"
        return 1
    elif grep -q '^SKIP: ' "$work/log"; then
        skipped=$((skipped + 1))
        grep '^SKIP: ' "$work/log" >>"$work/skips"
    else
        passed=$((passed + 1))
        grep '^PARTLY SKIPPED: ' "$work/log" >>"$work/skips"
    fi
    return 0
}

sum_of() { awk -v word="$1" '/^test result: / {
    for (i = 2; i <= NF; i++) if ($i ~ "^" word) sum += $(i - 1)
} END { print sum + 0 }' "$work/log"; }

# said_by_passed_tests WORD: one line for each passed test that printed `WORD: reason`.
said_by_passed_tests() { awk -v word="$1: " '
    /^successes:$/ { in_passed = 1 }
    /^failures:$/ { in_passed = 0 }
    /^---- .* stdout ----$/ { name = $2; seen = 0 }
    index($0, word) == 1 && in_passed && !seen { seen = 1; print word name ": " substr($0, length(word) + 1) }
' "$work/log"; }

# What each failed test said when it panicked, in few lines, one `FAILED: ` line for each.
reasons_of_failed_tests() { awk '
    /^failures:$/ { in_failed = 1 }
    /^successes:$/ { in_failed = 0 }
    /^---- .* stdout ----$/ { name = $2; left = 0 }
    /^note: |^$/ { left = 0 }
    left > 0 { print "FAILED: " name ": error: " substr($0, 1, 240); left-- }
    in_failed && / panicked at / { left = 30 }
' "$work/log"; }

# The tests of cargo: the counts are libtest's own, but a passed test that printed `SKIP: reason`
# counts as skipped. One that printed `PARTLY SKIPPED: reason` did the rest and counts as passed;
# what it left out is told with the skips.
cargo_tests() {
    title "cargo test --workspace"
    { cargo test --workspace --no-fail-fast -- --show-output </dev/null 2>&1; echo $? >"$work/code"; } |
        tee "$work/log" |
        grep --line-buffered -E '^ *(Compiling|Running|Doc-tests) |^test |^error|^(PARTLY )?SKIP(PED)?: '
    code=$(cat "$work/code")
    said_by_passed_tests SKIP >"$work/said-skip"
    said_skip=$(wc -l <"$work/said-skip")
    ignored=$(sum_of ignored)
    bad=$(sum_of failed)
    cat "$work/said-skip" >>"$work/skips"
    said_by_passed_tests "PARTLY SKIPPED" >>"$work/skips"
    sed -n 's/^test \(.*\) \.\.\. ignored\(.*\)/SKIP: \1\2/p' "$work/log" >>"$work/skips"
    sed -n 's/^test \(.*\) \.\.\. FAILED$/FAILED: \1/p' "$work/log" >>"$work/failures"
    reasons_of_failed_tests >>"$work/failures"
    passed=$((passed + $(sum_of passed) - said_skip))
    skipped=$((skipped + ignored + said_skip))
    failed=$((failed + bad))
    if [ "$code" -ne 0 ]; then
        # A build that fails, or a test program that dies, counts nothing by itself.
        [ "$bad" -gt 0 ] || fail "cargo test ended with code $code"
        echo "---- the whole output of the failed cargo test:"
        cat "$work/log"
    fi
}

# shellcheck disable=SC2317
formatting() {
    cargo fmt --version >/dev/null 2>&1 || {
        echo "SKIP: rustfmt is not installed (rustup component add rustfmt)"
        return 0
    }
    cargo fmt --all --check
}

# lab NAME ARGUMENT...: cases in host VMs; each counts by itself.
lab_cases() {
    name=$1
    title "$name"
    shift
    { cargo run --quiet --release -p lab -- run "$@" </dev/null 2>&1; echo $? >"$work/code"; } |
        tee "$work/log"
    counts=$(grep -xE '[0-9]+ passed, [0-9]+ failed, [0-9]+ skipped' "$work/log" | tail -n 1)
    if [ -z "$counts" ]; then
        fail "$name ended with code $(cat "$work/code")"
        return
    fi
    # shellcheck disable=SC2086
    set -- $counts
    passed=$((passed + $1))
    failed=$((failed + $3))
    skipped=$((skipped + $5))
    if [ "$(cat "$work/code")" -ne 0 ] && [ "$3" -eq 0 ]; then
        fail "$name ended with code $(cat "$work/code"), though no case failed"
    fi
    grep '^SKIP: ' "$work/log" >>"$work/skips"
    sed -n 's/^FAILED  */FAILED: /p' "$work/log" >>"$work/failures"
    sed -n 's/^  | all of it: //p' "$work/log" | xargs -r -d '\n' cp -t "$logs"
}

# Debian sid is not always to be had; what was fetched before will do.
# shellcheck disable=SC2317
sid_kernel() {
    scripts/kernel/sid.sh || echo "SKIP: sid's kernel cannot be fetched, nothing was tested on it"
}

stage "set-up: packages" scripts/setup.sh test || finish
stage "formatting" formatting
stage "documents" scripts/check-docs.sh
stage "build" cargo build --workspace --all-targets || finish
stage "set-up: guest kernel, root image, accelerator" cargo run --quiet -p lab -- fetch || finish
cargo_tests
stage "fuzz targets, a short run" scripts/fuzz-smoke.sh
stage "set-up: sid's kernel" sid_kernel
has_sid=$(grep -q '^SKIP: ' "$work/log" || echo yes)
stage "kernel module: checkpatch, gcc, sparse" scripts/kernel/lint.sh
stage "kernel modules: as DKMS builds them" scripts/kernel/dkms.sh
if stage "build for the VMs" cargo build --release -p vhost-blk -p lab -p torture -p nested -p guest-cases &&
    stage "set-up: debug kernel" scripts/kernel/debug.sh; then
    lab_cases "kernel module: gating cases" --kernel debug,6.12 --set gating
    lab_cases "guest driver" --kernel 6.12 --report target/lab/guest --set guest
    # Of each kind one: the emulated debug kernel takes its time. `make lab` runs all of them on it.
    lab_cases "guest driver: debug kernel" --kernel debug --report target/lab/guest-debug \
        guest-verify/bio guest-ext4/request guest-errors/bio guest-unplug/request \
        guest-surprise/bio guest-bind/bio guest-rings/bio guest-hostile-ring/request
fi
if [ -n "$has_sid" ]; then
    lab_cases "kernel module: sid's kernel" --kernel sid --report target/lab/sid module-reload
fi
finish
