// SPDX-License-Identifier: Apache-2.0
//! One boot of the host VM, which runs one script and ends.

use std::fs::{self, File};
use std::io::Read;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result};
use tempfile::TempDir;

use crate::accel::Accel;
use crate::cache::Cache;
use crate::emulator::{self, PERIODIC_TIMERS};
use crate::guest::{GuestReport, escaped};
use crate::qemu::Qemu;
use crate::run::Lab;
use crate::vm::kernel::VmKernel;
use crate::vm::machine::{Helper, Machine};
use crate::vm::payload::Payload;
use crate::vm::root::{self, INIT_PATH};
use crate::vm::stall::{Cpus, StallWatch};
use kit::process::{OwnedChild, StopWith};

/// Size of the virtio disk of the Debian machine.
const VIRTIO_DISK_BYTES: u64 = 16 << 20;

/// Poll queues of NVMe disks, one for each of two CPUs (a parameter of the kernel's driver).
const NVME_POLL_QUEUES: &str = " nvme.poll_queues=2";
/// The further controller: serial number, number of disks and bytes of each.
const NVME_SERIAL: &str = "zeros";
const NVME_DISKS: u32 = 16;
const NVME_BYTES: u64 = 1 << 30;

/// The parts of a VM without the payload.
#[derive(Debug)]
pub struct VmBase {
    qemu: Qemu,
    kernel: VmKernel,
    root: PathBuf,
    modules: PathBuf,
    accel: Accel,
}

impl VmBase {
    /// Makes the parts that the cache does not have.
    pub fn open(lab: &Lab, kernel: VmKernel, machine: Machine) -> Result<Self> {
        let cache: &Cache = &lab.cache;
        let qemu = match (machine, lab.choice.accel) {
            (Machine::Nested, Accel::Tcg) => Qemu::for_nested_guests(cache)?,
            _ => lab.base.qemu.clone(),
        };
        let root = match machine.systemd_root() {
            Some(root) => root.cached(cache, &kernel)?,
            None => root::cached(cache, &lab.base, machine.more_packages())?,
        };
        let modules = kernel.modules_image(cache)?;
        Ok(Self { qemu, kernel, root, modules, accel: lab.choice.accel })
    }

    /// The kernel it boots.
    pub fn kernel(&self) -> &VmKernel {
        &self.kernel
    }
}

/// The machine.
#[derive(Debug, Clone)]
pub struct VmShape {
    /// Kind of machine, which decides its devices.
    pub machine: Machine,
    /// Virtual CPUs.
    pub vcpus: u32,
    /// Memory in MiB.
    pub memory_mib: u32,
    /// Emulates one CPU for which an instruction is a nanosecond: path lengths instead of times.
    pub icount: bool,
    /// A second NVMe controller with disks of zeros, and poll queues for all NVMe disks.
    pub nvme: bool,
}

impl Default for VmShape {
    fn default() -> Self {
        let machine = Machine::default();
        Self { machine, vcpus: machine.vcpus(), memory_mib: 3072, icount: false, nvme: false }
    }
}

/// A running VM; dropping it ends it.
#[derive(Debug)]
pub struct Vm {
    qemu: OwnedChild,
    /// Set for emulated CPUs only.
    stall: Option<StallWatch>,
    files: Files,
}

/// Resources that must outlive the VM.
#[derive(Debug)]
struct Files {
    helper: Option<Helper>,
    dir: TempDir,
}

impl Vm {
    /// Starts the VM; `script` runs in it as soon as it has booted.
    pub fn boot(base: &VmBase, shape: &VmShape, payload: &Payload, script: &str) -> Result<Self> {
        let (files, mut args) = prepare(base, shape, payload, script)?;
        let dir = files.dir.path();
        let at = |name: &str| escaped(&dir.join(name));
        args.extend(["-serial".into(), format!("file:{}", at("console"))]);
        for port in ["stdout", "stderr"] {
            fs::write(dir.join(port), "")?;
            args.extend(port_args(port, &at(port)));
        }
        args.extend(["-qmp".into(), format!("unix:{},server=on,wait=off", at("control"))]);
        let qemu = OwnedChild::spawn(&args, &dir.join("qemu"), StopWith::Kill)?;
        let watch = || StallWatch::new(qemu.id(), dir.join("control"));
        let stall = (accel_of(base, shape) == Accel::Tcg).then(watch);
        Ok(Self { qemu, stall, files })
    }

    /// Boots with the VM's console on the lab's own terminal, until the VM ends.
    pub fn boot_on_terminal(
        base: &VmBase,
        shape: &VmShape,
        payload: &Payload,
        script: &str,
    ) -> Result<()> {
        let (_files, mut args) = prepare(base, shape, payload, script)?;
        args.extend(["-serial".into(), "mon:stdio".into()]);
        let mut qemu = OwnedChild::spawn_on_terminal(&args, StopWith::Kill)?;
        qemu.wait(Duration::from_secs(24 * 3600))?;
        Ok(())
    }

    /// True if the machine has ended.
    pub fn has_ended(&mut self) -> Result<bool> {
        Ok(self.qemu.try_wait()?.is_some())
    }

    /// Looks at emulated CPUs, and wakes them if they have stood still for long. A machine that the
    /// emulator has ended by an assertion is lost.
    pub(crate) fn look_at_cpus(&mut self) -> Result<Cpus> {
        if self.has_ended()? {
            return Ok(emulator::assertion(&self.qemu_log()).map_or(Cpus::Fine, Cpus::Lost));
        }
        Ok(self.stall.as_mut().map_or(Cpus::Fine, StallWatch::look))
    }

    /// Adds the state of an emulated machine to QEMU's output, if it still runs.
    pub fn note_state(&mut self) -> Result<()> {
        if !self.has_ended()? {
            self.stall.iter_mut().for_each(StallWatch::note_state);
        }
        Ok(())
    }

    /// The script's reports so far.
    pub fn report(&self) -> GuestReport {
        GuestReport::parse(&self.text_of("results"))
    }

    /// The console so far, which is the kernel's log.
    pub fn console(&self) -> String {
        self.text_of("console").replace('\r', "")
    }

    /// QEMU's own output, without its usual lines at each start; also the helper's output, and the
    /// states of emulated machines that hung.
    pub fn qemu_log(&self) -> String {
        let text = self.text_of("qemu");
        let lines = text.lines().filter(|line| !line.contains("TCG doesn't support requested"));
        let mut log: String = lines.map(|line| format!("  qemu| {line}\n")).collect();
        log.extend(self.files.helper.as_ref().map(Helper::log));
        log.extend(self.stall.as_ref().map(StallWatch::log));
        log
    }

    /// A reader of the script's `stdout` or `stderr`.
    pub fn stream(&self, name: &str) -> Result<File> {
        File::open(self.files.dir.path().join(name)).with_context(|| format!("no stream {name}"))
    }

    fn text_of(&self, name: &str) -> String {
        let mut bytes = Vec::new();
        if let Ok(mut file) = File::open(self.files.dir.path().join(name)) {
            let _ = file.read_to_end(&mut bytes);
        }
        String::from_utf8_lossy(&bytes).into_owned()
    }
}

/// The files of a VM and QEMU's arguments.
fn prepare(
    base: &VmBase,
    shape: &VmShape,
    payload: &Payload,
    script: &str,
) -> Result<(Files, Vec<String>)> {
    let dir = tempfile::Builder::new().prefix("lab-vm-").tempdir()?;
    fs::write(dir.path().join("results"), "")?;
    let image = dir.path().join("payload.img");
    payload.write_image(&image, script)?;
    let mut args = machine_args(base, shape);
    args.extend(disk_args(&[&base.root, &base.modules, &image]));
    if shape.nvme {
        args.extend(nvme_args());
    }
    args.extend(["-device".into(), "virtio-serial-pci".into()]);
    args.extend(port_args("results", &escaped(&dir.path().join("results"))));
    let helper = match shape.machine {
        Machine::Guest => Some(Helper::start()?),
        _ => None,
    };
    args.extend(helper.iter().flat_map(|helper| helper.args(shape.memory_mib)));
    if matches!(shape.machine, Machine::Debian12 | Machine::Debian13) {
        args.extend(virtio_disk(dir.path())?);
    }
    Ok((Files { helper, dir }, args))
}

/// The accelerator of a VM: only an emulator counts instructions.
fn accel_of(base: &VmBase, shape: &VmShape) -> Accel {
    if shape.icount { Accel::Tcg } else { base.accel }
}

fn machine_args(base: &VmBase, shape: &VmShape) -> Vec<String> {
    let accel = accel_of(base, shape);
    // The command line of an emulated machine. Watchdogs allow for a busy machine. KVM inside runs
    // without nested paging, which is slow in emulation and made this VM crash with guests of two
    // CPUs. DAMON does not sample memory (newer kernels do so by default), so that the VM's idle
    // time stays visible to `stall`.
    let emulated = if accel == Accel::Tcg {
        " watchdog_thresh=30 workqueue.watchdog_thresh=90 \
         rcupdate.rcu_cpu_stall_timeout=90 kvm_amd.npt=0 damon_stat.enabled=0"
    } else {
        ""
    };
    // The emulator loses timer interrupts, on the four CPUs of the guest machine most of all. Other
    // machines need timers of a fine resolution, for devices that take some microseconds. A counted
    // machine loses none, and would count the periodic ones.
    let is_lossy = accel == Accel::Tcg && shape.machine == Machine::Guest && !shape.icount;
    let timer = if is_lossy { PERIODIC_TIMERS } else { "" };
    let nvme = if shape.nvme { NVME_POLL_QUEUES } else { "" };
    let command_line = format!(
        "root={} rootwait rw init={INIT_PATH} console=ttyS0 panic=-1 oops=panic loglevel=7{}{emulated}{timer}{nvme}{}",
        root::root_argument(),
        accel.kernel_args(),
        base.kernel.name().command_line()
    );
    let (vcpus, sockets) = match (shape.icount, shape.machine) {
        // The measurement switches the second CPU off: drivers have as many queues as there are
        // possible CPUs, and with only one queue none may poll.
        (true, Machine::Guest) => (2, 2),
        (true, _) => (1, 1),
        (false, _) => (shape.vcpus, shape.vcpus.max(2)),
    };
    // One socket for each CPU: the MP table, which a kernel without ACPI reads, has no cores.
    let smp = format!("cpus={vcpus},maxcpus={sockets},sockets={sockets},cores=1");
    let memory = format!("{}M", shape.memory_mib);
    let qemu = base.qemu.program();
    let mut args =
        vec![qemu.as_str(), "-nodefaults", "-no-user-config", "-no-reboot", "-display", "none"];
    args.extend(["-machine", "q35"]);
    args.extend(match (accel, shape.icount) {
        (_, true) => ["-accel", "tcg,thread=single", "-cpu", "EPYC,+svm,+npt"],
        (Accel::Kvm, false) => ["-accel", "kvm", "-cpu", "host"],
        (Accel::Tcg, false) => ["-accel", base.qemu.tcg(), "-cpu", "EPYC,+svm,+npt"],
    });
    if shape.icount {
        args.extend(["-icount", "shift=0,sleep=off"]);
    }
    args.extend(["-smp", &smp]);
    let kernel = base.kernel.image().to_string_lossy();
    args.extend(["-m", &memory, "-kernel", &kernel, "-append", &command_line]);
    args.into_iter().map(str::to_owned).collect()
}

/// The images as namespaces of one NVMe controller, which every kernel here has built in. Changes
/// go to throw-away overlays.
fn disk_args(images: &[&Path]) -> Vec<String> {
    let mut args: Vec<String> = vec!["-device".into(), "nvme,id=nvme,serial=lab".into()];
    for (index, image) in images.iter().enumerate() {
        let file = escaped(image);
        args.extend([
            "-drive".into(),
            format!("if=none,id=disk{index},file={file},format=raw,snapshot=on"),
            "-device".into(),
            format!("nvme-ns,drive=disk{index},bus=nvme,nsid={}", index + 1),
        ]);
    }
    args
}

/// A controller with disks that contain zeros, which QEMU gives at once.
fn nvme_args() -> Vec<String> {
    let controller = format!("nvme,id=zeros,serial={NVME_SERIAL}");
    let mut args: Vec<String> = vec!["-device".into(), controller];
    for disk in 1..=NVME_DISKS {
        args.extend([
            "-blockdev".into(),
            format!("driver=null-co,node-name=zeros{disk},size={NVME_BYTES},read-zeroes=on"),
            "-device".into(),
            format!("nvme-ns,drive=zeros{disk},bus=zeros,nsid={disk}"),
        ]);
    }
    args
}

/// An empty disk for the packaged driver of guests.
fn virtio_disk(dir: &Path) -> Result<[String; 4]> {
    let path = dir.join("virtio-disk");
    File::create(&path)?.set_len(VIRTIO_DISK_BYTES)?;
    Ok([
        "-drive".into(),
        format!("if=none,id=virtio,file={},format=raw", escaped(&path)),
        "-device".into(),
        "virtio-blk-pci,drive=virtio".into(),
    ])
}

fn port_args(name: &str, path: &str) -> Vec<String> {
    vec![
        "-chardev".into(),
        format!("file,id={name},path={path}"),
        "-device".into(),
        format!("virtserialport,chardev={name},name=lab.{name}"),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_further_controller_has_disks_of_its_own() {
        let args = nvme_args();
        assert_eq!(args.iter().filter(|arg| arg.starts_with("nvme-ns,")).count(), 16);
        assert!(args.contains(&"nvme,id=zeros,serial=zeros".to_owned()));
        assert!(args.contains(&"nvme-ns,drive=zeros16,bus=zeros,nsid=16".to_owned()));
    }

    #[test]
    fn each_image_is_a_namespace() {
        let args = disk_args(&[Path::new("/a"), Path::new("/b")]);
        assert!(args.contains(&"nvme-ns,drive=disk1,bus=nvme,nsid=2".to_owned()));
        assert!(args.iter().any(|arg| arg.contains("id=disk0,file=/a")));
    }
}
