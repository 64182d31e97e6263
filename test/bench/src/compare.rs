// SPDX-License-Identifier: Apache-2.0
//! The comparison: starts all servers and measures them in turn, round by round.

use std::fs;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use clap::Args as ClapArgs;
use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::flag::{register, register_conditional_shutdown};

use crate::client::Client;
use crate::cpu::{self, CpuList};
use crate::load::{Chains, Load, Mode, Op};
use crate::report::{Idle, Report, Row, Sample, storage_name};
use crate::server::{Family, Server, Settings, Spec, Storage};
use crate::{disk, fio, goals, scaling, setup};

/// A sample counts as disturbed above this share of time spent waiting for a CPU.
const WAITED_PERCENT_MAX: f64 = 3.0;

/// Options of a comparison.
#[derive(Clone, Debug, ClapArgs)]
pub struct Args {
    /// Fewer and shorter rounds: a first look, not a result
    #[arg(long)]
    quick: bool,
    /// Rounds; each measures every server once at every point [default: 5, quick: 3]
    #[arg(long)]
    rounds: Option<u32>,
    /// Seconds of each measurement [default: 1, quick: 0.3]
    #[arg(long)]
    seconds: Option<f64>,
    /// Reads or writes
    #[arg(long, value_enum, default_value = "randread")]
    op: Op,
    /// Bytes of each request
    #[arg(long, default_value_t = 4096)]
    block_size: u32,
    /// Requests in flight
    #[arg(long = "depth", value_delimiter = ',', default_value = "1,4,32")]
    pub depths: Vec<u16>,
    /// Wait of the client: asleep until a call, or polling
    #[arg(long = "mode", value_enum, value_delimiter = ',', default_value = "event,spin")]
    modes: Vec<Mode>,
    /// Backing storage of the servers
    #[arg(long = "storage", value_parser = parse_storage, value_delimiter = ',', default_value = "file,null")]
    storages: Vec<Storage>,
    /// The vhost-blk program [default: next to this program]
    #[arg(long, value_name = "PATH")]
    vhost_blk: Option<PathBuf>,
    /// A further argument of `vhost-blk serve`; may be repeated
    #[arg(long, value_name = "ARG", allow_hyphen_values = true)]
    ours_arg: Vec<String>,
    /// The qemu-storage-daemon program, or `none`
    #[arg(long, value_name = "PATH", default_value = "qemu-storage-daemon")]
    qsd: String,
    /// A server that runs already, compared on the file; may be repeated
    #[arg(long = "peer", value_name = "NAME=SOCKET", value_parser = parse_peer)]
    peers: Vec<(String, String)>,
    /// A server of a null device that runs already; may be repeated
    #[arg(long = "null-peer", value_name = "NAME=SOCKET", value_parser = parse_peer)]
    null_peers: Vec<(String, String)>,
    /// Do not run bare fio
    #[arg(long)]
    no_fio: bool,
    /// Do not measure two queues
    #[arg(long)]
    no_scaling: bool,
    /// Use packed rings (servers that lack them are left out)
    #[arg(long)]
    packed: bool,
    /// Folder of the disk file: a tmpfs
    #[arg(long, value_name = "FOLDER", default_value = "/dev/shm")]
    folder: PathBuf,
    /// MiB of the disks
    #[arg(long, default_value_t = 1024)]
    size_mib: u64,
    /// CPUs of the client's threads (`0-2,5` or `none`) [default: the first]
    #[arg(long, value_parser = cpu::parse_list)]
    client_cpus: Option<CpuList>,
    /// CPUs of the servers and of fio (`0-2,5` or `none`) [default: the second]
    #[arg(long, value_parser = cpu::parse_list)]
    server_cpus: Option<CpuList>,
    /// Repetitions of a sample while something else takes the CPUs
    #[arg(long, default_value_t = 1)]
    retries: u32,
    /// Also write everything as JSON
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Set by SIGINT and SIGTERM, so that everything is cleaned up.
    #[arg(skip)]
    interrupted: Arc<AtomicBool>,
}

fn parse_storage(text: &str) -> Result<Storage, String> {
    match text {
        "file" => Ok(Storage::File),
        "null" => Ok(Storage::Null),
        _ => Err("use file or null".to_owned()),
    }
}

fn parse_peer(text: &str) -> Result<(String, String), String> {
    match text.split_once('=') {
        Some((name, socket)) if !name.is_empty() && !socket.is_empty() => {
            Ok((name.to_owned(), socket.to_owned()))
        }
        _ => Err("use NAME=SOCKET".to_owned()),
    }
}

impl Args {
    /// Number of rounds.
    pub fn rounds(&self) -> u32 {
        self.rounds.unwrap_or(if self.quick { 3 } else { 5 })
    }

    fn duration(&self) -> Duration {
        Duration::from_secs_f64(self.seconds.unwrap_or(if self.quick { 0.3 } else { 1.0 }))
    }

    /// The load of one point on one queue.
    pub fn load(&self, mode: Mode, depth: u16) -> Load {
        Load {
            op: self.op,
            block_bytes: self.block_size,
            depth,
            mode,
            queues: 1,
            queue_size: 128,
            packed: self.packed,
            chains: Chains::Auto,
            cpus: self.client_cpus.clone().map(|list| list.0).unwrap_or_default(),
        }
    }

    /// Fills in the CPUs that were not chosen.
    fn place(&mut self) -> Result<()> {
        let usable = cpu::usable()?;
        let or_nth = |list: &mut Option<CpuList>, n: usize| {
            let nth = if usable.len() > 1 { vec![usable[n]] } else { Vec::new() };
            list.get_or_insert(CpuList(nth));
        };
        or_nth(&mut self.client_cpus, 0);
        or_nth(&mut self.server_cpus, 1);
        Ok(())
    }

    fn server_cpus(&self) -> &[usize] {
        self.server_cpus.as_ref().map_or(&[], |list| &list.0)
    }

    fn settings(&self, folder: PathBuf, file: PathBuf) -> Result<Settings> {
        let ours = match &self.vhost_blk {
            Some(path) if path.exists() => Some(path.clone()),
            Some(path) => bail!("{} does not exist: build vhost-blk first", path.display()),
            None => Some(std::env::current_exe()?.with_file_name("vhost-blk")),
        };
        if let Some(path) = ours.as_ref().filter(|path| !path.exists()) {
            eprintln!("bench: {} is not built: ours is left out", path.display());
        }
        let qsd_runs = self.qsd != "none" && !setup::version(&self.qsd).starts_with("not usable");
        if self.qsd != "none" && !qsd_runs {
            eprintln!("bench: {} cannot be run: qemu-storage-daemon is left out", self.qsd);
        }
        Ok(Settings {
            ours: ours.filter(|path| path.exists()),
            ours_args: self.ours_arg.clone(),
            qsd: qsd_runs.then(|| self.qsd.clone()),
            size_bytes: self.size_mib << 20,
            file,
            folder,
            queues: 2,
        })
    }

    fn peers(&self, storage: Storage) -> impl Iterator<Item = Spec> {
        let peers = if storage == Storage::File { &self.peers } else { &self.null_peers };
        peers.iter().map(|(name, socket)| Spec::peer(name, socket))
    }
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
    let mut report = Report { setup: setup::describe(), ..Report::default() };
    for program in settings.ours.iter().map(|p| p.display().to_string()).chain(settings.qsd.clone())
    {
        report.setup.push((program.clone(), setup::version(&program)));
    }
    for &storage in &args.storages {
        compare(&args, &settings, storage, &mut report)?;
    }
    report.goals = goals::judge(&report);
    println!("{}", report.markdown());
    if let Some(path) = &args.json {
        let json = serde_json::to_string_pretty(&report)?;
        fs::write(path, json).with_context(|| format!("cannot write {}", path.display()))?;
    }
    Ok(())
}

/// Measures one kind of storage: all points, idle time, scaling.
fn compare(args: &Args, settings: &Settings, storage: Storage, report: &mut Report) -> Result<()> {
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
        let name = format!("{}, {}", server.name, storage_name(storage));
        report.setup.push((name, server.command_line.clone()));
    }
    report.rows.extend(measure_points(args, settings, storage, &servers)?);
    for server in &servers {
        report.idle.push(idle(args, storage, server)?);
    }
    let measured: Vec<_> = servers.into_iter().map(|server| server.name).collect();
    let usable = cpu::usable()?;
    if !args.no_scaling && usable.len() > 1 {
        let chosen: Vec<_> =
            specs.into_iter().filter(|s| s.scales() && measured.contains(&s.name)).collect();
        let rows = scaling::measure(args, storage, &chosen, [usable[0], usable[1]])?;
        report.scaling.extend(rows);
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
) -> Result<Vec<Row>> {
    let points: Vec<_> = args
        .depths
        .iter()
        .flat_map(|&depth| args.modes.iter().map(move |&mode| args.load(mode, depth)))
        .collect();
    let mut rows: Vec<Row> = points
        .iter()
        .flat_map(|load| servers.iter().map(|server| Row::new(storage, load, server)))
        .collect();
    let with_fio = storage == Storage::File && !args.no_fio && fio::installed();
    let mut bare: Vec<_> = args.depths.iter().map(|&depth| Row::bare(storage, depth)).collect();
    for round in 0..args.rounds() {
        let mut next = rows.iter_mut();
        for load in &points {
            for server in servers {
                let row = next.next().expect("one row for each point and server");
                row.samples.push(sample(args, server, load, args.server_cpus())?);
            }
        }
        for row in bare.iter_mut().filter(|_| with_fio) {
            let seconds = args.duration().as_secs_f64();
            let cpus = args.server_cpus();
            let fio =
                fio::arguments(&settings.file, args.op, args.block_size, row.depth, cpus, seconds);
            row.samples.push(fio::measure(&fio)?);
        }
        eprintln!("bench: {} round {} of {}", storage_name(storage), round + 1, args.rounds());
    }
    rows.extend(bare.into_iter().filter(|row| !row.samples.is_empty()));
    Ok(rows)
}

/// One measurement; repeats a disturbed one a few times and keeps the least disturbed.
pub fn sample(args: &Args, server: &Server, load: &Load, server_cpus: &[usize]) -> Result<Sample> {
    let what = || format!("measuring {} at depth {}", server.name, load.depth);
    let mut best = sample_once(args, server, load, server_cpus).with_context(what)?;
    let shared = server_cpus.iter().any(|cpu| load.cpus.contains(cpu));
    let tries = if shared { 0 } else { args.retries };
    for _ in 0..tries {
        if best.waited_percent <= WAITED_PERCENT_MAX {
            break;
        }
        let again = sample_once(args, server, load, server_cpus).with_context(what)?;
        if again.waited_percent < best.waited_percent {
            best = again;
        }
    }
    Ok(best)
}

/// Connects, warms up, measures, hangs up.
fn sample_once(args: &Args, server: &Server, load: &Load, cpus: &[usize]) -> Result<Sample> {
    if args.interrupted.load(Ordering::Relaxed) {
        bail!("interrupted");
    }
    let mut client = Client::connect(&server.socket, load)?;
    if server.family != Family::Peer {
        // Includes threads that the server started for this connection.
        cpu::pin_process(server.pid, cpus)?;
    }
    client.run(args.duration() / 5, &load.cpus)?;
    let before = cpu::times(server.pid)?;
    let outcome = client.run(args.duration(), &load.cpus)?;
    let spent = cpu::times(server.pid)?.since(&before);
    let waited = spent.waited + outcome.waited;
    let quantile_us = |q| outcome.latency_ns.value_at_quantile(q) as f64 / 1e3;
    Ok(Sample {
        iops: outcome.iops(),
        cpu_us_per_io: spent.busy.as_secs_f64() * 1e6 / outcome.ios as f64,
        p50_us: quantile_us(0.5),
        p99_us: quantile_us(0.99),
        waited_percent: 100.0 * waited.as_secs_f64() / outcome.elapsed.as_secs_f64(),
    })
}

/// CPU time with a client that has worked for a moment and then does nothing.
fn idle(args: &Args, storage: Storage, server: &Server) -> Result<Idle> {
    let load = args.load(Mode::Event, 1);
    let mut client = Client::connect(&server.socket, &load)?;
    client.run(args.duration() / 5, &load.cpus)?;
    std::thread::sleep(Duration::from_millis(500));
    let time = Duration::from_secs(if args.quick { 2 } else { 5 });
    let before = cpu::times(server.pid)?;
    std::thread::sleep(time);
    let busy = cpu::times(server.pid)?.since(&before).busy;
    let cpu_percent = 100.0 * busy.as_secs_f64() / time.as_secs_f64();
    Ok(Idle { storage, server: server.name.clone(), family: server.family, cpu_percent })
}
