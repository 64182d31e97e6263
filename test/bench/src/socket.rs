// SPDX-License-Identifier: Apache-2.0
//! `bench socket`: one measurement of one running server.

use std::time::Duration;

use anyhow::Result;
use clap::Args as ClapArgs;

use crate::client::Client;
use crate::cpu::{self, CpuList};
use crate::load::{Chains, Load, Mode, Op};

/// Options of `bench socket`.
#[derive(Debug, ClapArgs)]
pub struct Args {
    /// The server's Unix socket
    path: String,
    /// Wait of the client on an empty used ring: asleep until a call, or polling
    #[arg(long, value_enum, default_value = "event")]
    mode: Mode,
    /// Reads or writes
    #[arg(long, value_enum, default_value = "randread")]
    op: Op,
    /// Requests in flight on each queue; a comma-separated list measures one after the other
    #[arg(long, default_value = "32", value_delimiter = ',')]
    depth: Vec<u16>,
    /// Bytes of each request
    #[arg(long, default_value_t = 4096)]
    block_size: u32,
    /// Queues, each driven by a thread
    #[arg(long, default_value_t = 1)]
    queues: u16,
    /// Descriptors of each queue
    #[arg(long, default_value_t = 128)]
    queue_size: u16,
    /// Use packed rings
    #[arg(long)]
    packed: bool,
    /// Direct descriptors or, where offered, indirect tables
    #[arg(long, value_enum, default_value = "auto")]
    chains: Chains,
    /// Seconds of each measurement
    #[arg(long, default_value_t = 2.0)]
    seconds: f64,
    /// Seconds of load before it
    #[arg(long, default_value_t = 0.3)]
    warm_up: f64,
    /// Measurements
    #[arg(long, default_value_t = 1)]
    rounds: u32,
    /// The server's process, for its CPU time and for --server-cpus
    #[arg(long)]
    pid: Option<u32>,
    /// CPUs of the client's threads (`0-2,5` or `none`)
    #[arg(long, value_parser = cpu::parse_list, default_value = "0")]
    client_cpus: CpuList,
    /// Move the server (--pid) to these CPUs; by default it stays where it is
    #[arg(long, value_parser = cpu::parse_list, default_value = "none", requires = "pid")]
    server_cpus: CpuList,
}

impl Args {
    fn load(&self, depth: u16) -> Load {
        Load {
            op: self.op,
            block_bytes: self.op.block_bytes(self.block_size),
            depth,
            mode: self.mode,
            queues: self.queues,
            queue_size: self.queue_size,
            packed: self.packed,
            chains: self.chains,
            cpus: self.client_cpus.0.clone(),
        }
    }
}

/// Measures and prints a line for each round.
pub fn run(args: &Args) -> Result<()> {
    if let Some(pid) = args.pid {
        cpu::pin_process(pid, &args.server_cpus.0)?;
    }
    println!(
        "{:>6} {:>10} {:>12} {:>10} {:>10} {:>11}",
        "depth", "kIOPS", "CPU us/IO", "p50 us", "p99 us", "CPU wait %"
    );
    for _ in 0..args.rounds {
        for &depth in &args.depth {
            measure(args, depth)?;
        }
    }
    Ok(())
}

fn measure(args: &Args, depth: u16) -> Result<()> {
    let mut client = Client::connect(&args.path, &args.load(depth))?;
    client.run(Duration::from_secs_f64(args.warm_up), &args.client_cpus.0)?;
    let before = args.pid.map(cpu::times).transpose()?;
    let outcome = client.run(Duration::from_secs_f64(args.seconds), &args.client_cpus.0)?;
    let after = args.pid.map(cpu::times).transpose()?;
    let spent = before.zip(after).map(|(before, after)| after.since(&before));
    let cpu = spent
        .map_or_else(|| "-".to_owned(), |spent| format!("{:.3}", outcome.us_per_io(spent.busy)));
    // Includes the server's wait if its process is known.
    let waited = outcome.waited + spent.map_or(Duration::ZERO, |spent| spent.waited);
    println!(
        "{depth:>6} {:>10.1} {cpu:>12} {:>10.1} {:>10.1} {:>11.0}",
        outcome.iops() / 1e3,
        outcome.quantile_us(0.5),
        outcome.quantile_us(0.99),
        100.0 * waited.as_secs_f64() / outcome.elapsed.as_secs_f64(),
    );
    Ok(())
}
