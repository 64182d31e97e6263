// SPDX-License-Identifier: Apache-2.0
//! The pages of the commands that show changes and work in progress.

use super::Page;
use super::pages::{CONTROL_SOCKET, FAILED, MISUSED, USUAL};

/// Of the commands that print until the end of the daemon.
const CRASHED: (u8, &str) = (
    3,
    "No daemon answers, or not in time; or the daemon has ended without a stop: it has crashed, or was killed.",
);

pub(super) const EVENTS: Page = Page {
    command: "vhost-blk ctl events",
    statuses: &[(0, "The daemon was stopped; the last event says so."), FAILED, MISUSED, CRASHED],
    files: CONTROL_SOCKET,
    examples: &[
        ("Print changes as they happen:", "vhost-blk ctl --control-path vhost-blk.ctl events"),
        ("The same for programs:", "vhost-blk ctl --control-path vhost-blk.ctl --json events"),
    ],
    see_also: &[("vhost-blk-ctl", "1"), ("vhost-blk-ctl-status", "1")],
};

pub(super) const JOBS: Page = Page {
    command: "vhost-blk ctl jobs",
    statuses: USUAL,
    files: CONTROL_SOCKET,
    examples: &[
        (
            "Show the backups, commits and mirrors in progress on all disks:",
            "vhost-blk ctl --control-path vhost-blk.ctl jobs",
        ),
        (
            "Show those of one disk, for a program:",
            "vhost-blk ctl --control-path vhost-blk.ctl --json jobs data",
        ),
        (
            "Slow the copy of one disk down:",
            "vhost-blk ctl --control-path vhost-blk.ctl jobs data --bandwidth 20M",
        ),
        ("Cancel it:", "vhost-blk ctl --control-path vhost-blk.ctl jobs data --cancel"),
    ],
    see_also: &[
        ("vhost-blk-ctl", "1"),
        ("vhost-blk-ctl-backup", "1"),
        ("vhost-blk-ctl-commit", "1"),
        ("vhost-blk-ctl-mirror", "1"),
        ("vhost-blk-ctl-events", "1"),
    ],
};

pub(super) const TRACE: Page = Page {
    command: "vhost-blk ctl trace",
    statuses: &[
        (0, "The wanted number is printed, the disk has gone, or the daemon was stopped."),
        FAILED,
        MISUSED,
        CRASHED,
    ],
    files: CONTROL_SOCKET,
    examples: &[
        (
            "Print requests of all disks that take 50 ms or longer:",
            "vhost-blk ctl --control-path vhost-blk.ctl trace --slower-than 50",
        ),
        (
            "Print ten of the disk data, for programs:",
            "vhost-blk ctl --control-path vhost-blk.ctl --json trace data --count 10",
        ),
    ],
    see_also: &[("vhost-blk-ctl", "1"), ("vhost-blk-ctl-stats", "1")],
};
