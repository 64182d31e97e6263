// SPDX-License-Identifier: Apache-2.0
//! The pages of the commands that move a running disk to another image.

use super::Page;
use super::pages::{CONTROL_SOCKET, DONE, MISUSED, USUAL};

pub(super) const COMMIT: Page = Page {
    command: "vhost-blk ctl commit",
    statuses: &[
        DONE,
        (
            1,
            "Failure, or it was cancelled. The disk goes on in its image; standard error has the \
             reason.",
        ),
        MISUSED,
    ],
    files: &[
        ("DIR/NAME.toml", "The file of a disk of --config-dir, which --update-config rewrites."),
        ("PATH", "The control socket of a daemon (--control-path)."),
    ],
    examples: &[
        (
            "Merge the newest image of a disk into the one before:",
            "vhost-blk ctl --control-path vhost-blk.ctl commit data",
        ),
        ("Cancel the commit:", "vhost-blk ctl --control-path vhost-blk.ctl commit data --cancel"),
    ],
    see_also: &[
        ("vhost-blk-ctl", "1"),
        ("vhost-blk-ctl-snapshot", "1"),
        ("vhost-blk-ctl-snapshots", "1"),
        ("qemu-img", "1"),
    ],
};

pub(super) const MIRROR: Page = Page {
    command: "vhost-blk ctl mirror",
    statuses: &[
        DONE,
        (
            1,
            "Failure. The disk goes on in its old storage; standard error has the reason, and tells \
             whether the mirror goes on.",
        ),
        MISUSED,
    ],
    files: &[
        ("DIR/NAME.toml", "The file of a disk of --config-dir, which --update-config rewrites."),
        (".FILE.*.part", "The incomplete new file, beside its place."),
        ("PATH", "The control socket of a daemon (--control-path)."),
    ],
    examples: &[
        (
            "Move a disk to another directory while its guest runs:",
            "vhost-blk ctl --control-path vhost-blk.ctl mirror data --to /fast/data.img --complete",
        ),
        (
            "Copy to a block device, at 100 MiB per second at most:",
            "vhost-blk ctl --control-path vhost-blk.ctl mirror data --to /dev/vg/data --overwrite --bandwidth 100M",
        ),
        ("Show its progress:", "vhost-blk ctl --control-path vhost-blk.ctl mirror data"),
        (
            "Complete the mirror:",
            "vhost-blk ctl --control-path vhost-blk.ctl mirror data --complete",
        ),
        ("Cancel the mirror:", "vhost-blk ctl --control-path vhost-blk.ctl mirror data --cancel"),
    ],
    see_also: &[
        ("vhost-blk-ctl", "1"),
        ("vhost-blk-ctl-backup", "1"),
        ("vhost-blk-convert", "1"),
        ("qemu-img", "1"),
        ("setfattr", "1"),
    ],
};

pub(super) const SNAPSHOT: Page = Page {
    command: "vhost-blk ctl snapshot",
    statuses: &[
        DONE,
        (
            1,
            "Failure. The disk goes on in its image, and there is no new one; standard error has the \
             reason.",
        ),
        MISUSED,
    ],
    files: &[
        ("OVERLAY", "The new image. The old one must stay where it is: OVERLAY names it."),
        ("DIR/NAME.toml", "The file of a disk of --config-dir, which --update-config rewrites."),
        ("PATH", "The control socket of a daemon (--control-path)."),
    ],
    examples: &[
        (
            "Keep the present content of a disk in its image:",
            "vhost-blk ctl --control-path vhost-blk.ctl snapshot data --to /var/lib/images/data-1.qcow2",
        ),
        (
            "The same for a disk of --config-dir:",
            "vhost-blk ctl --control-path vhost-blk.ctl snapshot data --to data-1.qcow2 --update-config",
        ),
    ],
    see_also: &[
        ("vhost-blk-ctl", "1"),
        ("vhost-blk-ctl-commit", "1"),
        ("vhost-blk-ctl-snapshots", "1"),
        ("vhost-blk-info", "1"),
        ("qemu-img", "1"),
        ("setfattr", "1"),
    ],
};

pub(super) const SNAPSHOTS: Page = Page {
    command: "vhost-blk ctl snapshots",
    statuses: USUAL,
    files: CONTROL_SOCKET,
    examples: &[
        (
            "Show the image and the backing files of a disk:",
            "vhost-blk ctl --control-path vhost-blk.ctl snapshots data",
        ),
        (
            "The same for programs:",
            "vhost-blk ctl --control-path vhost-blk.ctl --json snapshots data",
        ),
    ],
    see_also: &[("vhost-blk-ctl", "1"), ("vhost-blk-ctl-snapshot", "1"), ("vhost-blk-info", "1")],
};
