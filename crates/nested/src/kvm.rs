// SPDX-License-Identifier: Apache-2.0
//! Whether an inner guest can be run, found out by running one.

use std::fs;
use std::path::Path;

use anyhow::Result;
use bench::rig::modprobe;
use lab_case::outcome::skip;

use crate::guest::{Guest, GuestSpec, Image};

/// Left once a guest has booted in this VM.
const MARK: &str = "/run/nested/kvm-works";

/// Boots a guest, once in the life of this VM; an error with [`lab_case::outcome::Skip`] at its
/// root if that does not work.
pub fn must_work(image: &Image) -> Result<()> {
    if Path::new(MARK).exists() {
        return Ok(());
    }
    let flags = fs::read_to_string("/proc/cpuinfo")?;
    let has = |flag: &str| flags.split_whitespace().any(|word| word == flag);
    let module = match (has("svm"), has("vmx")) {
        (true, _) => "kvm_amd",
        (_, true) => "kvm_intel",
        _ => return Err(skip("this VM's CPU has neither svm nor vmx")),
    };
    modprobe(&[module]).map_err(|error| skip(format!("{error:#}")))?;
    if let Err(error) = Guest::boot(image, &GuestSpec { vcpus: 1, ..GuestSpec::default() }) {
        return Err(skip(format!("no guest boots under KVM here: {error:#}").replace('\n', " ")));
    }
    fs::write(MARK, "")?;
    Ok(())
}
