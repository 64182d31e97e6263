// SPDX-License-Identifier: Apache-2.0
//! `make soak`: [`kit::soak`] with a guest in stock QEMU on this machine.

use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result};
use kit::agent::{Agent, Output, Shell};
use kit::qmp::Qmp;
use kit::soak::{self, Machine, Options, Report, Served};
use serde_json::Value;

use crate::disk;
use crate::guest::{Guest, GuestDisk, GuestSpec};
use crate::job::Job;
use crate::run::{GUEST_PATIENCE, Lab};

const DISK_BYTES: u64 = 256 << 20;
const MEMORY_MIB: u32 = 512;

/// Time that a command in the guest may take: those that compare all data take longest.
const COMMAND_LIMIT: Duration = Duration::from_secs(300);

/// Time in which a guest that lives answers after a failure.
const ANSWER_LIMIT: Duration = Duration::from_secs(10);

/// A guest with the agent and QEMU's monitor.
struct SoakGuest {
    agent: Agent,
    qmp: Qmp<UnixStream>,
    guest: Guest,
}

impl SoakGuest {
    fn boot(lab: &Lab, directory: &Path, served: &Served) -> Result<Self> {
        let [commands, monitor] = ["commands", "monitor"].map(|name| directory.join(name));
        let mut args = served.qemu_args("reconnect=1");
        args.extend(soak::memory_args(MEMORY_MIB));
        let port = format!("socket,id=commands,path={},server=on,wait=off", commands.display());
        let device = "virtserialport,chardev=commands,name=agent.commands".to_owned();
        args.extend(["-chardev".into(), port, "-device".into(), device, "-qmp".into()]);
        args.push(format!("unix:{},server=on,wait=off", monitor.display()));
        let spec = GuestSpec {
            accel: lab.choice.accel,
            vcpus: 2,
            disks: vec![GuestDisk::Arguments(args)],
            job: Job::agent(),
        };
        let mut guest = Guest::boot(&lab.base, &spec)?;
        // QEMU listens long before the guest reports something.
        guest.wait_for("stage", GUEST_PATIENCE)?;
        let connect = || {
            let (qmp, mut agent) = (Qmp::connect(&monitor)?, Agent::connect(&commands)?);
            agent.wait_ready(GUEST_PATIENCE).context("the guest's agent")?;
            Ok((qmp, agent))
        };
        let (qmp, agent) = connect().map_err(|error| guest.blame(error))?;
        Ok(Self { agent, qmp, guest })
    }
}

impl Shell for SoakGuest {
    fn run(&mut self, command: &str) -> Result<Output> {
        self.agent.run(command, COMMAND_LIMIT)
    }
}

impl Machine for SoakGuest {
    fn monitor(&mut self, command: &str, arguments: Value) -> Result<Value> {
        self.qmp.execute(command, arguments)
    }

    fn tail(&self) -> String {
        self.guest.log()
    }
}

/// Runs the events on a guest that boots for them; then checks the file system from outside.
///
/// # Errors
/// As [`kit::soak::run`], or the file system is damaged.
pub fn run(lab: &Lab, program: &Path, options: &Options) -> Result<Report> {
    let directory = tempfile::Builder::new().prefix("soak-").tempdir_in(lab.cache.dir())?;
    let image = directory.path().join("image");
    disk::create(&image, DISK_BYTES)?;
    // An upgrade wants an absolute path.
    let program = program.canonicalize().with_context(|| program.display().to_string())?;
    let mut served = Served::start(&program, directory.path(), &image)?;
    let mut guest = SoakGuest::boot(lab, directory.path(), &served)?;
    let report = soak::run(&mut guest, &mut served, options);
    let report = report.map_err(|error| match guest.agent.run("true", ANSWER_LIMIT) {
        Ok(_) => error,
        Err(_) => guest.guest.blame(error),
    })?;
    guest.guest.cut_power()?;
    disk::check_ext4(&served.stop()?)?;
    Ok(report)
}
