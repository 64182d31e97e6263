// SPDX-License-Identifier: Apache-2.0
//! The measured parts of a report: the files, and the commands that write them.

use std::path::Path;

use anyhow::Result;
use kit::report::Report;
use serde::Serialize;

/// The part without a VM.
pub(super) const NATIVE: &str = "native";

/// The parts of the lab, as `scripts/bench-lab.sh` names them.
const LAB: [(&str, &str); 6] = [
    ("host", "the host side alone, both planes, in a VM"),
    ("queues", "1, 2 and 4 queues, in a VM"),
    ("icount", "path lengths in instructions"),
    ("nested", "a guest with KVM inside an emulated VM"),
    ("guest", "the guest's driver"),
    ("guest-icount", "instructions of the guest's driver"),
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
    /// Reads the files that exist. A file that cannot be read is an error.
    pub(super) fn read(native: Option<&Path>, lab: Option<&Path>) -> Result<Self> {
        let mut parts = vec![Part {
            name: NATIVE,
            about: "the io_uring plane on this machine, without a VM",
            command: "make report".to_owned(),
            report: native.map(Report::read).transpose()?,
        }];
        for (name, about) in LAB {
            let file = lab.map(|folder| folder.join(format!("{name}.json")));
            let file = file.filter(|file| file.exists());
            let command = format!("make bench-lab ARGS=\"--only {name}\"");
            let report = file.as_deref().map(Report::read).transpose()?;
            parts.push(Part { name, about, command, report });
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
