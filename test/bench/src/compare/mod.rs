// SPDX-License-Identifier: Apache-2.0
//! The comparison: starts all servers and measures them in turn, round by round.

mod allocation;
mod args;
mod goals;
mod sample;
mod scaling;

pub use args::Args;

use std::path::PathBuf;

use anyhow::{Context, Result, bail};
use kit::metric::{CPU, IDLE_CPU, IOPS, P50, P99, Set, in_turn, point};
use kit::report::{Column, Report, Section};
use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::flag::{register, register_conditional_shutdown};
use tempfile::{NamedTempFile, TempPath};

use self::args::tell;
use self::sample::{WAITED, idle, sample};
use crate::bare::{self, Engine};
use crate::client::Client;
use crate::load::{Load, Mode};
use crate::plan::{Shape, bare_point, point_of};
use crate::server::{OURS, OURS_QCOW2, Server, Settings, Storage};
use crate::syscalls::SYSCALLS;
use crate::{cpu, disk, setup};

const METHOD: &str = "Medians over the rounds. `ours/it`: rate of ours over that server's. `CPU \
    wait`: time that server and client were ready to run while something else had their CPU; more \
    than a few percent means a disturbed machine.";

/// Everything that was measured.
#[derive(Default)]
struct Results {
    setup: Vec<(String, String)>,
    points: Set,
    /// Writes that allocate.
    allocation: Set,
    scaling: Set,
    idle: Set,
    left_out: Vec<String>,
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
    if args.quick {
        // Its few short rounds meet and miss goals by chance.
        args.baseline.keep_none();
    }
    let earlier = args.baseline.read()?;
    let directory = tempfile::Builder::new().prefix("bench-").tempdir()?;
    let mut results = Results { setup: setup::describe(), ..Results::default() };
    args.count_calls_if_possible(&mut results.left_out);
    let tmpfs = file(&mut args, Storage::File, &mut results.left_out)?;
    let disk = file(&mut args, Storage::Disk, &mut results.left_out)?;
    let files = [&tmpfs, &disk]
        .map(|file| file.as_ref().map_or_else(PathBuf::new, |file| file.path().to_owned()));
    let settings = args.settings(directory.path().to_owned(), files, &mut results.left_out)?;
    let _images = images(&settings, [&tmpfs, &disk])?;
    if disk.is_some() {
        let storage = setup::storage_of(&settings.disk)?;
        results.setup.push(("real disk".to_owned(), storage));
    }
    let cpus = format!("client {:?}, server and fio {:?}", args.client_cpus(), args.server_cpus());
    results.setup.push(("CPUs".to_owned(), cpus));
    for program in settings.ours.iter().map(|p| p.display().to_string()).chain(settings.qsd.clone())
    {
        results.setup.push((program.clone(), setup::version(&program)));
    }
    for &storage in &args.storages {
        compare(&args, &settings, storage, &mut results)?;
    }
    let report = report(results);
    report.publish(args.json.as_deref())?;
    earlier.judge(&report)
}

/// The file behind a kind of storage, if the kind is wanted. A directory that is no place for it takes
/// the kind out of the comparison.
fn file(
    args: &mut Args,
    storage: Storage,
    left_out: &mut Vec<String>,
) -> Result<Option<NamedTempFile>> {
    if !args.storages.contains(&storage) {
        return Ok(None);
    }
    let bytes = args.size_mib << 20;
    if storage == Storage::File {
        return disk::create(&args.directory, bytes).map(Some);
    }
    let directory = args.dir()?;
    std::fs::create_dir_all(&directory).with_context(|| directory.display().to_string())?;
    if let Some(why) = disk::is_no_real_disk(&directory)? {
        let directory = directory.display();
        tell(
            left_out,
            format!("{storage}: {directory} {why}; choose another directory with --dir"),
        );
        args.storages.retain(|&kept| kept != storage);
        return Ok(None);
    }
    disk::create(&directory, bytes).map(Some)
}

/// Title of the section of writes into an empty qcow2 image.
pub(crate) const ALLOCATION_TITLE: &str = "Writes that allocate";

/// Makes the qcow2 images of the files, if they are wanted.
fn images(settings: &Settings, files: [&Option<NamedTempFile>; 2]) -> Result<Vec<TempPath>> {
    let Some(program) = settings.ours.as_deref().filter(|_| settings.qcow2) else {
        return Ok(Vec::new());
    };
    let mut images = Vec::new();
    for file in files.into_iter().flatten() {
        images.push(disk::create_image(program, file.path())?);
        if settings.has_fragmented() {
            images.push(disk::fragment(file.path())?);
        }
    }
    Ok(images)
}

fn report(results: Results) -> Report {
    let Results { setup, points, allocation, scaling, idle, left_out } = results;
    let mut report = Report::new("Set-up", setup);
    report.left_out = left_out;
    report.goals = goals::judge(&points, &scaling, &idle);
    report.goals.extend(goals::allocation(&allocation));
    report.sections.push(Section::new("Measurements", METHOD, &points, &columns(&points, OURS)));
    if !allocation.rows().is_empty() {
        let columns = columns(&allocation, OURS_QCOW2);
        let method = allocation::METHOD;
        report.sections.push(Section::new(ALLOCATION_TITLE, method, &allocation, &columns));
    }
    if !scaling.rows().is_empty() {
        let columns = columns(&scaling, OURS);
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

fn columns<'a>(set: &'a Set, ours: &'static str) -> Vec<Column<'a>> {
    vec![
        Column::label("storage"),
        Column::label("load"),
        Column::count("block"),
        Column::label("client"),
        Column::count("queues"),
        Column::count("depth"),
        Column::subject("server"),
        Column::median("kIOPS", IOPS, 1e3, 1),
        Column::range(IOPS, 1e3, 1),
        Column::number("ours/it", move |row| match set.at(ours, &row.point) {
            Some(ours) => format!("{:.2}", ours.over(row, IOPS)),
            None => "-".to_owned(),
        }),
        Column::median("CPU us/IO", CPU, 1.0, 3),
        Column::median("calls/IO", SYSCALLS, 1.0, 2),
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
        servers.retain(|server| {
            let load = args.load(Mode::Event, 1);
            is_possible(server, &load, &format!("{storage}, packed"), &mut results.left_out)
        });
    }
    if servers.is_empty() {
        bail!("nothing to measure: build vhost-blk, install qemu-storage-daemon or give --peer");
    }
    for server in &servers {
        results.setup.push((format!("{}, {storage}", server.name), server.command_line.clone()));
    }
    let works = works(args, storage, &servers, &mut results.left_out);
    for round in 0..args.rounds() {
        for work in &works {
            measure(args, settings, (storage, round), work, &mut results.points)?;
        }
        eprintln!("bench: {storage} round {} of {}", round + 1, args.rounds());
    }
    for server in &servers {
        results.idle.add(&server.name, &point(&[("storage", &storage)]), idle(args, server)?);
    }
    // They end here: the servers of the next measurements listen on the same sockets.
    let measured: Vec<_> = servers.into_iter().map(|server| server.name).collect();
    allocation::measure(args, settings, storage, &mut results.allocation)?;
    let usable = cpu::usable()?;
    if !args.no_scaling && usable.len() > 1 {
        let chosen: Vec<_> =
            specs.into_iter().filter(|s| s.scales() && measured.contains(&s.name)).collect();
        scaling::measure(args, storage, &chosen, &usable, &mut results.scaling)?;
    }
    Ok(())
}

/// A load, and the servers that can run it.
struct Work<'a> {
    shape: Shape,
    servers: Vec<&'a Server>,
}

/// The loads of a kind of storage; tells those that a server refuses.
fn works<'a>(
    args: &Args,
    storage: Storage,
    servers: &'a [Server],
    left_out: &mut Vec<String>,
) -> Vec<Work<'a>> {
    let mut works = Vec::new();
    for shape in args.shapes(storage) {
        let deepest = shape.depths.iter().copied().max().unwrap_or(1);
        let load = args.load_of(&shape, Mode::Event, deepest);
        let what = format!("{storage}, {} of {} bytes", shape.op, shape.block_bytes);
        let able = |server: &&Server| is_possible(server, &load, &what, left_out);
        works.push(Work { servers: servers.iter().filter(able).collect(), shape });
    }
    works
}

/// True if the server accepts a client with this load; tells the reason otherwise.
fn is_possible(server: &Server, load: &Load, what: &str, left_out: &mut Vec<String>) -> bool {
    let connected = Client::connect(&server.socket, load);
    if let Err(error) = &connected {
        tell(left_out, format!("{what}: {} is left out: {error:#}", server.name));
    }
    connected.is_ok()
}

/// Measures one load once at each depth, on all servers in turn.
fn measure(
    args: &Args,
    settings: &Settings,
    (storage, round): (Storage, u32),
    work: &Work<'_>,
    set: &mut Set,
) -> Result<()> {
    let cpus = args.server_cpus();
    let file = settings.file_of(storage).filter(|_| args.has_bare(round));
    for &depth in &work.shape.depths {
        for &mode in &work.shape.modes {
            let load = args.load_of(&work.shape, mode, depth);
            for server in in_turn(&work.servers, round) {
                let figures = sample(args, server, &load, cpus)?;
                set.add(&server.name, &point_of(storage, &load), figures);
            }
        }
        let load = args.load_of(&work.shape, Mode::Event, depth);
        let Some(file) = file else { continue };
        for engine in Engine::SLEEPING {
            args.go_on()?;
            let got = bare::measure(file, &load, engine, cpus, args.duration().as_secs_f64())?;
            set.add(engine.name(), &bare_point(storage, &load), bare::figures(&got, &load));
        }
    }
    Ok(())
}
