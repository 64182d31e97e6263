#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
#
# Runs the fuzz targets for some minutes, the same inputs each time; options go to the runner
# (`--seed N`, `--target NAME`, `--iterations N`). Needs no fuzzer and no nightly toolchain.

set -eu
cd "$(dirname "$0")/.."
PATH=$PATH:$HOME/.cargo/bin

# The package alone has other features of its crates than the workspace, and would build them anew.
cargo build --quiet --locked --workspace --all-targets
exec "${CARGO_TARGET_DIR:-target}/debug/fuzz-smoke" "$@"
