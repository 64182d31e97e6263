// SPDX-License-Identifier: Apache-2.0
//! Exit statuses, files, examples and references of each command's page, alphabetical.

use super::{Page, images, saving, snapshots, streams};

pub(super) const DONE: (u8, &str) = (0, "Success.");
pub(super) const FAILED: (u8, &str) =
    (1, "Failure; one line on standard error has the cause and the remedy.");
pub(super) const MISUSED: (u8, &str) = (2, "The command line is wrong.");
pub(super) const USUAL: &[(u8, &str)] = &[DONE, FAILED, MISUSED];
/// Of each command that asks a daemon, on its page after the others.
pub(super) const NO_ANSWER: (u8, &str) = (3, "No daemon answers, or not in time.");

pub(super) const CONTROL_SOCKET: &[(&str, &str)] = &[(
    "PATH",
    "The control socket of a daemon (--control-path; by default that of VHOST_BLK_CONTROL, or /run/vhost-blk/control).",
)];

/// One page for each command.
pub const PAGES: &[Page] = &[
    Page {
        command: "vhost-blk",
        statuses: &[DONE, FAILED, (2, "The command line or the configuration file is wrong.")],
        files: &[
            ("/etc/vhost-blk/NAME.toml", "Options of the service vhost-blk@NAME."),
            ("/etc/vhost-blk/disks", "The disks of the service vhost-blk, as NAME.toml."),
            ("/run/vhost-blk/control", "The control socket of vhost-blk daemon."),
            ("/dev/vhost-blk", "The kernel data plane, if the module vhost_blk is loaded."),
            (
                "/usr/share/qemu/vhost-user/50-vhost-blk.json",
                "Tells programs that start vhost-user daemons about this one.",
            ),
        ],
        examples: &[
            ("Make an image of 20 GiB:", "vhost-blk create data.img 20G"),
            (
                "Serve it to a VMM:",
                "vhost-blk serve --socket-path /run/data.sock --blk-file data.img",
            ),
            ("Test the machine:", "vhost-blk doctor --blk-file data.img"),
        ],
        see_also: &[
            ("vhost-blk-check", "1"),
            ("vhost-blk-convert", "1"),
            ("vhost-blk-create", "1"),
            ("vhost-blk-ctl", "1"),
            ("vhost-blk-daemon", "1"),
            ("vhost-blk-doctor", "1"),
            ("vhost-blk-generate", "1"),
            ("vhost-blk-info", "1"),
            ("vhost-blk-serve", "1"),
            ("qemu", "1"),
        ],
    },
    images::CHECK,
    images::CONVERT,
    Page {
        command: "vhost-blk create",
        statuses: USUAL,
        files: &[("PATH", "The new image. A failure leaves nothing behind.")],
        examples: &[
            ("Make a sparse image:", "vhost-blk create data.img 20G"),
            (
                "Reserve its space now:",
                "vhost-blk create --preallocation full /var/lib/images/data.img 512M",
            ),
            (
                "Make a qcow2 overlay of a raw image:",
                "vhost-blk create --format qcow2 --backing data.img --backing-format raw top.qcow2",
            ),
        ],
        see_also: &[
            ("vhost-blk-convert", "1"),
            ("vhost-blk-info", "1"),
            ("vhost-blk-serve", "1"),
            ("truncate", "1"),
            ("qemu-img", "1"),
        ],
    },
    Page {
        command: "vhost-blk ctl",
        statuses: &[
            DONE,
            (
                1,
                "The daemon refused the command; standard error has the reason, with --json as an object.",
            ),
            (2, "The command line, or an option of a new disk, is wrong."),
        ],
        files: CONTROL_SOCKET,
        examples: &[
            ("Show all disks:", "vhost-blk ctl --control-path vhost-blk.ctl list"),
            ("Print the state of the only disk:", "vhost-blk ctl --control-path disk.ctl status"),
        ],
        see_also: &[
            ("vhost-blk-ctl-add", "1"),
            ("vhost-blk-ctl-backup", "1"),
            ("vhost-blk-ctl-bitmaps", "1"),
            ("vhost-blk-ctl-commit", "1"),
            ("vhost-blk-ctl-discard-stats", "1"),
            ("vhost-blk-ctl-events", "1"),
            ("vhost-blk-ctl-jobs", "1"),
            ("vhost-blk-ctl-limit", "1"),
            ("vhost-blk-ctl-list", "1"),
            ("vhost-blk-ctl-log-level", "1"),
            ("vhost-blk-ctl-mirror", "1"),
            ("vhost-blk-ctl-pause", "1"),
            ("vhost-blk-ctl-reload", "1"),
            ("vhost-blk-ctl-remove", "1"),
            ("vhost-blk-ctl-resize", "1"),
            ("vhost-blk-ctl-resume", "1"),
            ("vhost-blk-ctl-save", "1"),
            ("vhost-blk-ctl-set-cache", "1"),
            ("vhost-blk-ctl-set-errors", "1"),
            ("vhost-blk-ctl-snapshot", "1"),
            ("vhost-blk-ctl-snapshots", "1"),
            ("vhost-blk-ctl-stats", "1"),
            ("vhost-blk-ctl-status", "1"),
            ("vhost-blk-ctl-stop", "1"),
            ("vhost-blk-ctl-switch", "1"),
            ("vhost-blk-ctl-trace", "1"),
            ("vhost-blk-ctl-upgrade", "1"),
            ("vhost-blk-ctl-version", "1"),
            ("vhost-blk-daemon", "1"),
            ("vhost-blk-serve", "1"),
        ],
    },
    Page {
        command: "vhost-blk ctl add",
        statuses: &[
            DONE,
            (1, "Failure. Nothing of the disk remains; standard error has the reason."),
            MISUSED,
        ],
        files: CONTROL_SOCKET,
        examples: &[
            (
                "Serve another image:",
                "vhost-blk ctl --control-path vhost-blk.ctl add data --blk-file data.img --socket-path /run/data.sock",
            ),
            (
                "Pass the image to a daemon that cannot see its path:",
                "vhost-blk ctl --control-path vhost-blk.ctl add data --pass-file --blk-file data.img --socket-path /run/data.sock",
            ),
        ],
        see_also: &[
            ("vhost-blk-ctl", "1"),
            ("vhost-blk-ctl-remove", "1"),
            ("vhost-blk-ctl-list", "1"),
            ("vhost-blk-serve", "1"),
        ],
    },
    images::BACKUP,
    images::BITMAPS,
    snapshots::COMMIT,
    images::DISCARD_STATS,
    streams::EVENTS,
    saving::LIMIT,
    streams::JOBS,
    Page {
        command: "vhost-blk ctl list",
        statuses: USUAL,
        files: CONTROL_SOCKET,
        examples: &[("Show all disks:", "vhost-blk ctl --control-path vhost-blk.ctl list")],
        see_also: &[("vhost-blk-ctl", "1"), ("vhost-blk-ctl-status", "1")],
    },
    Page {
        command: "vhost-blk ctl log-level",
        statuses: USUAL,
        files: CONTROL_SOCKET,
        examples: &[(
            "See each message of the VMMs:",
            "vhost-blk ctl --control-path vhost-blk.ctl log-level debug",
        )],
        see_also: &[("vhost-blk-ctl", "1")],
    },
    snapshots::MIRROR,
    Page {
        command: "vhost-blk ctl pause",
        statuses: USUAL,
        files: CONTROL_SOCKET,
        examples: &[
            (
                "Keep an image unchanged, to copy it:",
                "vhost-blk ctl --control-path vhost-blk.ctl pause data",
            ),
            ("The same for all images:", "vhost-blk ctl --control-path vhost-blk.ctl pause --all"),
        ],
        see_also: &[("vhost-blk-ctl", "1"), ("vhost-blk-ctl-resume", "1")],
    },
    Page {
        command: "vhost-blk ctl reload",
        statuses: &[
            DONE,
            (1, "Failure, or the change of a disk has failed; the output names it."),
            MISUSED,
        ],
        files: CONTROL_SOCKET,
        examples: &[(
            "Use changed configuration files:",
            "vhost-blk ctl --control-path vhost-blk.ctl reload",
        )],
        see_also: &[("vhost-blk-ctl", "1"), ("vhost-blk-ctl-list", "1"), ("vhost-blk-daemon", "1")],
    },
    Page {
        command: "vhost-blk ctl remove",
        statuses: &[
            DONE,
            (1, "Failure. The disk goes later if its storage takes longer."),
            MISUSED,
        ],
        files: CONTROL_SOCKET,
        examples: &[(
            "Stop serving a disk:",
            "vhost-blk ctl --control-path vhost-blk.ctl remove data",
        )],
        see_also: &[("vhost-blk-ctl", "1"), ("vhost-blk-ctl-add", "1")],
    },
    Page {
        command: "vhost-blk ctl resize",
        statuses: &[
            DONE,
            (1, "Failure. The disk has its old size; standard error has the reason."),
            MISUSED,
        ],
        files: CONTROL_SOCKET,
        examples: &[
            (
                "Enlarge an image to 40 GiB:",
                "vhost-blk ctl --control-path vhost-blk.ctl resize data 40G",
            ),
            (
                "Adopt the size of an image that was enlarged by other means:",
                "vhost-blk ctl --control-path vhost-blk.ctl resize data",
            ),
        ],
        see_also: &[("vhost-blk-ctl", "1"), ("vhost-blk-ctl-status", "1"), ("lvextend", "8")],
    },
    Page {
        command: "vhost-blk ctl resume",
        statuses: USUAL,
        files: CONTROL_SOCKET,
        examples: &[
            ("End a pause:", "vhost-blk ctl --control-path vhost-blk.ctl resume data"),
            ("End all pauses:", "vhost-blk ctl --control-path vhost-blk.ctl resume --all"),
        ],
        see_also: &[("vhost-blk-ctl", "1"), ("vhost-blk-ctl-pause", "1")],
    },
    saving::SAVE,
    saving::SET_CACHE,
    saving::SET_ERRORS,
    snapshots::SNAPSHOT,
    snapshots::SNAPSHOTS,
    Page {
        command: "vhost-blk ctl stats",
        statuses: USUAL,
        files: CONTROL_SOCKET,
        examples: &[(
            "Print the counters of a disk:",
            "vhost-blk ctl --control-path vhost-blk.ctl stats data",
        )],
        see_also: &[("vhost-blk-ctl", "1"), ("vhost-blk-ctl-status", "1")],
    },
    Page {
        command: "vhost-blk ctl status",
        statuses: USUAL,
        files: CONTROL_SOCKET,
        examples: &[
            (
                "Print the state of a disk:",
                "vhost-blk ctl --control-path vhost-blk.ctl status data",
            ),
            (
                "The same for programs:",
                "vhost-blk ctl --control-path vhost-blk.ctl --json status data",
            ),
        ],
        see_also: &[
            ("vhost-blk-ctl", "1"),
            ("vhost-blk-ctl-list", "1"),
            ("vhost-blk-ctl-stats", "1"),
        ],
    },
    Page {
        command: "vhost-blk ctl stop",
        statuses: USUAL,
        files: CONTROL_SOCKET,
        examples: &[("Stop the daemon:", "vhost-blk ctl --control-path vhost-blk.ctl stop")],
        see_also: &[("vhost-blk-ctl", "1"), ("vhost-blk-ctl-remove", "1")],
    },
    Page {
        command: "vhost-blk ctl switch",
        statuses: &[
            DONE,
            (1, "Failure. The queues run where they were; standard error has the reason."),
            MISUSED,
        ],
        files: CONTROL_SOCKET,
        examples: &[
            (
                "Move a running disk to the kernel:",
                "vhost-blk ctl --control-path vhost-blk.ctl switch data kernel",
            ),
            (
                "Move it back, and wait for slow storage without a limit:",
                "vhost-blk ctl --control-path vhost-blk.ctl --timeout 0 switch data uring",
            ),
        ],
        see_also: &[("vhost-blk-ctl", "1"), ("vhost-blk-ctl-status", "1")],
    },
    streams::TRACE,
    Page {
        command: "vhost-blk ctl upgrade",
        statuses: &[
            DONE,
            (
                1,
                "Failure. Standard error has the reason, and says so if the new program runs without \
                 one of the disks or front-ends.",
            ),
            MISUSED,
        ],
        files: CONTROL_SOCKET,
        examples: &[
            (
                "Continue with the program that a package manager has installed:",
                "vhost-blk ctl --control-path disk.ctl upgrade",
            ),
            (
                "Continue with another program:",
                "vhost-blk ctl --control-path disk.ctl upgrade --program /opt/new/vhost-blk",
            ),
        ],
        see_also: &[("vhost-blk-ctl", "1"), ("vhost-blk-daemon", "1"), ("vhost-blk-serve", "1")],
    },
    Page {
        command: "vhost-blk ctl version",
        statuses: USUAL,
        files: CONTROL_SOCKET,
        examples: &[(
            "Compare the versions of the daemon, the module and this program:",
            "vhost-blk ctl --control-path vhost-blk.ctl version",
        )],
        see_also: &[
            ("vhost-blk-ctl", "1"),
            ("vhost-blk-ctl-upgrade", "1"),
            ("vhost-blk-doctor", "1"),
        ],
    },
    Page {
        command: "vhost-blk daemon",
        statuses: &[
            (0, "It was stopped by SIGTERM, SIGINT or vhost-blk ctl stop. --check: no error."),
            FAILED,
            (
                2,
                "The command line is wrong, or the directory of --config-dir is missing. --check: a file is wrong.",
            ),
        ],
        files: &[
            ("DIR/NAME.toml", "Options of the disk NAME (--config-dir)."),
            (
                "PATH",
                "The control socket (--control-path), mode 0600 unless options say otherwise.",
            ),
        ],
        examples: &[
            ("Serve disks that commands add:", "vhost-blk daemon --control-path vhost-blk.ctl"),
            (
                "Serve the disks of a directory, with four threads:",
                "vhost-blk daemon --control-path vhost-blk.ctl --config-dir disks --threads 4",
            ),
            ("Check the files of a directory:", "vhost-blk daemon --check --config-dir disks"),
        ],
        see_also: &[("vhost-blk-ctl", "1"), ("vhost-blk-serve", "1")],
    },
    Page {
        command: "vhost-blk doctor",
        statuses: &[
            (0, "Serving a disk works here. There may be warnings."),
            (1, "Serving a disk fails here; the output has the reason."),
            MISUSED,
        ],
        files: &[
            ("/dev/vhost-blk", "Tells whether the kernel data plane is available."),
            ("/dev/kvm", "Opened, and used to boot a kernel, if one is found."),
            ("/proc/sys/kernel/io_uring_disabled", "A common reason of failure."),
        ],
        examples: &[
            ("Test the machine and an image:", "vhost-blk doctor --blk-file data.img"),
            ("The same for programs:", "vhost-blk doctor --json --num-queues 4"),
        ],
        see_also: &[("vhost-blk-serve", "1")],
    },
    Page {
        command: "vhost-blk generate",
        statuses: USUAL,
        files: &[("DIR/vhost-blk*.1", "The man pages.")],
        examples: &[
            ("Write the man pages:", "vhost-blk generate man /usr/local/share/man/man1"),
            ("Print a completion script:", "vhost-blk generate completions bash"),
        ],
        see_also: &[
            ("vhost-blk-generate-completions", "1"),
            ("vhost-blk-generate-man", "1"),
            ("vhost-blk-generate-options-table", "1"),
        ],
    },
    Page {
        command: "vhost-blk generate completions",
        statuses: USUAL,
        files: &[(
            "/usr/share/bash-completion/completions/vhost-blk",
            "The usual place of the script for bash.",
        )],
        examples: &[
            ("Print the script for bash:", "vhost-blk generate completions bash"),
            ("Print the script for zsh:", "vhost-blk generate completions zsh"),
        ],
        see_also: &[("vhost-blk-generate", "1"), ("bash", "1")],
    },
    Page {
        command: "vhost-blk generate man",
        statuses: USUAL,
        files: &[("DIR/vhost-blk*.1", "One page for each command.")],
        examples: &[("Write the pages:", "vhost-blk generate man /usr/local/share/man/man1")],
        see_also: &[("vhost-blk-generate", "1"), ("man", "1")],
    },
    Page {
        command: "vhost-blk generate options-table",
        statuses: USUAL,
        files: &[("docs/options.md", "The page of options in the sources.")],
        examples: &[("Print the page:", "vhost-blk generate options-table")],
        see_also: &[("vhost-blk-generate", "1"), ("vhost-blk-serve", "1")],
    },
    images::INFO,
    Page {
        command: "vhost-blk serve",
        statuses: &[
            (0, "A signal stopped the daemon, or the connected socket of --fd has ended."),
            (
                1,
                "The daemon cannot start; one line on standard error has the cause and the remedy.",
            ),
            (2, "The command line or the configuration file is wrong."),
        ],
        files: &[
            ("FILE", "The configuration (--config), TOML: option names without the dashes."),
            ("/etc/vhost-blk/NAME.toml", "The configuration of the service vhost-blk@NAME."),
            ("/dev/vhost-blk", "The kernel data plane, if the module vhost_blk is loaded."),
        ],
        examples: &[
            (
                "Serve an image with four queues:",
                "vhost-blk serve --socket-path /run/data.sock --blk-file data.img --num-queues 4",
            ),
            (
                "Serve a block device read-only, by the kernel plane:",
                "vhost-blk serve --socket-path /run/data.sock --blk-file /dev/sdb --read-only \
                 --data-plane kernel",
            ),
            (
                "Serve a slow disk, for a test:",
                "vhost-blk serve --socket-path s --blk-file a.img --wrap delay:us=2000,ops=read",
            ),
            (
                "Serve a disk in memory, with a control socket:",
                "vhost-blk serve --socket-path s --backend mem --size 1G --control-path disk.ctl",
            ),
        ],
        see_also: &[
            ("vhost-blk", "1"),
            ("vhost-blk-create", "1"),
            ("vhost-blk-ctl", "1"),
            ("vhost-blk-doctor", "1"),
            ("systemd.socket", "5"),
        ],
    },
    Page {
        command: "vhost-blk top",
        statuses: USUAL,
        files: CONTROL_SOCKET,
        examples: &[
            ("Watch the disks of a daemon:", "vhost-blk top --control-path vhost-blk.ctl"),
            (
                "Print the rates of ten seconds for programs:",
                "vhost-blk top --control-path vhost-blk.ctl --once --json --interval 10",
            ),
        ],
        see_also: &[("vhost-blk-ctl", "1"), ("vhost-blk-ctl-stats", "1")],
    },
];
