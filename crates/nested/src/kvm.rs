// SPDX-License-Identifier: Apache-2.0
//! Whether an inner guest can be run, found out by running one.

use std::fs;
use std::path::Path;

use anyhow::Result;
use bench::rig::modprobe;

use crate::guest::{Guest, GuestSpec, Image};

/// Left once a guest has booted in this VM.
const MARK: &str = "/run/nested/kvm-works";

/// `Ok(Err(reason))`: it does not.
pub fn works(image: &Image) -> Result<Result<(), String>> {
    if Path::new(MARK).exists() {
        return Ok(Ok(()));
    }
    let flags = fs::read_to_string("/proc/cpuinfo")?;
    let has = |flag: &str| flags.split_whitespace().any(|word| word == flag);
    let module = match (has("svm"), has("vmx")) {
        (true, _) => "kvm_amd",
        (_, true) => "kvm_intel",
        _ => return Ok(Err("this VM's CPU has neither svm nor vmx".to_owned())),
    };
    if let Err(error) = modprobe(&[module]) {
        return Ok(Err(format!("{error:#}")));
    }
    if let Err(error) = Guest::boot(image, &GuestSpec { vcpus: 1, ..GuestSpec::default() }) {
        return Ok(Err(format!("no guest boots under KVM here: {error:#}").replace('\n', " ")));
    }
    fs::write(MARK, "")?;
    Ok(Ok(()))
}
