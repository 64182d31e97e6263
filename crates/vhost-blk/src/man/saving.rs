// SPDX-License-Identifier: Apache-2.0
//! The page of the command that keeps a disk for the next start.

use super::Page;
use super::pages::{CONTROL_SOCKET, DONE, MISUSED};

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
