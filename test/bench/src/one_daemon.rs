// SPDX-License-Identifier: Apache-2.0
//! One `vhost-blk daemon` with many disks, and light drivers for them.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Result, bail};
use driver::{Device, Options};
use kit::daemon::Daemon;
use kit::wait::wait_until;

/// Maximum wait for the sockets of the disks.
const DISKS_MAX: Duration = Duration::from_secs(60);

/// A running daemon with its disks, ended on drop.
#[derive(Debug)]
pub(crate) struct OneDaemon {
    pub(crate) daemon: Daemon,
    pub(crate) program: PathBuf,
    /// The control socket.
    pub(crate) control: PathBuf,
    /// The sockets of the disks.
    pub(crate) sockets: Vec<PathBuf>,
}

/// The vhost-blk program: this one, or the one beside the present program.
pub(crate) fn program(given: Option<&Path>) -> Result<PathBuf> {
    let beside = std::env::current_exe()?.with_file_name("vhost-blk");
    let program = given.map_or(beside, Path::to_owned);
    if !program.exists() {
        bail!("{} is not there: build vhost-blk, or give --vhost-blk", program.display());
    }
    Ok(program)
}

/// Bytes of the requests that a light driver has room for, one at a time.
pub(crate) const LIGHT_BYTES: usize = 4096;

/// A connected driver with one small queue.
pub(crate) fn light_driver(socket: &Path) -> Result<Device> {
    let options = Options { queue_size: 16, scratch_bytes: 2 * LIGHT_BYTES, ..Options::default() };
    Ok(Device::connect(socket, &options)?)
}

impl OneDaemon {
    /// Starts the daemon with these options, and its files in `directory`. Each of `disks` is the text of a disk's
    /// configuration without its socket.
    pub(crate) fn start(
        program: &Path,
        directory: &Path,
        disks: &[String],
        options: &[&str],
    ) -> Result<Self> {
        let configuration = directory.join("disks");
        fs::create_dir(&configuration)?;
        let mut sockets = Vec::new();
        for (at, disk) in disks.iter().enumerate() {
            let socket = directory.join(format!("{at}.sock"));
            let text = format!("{disk}socket-path = \"{}\"\n", socket.display());
            fs::write(configuration.join(format!("disk{at}.toml")), text)?;
            sockets.push(socket);
        }
        let control = directory.join("control");
        let mut args = vec![
            program.display().to_string(),
            "daemon".to_owned(),
            format!("--control-path={}", control.display()),
            format!("--config-dir={}", configuration.display()),
        ];
        args.extend(options.iter().map(|&option| option.to_owned()));
        let daemon = Daemon::start(args, &control, &directory.join("daemon.log"))?;
        // The disks of the directory come after the control socket.
        wait_until(DISKS_MAX, "the sockets of all disks", || {
            Ok(sockets.iter().all(|socket| socket.exists()).then_some(()))
        })?;
        Ok(Self { daemon, program: program.to_owned(), control, sockets })
    }
}
