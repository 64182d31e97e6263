// SPDX-License-Identifier: Apache-2.0
//! The man pages: name, synopsis and options come from the definitions of the command line, the
//! rest from [`PAGES`].

use crate::cli::Cli;
use clap::{Command, CommandFactory};
use clap_mangen::Man;
use clap_mangen::roff::{Inline, Roff, bold, italic, roman};
use std::io::{self, Write};
use std::path::Path;

/// The sections of a command's page that its definition does not have.
#[derive(Clone, Copy, Debug)]
pub struct Page {
    /// The command line up to the command, as in `vhost-blk ctl switch`.
    pub command: &'static str,
    /// Exit statuses and their meaning.
    pub statuses: &'static [(u8, &'static str)],
    /// Files and their purpose.
    pub files: &'static [(&'static str, &'static str)],
    /// Purposes and command lines. Each line is complete: the parser accepts it.
    pub examples: &'static [(&'static str, &'static str)],
    /// Names of other pages, as in `vhost-blk-serve`, each with its section.
    pub see_also: &'static [(&'static str, &'static str)],
}

const DONE: (u8, &str) = (0, "Success.");
const FAILED: (u8, &str) = (1, "Failure; one line on standard error has the cause and the remedy.");
const MISUSED: (u8, &str) = (2, "The command line is wrong.");
const USUAL: &[(u8, &str)] = &[DONE, FAILED, MISUSED];

const CONTROL_SOCKET: &[(&str, &str)] =
    &[("PATH", "The control socket of a daemon (--control-path), mode 0600.")];

/// One page for each command.
pub const PAGES: &[Page] = &[
    Page {
        command: "vhost-blk",
        statuses: &[DONE, FAILED, (2, "The command line or the configuration file is wrong.")],
        files: &[
            ("/etc/vhost-blk/NAME.toml", "Options of the service vhost-blk@NAME."),
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
            ("vhost-blk-create", "1"),
            ("vhost-blk-ctl", "1"),
            ("vhost-blk-doctor", "1"),
            ("vhost-blk-generate", "1"),
            ("vhost-blk-serve", "1"),
            ("qemu", "1"),
        ],
    },
    Page {
        command: "vhost-blk create",
        statuses: USUAL,
        files: &[("PATH", "The new image. A failure leaves nothing behind.")],
        examples: &[
            ("Make a sparse image:", "vhost-blk create data.img 20G"),
            (
                "Reserve its space now:",
                "vhost-blk create --preallocate full /var/lib/images/data.img 512M",
            ),
        ],
        see_also: &[("vhost-blk-serve", "1"), ("truncate", "1"), ("qemu-img", "1")],
    },
    Page {
        command: "vhost-blk ctl",
        statuses: USUAL,
        files: CONTROL_SOCKET,
        examples: &[
            ("Print the state of a disk:", "vhost-blk ctl --control-path disk.ctl status"),
            ("Move it to io_uring:", "vhost-blk ctl --control-path disk.ctl switch uring"),
        ],
        see_also: &[
            ("vhost-blk-ctl-limit", "1"),
            ("vhost-blk-ctl-pause", "1"),
            ("vhost-blk-ctl-resize", "1"),
            ("vhost-blk-ctl-resume", "1"),
            ("vhost-blk-ctl-status", "1"),
            ("vhost-blk-ctl-switch", "1"),
            ("vhost-blk-ctl-upgrade", "1"),
            ("vhost-blk-serve", "1"),
        ],
    },
    Page {
        command: "vhost-blk ctl limit",
        statuses: &[
            DONE,
            (1, "Failure. The old limits hold; standard error has the reason."),
            MISUSED,
        ],
        files: CONTROL_SOCKET,
        examples: &[
            (
                "Allow 5000 requests and 200 MiB a second:",
                "vhost-blk ctl --control-path disk.ctl limit --iops 5000 --bandwidth 200M",
            ),
            ("Remove the limits:", "vhost-blk ctl --control-path disk.ctl limit --none"),
        ],
        see_also: &[("vhost-blk-ctl", "1"), ("vhost-blk-ctl-status", "1")],
    },
    Page {
        command: "vhost-blk ctl pause",
        statuses: USUAL,
        files: CONTROL_SOCKET,
        examples: &[(
            "Keep an image unchanged, to copy it:",
            "vhost-blk ctl --control-path disk.ctl pause",
        )],
        see_also: &[("vhost-blk-ctl", "1"), ("vhost-blk-ctl-resume", "1")],
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
            ("Enlarge an image to 40 GiB:", "vhost-blk ctl --control-path disk.ctl resize 40G"),
            (
                "Take up the size of an image that was enlarged by other means:",
                "vhost-blk ctl --control-path disk.ctl resize",
            ),
        ],
        see_also: &[("vhost-blk-ctl", "1"), ("vhost-blk-ctl-status", "1"), ("lvextend", "8")],
    },
    Page {
        command: "vhost-blk ctl resume",
        statuses: USUAL,
        files: CONTROL_SOCKET,
        examples: &[("End a pause:", "vhost-blk ctl --control-path disk.ctl resume")],
        see_also: &[("vhost-blk-ctl", "1"), ("vhost-blk-ctl-pause", "1")],
    },
    Page {
        command: "vhost-blk ctl status",
        statuses: USUAL,
        files: CONTROL_SOCKET,
        examples: &[
            ("Print the state of a disk:", "vhost-blk ctl --control-path disk.ctl status"),
            ("The same for programs:", "vhost-blk ctl --control-path disk.ctl --json status"),
        ],
        see_also: &[("vhost-blk-ctl", "1"), ("vhost-blk-ctl-switch", "1")],
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
                "vhost-blk ctl --control-path disk.ctl switch kernel",
            ),
            (
                "Move it back, and wait for slow storage without a limit:",
                "vhost-blk ctl --control-path disk.ctl --timeout 0 switch uring",
            ),
        ],
        see_also: &[("vhost-blk-ctl", "1"), ("vhost-blk-ctl-status", "1")],
    },
    Page {
        command: "vhost-blk ctl upgrade",
        statuses: &[
            DONE,
            (
                1,
                "Failure. Standard error has the reason, and says so if the new program runs without \
                 its front-end.",
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
];

/// Writes the page of every command into `dir`.
///
/// # Errors
/// When a file cannot be written.
pub fn write_pages(dir: &Path) -> io::Result<()> {
    std::fs::create_dir_all(dir)?;
    for page in PAGES {
        std::fs::write(dir.join(file_name(page)), text(page)?)?;
    }
    Ok(())
}

/// The name of a page's file.
pub fn file_name(page: &Page) -> String {
    format!("{}.1", page.command.replace(' ', "-"))
}

/// A page as troff.
fn text(page: &Page) -> io::Result<Vec<u8>> {
    let man = Man::new(command_of(page))
        .source(concat!("vhost-blk ", env!("CARGO_PKG_VERSION")))
        .manual("vhost-blk");
    let mut text = Vec::new();
    man.render(&mut text)?;
    write_sections(page, &mut text)?;
    Ok(text)
}

/// The definition of the page's command.
fn command_of(page: &Page) -> Command {
    let mut program = Cli::command();
    program.build();
    page.command.split(' ').skip(1).fold(program, |command, name| {
        command.find_subcommand(name).expect("a page for each command").clone()
    })
}

fn write_sections(page: &Page, to: &mut dyn Write) -> io::Result<()> {
    let mut roff = Roff::new();
    roff.control("SH", ["EXIT STATUS"]);
    for (status, meaning) in page.statuses {
        entry(&mut roff, bold(status.to_string()), meaning);
    }
    roff.control("SH", ["FILES"]);
    for (path, purpose) in page.files {
        entry(&mut roff, italic(*path), purpose);
    }
    roff.control("SH", ["EXAMPLES"]);
    for (purpose, line) in page.examples {
        entry(&mut roff, roman(*purpose), line);
    }
    roff.control("SH", ["SEE ALSO"]);
    let names = page.see_also.iter().map(|(name, section)| format!("{name}({section})"));
    roff.text([roman(names.collect::<Vec<_>>().join(", "))]);
    roff.to_writer(to)
}

/// A tagged paragraph.
fn entry(roff: &mut Roff, tag: Inline, text: &str) {
    roff.control("TP", []);
    roff.text([tag]);
    roff.text([roman(text)]);
}
