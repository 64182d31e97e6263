// SPDX-License-Identifier: Apache-2.0
//! KVM: boots a kernel, because an open device node does not prove that guests work.

use super::vmm::QEMU;
use super::{Finding, Outcome};
use std::fs::{self, OpenOptions};
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc;
use std::time::{Duration, Instant};

const BOOT_MAX: Duration = Duration::from_secs(10);
/// Maximum depth of the search for kernels below the cache directory.
const DEPTH_MAX: u32 = 4;
/// Messages of a kernel without a root file system at the end of its start.
const BOOTED: [&str; 3] = ["Unable to mount root", "Cannot open root device", "No working init"];
const EMULATE: &str = "use -accel tcg (slow), or a machine where KVM works";

pub(super) fn kvm() -> Finding {
    if let Err(error) = OpenOptions::new().read(true).write(true).open("/dev/kvm") {
        let message = format!("/dev/kvm cannot be opened: {error}");
        return Finding::new("kvm", Outcome::Warn, message)
            .remedy(format!("load kvm_intel or kvm_amd, join the group kvm, or {EMULATE}"));
    }
    let Some(kernel) = find_kernel() else {
        let message = "/dev/kvm opens; whether a guest boots was not tried: no kernel was found";
        return Finding::new("kvm", Outcome::Info, message)
            .remedy("put one (vmlinuz) into ~/.cache/vhost-blk or /boot");
    };
    match boot(&kernel) {
        Boot::Up(time) => {
            let message = format!("a guest booted in {:.1} s", time.as_secs_f64());
            Finding::new("kvm", Outcome::Ok, message)
        }
        Boot::Untried(why) => {
            let message = format!("/dev/kvm opens; whether a guest boots was not tried: {why}");
            Finding::new("kvm", Outcome::Info, message).remedy("install QEMU")
        }
        Boot::Down(why) => {
            let message = format!("/dev/kvm opens, but {} does not boot: {why}", kernel.display());
            Finding::new("kvm", Outcome::Warn, message).remedy(EMULATE)
        }
    }
}

enum Boot {
    Up(Duration),
    Down(String),
    Untried(String),
}

fn boot(kernel: &Path) -> Boot {
    let start = Instant::now();
    let spawned = Command::new(QEMU)
        .args(["-accel", "kvm", "-cpu", "host", "-m", "256", "-nodefaults", "-no-user-config"])
        .args(["-display", "none", "-serial", "stdio", "-no-reboot"])
        .args(["-append", "console=ttyS0 panic=-1", "-kernel"])
        .arg(kernel)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn();
    let mut qemu = match spawned {
        Ok(child) => Running(child),
        Err(error) => return Boot::Untried(format!("{QEMU}: {error}")),
    };
    let lines = qemu.lines();
    let mut last = String::from("it said nothing");
    loop {
        match lines.recv_timeout(BOOT_MAX.saturating_sub(start.elapsed())) {
            Ok(line) if BOOTED.iter().any(|words| line.contains(words)) => {
                return Boot::Up(start.elapsed());
            }
            Ok(line) if line.trim().is_empty() => {}
            Ok(line) => last = line.trim().to_owned(),
            Err(mpsc::RecvTimeoutError::Timeout) => {
                return Boot::Down(format!("not up after {} s", BOOT_MAX.as_secs()));
            }
            Err(mpsc::RecvTimeoutError::Disconnected) => {
                return Boot::Down(format!("QEMU ended; its last line: {last}"));
            }
        }
    }
}

/// A child process; dropping this value kills it.
struct Running(Child);

impl Running {
    /// The lines of both outputs, until both are closed.
    fn lines(&mut self) -> mpsc::Receiver<String> {
        let (sender, receiver) = mpsc::channel();
        let outputs: [Option<Box<dyn std::io::Read + Send>>; 2] = [
            self.0.stdout.take().map(|pipe| Box::new(pipe) as _),
            self.0.stderr.take().map(|pipe| Box::new(pipe) as _),
        ];
        for output in outputs.into_iter().flatten() {
            let sender = sender.clone();
            std::thread::spawn(move || {
                for line in BufReader::new(output).split(b'\n').map_while(Result::ok) {
                    if sender.send(String::from_utf8_lossy(&line).into_owned()).is_err() {
                        break;
                    }
                }
            });
        }
        receiver
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn find_kernel() -> Option<PathBuf> {
    let cache = std::env::var_os("HOME").map(|home| Path::new(&home).join(".cache/vhost-blk"));
    cache.into_iter().chain([PathBuf::from("/boot")]).find_map(|dir| kernel_below(&dir, DEPTH_MAX))
}

/// A readable `vmlinuz*` in `dir` or below: the last by name, which is usually the newest.
fn kernel_below(dir: &Path, depth: u32) -> Option<PathBuf> {
    let mut entries: Vec<PathBuf> =
        fs::read_dir(dir).ok()?.filter_map(|entry| Some(entry.ok()?.path())).collect();
    entries.sort_unstable();
    entries.reverse();
    let is_kernel = |path: &&PathBuf| {
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        name.starts_with("vmlinuz") && path.is_file() && fs::File::open(path).is_ok()
    };
    entries.iter().find(is_kernel).cloned().or_else(|| {
        let directories = entries.iter().filter(|path| path.is_dir() && !path.is_symlink());
        directories.filter(|_| depth > 0).find_map(|path| kernel_below(path, depth - 1))
    })
}
