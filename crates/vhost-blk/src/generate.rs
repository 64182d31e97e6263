// SPDX-License-Identifier: Apache-2.0
//! `vhost-blk generate`: man pages, shell completions and the table of options, all made from the
//! definitions of the command line.

use crate::cli::Cli;
use crate::failure::Failure;
use crate::man;
use crate::output::print;
use clap::{Arg, Args, Command, CommandFactory, Subcommand};
use clap_complete::Shell;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};

/// Arguments of `vhost-blk generate`.
#[derive(Args, Debug)]
pub struct GenerateArgs {
    /// The output to write.
    #[command(subcommand)]
    pub what: What,
}

/// The outputs that `generate` can write.
#[derive(Debug, Subcommand)]
pub enum What {
    /// Print a shell's completion script
    Completions {
        /// The shell.
        shell: Shell,
    },
    /// Write the man pages into a directory
    Man {
        /// The directory; made if it is not there.
        dir: PathBuf,
    },
    /// Print the options of serve as a Markdown page (docs/options.md)
    OptionsTable,
}

/// Runs `vhost-blk generate`.
///
/// # Errors
/// When the output cannot be written.
pub fn generate(args: &GenerateArgs) -> Result<(), Failure> {
    let text = match &args.what {
        What::Completions { shell } => completions(*shell),
        What::Man { dir } => return man_pages(dir),
        What::OptionsTable => options_page().into_bytes(),
    };
    print(text)
}

fn completions(shell: Shell) -> Vec<u8> {
    let mut text = Vec::new();
    clap_complete::generate(shell, &mut Cli::command(), "vhost-blk", &mut text);
    text
}

fn man_pages(dir: &Path) -> Result<(), Failure> {
    man::write_pages(dir).map_err(|error| {
        let what = format!("write man pages into {}", dir.display());
        Failure::run(what, error, "choose a directory that may be written")
    })
}

/// `docs/options.md`.
pub fn options_page() -> String {
    let mut program = Cli::command();
    program.build();
    let serve = program.find_subcommand("serve").expect("a command of this program");
    let mut page = String::from(
        "# Options of `vhost-blk serve`\n\n\
         Written by `vhost-blk generate options-table`; do not edit.\n\n\
         Every option but `--config` and `--print-capabilities` may also stand in a TOML file \
         (`--config FILE`) under its\nname without the dashes, for example \
         `queue-size = 256` or `direct = \"off\"`; `wrap` may be an array. The\ncommand line \
         wins over the file.\n",
    );
    page.push_str(
        "\nThe options under Socket (except `--fd`), Disk, Limits, Queues and `--data-plane` belong to one \
         disk: a file\n`NAME.toml` of `vhost-blk daemon --config-dir` and `vhost-blk ctl add` take \
         them. The others belong to the process,\nand `vhost-blk daemon` takes them, but not \
         `--config`, `--name` and `--print-capabilities`. `--fd` is for `serve`\nonly.\n",
    );
    let mut headings: Vec<&str> = Vec::new();
    for option in serve.get_arguments() {
        let heading = option.get_help_heading().unwrap_or("Other");
        if option.get_long().is_some() && option.get_id() != "help" && !headings.contains(&heading)
        {
            headings.push(heading);
        }
    }
    for heading in headings {
        write_section(&mut page, serve, heading);
    }
    page
}

fn write_section(page: &mut String, serve: &Command, heading: &str) {
    let _ = write!(page, "\n## {heading}\n\n| Option | Default | Meaning |\n|---|---|---|\n");
    let mut options: Vec<&Arg> = serve.get_arguments().collect();
    options.sort_by_key(|option| option.get_long());
    for option in options {
        let here = option.get_help_heading().unwrap_or("Other") == heading;
        if let (true, Some(long)) = (here && option.get_id() != "help", option.get_long()) {
            let (default, meaning) = default_and_meaning(option);
            let value = value_of(option);
            let _ = writeln!(page, "| `--{long}{value}` | {default} | {meaning} |");
        }
    }
}

fn value_of(option: &Arg) -> String {
    if !option.get_action().takes_values() {
        return String::new();
    }
    let choices: Vec<String> =
        option.get_possible_values().iter().map(|value| value.get_name().to_owned()).collect();
    let value = match choices.is_empty() {
        false => choices.join("|"),
        true => option.get_value_names().map_or("VALUE", |names| names[0].as_str()).to_owned(),
    };
    let value = value.replace('|', "\\|");
    match option.get_num_args().is_some_and(|range| range.min_values() == 0) {
        true => format!("[={value}]"),
        false => format!(" {value}"),
    }
}

/// The help text ends with a computed default as `[default: ...]`.
fn default_and_meaning(option: &Arg) -> (String, String) {
    let help = option.get_help().map(ToString::to_string).unwrap_or_default().replace('|', "\\|");
    if let Some((meaning, default)) = help.split_once(" [default: ") {
        return (default.trim_end_matches(']').to_owned(), meaning.to_owned());
    }
    let default = match option.get_default_values() {
        [value] if option.get_action().takes_values() && !value.is_empty() => {
            format!("`{}`", value.to_string_lossy())
        }
        _ => "none".to_owned(),
    };
    (default, help)
}
