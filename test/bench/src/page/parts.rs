// SPDX-License-Identifier: Apache-2.0
//! The measured parts of a report: the files, and the commands that write them.

use std::path::Path;

use anyhow::Result;
use kit::report::Report;
use serde::Serialize;

/// The part without a VM.
pub(super) const NATIVE: &str = "native";

pub(super) const DENSITY: &str = "density";
pub(super) const HOST: &str = "host";
pub(super) const QUEUES: &str = "queues";
pub(super) const LOADS: &str = "loads";
pub(super) const ICOUNT: &str = "icount";
pub(super) const NESTED: &str = "nested";
pub(super) const GUEST: &str = "guest";
pub(super) const TIMELINE: &str = "timeline";
pub(super) const QCOW2: &str = "qcow2";
/// The same program in a VM.
pub(super) const STAGES: &str = "stages";

/// The parts of the lab, as `scripts/bench-lab.sh` names them.
const LAB: [(&str, &str); 8] = [
    (HOST, "the host side alone, both planes, in a VM"),
    (LOADS, "the host side alone, all loads, in a VM"),
    (QUEUES, "1, 2 and 4 queues, in a VM"),
    (ICOUNT, "path lengths in instructions"),
    (STAGES, "where requests spend their time, both planes, in a VM"),
    (NESTED, "a guest with KVM inside an emulated VM"),
    (GUEST, "the guest's driver"),
    ("guest-icount", "instructions of the guest's driver"),
];

/// Further parts without a VM: name, subject, and arguments of `bench`.
const OTHERS: [(&str, &str, &str); 4] = [
    (DENSITY, "many lightly loaded disks: one daemon, or a process each", "density"),
    ("operations", "the wait of a busy driver during upgrades, snapshots and others", "operations"),
    (TIMELINE, "where requests spend their time, on a real disk", "timeline"),
    (
        QCOW2,
        "qcow2 images beside a raw file",
        "\"--qcow2 --storage file --op randread,randwrite --no-scaling\"",
    ),
];

/// A part, measured or not.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Part {
    /// Name of the part.
    pub(super) name: &'static str,
    /// Subject of the measurement.
    pub(super) about: &'static str,
    /// The command that measures it.
    pub(super) command: String,
    /// The results; none: not measured.
    pub(super) report: Option<Report>,
}

/// All parts.
#[derive(Clone, Debug, Serialize)]
#[serde(transparent)]
pub(super) struct Parts(pub(super) Vec<Part>);

impl Parts {
    /// Reads the file of the part without a VM, and those that exist in the directories of the further
    /// parts without a VM (`others`) and of the lab. A file that cannot be read is an error.
    pub(super) fn read(
        native: Option<&Path>,
        others: Option<&Path>,
        lab: Option<&Path>,
    ) -> Result<Self> {
        let mut parts = vec![Part {
            name: NATIVE,
            about: "the io_uring plane on this machine, without a VM",
            command: "make report".to_owned(),
            report: native.map(Report::read).transpose()?,
        }];
        let mut add = |(name, about), directory: Option<&Path>, command| {
            let file = directory.map(|directory| directory.join(format!("{name}.json")));
            let file = file.filter(|file| file.exists());
            let report = file.as_deref().map(Report::read).transpose()?;
            parts.push(Part { name, about, command, report });
            anyhow::Ok(())
        };
        for (name, about, arguments) in OTHERS {
            add((name, about), others, format!("make bench ARGS={arguments}"))?;
        }
        for part in LAB {
            add(part, lab, format!("make bench-lab ARGS=\"--only {}\"", part.0))?;
        }
        Ok(Self(parts))
    }

    /// The results of a part.
    pub(super) fn of(&self, name: &str) -> Option<&Report> {
        self.0.iter().find(|part| part.name == name)?.report.as_ref()
    }

    /// The measured parts.
    pub(super) fn measured(&self) -> impl Iterator<Item = (&Part, &Report)> {
        self.0.iter().filter_map(|part| Some((part, part.report.as_ref()?)))
    }

    /// The parts without results.
    pub(super) fn missing(&self) -> impl Iterator<Item = &Part> {
        self.0.iter().filter(|part| part.report.is_none())
    }
}
