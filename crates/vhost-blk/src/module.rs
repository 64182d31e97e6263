// SPDX-License-Identifier: Apache-2.0
//! The state of the kernel module vhost_blk, without a disk.

use data_plane::DEVICE_PATH;
use std::fs::{self, File};
use std::io::{self, ErrorKind};
use std::path::Path;

const SYSFS: &str = "/sys/module/vhost_blk";

/// The state of the device node of the module.
#[derive(Debug)]
pub(crate) enum Device {
    /// This process can use it.
    Usable,
    /// This user may not open it.
    Forbidden,
    /// There is none.
    Absent,
    /// It does not open for another reason.
    Failed(io::Error),
}

impl Device {
    /// Opens the device briefly.
    pub(crate) fn look() -> Device {
        Device::of(File::options().read(true).write(true).open(DEVICE_PATH))
    }

    fn of(opened: io::Result<File>) -> Device {
        match opened {
            Ok(_) => Device::Usable,
            Err(error) if error.kind() == ErrorKind::PermissionDenied => Device::Forbidden,
            Err(error) if error.kind() == ErrorKind::NotFound => Device::Absent,
            Err(error) => Device::Failed(error),
        }
    }
}

/// Returns whether the module is loaded, or built in.
pub(crate) fn is_loaded() -> bool {
    Path::new(SYSFS).exists()
}

/// The version of the loaded module.
pub(crate) fn version() -> Option<String> {
    let text = fs::read_to_string(Path::new(SYSFS).join("version")).ok()?;
    Some(text.trim().to_owned()).filter(|text| !text.is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_error_of_the_device_has_its_state() {
        let of = |kind: ErrorKind| Device::of(Err(kind.into()));
        assert!(matches!(of(ErrorKind::NotFound), Device::Absent));
        assert!(matches!(of(ErrorKind::PermissionDenied), Device::Forbidden));
        assert!(matches!(of(ErrorKind::ResourceBusy), Device::Failed(_)));
        assert!(matches!(Device::of(File::open("/dev/null")), Device::Usable));
    }
}
