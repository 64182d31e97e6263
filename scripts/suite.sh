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
set -- requests durability ring_faults misuse reconfigure load descriptors inflight dirty_log leaks \
    workers switch replace restart counters
messages=$(mktemp)
trap 'rm -f "$messages"' EXIT
# The words of the list are arguments.
# shellcheck disable=SC2046
cargo test --profile suite --no-run --message-format=json -p vhost-user -p vhost-blk \
    $(printf -- '--test %s ' "$@") >"$messages"
for name in "$@"; do
    path=$(sed -n "s/.*\"name\":\"$name\".*\"executable\":\"\([^\"]*\)\".*/\1/p" "$messages" | tail -n 1)
    [ -n "$path" ] || {
        echo "suite: cargo has made no test program $name" >&2
        exit 1
    }
    strip -o "$beside/suite-$name" "$path"
done
echo "suite: $# programs in $beside"
