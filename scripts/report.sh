#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
#
# Measures and writes the report: report/index.html, report.md, report.json.
#
#   report.sh [DIR]
#
# QUICK=1            fewer and shorter measurements, sized for ten minutes on two idle cores
# PARTS=native|all   without or with the lab's parts (default: all, with QUICK=1 native)
# ARGS=...           further options of the part without a VM, such as --dir DIR

set -eu
cd "$(dirname "$0")/.."

out=${1:-report}
case ${QUICK:-} in 1 | yes | true) quick=1 ;; *) quick= ;; esac
parts=${PARTS:-$([ "$quick" ] && echo native || echo all)}
case $parts in
    native | all) ;;
    *) echo "report: PARTS is native or all, not '$parts'" >&2; exit 2 ;;
esac
raw=target/report
rm -rf "$raw"
mkdir -p "$raw/lab" "$raw/others"

scripts/setup.sh build bench
cargo build --release -p vhost-blk -p bench
# shellcheck disable=SC2086 # the options are several words
cargo run --quiet --release -p bench -- --all-loads --storage file,disk,null --json "$raw/native.json" \
    --syscalls ${quick:+--quick --size-mib 256} ${ARGS:-} >"$raw/native.md"
failed=0
# The other directory of a real disk, if ARGS names one.
dir=$(echo " ${ARGS:-} " | sed -n 's/.* --dir[ =]\([^ ]*\) .*/--dir=\1/p')
# other NAME ARGUMENTS...: a further part without a VM; a failure does not stop the others
other() {
    name=$1
    shift
    cargo run --quiet --release -p bench -- "$@" --json "$raw/others/$name.json" \
        >"$raw/others/$name.md" || { echo "report: $name failed" >&2; failed=1; }
}
other density density ${quick:+--disks 1,16,64 --rounds 1 --seconds 1}
other operations operations ${quick:+--disks 1,16 --windows 3}
# shellcheck disable=SC2086 # the option and its value
other timeline timeline $dir ${quick:+--seconds 0.3 --warm-up 0.7 --size-mib 256}
[ "$quick" ] || other qcow2 --qcow2 --storage file --op randread,randwrite --no-scaling
if [ "$parts" = all ]; then
    scripts/setup.sh build lab
    cargo build --release -p lab -p cases
    scripts/bench-lab.sh ${quick:+--quick} "$raw/lab" >"$raw/lab.md" || failed=1
    # A part that failed leaves an empty file.
    find "$raw/lab" -name '*.json' -empty -delete
fi
cargo run --quiet --release -p bench -- report --native "$raw/native.json" --others "$raw/others" --lab "$raw/lab" --out "$out"
exit $failed
