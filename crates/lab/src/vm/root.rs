// SPDX-License-Identifier: Apache-2.0
//! The host VM's root image: Debian with QEMU and the tools of the cases, and the image and kernel
//! that guests inside it boot.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::Result;

use crate::cache::{Cache, key_of};
use crate::debian;
use crate::guest::GuestBase;
use crate::process::run_to_end;

const SUITE: &str = "trixie";
const PACKAGES: &str = "qemu-system-x86,qemu-system-common,qemu-utils,fio,e2fsprogs,xfsprogs,\
                        dmsetup,kmod,util-linux,mount,fdisk,busybox-static,nvme-cli,procps,strace";
const SIZE: &str = "5G";

/// The VM's first process: only finds the payload, which has the rest.
const INIT: &str = "#!/bin/sh\n\
    mount -t devtmpfs devtmpfs /dev 2>/dev/null\n\
    mount /dev/nvme0n3 /lab && exec /lab/init\n";

/// Where that process is found.
pub(crate) const INIT_PATH: &str = "/sbin/lab-init";

/// Where the inner guest's kernel and root image are; the payload has a link to it.
pub(crate) const GUEST_DIR: &str = "/opt/guest";

/// The root image, made in the cache if it is not there.
pub(crate) fn cached(cache: &Cache, inner: &GuestBase) -> Result<PathBuf> {
    let inner_image = inner.image.path().to_string_lossy();
    let key = key_of(&[SUITE, PACKAGES, SIZE, INIT, &inner_image, inner.kernel.release()]);
    let entry = cache.entry(&format!("vm-root-{key}"), |staging| {
        eprintln!("lab: making the host VM's root image (about a minute)");
        build(staging, inner)
    })?;
    Ok(entry.join("root.img"))
}

fn build(staging: &Path, inner: &GuestBase) -> Result<()> {
    let root = staging.join("root");
    debian::bootstrap(SUITE, PACKAGES, &root)?;
    debian::install_program(&root.join(INIT_PATH.trim_start_matches('/')), INIT)?;
    for folder in ["lab", "usr/lib/modules", GUEST_DIR.trim_start_matches('/')] {
        fs::create_dir_all(root.join(folder))?;
    }
    let guest = root.join(GUEST_DIR.trim_start_matches('/'));
    let files = [(inner.kernel.vmlinuz(), "vmlinuz"), (inner.image.path().to_owned(), "root.img")];
    for (from, to) in files {
        let (from, to) = (from.to_string_lossy(), guest.join(to).to_string_lossy().into_owned());
        run_to_end(&["cp", "--sparse=always", &from, &to])?;
    }
    debian::ext4_from(&root, &staging.join("root.img"), SIZE)?;
    fs::remove_dir_all(&root)?;
    Ok(())
}
