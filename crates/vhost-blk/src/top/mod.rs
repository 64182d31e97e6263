// SPDX-License-Identifier: Apache-2.0
//! `vhost-blk top`: shows the rates of a daemon's disks, live on a terminal or once.
//!
//! A thread samples the daemon, another one reads the keys, and a third one waits for signals. All of
//! them send messages to the main thread, which has the state and the terminal.

mod app;
mod live;
mod sample;
mod view;

use crate::ctl::Asker;
use crate::failure::Failure;
use crate::options::{CONTROL_PATH, CONTROL_VARIABLE};
use crate::output::print;
use app::{App, SortKey};
use clap::Args;
use sample::{DiskSample, Sample};
use serde_json::{Value, json};
use std::io::{self, IsTerminal};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// Maximum wait for an answer of the daemon, which itself waits two seconds for a disk.
const ANSWER_MAX: Duration = Duration::from_secs(5);

/// Arguments of `vhost-blk top`.
#[derive(Args, Clone, Debug)]
pub struct TopArgs {
    /// The daemon's --control-path
    #[arg(long, value_name = "PATH", default_value = CONTROL_PATH, env = CONTROL_VARIABLE,
          hide_env_values = true)]
    pub control_path: PathBuf,
    /// Seconds between two samples, 0.1 to 3600
    #[arg(long, value_name = "SECONDS", default_value = "1", value_parser = interval)]
    pub interval: Duration,
    /// Print the rates as JSON; needs --once
    #[arg(long, requires = "once")]
    pub json: bool,
    /// Print the rates of one interval and exit
    #[arg(long)]
    pub once: bool,
    /// The order of the disks
    #[arg(long, value_name = "KEY", default_value = "iops")]
    pub sort: SortKey,
}

fn interval(text: &str) -> Result<Duration, String> {
    let seconds = text.parse::<f64>().ok().filter(|seconds| (0.1..=3600.0).contains(seconds));
    let seconds = seconds.ok_or("give a number of seconds from 0.1 to 3600")?;
    Ok(Duration::from_secs_f64(seconds))
}

/// Runs `vhost-blk top`.
///
/// # Errors
/// [`Failure`] if the daemon does not answer at the start, or there is no terminal.
pub fn top(args: &TopArgs) -> Result<(), Failure> {
    let mut sampler = Sampler::new(&args.control_path);
    if args.once {
        return once(args, &mut sampler);
    }
    if !(io::stdin().is_terminal() && io::stdout().is_terminal()) {
        return Err(Failure::run(
            "show the disks live",
            "standard input or output is no terminal",
            "use --once, with --json for programs",
        ));
    }
    let first = sampler.sample()?;
    live::run(args, first)
}

/// Prints the rates between two samples.
fn once(args: &TopArgs, sampler: &mut Sampler<'_>) -> Result<(), Failure> {
    let mut app = App::new(args.sort);
    app.sampled(Ok(sampler.sample()?));
    std::thread::sleep(args.interval);
    app.sampled(Ok(sampler.sample()?));
    print(match args.json {
        true => format!("{}\n", app.disks.iter().map(sample::Disk::value).collect::<Value>()),
        false => table(&app),
    })
}

fn table(app: &App) -> String {
    let names = ["NAME", "STATE", "PLANE", "IOPS", "READ/S", "WRITE/S", "P50", "P99"];
    let mut rows = vec![names.map(String::from)];
    for disk in &app.disks {
        let [iops, read, write, p50, p99] = view::rate_cells(&disk.rates);
        let (name, state, plane) = (disk.name.clone(), disk.state.clone(), disk.plane.clone());
        rows.push([name, state, plane, iops, read, write, p50, p99]);
    }
    crate::ctl::table(&rows)
}

/// Takes samples of a daemon. Connects again after a failure.
struct Sampler<'a> {
    path: &'a Path,
    asker: Option<Asker<'a>>,
}

impl<'a> Sampler<'a> {
    fn new(path: &'a Path) -> Self {
        Sampler { path, asker: None }
    }

    /// The counters of all disks. A disk that goes meanwhile is left out.
    fn sample(&mut self) -> Result<Sample, Failure> {
        let sampled = self.ask();
        if sampled.is_err() {
            self.asker = None;
        }
        sampled
    }

    fn ask(&mut self) -> Result<Sample, Failure> {
        let asker = match &mut self.asker {
            Some(asker) => asker,
            none => none.insert(Asker::connect(self.path, Some(ANSWER_MAX))?),
        };
        let list = asker.ask("list the disks", "List", &json!({}), None)?;
        let mut disks = std::collections::BTreeMap::new();
        let listed = list["disks"].as_array().into_iter().flatten();
        // Other disks may have the names of those that were given up.
        for summary in listed.filter(|summary| summary["state"] != "given_up") {
            let Some(name) = summary["name"].as_str() else { continue };
            let without = ["starting", "failed", "silent", "stopping"];
            let is_silent = without.iter().any(|state| summary["state"] == *state);
            let stats = match is_silent {
                true => Value::Null,
                false => match asker.ask("get the counters", "Stats", &json!({"name": name}), None)
                {
                    Ok(stats) => stats,
                    Err(failure) if failure.sort == crate::failure::Sort::NoSuchDisk => continue,
                    Err(failure) => return Err(failure),
                },
            };
            disks.insert(name.to_owned(), DiskSample::of(summary, &stats));
        }
        Ok(Sample { at: Instant::now(), disks })
    }
}
