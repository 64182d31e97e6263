#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
#
# Every test of the project but the lab's sets full, nested, guest-full and ceph (`make lab`) and debian12, debian13
# and libvirt (`make deb-lab`), from a clean checkout, without anyone to ask: the set-up, and then the steps of
# `test/steps`.
# The last line of the output is `N passed, N failed, N skipped`.

set -u
cd "$(dirname "$0")/.." || exit 1
PATH=$PATH:$HOME/.cargo/bin

scripts/setup.sh test && nextest=$(scripts/nextest.sh) && PATH=$PATH${nextest:+:$nextest} &&
    cargo build --quiet -p steps || {
    echo "FAILED: set-up"
    echo "0 passed, 1 failed, 0 skipped"
    exit 1
}
export PATH
exec "${CARGO_TARGET_DIR:-target}/debug/steps"
