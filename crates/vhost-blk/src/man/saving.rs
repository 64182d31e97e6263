// SPDX-License-Identifier: Apache-2.0
//! The pages of commands that keep a disk for the next start, or change options that are kept.

use super::Page;
use super::pages::{CONTROL_SOCKET, DONE, MISUSED, USUAL};

pub(super) const LIMIT: Page = Page {
    command: "vhost-blk ctl limit",
    statuses: &[
        DONE,
        (
            1,
            "Failure. The old limits hold, unless only the saving failed; standard error has the reason.",
        ),
        MISUSED,
    ],
    files: CONTROL_SOCKET,
    examples: &[
        (
            "Allow 5000 requests and 200 MiB a second:",
            "vhost-blk ctl --control-path vhost-blk.ctl limit data --iops 5000 --bandwidth 200M",
        ),
        (
            "Remove the limit on bytes, and keep that on requests:",
            "vhost-blk ctl --control-path vhost-blk.ctl limit data --bandwidth off",
        ),
        (
            "Allow 5000 requests a second to all disks of a group together:",
            "vhost-blk ctl --control-path vhost-blk.ctl limit data --group gold --iops 5000",
        ),
        (
            "Add another disk to the group:",
            "vhost-blk ctl --control-path vhost-blk.ctl limit logs --group gold",
        ),
        (
            "Remove the limits of the only disk:",
            "vhost-blk ctl --control-path vhost-blk.ctl limit --none",
        ),
    ],
    see_also: &[("vhost-blk-ctl", "1"), ("vhost-blk-ctl-status", "1")],
};

pub(super) const SAVE: Page = Page {
    command: "vhost-blk ctl save",
    statuses: &[
        DONE,
        (1, "Failure. The file is as it was; standard error has the reason."),
        MISUSED,
    ],
    files: CONTROL_SOCKET,
    examples: &[(
        "Serve a disk again after a restart of the daemon:",
        "vhost-blk ctl --control-path vhost-blk.ctl save data",
    )],
    see_also: &[
        ("vhost-blk-ctl", "1"),
        ("vhost-blk-ctl-add", "1"),
        ("vhost-blk-ctl-remove", "1"),
        ("vhost-blk-daemon", "1"),
    ],
};

pub(super) const SET_CACHE: Page = Page {
    command: "vhost-blk ctl set-cache",
    statuses: USUAL,
    files: CONTROL_SOCKET,
    examples: &[(
        "Make each completed write durable:",
        "vhost-blk ctl --control-path vhost-blk.ctl set-cache data writethrough",
    )],
    see_also: &[("vhost-blk-ctl", "1"), ("vhost-blk-ctl-status", "1")],
};

pub(super) const SET_ERRORS: Page = Page {
    command: "vhost-blk ctl set-errors",
    statuses: USUAL,
    files: CONTROL_SOCKET,
    examples: &[
        (
            "Halt the disk if no space is left, and report storage that hangs for 30 s:",
            "vhost-blk ctl --control-path vhost-blk.ctl set-errors data --on-error enospc --io-timeout 30",
        ),
        (
            "Halt it at failed writes only:",
            "vhost-blk ctl --control-path vhost-blk.ctl set-errors data --on-error stop --on-read-error report",
        ),
    ],
    see_also: &[("vhost-blk-ctl", "1"), ("vhost-blk-ctl-resume", "1"), ("vhost-blk-ctl-save", "1")],
};
