#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
#
# The long forms of three tests of qcow2 images, which need no VM: thousands of crashes, random discards
# and writes on two lanes, and random changes of a chain in turn with QEMU. `make lab` runs them before its VMs.
#
#   scripts/qcow2-long.sh
#   PROPTEST_CASES=200 scripts/qcow2-long.sh    # more sequences (40)

set -eu
cd "$(dirname "$0")/.."
PATH=$PATH:$HOME/.cargo/bin

# run ARGUMENTS...: runs tests, and fails if one has failed or there is none
run() {
    cargo test --profile suite -p qcow2 "$@" | tee "$output"
    grep -q '^test result: ok. [1-9]' "$output" || {
        echo "qcow2-long: no test has passed: cargo test -p qcow2 $*" >&2
        exit 1
    }
}

export PROPTEST_CASES="${PROPTEST_CASES:-40}"
output=$(mktemp)
trap 'rm -f "$output"' EXIT
run --lib -- --ignored --exact crash_tests::images_survive_thousands_of_crashes
run --test space -- discards_on
run --test model
