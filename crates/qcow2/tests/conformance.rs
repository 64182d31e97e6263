// SPDX-License-Identifier: Apache-2.0
//! A qcow2 disk passes the suite of every backend, and QEMU agrees with it afterwards.

mod common;

use backend::conformance;
use backend::conformance::{Quirks, SyncEngine, Target};
use common::{check, directory, image, open, options, qemu_ok};
use qcow2::{AllowBacking, Qcow2Disk};

use std::path::PathBuf;
use tempfile::TempDir;

/// Checks the image with QEMU when the target ends.
struct Checked(PathBuf, #[expect(dead_code, reason = "the directory of the image")] TempDir);

impl Drop for Checked {
    fn drop(&mut self) {
        let checked = check(&self.0);
        assert!(checked.is_ok() || std::thread::panicking(), "{checked:?}");
    }
}

fn target(options_of_image: &str, direct: bool) -> Result<Target, String> {
    let directory = directory();
    let path = image(&directory, 16, options_of_image);
    let disk = Qcow2Disk::open(&path, &options(AllowBacking::Off, direct)).expect("it opens");
    Ok(Target::new(disk).keeping(Checked(path, directory)))
}

/// An overlay over a qcow2 image with compressed clusters over a raw file.
fn overlay() -> Result<Target, String> {
    let directory = directory();
    let at = directory.path();
    std::fs::write(at.join("base.raw"), vec![0x5a; 9 << 20]).expect("a base");
    for args in [
        &["create", "-qf", "qcow2", "-b", "base.raw", "-F", "raw", "plain.qcow2", "12M"][..],
        &["convert", "-c", "-O", "qcow2", "plain.qcow2", "mid.qcow2"],
        &["rebase", "-u", "-b", "base.raw", "-F", "raw", "mid.qcow2"],
        &["create", "-qf", "qcow2", "-b", "mid.qcow2", "-F", "qcow2", "a.qcow2", "16M"],
    ] {
        qemu_ok("qemu-img", at, args);
    }
    let path = at.join("a.qcow2");
    let disk = open(&path).expect("the overlay opens");
    Ok(Target::new(disk).keeping(Checked(path, directory)))
}

fn quirky() -> Result<Target, String> {
    let quirks = Quirks { transfer_bytes_max: Some(9 * 512), interrupts: true, newest_first: true };
    Ok(target("cluster_size=4k", true)?.run_by(move || Box::new(SyncEngine::with_quirks(quirks))))
}

conformance!(empty_image, target("cluster_size=64k", true));
conformance!(cached_image, target("cluster_size=64k", false));
conformance!(small_clusters, target("cluster_size=4k", true));
conformance!(preallocated_metadata, target("preallocation=metadata", true));
conformance!(small_clusters_quirky, quirky());
conformance!(overlay_of_two, overlay());
