# SPDX-License-Identifier: Apache-2.0
# shellcheck shell=sh
#
# Stages of scripts/test.sh: their time limits, skips and counts. Source it with `.` in the checkout.

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
# The run's time is over, and counted as a failure.
is_over=
: >"$work/skips"
: >"$work/failures"
: >"$work/boots"
: >"$work/times"

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

# limit_run SECONDS: sets the time for all stages.
limit_run() {
    run_seconds=$1
    deadline=$(($(date +%s) + run_seconds))
}

# begin MINUTES NAME: sets the limit of a stage, or ends a run that has no time left.
begin() {
    name=$2
    limit="$1 minutes"
    seconds=$(($1 * 60))
    began=$(date +%s)
    left=$((deadline - began))
    if [ "$left" -lt "$seconds" ]; then
        limit="the $run_seconds seconds of the whole run"
        seconds=$left
    fi
    if [ "$left" -le 0 ]; then
        [ -n "$is_over" ] || fail "$name and all after it did not run: the run took more than $limit"
        finish
    fi
    printf '\n== %s (%s)\n' "$name" "$(date -u +%H:%M:%S)"
}

# limited COMMAND...: runs a command; ends it, with all its processes, after $seconds.
limited() {
    # The shell starts background commands with SIGINT ignored.
    env --default-signal=INT,QUIT timeout --kill-after=60 "$seconds" "$@" </dev/null 2>&1 &
    limited_pid=$!
    trap 'kill "$limited_pid" 2>/dev/null; exit 130' INT TERM HUP
    wait "$limited_pid"
}

# run COMMAND...: runs a command; its output goes to our own and to $work/log, its exit code to
# $work/code.
run() { { limited "$@"; echo $? >"$work/code"; } | tee "$work/log"; }

# ended: reads the stage's exit code into $code, and its time.
ended() {
    code=$(cat "$work/code")
    printf '%6d s  %s\n' $(($(date +%s) - began)) "$name" >>"$work/times"
}

# fail_stage: says that a time limit has ended the stage, or its exit code.
fail_stage() {
    case $code in
    124 | 137)
        fail "$name: it took more than $limit and was ended"
        [ "$(date +%s)" -lt "$deadline" ] || is_over=yes
        ;;
    *) fail "$name: exit code $code" ;;
    esac
}

# unexpected_skips PLACE: prints the lines `NAME: REASON` of its input that expected-skips.txt does
# not have. Names of the list are patterns of the shell.
unexpected_skips() {
    while IFS= read -r line; do
        grep "^$1 " scripts/expected-skips.txt | {
            while read -r _ pattern reason; do
                case $line in $pattern:\ *"$reason"*) exit 1 ;; esac
            done
        } && printf '%s\n' "$line"
    done
}

# not_expected PLACE FILE: counts each line of FILE, `NAME: REASON`, that the list does not have as
# failed; $new is how many there are.
not_expected() {
    unexpected_skips "$1" <"$2" >"$work/new"
    new=$(wc -l <"$work/new")
    failed=$((failed + new))
    sed 's|^|FAILED: a skip that scripts/expected-skips.txt does not have: |' "$work/new" \
        >>"$work/failures"
}

# stage MINUTES NAME COMMAND...: one test, judged by its exit code; a line `SKIP: reason` makes it
# skipped, a line `PARTLY SKIPPED: reason` is listed with the skips. Both must be expected.
stage() {
    begin "$1" "$2"
    shift 2
    run "$@"
    ended
    if [ "$code" -ne 0 ]; then
        fail_stage
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
