// SPDX-License-Identifier: Apache-2.0
//! `vhost-blk ctl version`: the versions of the daemon, of the kernel module and of this program.

use super::ask::Asker;
use super::text::{since, warn, word};
use crate::control::protocol::interface_digest;
use crate::failure::Failure;
use crate::output::print;
use serde_json::{Value, json};

const OWN: &str = env!("CARGO_PKG_VERSION");

/// Prints the versions, and a warning for each difference.
///
/// # Errors
/// [`Failure`] if no daemon answers, or it does not know the method.
pub(super) fn show(mut asker: Asker<'_>, as_json: bool) -> Result<(), Failure> {
    let daemon = asker.ask("get the version of the daemon", "Version", &json!({}), None)?;
    let told = told(&daemon);
    print(if as_json { format!("{told}\n") } else { text(&told) })?;
    warn(&told, as_json);
    Ok(())
}

/// The reply with the version of this program and the differences.
fn told(daemon: &Value) -> Value {
    json!({
        "ctl": {"version": OWN, "interface_digest": interface_digest()},
        "daemon": daemon,
        "warnings": warnings(daemon),
    })
}

fn warnings(daemon: &Value) -> Vec<String> {
    let version = word(&daemon["version"]);
    let mut warnings = Vec::new();
    if version != OWN {
        warnings.push(format!(
            "the daemon runs version {version}, and this program is {OWN}: after an installation run vhost-blk ctl \
             upgrade"
        ));
    } else if daemon["interface_digest"] != interface_digest() {
        warnings.push(format!(
            "the daemon and this program have the version {OWN} and different interfaces: they are different builds; \
             after an installation run vhost-blk ctl upgrade"
        ));
    }
    if let Some(module) = daemon["module"]["version"].as_str().filter(|module| **module != version)
    {
        warnings.push(format!(
            "the loaded kernel module is version {module}, and the daemon is {version}: load the one that belongs to it"
        ));
    }
    warnings
}

fn text(told: &Value) -> String {
    let daemon = &told["daemon"];
    let mut lines = vec![
        ("ctl", OWN.to_owned()),
        ("daemon", word(&daemon["version"])),
        (
            "interface",
            format!("{} {}", word(&daemon["interface"]), word(&daemon["interface_digest"])),
        ),
        ("pid", word(&daemon["pid"])),
        ("since", since(&daemon["since"])),
    ];
    if daemon["upgraded"].is_string() {
        lines.push(("upgraded", since(&daemon["upgraded"])));
    }
    lines.push(("module", module_text(&daemon["module"])));
    lines.iter().map(|(name, value)| format!("{name:<10}  {value}\n")).collect()
}

fn module_text(module: &Value) -> String {
    if module["loaded"] != true {
        return "not loaded".to_owned();
    }
    let version = module["version"].as_str().map(|version| format!(", version {version}"));
    let device = match module["device"].as_str() {
        Some("usable") => String::new(),
        Some("forbidden") => "; the daemon may not open its device".to_owned(),
        Some("absent") => "; the daemon sees no device of it".to_owned(),
        _ => format!("; its device does not open: {}", word(&module["reason"])),
    };
    format!("loaded{}{device}", version.unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn daemon(version: &str, digest: &str, module: &Value) -> Value {
        json!({
            "version": version, "interface": "io.vhostblk", "interface_digest": digest, "pid": 7,
            "since": "2026-11-25T10:50:12Z", "upgraded": null,
            "module": module,
        })
    }

    #[test]
    fn each_difference_is_a_warning_with_its_remedy() {
        let absent = json!({"loaded": false, "version": null, "device": "absent", "reason": null});
        let digest = interface_digest();
        assert_eq!(warnings(&daemon(OWN, &digest, &absent)), [""; 0]);
        let other = warnings(&daemon("9.8.7", "x", &absent));
        assert!(other.len() == 1 && other[0].contains("runs version 9.8.7"), "{other:?}");
        assert!(other[0].contains("vhost-blk ctl upgrade"), "{other:?}");
        let build = warnings(&daemon(OWN, "x", &absent));
        assert!(build.len() == 1 && build[0].contains("different builds"), "{build:?}");
        let module = json!({"loaded": true, "version": "0.0.9", "device": "usable"});
        let old = warnings(&daemon(OWN, &digest, &module));
        assert!(old.len() == 1 && old[0].contains("module is version 0.0.9"), "{old:?}");
    }

    #[test]
    fn the_module_is_told_in_one_line() {
        let of = |loaded: bool, version: Option<&str>, device: &str| {
            module_text(&json!({
                "loaded": loaded, "version": version, "device": device, "reason": "busy",
            }))
        };
        assert_eq!(of(false, None, "absent"), "not loaded");
        assert_eq!(of(true, Some("0.1.0"), "usable"), "loaded, version 0.1.0");
        assert_eq!(of(true, None, "forbidden"), "loaded; the daemon may not open its device");
        assert_eq!(of(true, None, "absent"), "loaded; the daemon sees no device of it");
        assert_eq!(of(true, None, "failed"), "loaded; its device does not open: busy");
    }

    #[test]
    fn the_time_of_an_upgrade_is_shown() {
        let module = json!({"loaded": false});
        let mut daemon = daemon(OWN, "x", &module);
        assert!(!text(&told(&daemon)).contains("upgraded "));
        daemon["upgraded"] = "2026-11-26T10:50:12Z".into();
        assert!(text(&told(&daemon)).contains("\nupgraded    2026-11-26T10:50:12Z ("));
    }
}
