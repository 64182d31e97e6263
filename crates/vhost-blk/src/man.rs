// SPDX-License-Identifier: Apache-2.0
//! The man pages: name, synopsis and options come from the definitions of the command line, the
//! rest from [`PAGES`].

mod images;
mod pages;
mod saving;
mod snapshots;
mod streams;

use pages::NO_ANSWER;
pub use pages::PAGES;

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
    let has_own = page.statuses.iter().any(|(status, _)| *status == NO_ANSWER.0);
    let no_answer = (asks_daemon(page) && !has_own).then_some(&NO_ANSWER);
    for (status, meaning) in page.statuses.iter().chain(no_answer) {
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

/// Returns whether the command is a client of a daemon.
fn asks_daemon(page: &Page) -> bool {
    let mut words = page.command.split(' ');
    words.nth(1).is_some_and(|command| ["ctl", "top"].contains(&command))
}

/// A tagged paragraph.
fn entry(roff: &mut Roff, tag: Inline, text: &str) {
    roff.control("TP", []);
    roff.text([tag]);
    roff.text([roman(text)]);
}
