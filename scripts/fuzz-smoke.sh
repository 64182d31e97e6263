#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
#
# Runs the fuzz targets for some minutes, the same inputs each time; options go to the runner
# (`--seed N`, `--target NAME`, `--iterations N`). Needs no fuzzer and no nightly toolchain.

set -eu
cd "$(dirname "$0")/.."
PATH=$PATH:$HOME/.cargo/bin
export PATH

exec cargo run --quiet --locked -p vhost-blk-fuzz --bin fuzz-smoke -- "$@"
