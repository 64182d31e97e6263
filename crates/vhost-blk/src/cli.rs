// SPDX-License-Identifier: Apache-2.0
//! The command line.

use crate::failure::{Failure, Sort};
use crate::image::{check, convert, info};
use crate::options::{DaemonArgs, ServeArgs};
use crate::output::print;
use crate::{config, create, ctl, daemon, doctor, generate, log, top, upgrade};
use clap::{ArgMatches, CommandFactory, FromArgMatches, Parser, Subcommand};
use std::ffi::OsString;
use std::process::ExitCode;

/// Serves disks to virtual machines (vhost-user-blk).
///
/// If the first argument is an option, the command is `serve`, as the vhost-user back-end
/// conventions require:
/// `vhost-blk --socket-path=PATH --blk-file=PATH`.
#[derive(Debug, Parser)]
#[command(name = "vhost-blk", version, subcommand_required = true, disable_help_subcommand = true)]
pub struct Cli {
    /// The command.
    #[command(subcommand)]
    pub command: Command,
}

/// The commands, alphabetical.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Check the tables of a qcow2 image, and free leaked clusters
    Check(check::CheckArgs),
    /// Copy an image to a new one of another format
    Convert(convert::ConvertArgs),
    /// Make a raw or qcow2 image file
    Create(create::CreateArgs),
    /// Control a running daemon: show, change, add and remove disks
    Ctl(Box<ctl::CtlArgs>),
    /// Serve many disks, which come and go while it runs
    Daemon(Box<DaemonArgs>),
    /// Check what works on this machine
    Doctor(doctor::DoctorArgs),
    /// Write man pages, shell completions or the table of options
    Generate(generate::GenerateArgs),
    /// Describe an image: format, size, backing files, and the options to serve it
    Info(info::InfoArgs),
    /// Serve one disk on one socket, in the foreground
    Serve(Box<ServeArgs>),
    /// Show the rates and latencies of a daemon's disks, live or once
    Top(top::TopArgs),
}

/// The output of `--print-capabilities`.
pub const CAPABILITIES: &str = r#"{"type":"block","features":["read-only","blk-file"]}"#;

/// Runs the program with `args` (the first is the program's name).
pub fn run(args: Vec<OsString>) -> ExitCode {
    if args.get(1).is_some_and(|command| command == upgrade::CHECK_COMMAND) {
        return ended(check_upgrade(args), false);
    }
    let args = with_command(args);
    let as_json = asks_for_json(&args);
    if asks_for_capabilities(&args) {
        return ended(printed(&format!("{CAPABILITIES}\n")), false);
    }
    let outcome = match parse(&args) {
        Ok(cli) => execute(cli.command),
        Err(Answer::Text(text)) => printed(&text),
        Err(Answer::Failure(failure)) => Err(failure),
    };
    ended(outcome, as_json)
}

/// The check that an older program has this one make (`upgrade-check` and its own arguments).
fn check_upgrade(mut args: Vec<OsString>) -> Result<ExitCode, Failure> {
    args.remove(1);
    match parse(&with_command(args)) {
        Ok(Cli { command: Command::Serve(args) }) => upgrade::check(&args),
        Ok(Cli { command: Command::Daemon(args) }) => upgrade::check_daemon(&args),
        Err(Answer::Failure(failure)) => Err(failure),
        _ => {
            let why = "the command is neither serve nor daemon";
            Err(Failure::usage("check an upgrade", why, "give one of them"))
        }
    }
    .and_then(|()| printed(upgrade::CHECK_ANSWER))
}

fn ended(outcome: Result<ExitCode, Failure>, as_json: bool) -> ExitCode {
    log::flush();
    match outcome {
        Ok(code) => code,
        Err(failure) => {
            failure.tell(as_json);
            failure.exit_code()
        }
    }
}

/// The answer to a command line without a valid command.
#[derive(Debug)]
pub enum Answer {
    /// Help or version, for stdout.
    Text(String),
    /// The command line is wrong.
    Failure(Failure),
}

/// Parses `args` and the configuration file that they name.
///
/// # Errors
/// See [`Answer`].
pub fn parse(args: &[OsString]) -> Result<Cli, Answer> {
    let first = matches(args)?;
    let last = match first.subcommand() {
        Some(("serve", given)) => match given.get_one::<std::path::PathBuf>("config") {
            Some(path) => {
                let mut program = Cli::command();
                program.build();
                let serve = program.find_subcommand("serve").expect("a command of this program");
                let from_file = config::arguments(path, serve, given).map_err(Answer::Failure)?;
                let mut all = args[..2].to_vec();
                all.extend(from_file);
                all.extend_from_slice(&args[2..]);
                matches(&all)?
            }
            None => first,
        },
        _ => first,
    };
    let cli = Cli::from_arg_matches(&last).map_err(|error| answer(args, error))?;
    Ok(match cli.command {
        Command::Daemon(daemon) => {
            Cli { command: Command::Daemon(Box::new(daemon.with_defaults())) }
        }
        command => Cli { command },
    })
}

fn matches(args: &[OsString]) -> Result<ArgMatches, Answer> {
    Cli::command().try_get_matches_from(args).map_err(|error| answer(args, error))
}

fn answer(args: &[OsString], error: clap::Error) -> Answer {
    use clap::error::ErrorKind;
    match error.kind() {
        ErrorKind::DisplayHelp | ErrorKind::DisplayVersion => Answer::Text(styled(&error)),
        ErrorKind::MissingSubcommand | ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand => {
            Answer::Failure(no_command(args))
        }
        _ => {
            let program = Cli::command();
            let known = args.get(1).and_then(|name| program.find_subcommand(name));
            let mut command =
                known.map_or(String::new(), |command| format!(" {}", command.get_name()));
            let verbs = args.iter().skip(2);
            let verb =
                known.and_then(|known| verbs.filter_map(|it| known.find_subcommand(it)).next());
            if let Some(verb) = verb {
                command += &format!(" {}", verb.get_name());
            }
            let mut failure = Failure::from_clap("the command line", &command, &error);
            if command == " check" {
                failure.sort = Sort::Run; // as with `qemu-img check`, 2 means errors in the image
            }
            Answer::Failure(failure)
        }
    }
}

/// The error of a command line that ends before its command, or before the verb of its command.
fn no_command(args: &[OsString]) -> Failure {
    let program = Cli::command();
    let verbs = |of: &clap::Command| of.get_subcommands().next().is_some();
    let known = args.get(1).and_then(|name| program.find_subcommand(name)).filter(|it| verbs(it));
    let (name, of) =
        known.map_or((String::new(), &program), |it| (format!(" {}", it.get_name()), it));
    let names: Vec<&str> = of.get_subcommands().map(clap::Command::get_name).collect();
    let remedy = format!("give one of {}, and see vhost-blk{name} --help", names.join(", "));
    Failure::usage("read the command line", format!("vhost-blk{name} needs a command"), remedy)
}

fn execute(command: Command) -> Result<ExitCode, Failure> {
    match command {
        Command::Check(args) => return check::check(&args),
        Command::Convert(args) => convert::convert(&args),
        Command::Create(args) => create::create(&args),
        Command::Ctl(args) => ctl::ctl(&args),
        Command::Doctor(args) => return Ok(doctor::doctor(&args)),
        Command::Generate(args) => generate::generate(&args),
        Command::Daemon(args) => daemon::daemon(&args),
        Command::Info(args) => info::info(&args),
        Command::Serve(args) => daemon::serve(&args),
        Command::Top(args) => top::top(&args),
    }
    .map(|()| ExitCode::SUCCESS)
}

/// Adds the command `serve` to options without a command (QEMU's convention).
fn with_command(mut args: Vec<OsString>) -> Vec<OsString> {
    if args.is_empty() {
        args.push("vhost-blk".into());
    }
    let first = args.get(1).and_then(|arg| arg.to_str()).unwrap_or("");
    if first.starts_with("--") && !matches!(first, "--help" | "--version") {
        args.insert(1, "serve".into());
    }
    args
}

/// Commands whose failures are JSON with `--json`.
const TELLING_JSON: [&str; 5] = ["check", "ctl", "doctor", "info", "top"];

/// Returns whether the command is one of these, with `--json`. The rest of the arguments may be wrong.
fn asks_for_json(args: &[OsString]) -> bool {
    let mut options = args.iter().skip(2).take_while(|arg| *arg != "--");
    let tells = |command: &OsString| TELLING_JSON.iter().any(|telling| command == telling);
    args.get(1).is_some_and(tells) && options.any(|arg| arg == "--json")
}

fn asks_for_capabilities(args: &[OsString]) -> bool {
    args.get(1).is_some_and(|command| command == "serve")
        && args[2..].iter().any(|arg| arg == "--print-capabilities")
}

fn printed(text: &str) -> Result<ExitCode, Failure> {
    print(text).map(|()| ExitCode::SUCCESS)
}

/// The text of `error`, with colours if stdout is a terminal.
fn styled(error: &clap::Error) -> String {
    use std::io::IsTerminal;
    match std::io::stdout().is_terminal() {
        true => error.render().ansi().to_string(),
        false => error.render().to_string(),
    }
}
