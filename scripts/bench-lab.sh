#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
#
# Measures the whole project in lab VMs: the host side alone, path lengths in instructions, inner
# guests, the guest's driver. Prints the tables; leaves them and the JSON form in a directory. With the
# directory of an earlier run, a goal that was met there and is missed or not judged now is a failure.
#
#   bench-lab.sh [--quick] [--baseline EARLIER-DIR] [--only host|loads|queues|icount|stages|nested|guest|guest-icount]... [DIR]

set -eu
cd "$(dirname "$0")/.."

quick= only= directory= earlier=
while [ $# -gt 0 ]; do
    case $1 in
        --quick) quick=1 ;;
        --baseline)
            shift
            earlier=${1:-}
            [ -d "$earlier" ] || { echo "bench-lab: --baseline takes the directory of an earlier run" >&2; exit 2; }
            ;;
        --only)
            shift
            case ${1:-} in
                host | loads | queues | icount | stages | nested | guest | guest-icount) only="$only $1" ;;
                *) echo "bench-lab: --only takes a part, not '${1:-}'" >&2; exit 2 ;;
            esac
            ;;
        -*) echo "bench-lab: unknown option $1" >&2; exit 2 ;;
        *) directory=$1 ;;
    esac
    shift
done
directory=${directory:-target/bench-lab}
if [ "$earlier" ] && [ "$(realpath "$earlier")" = "$(realpath -m "$directory")" ]; then
    echo "bench-lab: the results would overwrite those of --baseline: name another directory" >&2
    exit 2
fi
mkdir -p "$directory"
failed=0

# run LAB-OPTIONS COMMAND...: runs it in a VM, with its JSON behind its output
run() {
    options=$1
    shift
    # shellcheck disable=SC2086 # the options are several words
    cargo run --quiet --release -p lab -- exec --timeout 14400 $options -- sh -c \
        'json=/run/result.json; "$@" --json $json; code=$?; echo @@json; cat $json; exit $code' sh "$@"
}

# measure NAME LAB-OPTIONS COMMAND...: the tables go to DIR/NAME.md, the JSON to DIR/NAME.json
measure() {
    name=$1 code=0
    shift
    case " ${only:-$name} " in *" $name "*) ;; *) return 0 ;; esac
    echo "bench-lab: $name" >&2
    run "$@" >"$directory/$name.out" || code=$?
    if [ $code = 123 ]; then
        echo "bench-lab: $name: the emulator failed, and not the measurement: it runs once more" >&2
        code=0
        run "$@" >"$directory/$name.out" || code=$?
    fi
    [ $code = 0 ] || { echo "bench-lab: $name failed" >&2; failed=1; }
    sed '/^@@json$/,$d' "$directory/$name.out" >"$directory/$name.md"
    sed '1,/^@@json$/d' "$directory/$name.out" >"$directory/$name.json"
    rm "$directory/$name.out"
    cat "$directory/$name.md"
    [ "$earlier" ] && [ -s "$directory/$name.json" ] || return 0
    [ -f "$earlier/$name.json" ] || { echo "bench-lab: $earlier lacks $name.json: not compared" >&2; return 0; }
    cargo run --quiet --release -p bench -- compare "$earlier/$name.json" "$directory/$name.json" || failed=1
}

measure icount --icount /lab/bin/bench icount --check
measure host "--nvme" /lab/bin/bench host --op randread,randwrite ${quick:+--rounds 2 --seconds 0.4 --depth 1,32}
measure loads "--nvme" /lab/bin/bench host --all-loads --queues 1 --slow-us 80 --seconds 0.4 \
    --rounds "$([ "$quick" ] && echo 1 || echo 3)"
measure queues "--vcpus 4" /lab/bin/bench host --op randread,randwrite --queues 1,2,4 --depth 32 --mode event \
    ${quick:+--rounds 2 --seconds 0.4}
measure stages "--nvme" /lab/bin/bench timeline --storage null_blk,80us,brd,nvme ${quick:+--seconds 0.4 --warm-up 0.7}
measure nested "--machine nested" /lab/bin/cases nested-bench ${quick:+--rounds 2 --seconds 0.7 --depth 1,32 --rw randread}
measure guest-icount "--machine guest --icount" /lab/bin/cases guest-icount ${quick:+--rounds 1 --requests 3000}
measure guest "--machine guest" /lab/bin/cases guest-bench ${quick:+--rounds 2 --seconds 0.4}
echo "bench-lab: tables and JSON are in $directory" >&2
exit $failed
