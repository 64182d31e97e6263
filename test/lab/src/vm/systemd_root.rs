// SPDX-License-Identifier: Apache-2.0
//! Root images with systemd: a Debian as users have it, with the dependencies of the packages, but
//! not the packages. The payload runs as a service.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};

use crate::cache::{Cache, key_of};
use crate::debian::{self, Variant};
use crate::scripts;
use crate::vm::kernel::{KernelName, VmKernel};
use crate::vm::root::{INIT_PATH, disk_of};
use kit::process::run_to_end;

/// A Debian with systemd as the first process.
#[derive(Debug)]
pub(crate) struct SystemdRoot {
    suite: &'static str,
    packages: &'static str,
    /// Size of the file system, in mke2fs syntax.
    size: &'static str,
    /// Puts files of the kernel into the tree: the machine has no network.
    add: fn(&Path, &VmKernel) -> Result<()>,
}

/// For the packages. Debian's 6.12 for Debian 12 was built by gcc 12, and its headers ask for it, and
/// for the libraries and pahole.
pub(crate) static DEBIAN12: SystemdRoot = SystemdRoot {
    suite: "bookworm",
    packages: "systemd-sysv,udev,dkms,gcc-12,make,xz-utils,libc6-dev,libelf1,libssl3,zlib1g,pahole,kmod,\
               procps,busybox-static,e2fsprogs,util-linux,mount",
    size: "4G",
    add: add_headers,
};

/// The same with the programs and libraries of Debian 13. The machine's kernel stays: Debian 13 has
/// the same version, and its gcc 12, too.
pub(crate) static DEBIAN13: SystemdRoot = SystemdRoot {
    suite: "trixie",
    packages: "systemd-sysv,udev,dkms,gcc-12,make,xz-utils,libc6-dev,libelf1t64,libssl3t64,zlib1g,pahole,kmod,\
               procps,busybox-static,e2fsprogs,util-linux,mount",
    size: "4G",
    add: add_headers,
};

/// For guests of libvirt, which AppArmor confines as on any Debian.
pub(crate) static LIBVIRT: SystemdRoot = SystemdRoot {
    suite: "bookworm",
    packages: "systemd-sysv,udev,kmod,procps,busybox-static,e2fsprogs,util-linux,mount,curl,\
               apparmor,libvirt-daemon-system,libvirt-clients,qemu-system-x86",
    size: "4G",
    add: add_image,
};

/// The machine's first process, which becomes systemd.
const INIT: &str = include_str!("first-systemd.sh");

/// The service that runs the payload.
const SERVICE: &str = "[Unit]
Description=the job of the lab
After=systemd-user-sessions.service
[Service]
ExecStart=/lab/init
StandardInput=tty-force
StandardOutput=tty
StandardError=tty
TTYPath=/dev/console
[Install]
WantedBy=multi-user.target
";

/// Keeps systemd's status lines out of the console, which is the kernel's log.
const MANAGER: &str = "[Manager]\nShowStatus=no\n";

/// Any fixed identity: a machine without one goes through systemd's questions of a first boot.
const MACHINE_ID: &str = "76686f73742d626c6b206f66206c6162\n";

/// Directory of fetched `vhost.h`, as the package's DKMS build looks for them.
const HEADER_CACHE: &str = "var/cache/vhost-blk";

impl SystemdRoot {
    /// The root image; made in the cache if it does not exist.
    pub(crate) fn cached(&self, cache: &Cache, kernel: &VmKernel) -> Result<PathBuf> {
        if kernel.name() != KernelName::Stable {
            bail!("the machines with systemd boot Debian's 6.12 only: give --kernel 6.12");
        }
        let Self { suite, packages, size, .. } = self;
        let key = key_of(&[suite, packages, size, INIT, SERVICE, MANAGER, kernel.release()]);
        let entry = cache.entry(&format!("systemd-root-{key}"), |staging| {
            eprintln!("lab: making a root image of {suite} with systemd (about a minute)");
            self.build(staging, kernel)
        })?;
        Ok(entry.join("root.img"))
    }

    fn build(&self, staging: &Path, kernel: &VmKernel) -> Result<()> {
        let root = staging.join("root");
        debian::bootstrap(Variant::Minbase, self.suite, self.packages, &root)?;
        debian::install_program(&root.join(INIT_PATH.trim_start_matches('/')), INIT)?;
        for directory in ["lab", "usr/lib/modules", "etc/systemd/system.conf.d"] {
            fs::create_dir_all(root.join(directory))?;
        }
        let units = root.join("etc/systemd/system");
        fs::write(units.join("lab.service"), SERVICE)?;
        fs::create_dir_all(units.join("multi-user.target.wants"))?;
        symlink("../lab.service", units.join("multi-user.target.wants/lab.service"))?;
        symlink("/dev/null", units.join("serial-getty@ttyS0.service"))?;
        fs::write(root.join("etc/systemd/system.conf.d/lab.conf"), MANAGER)?;
        fs::write(root.join("etc/machine-id"), MACHINE_ID)?;
        (self.add)(&root, kernel)?;
        disk_of(&root, staging, self.size)
    }
}

/// Puts the kernel into the tree, where a Debian has it, for guests of the machine.
fn add_image(root: &Path, kernel: &VmKernel) -> Result<()> {
    let to = root.join("boot").join(format!("vmlinuz-{}", kernel.release()));
    fs::copy(kernel.image(), to).context("cannot copy the kernel")?;
    Ok(())
}

/// Puts the kernel's headers and its `vhost.h` into the tree.
fn add_headers(root: &Path, kernel: &VmKernel) -> Result<()> {
    let release = kernel.release();
    let kdir = scripts::directory_from("headers.sh", &[release])?;
    let tree = kdir.ancestors().nth(3).context("headers are in usr/src")?;
    for directory in ["usr/src", "usr/lib"] {
        let from = tree.join(directory).join(".").to_string_lossy().into_owned();
        run_to_end(&["cp", "-a", &from, &root.join(directory).to_string_lossy()])?;
    }
    // In the cache this names the cache.
    let makefile = root.join("usr/src").join(format!("linux-headers-{release}")).join("Makefile");
    let text = fs::read_to_string(&makefile)?;
    fs::write(&makefile, text.replace(&format!("{}/", tree.to_string_lossy()), "/"))?;
    let header = scripts::directory_from("vhost-private.sh", &[&kdir.to_string_lossy()])?;
    let name = header.file_name().context("the header is in a directory with a name")?;
    let to = root.join(HEADER_CACHE).join(name);
    fs::create_dir_all(&to)?;
    fs::copy(header.join("vhost.h"), to.join("vhost.h"))?;
    Ok(())
}
