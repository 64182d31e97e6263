#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
#
# Builds the daemon's own test programs and puts them beside the others as `suite-NAME`, so that
# the lab takes them into its VMs, where they run on the kernel's data plane (`suite-*` cases).
#
# Built with all checks of a debug build, but optimized a little: an emulated CPU needs up to
# four times as long for those of `make test`, and a release build links for minutes each.
#
#   scripts/suite.sh

set -eu
cd "$(dirname "$0")/.."
PATH=$PATH:$HOME/.cargo/bin

beside=${CARGO_TARGET_DIR:-target}/release
rm -f "$beside"/suite-*
cargo test --profile suite --no-run --message-format=json -p vhost-user -p vhost-blk \
    --test requests --test durability --test ring_faults --test misuse --test reconfigure \
    --test load --test descriptors --test inflight --test dirty_log --test leaks --test workers \
    --test switch --test replace --test restart --test counters |
    sed -n 's/.*"name":"\([a-z_]*\)".*"executable":"\([^"]*\)".*/\1 \2/p' |
    while read -r name path; do
        strip -o "$beside/suite-$name" "$path"
    done
set -- "$beside"/suite-*
[ -e "$1" ] || {
    echo "suite: cargo named no test programs" >&2
    exit 1
}
echo "suite: $# programs in $beside"
