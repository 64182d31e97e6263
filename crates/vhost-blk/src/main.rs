// SPDX-License-Identifier: Apache-2.0
//! The `vhost-blk` program; see [`vhost_blk::run`].

use std::process::ExitCode;

fn main() -> ExitCode {
    vhost_blk::run(std::env::args_os().collect())
}
