// SPDX-License-Identifier: Apache-2.0
//! The pages of the commands about images.

use super::Page;
use super::pages::{CONTROL_SOCKET, DONE, MISUSED, USUAL};

pub(super) const BACKUP: Page = Page {
    command: "vhost-blk ctl backup",
    statuses: &[
        DONE,
        (
            1,
            "Failure. There is no new image, and an export may have a part of the copy; standard error has the reason.",
        ),
        MISUSED,
    ],
    files: CONTROL_SOCKET,
    examples: &[
        (
            "Copy a running disk, at 100 MiB per second at most:",
            "vhost-blk ctl --control-path vhost-blk.ctl backup data --to /backup/data.img --bandwidth 100M",
        ),
        (
            "Make a qcow2 image of it:",
            "vhost-blk ctl --control-path vhost-blk.ctl backup data --to data.qcow2 --format qcow2",
        ),
        (
            "Share the space of its image, on XFS or btrfs:",
            "vhost-blk ctl --control-path vhost-blk.ctl backup data --to /images/data-1.img --reflink always",
        ),
        (
            "Copy all of it, and note changes from then on in the bitmap nightly:",
            "vhost-blk ctl --control-path vhost-blk.ctl backup data --to /backup/0.qcow2 --format qcow2 --bitmap nightly",
        ),
        (
            "Copy the changes since then:",
            "vhost-blk ctl --control-path vhost-blk.ctl backup data --to /backup/1.qcow2 --incremental nightly",
        ),
        (
            "Copy a running disk into the export of an NBD server on this host:",
            "vhost-blk ctl --control-path vhost-blk.ctl backup data --to nbd:unix:/run/backup.sock",
        ),
        (
            "Cancel a backup that another client waits for:",
            "vhost-blk ctl --control-path vhost-blk.ctl backup data --cancel",
        ),
    ],
    see_also: &[
        ("vhost-blk-ctl", "1"),
        ("vhost-blk-ctl-bitmaps", "1"),
        ("vhost-blk-convert", "1"),
        ("fsfreeze", "8"),
        ("qemu-nbd", "8"),
        ("nbdkit", "1"),
    ],
};

pub(super) const BITMAPS: Page = Page {
    command: "vhost-blk ctl bitmaps",
    statuses: USUAL,
    files: &[
        ("PATH", "The control socket of a daemon (--control-path)."),
        (
            "IMAGE.vhost-blk-bitmaps",
            "The bitmaps of a disk between a clean end and the next start of it.",
        ),
    ],
    examples: &[
        (
            "Show the bitmaps of a disk, with their last backups:",
            "vhost-blk ctl --control-path vhost-blk.ctl bitmaps data",
        ),
        (
            "Remove one of them:",
            "vhost-blk ctl --control-path vhost-blk.ctl bitmaps data --remove nightly",
        ),
    ],
    see_also: &[("vhost-blk-ctl", "1"), ("vhost-blk-ctl-backup", "1")],
};

pub(super) const CHECK: Page = Page {
    command: "vhost-blk check",
    statuses: &[
        (0, "No errors and no leaks; after a repair, none are left."),
        (
            1,
            "The image was not checked, or the command line is wrong; standard error has the cause.",
        ),
        (2, "There are errors: data is damaged, or will be."),
        (3, "There are leaked clusters and no errors."),
    ],
    files: &[("PATH", "The image. Only --repair changes it.")],
    examples: &[
        ("Check an image that no program uses:", "vhost-blk check disk.qcow2"),
        ("Free leaked clusters:", "vhost-blk check --repair leaks disk.qcow2"),
    ],
    see_also: &[("vhost-blk-info", "1"), ("vhost-blk-convert", "1"), ("qemu-img", "1")],
};

pub(super) const CONVERT: Page = Page {
    command: "vhost-blk convert",
    statuses: &[
        DONE,
        (1, "Failure, or a signal. There is no new image, and an old one is as it was."),
        MISUSED,
    ],
    files: &[
        ("SOURCE", "The image; it is only read."),
        ("TARGET", "The new image. It gets its name when it is complete and durable."),
        (
            ".TARGET.XXXXXX.part",
            "The incomplete image, in the directory of the target. Remove it after a kill or a crash.",
        ),
    ],
    examples: &[
        ("Make a qcow2 image of a raw one:", "vhost-blk convert -O qcow2 data.img data.qcow2"),
        (
            "Share the space of an image, on XFS or btrfs:",
            "vhost-blk convert --reflink always data.img new.img",
        ),
        (
            "Make one raw image of an overlay and its backing files:",
            "vhost-blk convert -f qcow2 --allow-backing same-dir top.qcow2 data.img",
        ),
    ],
    see_also: &[
        ("vhost-blk-check", "1"),
        ("vhost-blk-create", "1"),
        ("vhost-blk-info", "1"),
        ("qemu-img", "1"),
    ],
};

pub(super) const INFO: Page = Page {
    command: "vhost-blk info",
    statuses: USUAL,
    files: &[("PATH", "The image or block device. It is only read, also while it is in use.")],
    examples: &[
        ("Describe an image and its backing files:", "vhost-blk info disk.qcow2"),
        ("The same for programs:", "vhost-blk info --json disk.qcow2"),
    ],
    see_also: &[
        ("vhost-blk-check", "1"),
        ("vhost-blk-convert", "1"),
        ("vhost-blk-serve", "1"),
        ("qemu-img", "1"),
    ],
};

pub(super) const DISCARD_STATS: Page = Page {
    command: "vhost-blk ctl discard-stats",
    statuses: USUAL,
    files: CONTROL_SOCKET,
    examples: &[
        (
            "Show the discards of a disk and the space of its files:",
            "vhost-blk ctl --control-path vhost-blk.ctl discard-stats data",
        ),
        (
            "The same for programs:",
            "vhost-blk ctl --control-path vhost-blk.ctl --json discard-stats data",
        ),
    ],
    see_also: &[
        ("vhost-blk-ctl", "1"),
        ("vhost-blk-ctl-snapshots", "1"),
        ("vhost-blk-ctl-stats", "1"),
    ],
};
