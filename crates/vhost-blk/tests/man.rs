// SPDX-License-Identifier: Apache-2.0
//! The man pages: every command has one, and its examples are accepted.

mod common;

use clap::CommandFactory;
use common::{Place, program};
use std::collections::BTreeSet;
use std::ffi::OsString;
use vhost_blk::cli::{self, Cli};
use vhost_blk::man::{self, PAGES, Page};

/// The names of a command and all below it.
fn names(command: &clap::Command, above: &str) -> BTreeSet<String> {
    let name = format!("{above}{}", command.get_name());
    let below = command.get_subcommands().flat_map(|sub| names(sub, &format!("{name} ")));
    below.chain([name.clone()]).collect()
}

#[test]
fn every_command_has_one_page() {
    let pages: BTreeSet<String> = PAGES.iter().map(|page| page.command.to_owned()).collect();
    assert_eq!(pages, names(&Cli::command(), ""));
    assert_eq!(pages.len(), PAGES.len());
}

/// All pages with their text.
fn generated() -> Vec<(&'static Page, String)> {
    let place = Place::new();
    let dir = place.path("man");
    assert!(program().args(["generate", "man"]).arg(&dir).status().unwrap().success());
    let text = |page| std::fs::read_to_string(dir.join(man::file_name(page))).unwrap();
    PAGES.iter().map(|page| (page, text(page))).collect()
}

#[test]
fn every_page_has_all_sections_and_a_synopsis_of_its_command() {
    for (page, text) in generated() {
        for section in ["NAME", "SYNOPSIS", "DESCRIPTION", "OPTIONS"] {
            assert!(text.contains(&format!(".SH {section}\n")), "{}: {section}", page.command);
        }
        for section in ["EXIT STATUS", "FILES", "EXAMPLES", "SEE ALSO"] {
            let heading = format!(".SH \"{section}\"\n");
            let plain = format!(".SH {section}\n");
            assert!(
                text.contains(&heading) || text.contains(&plain),
                "{}: {section}",
                page.command
            );
        }
        let synopsis = text.split(".SH SYNOPSIS\n").nth(1).unwrap().lines().next().unwrap();
        let command = page.command.replace('-', "\\-");
        assert!(synopsis.starts_with(&format!("\\fB{command}\\fR")), "{synopsis}");
    }
}

#[test]
fn clients_of_a_daemon_tell_the_status_of_no_answer_and_ctl_refers_to_its_verbs() {
    for (page, text) in generated() {
        let statuses = text.split("EXIT STATUS").nth(1).unwrap().split(".SH").next().unwrap();
        let is_client =
            ["vhost-blk ctl", "vhost-blk top"].iter().any(|it| page.command.starts_with(it));
        let told = statuses.matches("No daemon answers").count();
        assert_eq!(told, usize::from(is_client), "{}: {statuses}", page.command);
    }
    let ctl = PAGES.iter().find(|page| page.command == "vhost-blk ctl").unwrap();
    for page in PAGES.iter().filter(|page| page.command.starts_with("vhost-blk ctl ")) {
        let name = page.command.replace(' ', "-");
        assert!(ctl.see_also.iter().any(|(known, _)| *known == name), "{name}");
    }
}

#[test]
fn every_page_has_an_example_of_its_command_that_the_parser_accepts() {
    for page in PAGES {
        assert!(!page.examples.is_empty(), "{}", page.command);
        for (_, line) in page.examples {
            let args: Vec<OsString> = line.split(' ').map(Into::into).collect();
            assert!(cli::parse(&args).is_ok(), "{line}");
            let words: Vec<&str> = line.split(' ').collect();
            let mut rest = words.iter();
            let has_command = page.command.split(' ').all(|name| rest.any(|word| *word == name));
            assert!(has_command, "{}: {line}", page.command);
        }
    }
}

#[test]
fn pages_refer_to_pages_that_exist() {
    let written: BTreeSet<String> = PAGES.iter().map(man::file_name).collect();
    for page in PAGES {
        for (name, section) in
            page.see_also.iter().filter(|(name, _)| name.starts_with("vhost-blk"))
        {
            assert!(written.contains(&format!("{name}.{section}")), "{}: {name}", page.command);
            assert_ne!(*name, page.command.replace(' ', "-"));
        }
    }
}
