// SPDX-License-Identifier: Apache-2.0
//! Disks that are not served, in replies of the daemon: they are being opened, or could not be started.

use super::text::{since, word};
use crate::failure::Failure;
use serde_json::Value;

/// The reply to `status`.
pub(super) fn status(reply: &Value) -> String {
    let row = &reply["unserved"];
    if row.is_null() {
        return super::text::status(&reply["status"]);
    }
    let mut text = format!("name        {}\nstate       {}\n", word(&row["name"]), state(row));
    text += &format!("socket      {}\n", word(&row["socket"]));
    let tries = row["start"]["failed_tries"].as_u64().unwrap_or_default();
    if let Some(failure) = failure(row) {
        let noun = if tries == 1 { "try" } else { "tries" };
        text += &format!("failed      {tries} {noun}; last: {failure}\n");
    }
    text
}

/// The lines below the list of disks.
pub(super) fn below_list(reply: &Value) -> String {
    let rows = reply["disks"].as_array().into_iter().flatten();
    let line =
        |row: &Value| Some(format!("{}: {}: {}\n", word(&row["name"]), state(row), failure(row)?));
    rows.filter_map(line).collect()
}

/// The error after a reload that could not treat all disks.
///
/// # Errors
/// [`Failure`] with the names of the disks.
pub(super) fn check_changes(reply: &Value) -> Result<(), Failure> {
    let of = |outcome: &str| -> Vec<String> {
        let changes = reply["changes"].as_array().into_iter().flatten();
        changes.filter(|it| it["outcome"] == outcome).map(|it| word(&it["disk"])).collect()
    };
    let (failed, starting) = (of("failed"), of("starting"));
    let parts = [(failed, "failed"), (starting, "not served yet")];
    let told = parts.iter().filter(|(names, _)| !names.is_empty());
    let told: Vec<String> =
        told.map(|(names, state)| format!("{state}: {}", names.join(", "))).collect();
    match told.is_empty() {
        true => Ok(()),
        false => Err(Failure::run(
            "use all of the configuration",
            told.join("; "),
            "see the list above, and vhost-blk ctl list",
        )),
    }
}

fn state(row: &Value) -> String {
    let since = since(&row["start"]["since"]);
    format!("{} since {since}", word(&row["state"]))
}

fn failure(row: &Value) -> Option<String> {
    let failure = &row["start"]["failure"];
    let part = |name: &str| failure[name].as_str().unwrap_or_default();
    let told = Failure::run(part("what"), part("why"), part("remedy"));
    (!failure.is_null()).then(|| told.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn a_reload_names_the_disks_that_failed_and_those_that_are_not_served_yet() {
        let changes = |outcomes: &[(&str, &str)]| {
            let each =
                outcomes.iter().map(|(disk, outcome)| json!({"disk": disk, "outcome": outcome}));
            json!({"changes": each.collect::<Vec<_>>()})
        };
        assert!(check_changes(&json!({})).is_ok());
        assert!(check_changes(&changes(&[("a", "added")])).is_ok());
        let told = changes(&[("a", "failed"), ("b", "added"), ("c", "failed"), ("d", "starting")]);
        let line = check_changes(&told).unwrap_err().to_string();
        assert!(line.contains("failed: a, c; not served yet: d"), "{line}");
        assert!(check_changes(&changes(&[("d", "starting")])).is_err());
    }

    #[test]
    fn a_failed_disk_has_its_error_and_its_tries() {
        let row = json!({
            "name": "a", "state": "failed", "socket": "/s",
            "start": {
                "since": "2026-11-25T11:30:12Z", "failed_tries": 3,
                "failure": {"what": "open the disk", "why": "it is gone", "remedy": "bring it back"},
            },
        });
        let text = status(&json!({"status": null, "unserved": row}));
        for line in [
            "name        a\n",
            "state       failed since 2026-11-25T11:30:12Z (",
            "socket      /s\n",
            "failed      3 tries; last: cannot open the disk: it is gone; bring it back\n",
        ] {
            assert!(text.contains(line), "{text}");
        }
        let text = below_list(&json!({"disks": [row, {"name": "b", "state": "serving"}]}));
        assert!(
            text.starts_with("a: failed since ") && text.ends_with("; bring it back\n"),
            "{text}"
        );
        assert_eq!(text.lines().count(), 1, "{text}");
    }
}
