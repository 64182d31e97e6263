// SPDX-License-Identifier: Apache-2.0
//! The comparison: starts all servers and measures them in turn, round by round.

mod args;
mod goals;
mod sample;
mod scaling;

pub use args::Args;

use std::path::PathBuf;

use anyhow::{Result, bail};
use kit::fio;
use kit::metric::{CPU, IDLE_CPU, IOPS, P50, P99, Set, point};
use kit::report::{Column, Report, Section};
use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::flag::{register, register_conditional_shutdown};

use self::sample::{WAITED, idle, point_of, sample};
use crate::client::Client;
use crate::load::Mode;
use crate::server::{BARE_FIO, OURS, Server, Settings, Storage};
use crate::{bare, cpu, disk, setup};

const METHOD: &str = "Medians over the rounds. `ours/it`: rate of ours over that server's. `CPU \
    wait`: time that server and client were ready to run while something else had their CPU; more \
    than a few percent means a disturbed machine.";

/// Everything that was measured.
#[derive(Default)]
struct Results {
    setup: Vec<(String, String)>,
    points: Set,
    scaling: Set,
    idle: Set,
}

/// Runs the comparison and prints the report.
pub fn run(args: &Args) -> Result<()> {
    let mut args = args.clone();
    args.place()?;
    for signal in [SIGINT, SIGTERM] {
        // The second signal ends the process at once.
        register_conditional_shutdown(signal, 1, args.interrupted.clone())?;
        register(signal, args.interrupted.clone())?;
    }
    let folder = tempfile::Builder::new().prefix("bench-").tempdir()?;
    let disk = if args.storages.contains(&Storage::File) {
        Some(disk::create(&args.folder, args.size_mib << 20)?)
    } else {
        None
    };
    let file = disk.as_ref().map_or_else(PathBuf::new, |disk| disk.path().to_owned());
    let settings = args.settings(folder.path().to_owned(), file)?;
    let mut results = Results { setup: setup::describe(), ..Results::default() };
    for program in settings.ours.iter().map(|p| p.display().to_string()).chain(settings.qsd.clone())
    {
        results.setup.push((program.clone(), setup::version(&program)));
    }
    for &storage in &args.storages {
        compare(&args, &settings, storage, &mut results)?;
    }
    report(results).publish(args.json.as_deref())
}

fn report(results: Results) -> Report {
    let Results { setup, points, scaling, idle } = results;
    let mut report = Report::new("Set-up", setup);
    report.goals = goals::judge(&points, &scaling, &idle);
    report.sections.push(Section::new("Measurements", METHOD, &points, &columns(&points)));
    if !scaling.rows().is_empty() {
        let columns = columns(&scaling);
        report.sections.push(Section::new("Queues", scaling::METHOD, &scaling, &columns));
    }
    let columns = [
        Column::label("storage"),
        Column::subject("server"),
        Column::median("CPU % of a core", IDLE_CPU, 1.0, 3),
    ];
    report.sections.push(Section::new("Idle, a client connected", "", &idle, &columns));
    report
}

fn columns(set: &Set) -> Vec<Column<'_>> {
    vec![
        Column::label("storage"),
        Column::label("client"),
        Column::count("queues"),
        Column::count("depth"),
        Column::subject("server"),
        Column::median("kIOPS", IOPS, 1e3, 1),
        Column::range(IOPS, 1e3, 1),
        Column::number("ours/it", |row| match set.at(OURS, &row.point) {
            Some(ours) => format!("{:.2}", ours.over(row, IOPS)),
            None => "-".to_owned(),
        }),
        Column::median("CPU us/IO", CPU, 1.0, 3),
        Column::median("p50 us", P50, 1.0, 1),
        Column::median("p99 us", P99, 1.0, 1),
        Column::median("CPU wait %", WAITED, 1.0, 0),
    ]
}

/// Measures one kind of storage: all points, idle time, scaling.
fn compare(
    args: &Args,
    settings: &Settings,
    storage: Storage,
    results: &mut Results,
) -> Result<()> {
    let specs = settings.specs(storage);
    let all = specs.iter().cloned().chain(args.peers(storage));
    let mut servers = all.map(|spec| spec.start(args.server_cpus())).collect::<Result<Vec<_>>>()?;
    if args.packed {
        servers.retain(|server| has_packed_rings(args, server));
    }
    if servers.is_empty() {
        bail!("nothing to measure: build vhost-blk, install qemu-storage-daemon or give --peer");
    }
    for server in &servers {
        results.setup.push((format!("{}, {storage}", server.name), server.command_line.clone()));
    }
    measure_points(args, settings, storage, &servers, &mut results.points)?;
    for server in &servers {
        results.idle.add(&server.name, &point(&[("storage", &storage)]), idle(args, server)?);
    }
    let measured: Vec<_> = servers.into_iter().map(|server| server.name).collect();
    let usable = cpu::usable()?;
    if !args.no_scaling && usable.len() > 1 {
        let chosen: Vec<_> =
            specs.into_iter().filter(|s| s.scales() && measured.contains(&s.name)).collect();
        let cpus = [usable[0], usable[1]];
        scaling::measure(args, storage, &chosen, cpus, &mut results.scaling)?;
    }
    Ok(())
}

fn has_packed_rings(args: &Args, server: &Server) -> bool {
    let connected = Client::connect(&server.socket, &args.load(Mode::Event, 1));
    if let Err(error) = &connected {
        eprintln!("bench: {} is left out: {error:#}", server.name);
    }
    connected.is_ok()
}

fn measure_points(
    args: &Args,
    settings: &Settings,
    storage: Storage,
    servers: &[Server],
    set: &mut Set,
) -> Result<()> {
    let cpus = args.server_cpus();
    let with_fio = storage == Storage::File && !args.no_fio && fio::installed();
    for round in 0..args.rounds() {
        for &depth in &args.depths {
            for &mode in &args.modes {
                let load = args.load(mode, depth);
                for server in servers {
                    let figures = sample(args, server, &load, cpus)?;
                    set.add(&server.name, &point_of(storage, &load), figures);
                }
            }
        }
        for &depth in args.depths.iter().filter(|_| with_fio) {
            let load = args.load(Mode::Event, depth);
            let seconds = args.duration().as_secs_f64();
            let got = bare::measure(&settings.file, &load, cpus, seconds)?;
            // fio hardly sleeps here: when it did not run, it waited for a CPU or the host had
            // taken it.
            let waited = (100.0 - got.busy_percent).max(0.0);
            let point = point(&[("storage", &storage), ("queues", &1), ("depth", &depth)]);
            let mut figures = bare::figures(&got);
            figures.push((WAITED, waited));
            set.add(BARE_FIO, &point, figures);
        }
        eprintln!("bench: {storage} round {} of {}", round + 1, args.rounds());
    }
    Ok(())
}
