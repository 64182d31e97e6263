// SPDX-License-Identifier: Apache-2.0
//! `cases nested-bench`: the whole stack, from fio in an inner guest to the device, with all ways
//! to attach a disk. All disks are in one guest and are measured in turn, round by round.

mod attach;
mod exits;
mod report;

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result};
use bench::changes::Baseline;
use bench::rig::{Speed, null_blk};
use bench::setup;
use clap::Args as ClapArgs;
use kit::fio::{Job, Outcome};
use kit::metric::{IOPS, Set, in_turn, point};
use kit::report::Report;

use self::attach::{Attached, Way};
use self::exits::{Counter, Watched};
use self::report::{NO_GUEST, judge, section};
use crate::nested::Lab;
use crate::nested::guest::{Driver, Guest, GuestSpec, Image};
use crate::nested::kvm;

/// Longest time for a measurement without a guest.
const BARE_LIMIT: Duration = Duration::from_secs(600);

/// Options of `cases nested-bench`.
#[derive(Clone, Debug, ClapArgs)]
pub(crate) struct Args {
    /// Rounds; each measures every disk once at every point
    #[arg(long, default_value_t = 3)]
    rounds: u32,
    /// Seconds per measurement
    #[arg(long, default_value_t = 2.0)]
    seconds: f64,
    /// Virtual CPUs; the numbers of queues and jobs are the same
    #[arg(long, value_delimiter = ',', default_value = "1,2")]
    vcpus: Vec<u16>,
    /// Requests in flight per job
    #[arg(long = "depth", value_delimiter = ',', default_value = "1,4,32,128")]
    depths: Vec<u16>,
    /// fio's kinds of load
    #[arg(long, value_delimiter = ',', default_value = "randread,randwrite")]
    rw: Vec<String>,
    /// Ways to attach the disk
    #[arg(
        long,
        value_enum,
        value_delimiter = ',',
        default_value = "kernel,uring,qemu-native,qemu-uring,qemu-mapping,vhost-scsi"
    )]
    way: Vec<Way>,
    /// Microseconds that each request takes on the slow device; 0: without this device
    #[arg(long, default_value_t = 200)]
    slow_us: u32,
    /// MiB per second of the device whose throughput is the limit; 0: without this device
    #[arg(long, default_value_t = 2)]
    capped_mib: u32,
    /// Do not count exits, kicks and interrupts
    #[arg(long)]
    no_exits: bool,
    /// Also write all results as JSON
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    #[command(flatten)]
    baseline: Baseline,
}

/// Runs the measurement and prints the report.
pub(crate) fn run(args: &Args, lab: &Lab) -> Result<()> {
    let mut args = args.clone();
    let earlier = args.baseline.read()?;
    attach::possible(&mut args.way)?;
    let image = Image::prepare(lab, Driver::InTree)?;
    kvm::must_work(lab, &image)?;
    let mut report = Report::new("In a guest: set-up", setup::describe());
    report.setup.push(("QEMU".to_owned(), setup::version("qemu-system-x86_64")));
    let mut set = Set::default();
    for speed in speeds(&args) {
        for &vcpus in &args.vcpus {
            measure(&args, lab, &image, (speed, vcpus), &mut set)
                .with_context(|| format!("{} {vcpus} vcpus", speed.name()))?;
        }
    }
    report.goals = judge(&set, &Speed::Capped(args.capped_mib).name());
    report.sections.push(section(&set));
    report.publish(args.json.as_deref())?;
    earlier.judge(&report)
}

fn speeds(args: &Args) -> Vec<Speed> {
    let mut speeds = vec![Speed::Null];
    speeds.extend((args.slow_us > 0).then_some(Speed::Slow(args.slow_us)));
    speeds.extend((args.capped_mib > 0).then_some(Speed::Capped(args.capped_mib)));
    speeds
}

/// Measures all ways on one kind of device, in one guest.
fn measure(
    args: &Args,
    lab: &Lab,
    image: &Image,
    (speed, vcpus): (Speed, u16),
    set: &mut Set,
) -> Result<()> {
    let start = |&way: &Way| {
        let what = || format!("attaching {}", way.name());
        Attached::start(way, &lab.program(), speed, vcpus).with_context(what)
    };
    let disks = args.way.iter().map(start).collect::<Result<Vec<_>>>()?;
    let bare = null_blk("nested-bare", 1024, vcpus, speed)?;
    let bare_node = bare.device().display().to_string();
    let arguments = disks.iter().flat_map(|disk| disk.args.clone()).collect();
    let spec = GuestSpec { vcpus, memory_mib: 512, disks: arguments, incoming: false };
    let mut guest = Guest::boot(image, &spec)?;
    let nodes = disks.iter().map(|disk| disk.node(&mut guest)).collect::<Result<Vec<_>>>()?;
    let in_guest: Vec<_> = disks.iter().zip(&nodes).collect();
    let device = speed.name();
    for round in 0..args.rounds {
        for rw in &args.rw {
            for depth in &args.depths {
                let labels =
                    point(&[("device", &device), ("rw", rw), ("vcpus", &vcpus), ("depth", depth)]);
                let job = |node| job(node, rw, *depth, vcpus).timed(args.seconds, 300);
                for (disk, node) in in_turn(&in_guest, round) {
                    let outcome = Outcome::parse(&guest.ok(&job(node).command_line())?)?;
                    set.add(disk.way.name(), &labels, vec![(IOPS, outcome.iops)]);
                }
                let outcome = job(&bare_node).measure(BARE_LIMIT)?;
                set.add(NO_GUEST, &labels, vec![(IOPS, outcome.iops)]);
            }
        }
        eprintln!("nested: {device}, {vcpus} vcpus, round {} of {}", round + 1, args.rounds);
    }
    if !args.no_exits {
        count(args, &mut guest, (&disks, &nodes), (&device, vcpus), set)?;
    }
    guest.cut_power();
    disks.into_iter().try_for_each(Attached::stop)
}

/// Counts exits, kicks and interrupts of all disks of a guest, in a round of its own.
fn count(
    args: &Args,
    guest: &mut Guest,
    (disks, nodes): (&[Attached], &[String]),
    (device, vcpus): (&str, u16),
    set: &mut Set,
) -> Result<()> {
    let counter = Counter::start(guest)?;
    for rw in &args.rw {
        for depth in &args.depths {
            let labels =
                point(&[("device", &device), ("rw", rw), ("vcpus", &vcpus), ("depth", depth)]);
            for (attached, node) in disks.iter().zip(nodes) {
                let disk = Watched::find(guest, node, attached.device())?;
                let job = job(node, rw, *depth, vcpus).timed(args.seconds, 300);
                set.add(attached.way.name(), &labels, counter.of(guest, &disk, &job)?);
            }
        }
    }
    eprintln!("nested: {device}, {vcpus} vcpus, exits counted");
    Ok(())
}

fn job(node: &str, rw: &str, depth: u16, jobs: u16) -> Job {
    Job::new("bench", node).with(&format!(
        "--rw={rw} --bs=4k --iodepth={depth} --numjobs={jobs} --group_reporting \
         --ioengine=io_uring --direct=1"
    ))
}
