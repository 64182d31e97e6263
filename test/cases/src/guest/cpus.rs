// SPDX-License-Identifier: Apache-2.0
//! CPUs that go offline and come back.

use std::fs;
use std::os::unix::fs::FileExt;
use std::thread::JoinHandle;

use anyhow::{Context as _, Result, anyhow, ensure};
use kit::system::cpu_list;
use rustix::thread::{CpuSet, sched_setaffinity};

use crate::case::cases;
use crate::guest::load::everything::Everything;
use crate::guest::load::memory::Aligned;
use crate::guest::load::{Errors, open_direct};
use crate::guest::machine::backing::Backing;
use crate::guest::machine::disk::{Disk, Plug, cpus_online};
use crate::guest::mode::Mode;
use crate::guest::system::{KernelLog, interrupts, read, wait_for, write};
use crate::guest::{Context, Modes};

cases! { Guest;
    "guest-cpus", Modes::of(Mode::ALL),
        "CPUs go and come under load: each queue's interrupts arrive, and no request waits for a CPU",
        cpus;
}

/// The driver's message about used requests that were not completed for two seconds.
const LOST: &str = "interrupt is late or lost";
/// Time that the probed disk takes for a request: longer than a CPU takes to go offline, shorter
/// than the driver's watchdog takes to find a completion without an interrupt.
const LATENCY_MS: u64 = 500;
/// Requests of another CPU, one after the other. A stranded request ends before the last of them.
const WITNESSES: usize = 3;

/// A CPU that is offline until dropped.
pub(crate) struct Off(usize);

impl Off {
    pub(crate) fn new(cpu: usize) -> Result<Self> {
        write(online(cpu), "0")?;
        Ok(Self(cpu))
    }
}

impl Drop for Off {
    fn drop(&mut self) {
        if let Err(why) = write(online(self.0), "1") {
            eprintln!("clean-up: {why:#}");
        }
    }
}

fn online(cpu: usize) -> String {
    format!("/sys/devices/system/cpu/cpu{cpu}/online")
}

fn cpus(context: &Context) -> Result<()> {
    let log = KernelLog::mark()?;
    let disk = Disk::plug(&context.machine, &Plug::file(Everything::DISK_MIB))?;
    let latency_ns = LATENCY_MS * 1_000_000;
    let slow = Backing::Null { bytes: 64 << 20, latency_ns, limits: None };
    let probed = Disk::plug(&context.machine, &Plug::of(slow))?;
    let queues = Queue::all(&probed)?;
    ensure!(queues.len() > 1, "the probed disk has one queue with interrupts");
    let path = probed.path()?;
    let count = cpus_online()?;
    let mut load = Everything::start(context, &disk, Errors::Fail)?;
    let mut check = |online: usize| {
        load.goes_on()?;
        interrupts_arrive(&queues, &path, online)
            .with_context(|| format!("with the CPUs below {online} online"))
    };
    for _ in 0..context.effort.rounds.min(5) {
        let mut off = Vec::new();
        for cpu in (1..count).rev() {
            off.push(strand(&probed, &path, cpu)?);
            check(cpu)?;
        }
        while let Some(cpu) = off.pop() {
            let online = cpu.0 + 1;
            drop(cpu);
            check(online)?;
        }
    }
    load.finish()?;
    let log = log.lines()?;
    ensure!(!log.contains(LOST), "requests waited for a CPU that was switched off: {log}");
    Ok(())
}

/// A queue with interrupts.
struct Queue {
    irq: String,
    /// The CPUs that use the queue.
    cpus: Vec<usize>,
}

impl Queue {
    fn all(disk: &Disk<'_>) -> Result<Vec<Self>> {
        let mut queues = Vec::new();
        for entry in fs::read_dir(disk.pci().join("msi_irqs"))? {
            let irq = entry?.file_name().to_string_lossy().into_owned();
            // The other interrupt is that of the configuration.
            if read(format!("/sys/kernel/irq/{irq}/actions"))?.contains("-req.") {
                let cpus = cpu_list(&read(format!("/proc/irq/{irq}/smp_affinity_list"))?)?;
                queues.push(Self { irq, cpus });
            }
        }
        Ok(queues)
    }
}

/// Sends a request from a CPU of each queue, all at once, and waits for the queues' interrupts.
fn interrupts_arrive(queues: &[Queue], path: &str, online: usize) -> Result<()> {
    let mut sent = Vec::new();
    for queue in queues {
        let Some(&cpu) = queue.cpus.iter().find(|&&cpu| cpu < online) else { continue };
        sent.push((queue, interrupts(&queue.irq)?, read_on(cpu, path)?));
    }
    for (queue, before, reader) in sent {
        join(reader)?;
        let what = format!("interrupt {} of the CPUs {:?}", queue.irq, queue.cpus);
        wait_for(&what, || interrupts(&queue.irq).ok().filter(|&now| now > before))?;
    }
    Ok(())
}

/// Switches a CPU off that has a request in flight, and checks that the request does not wait for
/// the CPU's interrupt: it ends before later requests of another CPU.
fn strand(disk: &Disk<'_>, path: &str, cpu: usize) -> Result<Off> {
    let stranded = read_on(cpu, path)?;
    wait_for("a request in flight", || (disk.stat().ok()?.in_flight > 0).then_some(()))?;
    let off = Off::new(cpu)?;
    for _ in 0..WITNESSES {
        join(read_on(0, path)?)?;
    }
    ensure!(stranded.is_finished(), "a request of CPU {cpu} waits since it is offline");
    join(stranded)?;
    Ok(off)
}

/// Reads a block, past the page cache, by a thread that runs on one CPU.
fn read_on(cpu: usize, path: &str) -> Result<JoinHandle<Result<()>>> {
    let file = open_direct(path)?;
    Ok(std::thread::spawn(move || {
        let mut only = CpuSet::new();
        only.set(cpu);
        sched_setaffinity(None, &only)?;
        let mut buffer = Aligned::new(4096);
        Ok(file.read_exact_at(buffer.bytes(), 0)?)
    }))
}

fn join(reader: JoinHandle<Result<()>>) -> Result<()> {
    reader.join().map_err(|_| anyhow!("a thread has panicked"))?
}
