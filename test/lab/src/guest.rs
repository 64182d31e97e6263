// SPDX-License-Identifier: Apache-2.0
//! One boot of the guest in stock QEMU: it runs one [`Job`] and powers off.
//!
//! The guest reports over its own virtio-serial port, so that kernel messages on the console cannot
//! garble a result.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Error, Result, anyhow};
use tempfile::TempDir;

use crate::accel::Accel;
use crate::emulator::{self, PERIODIC_TIMERS};
use crate::failure::Remains;
use crate::image::{INIT_PATH, RootImage};
use crate::job::Job;
use crate::kernel::GuestKernel;
use crate::qemu::Qemu;
use kit::interrupt;
use kit::process::{OwnedChild, StopWith, TICK};
use kit::sched::Patience;

/// The parts that all guests share.
#[derive(Debug, Clone)]
pub struct GuestBase {
    /// The program that runs them.
    pub qemu: Qemu,
    /// The kernel they boot.
    pub kernel: GuestKernel,
    /// The root image they read.
    pub image: RootImage,
}

/// A disk under test.
#[derive(Debug, Clone)]
pub enum GuestDisk {
    /// QEMU connects to a daemon.
    VhostUser {
        /// The daemon's socket.
        socket: PathBuf,
    },
    /// The given QEMU arguments.
    Arguments(Vec<String>),
    /// QEMU's own virtio-blk device with an iothread, for comparison: without a lock, because the
    /// daemon serves the same disk.
    VirtioBlk {
        /// The image or block device.
        path: PathBuf,
        /// QEMU's `aio=` value: `io_uring` or `native`.
        aio: &'static str,
    },
}

/// One guest to boot.
#[derive(Debug, Clone)]
pub struct GuestSpec {
    /// KVM or emulation.
    pub accel: Accel,
    /// Virtual CPUs, and as many virtqueues.
    pub vcpus: u32,
    /// The disks under test; the first one is the guest's `/dev/vda`.
    pub disks: Vec<GuestDisk>,
    /// The job that the guest runs.
    pub job: Job,
}

/// A running guest; dropping it ends it.
#[derive(Debug)]
pub struct Guest {
    qemu: OwnedChild,
    /// The monitor of an emulator.
    control: Option<PathBuf>,
    dir: TempDir,
}

/// The reports of a guest until it powered off.
#[derive(Debug, Clone, Default)]
pub struct GuestReport {
    lines: Vec<(String, String)>,
}

impl GuestReport {
    pub(crate) fn parse(text: &str) -> Self {
        let lines = text.lines().map(|line| {
            let (word, value) = line.split_once(' ').unwrap_or((line, ""));
            (word.to_owned(), value.to_owned())
        });
        Self { lines: lines.collect() }
    }

    /// True if nothing was reported.
    pub fn is_empty(&self) -> bool {
        self.lines.is_empty()
    }

    /// All values reported under `word`, in order.
    pub fn values<'a, 'b>(&'a self, word: &'b str) -> impl Iterator<Item = &'a str> + use<'a, 'b> {
        self.lines.iter().filter(move |(w, _)| w == word).map(|(_, value)| value.as_str())
    }

    /// The last value reported under `word`.
    pub fn value(&self, word: &str) -> Option<&str> {
        self.values(word).last()
    }

    /// The job has ended or failed, whatever becomes of its machine.
    pub(crate) fn has_verdict(&self) -> bool {
        ["fail", "exit"].iter().any(|word| self.value(word).is_some())
    }

    /// The stage that the job is in, or was in at its end.
    pub fn stage(&self) -> &str {
        self.value("stage").unwrap_or("boot")
    }
}

impl Guest {
    /// Starts QEMU; the guest's job runs as soon as it has booted.
    pub fn boot(base: &GuestBase, spec: &GuestSpec) -> Result<Self> {
        let dir = tempfile::Builder::new().prefix("lab-guest-").tempdir()?;
        fs::write(dir.path().join("job"), spec.job.script())?;
        fs::write(dir.path().join("results"), "")?;
        let mut args = qemu_args(base, spec, dir.path());
        args.extend(["-serial".into(), format!("file:{}", dir.path().join("console").display())]);
        let control = (spec.accel == Accel::Tcg).then(|| dir.path().join("control"));
        if let Some(path) = &control {
            args.extend(["-qmp".into(), format!("unix:{},server=on,wait=off", escaped(path))]);
        }
        let log = dir.path().join("qemu");
        let qemu = OwnedChild::spawn(&args, &log, StopWith::Kill)?;
        Ok(Self { qemu, control, dir })
    }

    /// A guest started by other means: `dir` has its `results`, and its output in `console`.
    pub(crate) fn of(child: OwnedChild, dir: TempDir) -> Self {
        Self { qemu: child, control: None, dir }
    }

    /// Boots with the guest's console on the lab's own terminal, until the guest powers off.
    pub fn boot_on_terminal(base: &GuestBase, spec: &GuestSpec) -> Result<()> {
        let dir = tempfile::Builder::new().prefix("lab-guest-").tempdir()?;
        fs::write(dir.path().join("job"), spec.job.script())?;
        let mut args = qemu_args(base, spec, dir.path());
        args.extend(["-serial".into(), "mon:stdio".into()]);
        let mut qemu = OwnedChild::spawn_on_terminal(&args, StopWith::Kill)?;
        qemu.wait(Duration::from_secs(24 * 3600))?;
        Ok(())
    }

    /// Waits until the job has succeeded. A job that fails, or reports nothing for `patience`, is
    /// an error with the output of QEMU and of the guest's kernel.
    pub fn finish(self, patience: Duration) -> Result<GuestReport> {
        self.finish_watched(patience, |_, _| ())
    }

    /// As [`Guest::finish`]; `watch` gets the word and the value of each report when it comes.
    pub fn finish_watched(
        mut self,
        patience: Duration,
        mut watch: impl FnMut(&str, &str),
    ) -> Result<GuestReport> {
        let mut lines_seen = 0;
        let mut time = Patience::new(self.qemu.id(), patience);
        let status = loop {
            if let Some(status) = self.qemu.try_wait()? {
                break status;
            }
            interrupt::check()?;
            let report = self.report();
            if report.lines.len() > lines_seen {
                report.lines[lines_seen..].iter().for_each(|(word, value)| watch(word, value));
                lines_seen = report.lines.len();
                time.renew();
            }
            if time.is_over() {
                let (stage, seconds) = (report.stage(), patience.as_secs());
                return Err(
                    self.failed(format!("the guest hangs in stage '{stage}' ({seconds} s)"))
                );
            }
            std::thread::sleep(TICK);
        };
        let report = self.report();
        match self.remains().failure(&report, status) {
            None => Ok(report),
            Some(why) => {
                let stage = report.stage();
                Err(self.failed(format!("the guest failed in stage '{stage}': {why}")))
            }
        }
    }

    /// Waits until the guest has reported `word`.
    pub fn wait_for(&mut self, word: &str, timeout: Duration) -> Result<()> {
        let time = Patience::new(self.qemu.id(), timeout);
        while self.report().value(word).is_none() {
            interrupt::check()?;
            if let Some(status) = self.qemu.try_wait()? {
                let why = self.remains().failure(&self.report(), status).unwrap_or_default();
                return Err(self.failed(format!("the guest ended before it said '{word}': {why}")));
            }
            if time.is_over() {
                let seconds = timeout.as_secs();
                return Err(
                    self.failed(format!("the guest did not say '{word}' within {seconds} s"))
                );
            }
            std::thread::sleep(TICK);
        }
        Ok(())
    }

    /// Kills QEMU at once: a power cut for the guest and its disk.
    pub fn cut_power(mut self) -> Result<()> {
        self.qemu.kill_hard()
    }

    /// Makes an empty file `name` in the directory that a User Mode Linux guest shares.
    pub fn tell(&self, name: &str) -> Result<()> {
        Ok(fs::write(self.dir.path().join(name), "")?)
    }

    /// The guest's reports so far.
    pub fn report(&self) -> GuestReport {
        // The file may end in the middle of a multi-byte character; a later read has the whole
        // line.
        let bytes = fs::read(self.dir.path().join("results")).unwrap_or_default();
        GuestReport::parse(&String::from_utf8_lossy(&bytes))
    }

    /// An error with the logs, judged by [`Guest::blame`].
    fn failed(&self, why: String) -> Error {
        self.blame(anyhow!("{why}\n{}", self.log()))
    }

    /// The same error; the context of an [`emulator::EmulatorFault`] if there is evidence for one,
    /// and neither the job nor the kernel has reported a failure.
    pub fn blame(&self, error: Error) -> Error {
        let remains = self.remains();
        if self.report().has_verdict() || remains.has_complaint_beside_stalls() {
            return error;
        }
        let lost = || self.control.as_deref().and_then(emulator::lost_interrupt);
        match remains.assertion().or_else(lost) {
            Some(fault) => Error::new(fault).context(format!("{error:#}")),
            None => error,
        }
    }

    /// The end of QEMU's output and of the guest's console, for an error.
    pub fn log(&self) -> String {
        self.remains().log()
    }

    fn remains(&self) -> Remains {
        let text_of = |name: &str| {
            let bytes = fs::read(self.dir.path().join(name)).unwrap_or_default();
            String::from_utf8_lossy(&bytes).into_owned()
        };
        Remains::new(&text_of("qemu"), &text_of("console"))
    }
}

/// QEMU's `-smp` value. It leaves room for a second virtual CPU: if only one is possible, QEMU's
/// emulation omits the guest's memory barriers, as if no thread of the device ran beside it. Kicks
/// and interrupts then get lost now and then, with QEMU's own devices too.
pub fn smp(vcpus: u32) -> String {
    format!("cpus={vcpus},maxcpus={}", vcpus.max(2))
}

/// QEMU's whole command line without the console.
fn qemu_args(base: &GuestBase, spec: &GuestSpec, dir: &Path) -> Vec<String> {
    let machine = "q35,memory-backend=memory";
    let vcpus = smp(spec.vcpus);
    let kernel = base.kernel.vmlinuz();
    let timer = if spec.accel == Accel::Tcg { PERIODIC_TIMERS } else { "" };
    let command_line = format!(
        "root=/dev/nvme0n1 rootwait rw init={INIT_PATH} console=ttyS0 panic=-1 oops=panic quiet{}{timer}",
        spec.accel.kernel_args()
    );
    let qemu = base.qemu.program();
    let mut args: Vec<String> = [qemu.as_str(), "-nodefaults", "-no-user-config", "-no-reboot"]
        .into_iter()
        .chain(["-display", "none", "-machine", machine, "-smp", &vcpus, "-m", "512M"])
        .chain(["-object", "memory-backend-memfd,id=memory,size=512M,share=on"])
        .chain(spec.accel.qemu_args(&base.qemu))
        .map(str::to_owned)
        .collect();
    args.extend(["-kernel".into(), kernel.display().to_string(), "-append".into(), command_line]);
    args.extend(root_and_job_args(base.image.path(), dir));
    args.extend(spec.disks.iter().flat_map(|disk| disk_args(disk, spec.vcpus)));
    args
}

/// The root image as the only NVMe namespace (with two, their names can swap from boot to boot),
/// the job, and the results port.
fn root_and_job_args(image: &Path, dir: &Path) -> Vec<String> {
    // No guest writes to the image. User Mode Linux locks it as a whole, which QEMU takes for a user
    // that does not share it.
    let image = escaped(image);
    let job = escaped(&dir.join("job"));
    let results = escaped(&dir.join("results"));
    [
        "-drive".into(),
        format!("if=none,id=root,file={image},format=raw,snapshot=on,file.locking=off"),
        "-device".into(),
        "nvme,serial=lab,drive=root".into(),
        "-fw_cfg".into(),
        format!("name=opt/lab/job,file={job}"),
        "-device".into(),
        "virtio-serial-pci".into(),
        "-chardev".into(),
        format!("file,id=results,path={results}"),
        "-device".into(),
        "virtserialport,chardev=results,name=lab.results".into(),
    ]
    .to_vec()
}

fn disk_args(disk: &GuestDisk, queues: u32) -> Vec<String> {
    match disk {
        GuestDisk::Arguments(args) => args.clone(),
        GuestDisk::VhostUser { socket } => vec![
            "-chardev".into(),
            format!("socket,id=disk,path={}", escaped(socket)),
            "-device".into(),
            format!("vhost-user-blk-pci,chardev=disk,num-queues={queues}"),
        ],
        GuestDisk::VirtioBlk { path, aio } => {
            let driver = if crate::disk::is_block_device(path) { "host_device" } else { "file" };
            vec![
                "-object".into(),
                format!("iothread,id=thread-{aio}"),
                "-blockdev".into(),
                format!(
                    "driver={driver},node-name={aio},filename={},locking=off,cache.direct=on,\
                     aio={aio},discard=unmap",
                    escaped(path)
                ),
                "-device".into(),
                format!("virtio-blk-pci,drive={aio},iothread=thread-{aio},num-queues={queues}"),
            ]
        }
    }
}

/// A path in QEMU's option syntax, in which a comma is doubled.
pub(crate) fn escaped(path: &Path) -> String {
    path.display().to_string().replace(',', ",,")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_report_keeps_the_last_value_of_a_word_and_the_stage() {
        let report = GuestReport::parse("stage one\nverified all\nstage two\nexit 0\n");
        assert_eq!((report.value("verified"), report.stage()), (Some("all"), "two"));
        assert_eq!(GuestReport::parse("").stage(), "boot");
    }

    #[test]
    fn paths_with_commas_stay_one_option() {
        assert_eq!(escaped(Path::new("/a,b")), "/a,,b");
    }

    #[test]
    fn a_vhost_user_disk_gets_a_queue_per_vcpu() {
        let args = disk_args(&GuestDisk::VhostUser { socket: "/s".into() }, 3);
        assert!(args.contains(&"vhost-user-blk-pci,chardev=disk,num-queues=3".to_owned()));
    }
}
