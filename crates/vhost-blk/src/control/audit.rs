// SPDX-License-Identifier: Apache-2.0
//! A log line about each command of a client that changes something, with its outcome.

use super::client::Client;
use super::protocol::{Call, CallError, INTERFACE};
use crate::values::disk_name;

/// A command that changes something.
pub(super) struct Audit {
    method: String,
    /// The disk that the client names.
    disk: String,
}

impl Audit {
    /// The audit of a call; `None`: it only looks, or is no method of the interface.
    pub(super) fn of(call: &Call) -> Option<Audit> {
        let method = call.method.strip_prefix(INTERFACE)?.strip_prefix('.')?;
        changes(method).then(|| {
            let named = call.parameters.get("name").and_then(|name| name.as_str());
            let disk = named.and_then(|name| disk_name(name).ok()).unwrap_or_default();
            Audit { method: method.to_owned(), disk }
        })
    }

    /// The audit of the upgrade that has brought this program.
    pub(super) fn of_upgrade() -> Audit {
        Audit { method: "Upgrade".to_owned(), disk: String::new() }
    }

    /// Logs the begin of a command whose end may come much later, or not in this program, and of one after which there
    /// may be no such lines.
    pub(super) fn begin(&self, client: &Client<'_>) {
        let Audit { method, disk } = self;
        let (pid, uid) = (client.pid, client.uid);
        let lasts = ["Backup", "Commit", "CompleteMirror", "SetLogLevel", "Upgrade"];
        if lasts.contains(&&**method) {
            tracing::info!(method, disk, pid, uid, outcome = "begun", "command");
        }
    }

    /// Logs the end.
    pub(super) fn end(&self, client: &Client<'_>, outcome: Result<(), &CallError>) {
        let Audit { method, disk } = self;
        let found = client.disk.borrow();
        let disk = if found.is_empty() { disk } else { &*found };
        let (pid, uid) = (client.pid, client.uid);
        match outcome {
            Ok(()) => tracing::info!(method, disk, pid, uid, outcome = "ok", "command"),
            Err(error) => {
                let reason = error.to_string();
                tracing::info!(method, disk, pid, uid, outcome = "error", reason, "command");
            }
        }
    }
}

/// Returns whether a method of the interface changes something.
fn changes(method: &str) -> bool {
    match method {
        "Add" | "Backup" | "CancelJob" | "Commit" | "CompleteMirror" | "Limit" | "Mirror"
        | "Pause" | "Reload" | "Remove" | "RemoveBitmap" | "Resize" | "Resume" | "Save"
        | "SetCache" | "SetErrors" | "SetJobBandwidth" | "SetLogLevel" | "Snapshot" | "Stop"
        | "Switch" | "Trace" | "Upgrade" => true,
        // Bitmaps, DiscardStats, Events, Jobs, List, MirrorStatus, Snapshots, Stats, Status, Version.
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::control::protocol::DESCRIPTION;
    use serde_json::json;

    #[test]
    fn each_method_is_a_change_or_only_looks() {
        let looks = [
            "List",
            "Status",
            "Stats",
            "DiscardStats",
            "Bitmaps",
            "Jobs",
            "MirrorStatus",
            "Snapshots",
            "Events",
            "Version",
        ];
        let methods = DESCRIPTION.lines().filter_map(|line| line.strip_prefix("method "));
        let methods = methods.filter_map(|line| line.split('(').next());
        let wrong: Vec<_> =
            methods.filter(|method| changes(method) == looks.contains(method)).collect();
        assert_eq!(wrong, [""; 0]);
    }

    #[test]
    fn a_name_that_no_disk_can_have_is_not_logged() {
        let of = |method: &str, name: &str| {
            let call = json!({"method": method, "parameters": {"name": name}});
            Audit::of(&Call::of(call).unwrap()).map(|audit| audit.disk)
        };
        assert_eq!(of("io.vhostblk.Pause", "a").as_deref(), Some("a"));
        assert_eq!(of("io.vhostblk.Pause", "a\nb").as_deref(), Some(""));
        assert_eq!(of("io.vhostblk.Status", "a"), None);
        assert_eq!(of("Pause", "a"), None);
    }
}
