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

# All output is kept, with the logs of the lab's failed cases: a clean checkout is often deleted
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
: >"$work/boots"
: >"$work/times"

title() { printf '\n== %s (%s)\n' "$1" "$(date -u +%H:%M:%S)"; }

# Prints the skips with their reasons, the failures and the closing line, and ends the script.
finish() {
    echo
    [ ! -s "$work/skips" ] || { echo "skipped, as scripts/expected-skips.txt expects:"; sort -u "$work/skips"; }
    [ ! -s "$work/failures" ] || cat "$work/failures"
    cat "$work/boots"
    echo "the longest:"
    sort -rn "$work/times" | head -n 12
    echo "all of this output: $logs"
    echo "$passed passed, $failed failed, $skipped skipped"
    [ "$failed" -eq 0 ]
    exit
}

fail() {
    failed=$((failed + 1))
    echo "FAILED: $*" >>"$work/failures"
}

# limited MINUTES COMMAND...: runs a command; ends it, with all its processes, after its time.
limited() {
    minutes=$1
    shift
    # The shell starts background commands with SIGINT ignored.
    env --default-signal=INT,QUIT timeout --kill-after=60 "${minutes}m" "$@" </dev/null 2>&1 &
    limited_pid=$!
    trap 'kill "$limited_pid" 2>/dev/null; exit 130' INT TERM HUP
    wait "$limited_pid"
}

# run MINUTES COMMAND...: runs a command; its output goes to our own and to $work/log, its exit code
# to $work/code.
run() { { limited "$@"; echo $? >"$work/code"; } | tee "$work/log"; }

# why_failed NAME MINUTES: says that a time limit has ended it, or its exit code.
why_failed() {
    case $(cat "$work/code") in
    124 | 137) echo "$1: it took more than $2 minutes and was ended" ;;
    *) echo "$1: exit code $(cat "$work/code")" ;;
    esac
}

# unexpected_skips PLACE: prints the lines `NAME: REASON` of its input that expected-skips.txt does
# not have.
unexpected_skips() { awk -v place="$1" '
    function is_named(name, pattern) {
        if (sub(/\*$/, "", pattern)) return index(name, pattern) == 1
        if (sub(/^\*/, "", pattern))
            return length(name) >= length(pattern) &&
                substr(name, length(name) - length(pattern) + 1) == pattern
        return name == pattern
    }
    NR == FNR && /^#/ { next }
    NR == FNR { if ($1 == place) { names[++n] = $2; sub(/^[^ ]+ [^ ]+ /, ""); reasons[n] = $0 } next }
    {
        name = substr($0, 1, index($0, ": ") - 1)
        for (i = 1; i <= n; i++)
            if (is_named(name, names[i]) && index($0, reasons[i])) next
        print
    }' scripts/expected-skips.txt -; }

# not_expected PLACE FILE: counts each line of FILE, `NAME: REASON`, that the list does not have as
# failed; $new is how many there are.
not_expected() {
    unexpected_skips "$1" <"$2" >"$work/new"
    new=$(wc -l <"$work/new")
    failed=$((failed + new))
    sed 's|^|FAILED: a skip that scripts/expected-skips.txt does not have: |' "$work/new" \
        >>"$work/failures"
}

# took NAME: records the time since $began.
took() { printf '%6d s  %s\n' $(($(date +%s) - began)) "$1" >>"$work/times"; }

# stage MINUTES NAME COMMAND...: one test, judged by its exit code; a line `SKIP: reason` makes it
# skipped, a line `PARTLY SKIPPED: reason` is listed with the skips. Both must be expected.
stage() {
    minutes=$1
    name=$2
    shift 2
    title "$name"
    began=$(date +%s)
    run "$minutes" "$@"
    took "$name"
    if [ "$(cat "$work/code")" -ne 0 ]; then
        fail "$(why_failed "$name" "$minutes")"
        return 1
    fi
    place=$(echo "$name" | tr ' ' '_')
    sed -nE "s/^(PARTLY )?SKIP(PED)?: /$place: /p" "$work/log" >"$work/said"
    not_expected stage "$work/said"
    if [ "$new" -gt 0 ]; then
        return 1
    elif grep -q '^SKIP: ' "$work/log"; then
        skipped=$((skipped + 1))
    else
        passed=$((passed + 1))
    fi
    grep -E '^(PARTLY )?SKIP(PED)?: ' "$work/log" >>"$work/skips"
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
    title "cargo test --workspace"
    began=$(date +%s)
    run "$1" cargo test --workspace --no-fail-fast -- --show-output |
        grep --line-buffered -E '^ *(Compiling|Running|Doc-tests) |^test |^error|^(PARTLY )?SKIP(PED)?: '
    took "cargo test --workspace"
    said_by_passed_tests SKIP | sed 's/^SKIP: //' >"$work/said-skip"
    sed -n 's/^test \(.*\) \.\.\. ignored\(.*\)/\1: ignored\2/p' "$work/log" >"$work/ignored"
    said_by_passed_tests "PARTLY SKIPPED" | sed 's/^PARTLY SKIPPED: //' >"$work/said-part"
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
    if [ "$(cat "$work/code")" -ne 0 ]; then
        # A failed build, or a test program that dies, has no counts of its own.
        [ "$bad" -gt 0 ] || fail "$(why_failed "cargo test" "$1")"
        echo "---- the whole output of the failed cargo test:"
        cat "$work/log"
    fi
}

# lab_cases MINUTES NAME ARGUMENT...: cases in host VMs; each counts by itself. A VM that does not
# come up is booted again; the last lines say so, and its log is kept with those of failed cases.
lab_cases() {
    minutes=$1
    name=$2
    shift 2
    title "$name"
    began=$(date +%s)
    run "$minutes" cargo run --quiet --release -p lab -- run "$@"
    took "$name"
    counts=$(grep -xE '[0-9]+ passed, [0-9]+ failed, [0-9]+ skipped' "$work/log" | tail -n 1)
    if [ -z "$counts" ]; then
        fail "$(why_failed "$name" "$minutes")"
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
