// SPDX-License-Identifier: Apache-2.0
//! `cases nested-bench`: the whole stack, from fio in an inner guest to the device, with all ways
//! to attach a disk. All disks are in one guest and are measured in turn, round by round.

mod attach;
mod report;

use std::fs;
use std::path::PathBuf;

use anyhow::{Context, Result};
use bench::rig::{Speed, null_blk};
use bench::{fio, setup};
use clap::Args as ClapArgs;

use self::attach::{Attached, Way};
use self::report::{Point, Report, Row};
use crate::nested::Lab;
use crate::nested::guest::{Driver, Guest, GuestSpec, Image};
use crate::nested::kvm;
use kit::process::run_to_end;

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
    /// Also write all results as JSON
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

/// Runs the measurement and prints the report.
pub(crate) fn run(args: &Args, lab: &Lab) -> Result<()> {
    let mut args = args.clone();
    attach::possible(&mut args.way)?;
    let image = Image::prepare(&lab.guest, Driver::InTree)?;
    kvm::must_work(&image)?;
    let mut report = Report { setup: setup::describe(), ..Report::default() };
    report.setup.push(("QEMU".to_owned(), setup::version("qemu-system-x86_64")));
    for speed in speeds(&args) {
        for &vcpus in &args.vcpus {
            let rows = measure(&args, lab, &image, speed, vcpus);
            report.rows.extend(rows.with_context(|| format!("{} {vcpus} vcpus", speed.name()))?);
        }
    }
    report.judge();
    println!("{}", report.markdown());
    if let Some(path) = &args.json {
        let json = serde_json::to_string_pretty(&report)?;
        fs::write(path, json).with_context(|| format!("cannot write {}", path.display()))?;
    }
    Ok(())
}

fn speeds(args: &Args) -> Vec<Speed> {
    let mut speeds = vec![Speed::Null];
    speeds.extend((args.slow_us > 0).then_some(Speed::Slow(args.slow_us)));
    speeds.extend((args.capped_mib > 0).then_some(Speed::Capped(args.capped_mib)));
    speeds
}

/// Measures all ways on one kind of device, in one guest.
fn measure(args: &Args, lab: &Lab, image: &Image, speed: Speed, vcpus: u16) -> Result<Vec<Row>> {
    let start = |&way: &Way| {
        let what = || format!("attaching {}", way.name());
        Attached::start(way, &lab.program(), speed, vcpus).with_context(what)
    };
    let disks = args.way.iter().map(start).collect::<Result<Vec<_>>>()?;
    let bare = null_blk("nested-bare", 1024, vcpus, speed)?;
    let arguments = disks.iter().flat_map(|disk| disk.args.clone()).collect();
    let spec = GuestSpec { vcpus, memory_mib: 512, disks: arguments, incoming: false };
    let mut guest = Guest::boot(image, &spec)?;
    let nodes = disks.iter().map(|disk| disk.node(&mut guest)).collect::<Result<Vec<_>>>()?;
    let points = points(args, speed, vcpus);
    let row = |point: &Point, way| Row { point: point.clone(), way, iops: Vec::new() };
    let all_ways = || disks.iter().map(|disk| Some(disk.way)).chain([None]);
    let mut rows: Vec<_> =
        points.iter().flat_map(|point| all_ways().map(|way| row(point, way))).collect();
    for round in 0..args.rounds {
        let mut next = rows.iter_mut();
        for point in &points {
            for node in &nodes {
                let text = guest.ok(&fio_command(args, point, node).join(" "))?;
                next.next().expect("a row for each disk").iops.push(fio::parse(&text)?.iops);
            }
            let command = fio_command(args, point, &bare.device().display().to_string());
            let words: Vec<_> = command.iter().map(String::as_str).collect();
            let text = run_to_end(&words)?;
            next.next().expect("a row without guest").iops.push(fio::parse(&text)?.iops);
        }
        eprintln!(
            "nested: {}, {vcpus} vcpus, round {} of {}",
            speed.name(),
            round + 1,
            args.rounds
        );
    }
    guest.cut_power();
    disks.into_iter().try_for_each(Attached::stop)?;
    Ok(rows)
}

fn points(args: &Args, speed: Speed, vcpus: u16) -> Vec<Point> {
    let mut points = Vec::new();
    for rw in &args.rw {
        for &depth in &args.depths {
            points.push(Point {
                device: speed.name(),
                device_is_limit: matches!(speed, Speed::Capped(_)),
                rw: rw.clone(),
                vcpus,
                depth,
            });
        }
    }
    points
}

fn fio_command(args: &Args, point: &Point, node: &str) -> Vec<String> {
    let (rw, depth, jobs) = (&point.rw, point.depth, point.vcpus);
    let runtime = (args.seconds * 1e3) as u64;
    let text = format!(
        "fio --name=bench --filename={node} --rw={rw} --bs=4k --iodepth={depth} --numjobs={jobs} \
         --group_reporting --ioengine=io_uring --direct=1 --time_based --runtime={runtime}ms \
         --ramp_time=300ms --norandommap --randrepeat=0 --output-format=json"
    );
    text.split_whitespace().map(str::to_owned).collect()
}
