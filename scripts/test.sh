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
# shellcheck source=scripts/stages.sh
. scripts/stages.sh
limit_run $((85 * 60))

sum_of() { awk -v word="$1" '/^test result: / {
    for (i = 2; i <= NF; i++) if ($i ~ "^" word) sum += $(i - 1)
} END { print sum + 0 }' "$work/log"; }

# said_by_passed_tests WORD: a line `NAME: REASON` for each passed test that printed `WORD: REASON`.
said_by_passed_tests() { awk -v word="$1: " '
    /^successes:$/ { in_passed = 1 }
    /^failures:$/ { in_passed = 0 }
    /^---- .* stdout ----$/ { name = $2; seen = 0 }
    index($0, word) == 1 && in_passed && !seen { seen = 1; print name ": " substr($0, length(word) + 1) }
' "$work/log"; }

# The panic messages of failed tests, a few lines each, with `FAILED: ` in front.
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
# its missing part is listed with the skips.
cargo_tests() {
    begin "$1" "cargo test --workspace"
    run cargo test --workspace --no-fail-fast -- --show-output |
        grep --line-buffered -E '^ *(Compiling|Running|Doc-tests) |^test |^error|^(PARTLY )?SKIP(PED)?: '
    ended
    said_by_passed_tests SKIP >"$work/said-skip"
    sed -n 's/^test \(.*\) \.\.\. ignored\(.*\)/\1: ignored\2/p' "$work/log" >"$work/ignored"
    said_by_passed_tests "PARTLY SKIPPED" >"$work/said-part"
    passed=$((passed + $(sum_of passed) - $(wc -l <"$work/said-skip")))
    skipped=$((skipped + $(cat "$work/said-skip" "$work/ignored" | wc -l)))
    bad=$(sum_of failed)
    failed=$((failed + bad))
    # An unexpected skip counts as failed, not as skipped or passed.
    for list in said-skip ignored; do
        not_expected cargo "$work/$list"
        skipped=$((skipped - new))
    done
    not_expected cargo "$work/said-part"
    passed=$((passed - new))
    sed 's/^/SKIP: /' "$work/said-skip" "$work/ignored" >>"$work/skips"
    sed 's/^/PARTLY SKIPPED: /' "$work/said-part" >>"$work/skips"
    sed -n 's/^test \(.*\) \.\.\. FAILED$/FAILED: \1/p' "$work/log" >>"$work/failures"
    reasons_of_failed_tests >>"$work/failures"
    if [ "$code" -ne 0 ]; then
        # A failed build, or a test program that dies, has no counts of its own.
        [ "$bad" -gt 0 ] || fail_stage
        echo "---- the whole output of the failed cargo test:"
        cat "$work/log"
    fi
}

# lab_cases MINUTES NAME ARGUMENT...: cases in host VMs; each counts by itself. A VM that does not
# come up is booted again; the last lines say so, and its log is kept with those of failed cases.
lab_cases() {
    begin "$1" "$2"
    shift 2
    run cargo run --quiet --release -p lab -- run "$@"
    ended
    counts=$(grep -xE '[0-9]+ passed, [0-9]+ failed, [0-9]+ skipped' "$work/log" | tail -n 1)
    if [ -z "$counts" ]; then
        fail_stage
        return
    fi
    # shellcheck disable=SC2086
    set -- $counts
    passed=$((passed + $1))
    failed=$((failed + $3))
    skipped=$((skipped + $5))
    if [ "$code" -ne 0 ] && [ "$3" -eq 0 ]; then
        fail "$name ended with code $code, though no case failed"
    fi
    grep -E '^(PARTLY )?SKIP(PED)?: ' "$work/log" >>"$work/skips"
    sed -n 's/^FAILED  */FAILED: /p' "$work/log" >>"$work/failures"
    grep '^BOOTED AGAIN: ' "$work/log" >>"$work/boots"
    sed -n 's/^  | all of it: //p' "$work/log" | xargs -r -d '\n' cp -t "$logs"
}

# The limits are for hangs: several times the duration on a machine with two cores.
stage 20 "set-up: packages" scripts/setup.sh test || finish
# shellcheck disable=SC2016
stage 5 "formatting" sh -c 'if cargo fmt --version >/dev/null 2>&1; then cargo fmt --all --check
    else echo "SKIP: rustfmt is not installed (rustup component add rustfmt)"; fi'
stage 5 "prose" scripts/check-prose.sh
stage 45 "build" cargo build --workspace --all-targets || finish
stage 45 "set-up: QEMU, guest kernel, root image, accelerator" cargo run --quiet -p lab -- fetch || finish
# Programs of QEMU that are not installed.
qemu=$(cargo run --quiet -p lab -- qemu-path)
PATH=$PATH${qemu:+:$qemu}
# Debian sid is not always available; the cached kernel is sufficient.
stage 30 "set-up: sid's kernel" sh -c \
    'scripts/kernel/sid.sh || echo "SKIP: sid is not to be had, nothing was tested on its kernel"'
has_sid=$(grep -q '^SKIP: ' "$work/log" || echo yes)
stage 15 "kernel module: checkpatch, gcc, sparse" scripts/kernel/lint.sh
stage 15 "kernel modules: as DKMS builds them" scripts/kernel/dkms.sh
stage 15 "fuzz targets, a short run" scripts/fuzz-smoke.sh
cargo_tests 60
if stage 45 "build for the VMs" cargo build --release -p vhost-blk -p lab -p cases &&
    stage 60 "set-up: debug kernel" scripts/kernel/debug.sh; then
    lab_cases 60 "kernel module: gating cases" --kernel 6.12,debug --set gating
    # File systems below the image take too long on the emulated debug kernel.
    lab_cases 20 "losses of power below a file system" --kernel 6.12 --report target/lab/power \
        power-loss-ext4 power-loss-lies
    lab_cases 45 "guest driver" --kernel 6.12 --report target/lab/guest --set guest
    # One of each kind, because the emulated debug kernel is slow. `make lab` runs all of them on it.
    lab_cases 45 "guest driver: debug kernel" --kernel debug --report target/lab/guest-debug \
        guest-verify/bio guest-ext4/request guest-errors/bio guest-unplug/request \
        guest-surprise/bio guest-bind/bio guest-rings/bio guest-hostile-ring/request
fi
if [ -n "$has_sid" ]; then
    lab_cases 15 "kernel module: sid's kernel" --kernel sid --report target/lab/sid module-reload
fi
finish
