// SPDX-License-Identifier: Apache-2.0
//! The format of the image, its chain and its marks, as `vhost-blk info` describes them.

use super::{Finding, Outcome, storage};
use crate::image::info;
use qcow2::inspect::{self, Inspection, Needs};
use std::path::Path;

const CHECK: &str = "image";

/// The image and its chain, or the reason for which it cannot be read.
pub(super) fn inspect(path: &Path) -> Result<Inspection, Finding> {
    let failed = |why: String| {
        let (why, remedy) = why.rsplit_once("; ").unwrap_or((&why, ""));
        Finding::new(CHECK, Outcome::Fail, why).remedy(remedy)
    };
    // Its error names the way to make an image.
    storage::open(path).map_err(|error| failed(error.to_string()))?;
    inspect::inspect(path).map_err(|error| failed(error.to_string()))
}

/// Returns whether the image is qcow2, which the module does not take.
pub(super) fn is_qcow2(found: &Inspection) -> bool {
    found.files[0].qcow2.is_some()
}

/// Judges the image by the options with which it is served.
pub(super) fn image(path: &Path, found: &Inspection) -> Finding {
    let top = &found.files[0];
    let mut words = vec![info::format(top)];
    words.extend(top.qcow2.iter().flat_map(|header| header.features.clone()));
    let below = found.files[1..].iter();
    words.extend(
        below.map(|file| format!("backing file {} ({})", file.path.display(), info::format(file))),
    );
    let text = words.join(", ");
    match (&found.serve, &top.mark) {
        (Err(refusal), _) => {
            Finding::new(CHECK, Outcome::Fail, format!("{text}; refused: {}", refusal.what))
                .remedy(&refusal.remedy)
        }
        (Ok(needs), Some(mark)) => {
            let told = format!("{text}; it is served only with --read-only: {mark}");
            let read_only = Needs { read_only: true, ..*needs };
            let options = info::options(path, read_only);
            Finding::new(CHECK, Outcome::Fail, told)
                .remedy(format!("to read it, serve it with {options}"))
        }
        (Ok(needs), None) => Finding::new(CHECK, Outcome::Ok, text)
            .remedy(format!("serve it with {}", info::options(path, *needs))),
    }
}
