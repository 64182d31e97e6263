// SPDX-License-Identifier: Apache-2.0
//! The version of the daemon and of the kernel module.

use super::protocol::{Call, CallError, INTERFACE, interface_digest};
use crate::clock;
use crate::disks::Disks;
use crate::module::{self, Device};
use serde_json::{Value, json};

/// The reply of `Version`.
pub(super) fn version(disks: &Disks, call: &Call) -> Result<Value, CallError> {
    call.no_more()?;
    Ok(json!({
        "version": env!("CARGO_PKG_VERSION"),
        "interface": INTERFACE,
        "interface_digest": interface_digest(),
        "pid": std::process::id(),
        "since": clock::told(disks.started),
        "upgraded": disks.upgraded.get().copied().map(clock::told),
        "module": module_value(module::is_loaded(), module::version(), &Device::look()),
    }))
}

/// The kernel module (`Module`).
fn module_value(is_loaded: bool, version: Option<String>, device: &Device) -> Value {
    let (state, reason) = match device {
        Device::Usable => ("usable", None),
        Device::Forbidden => ("forbidden", None),
        Device::Absent => ("absent", None),
        Device::Failed(error) => ("failed", Some(error.to_string())),
    };
    json!({"loaded": is_loaded, "version": version, "device": state, "reason": reason})
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_module_has_its_version_and_the_state_of_its_device() {
        let none = module_value(false, None, &Device::Absent);
        let expected =
            json!({"loaded": false, "version": null, "device": "absent", "reason": null});
        assert_eq!(none, expected);
        let failed = Device::Failed(std::io::Error::from_raw_os_error(libc::ENODEV));
        let told = module_value(true, Some("0.1.0".into()), &failed);
        assert_eq!((&told["version"], &told["device"]), (&json!("0.1.0"), &json!("failed")));
        assert!(told["reason"].as_str().unwrap().contains("No such device"), "{told}");
    }
}
