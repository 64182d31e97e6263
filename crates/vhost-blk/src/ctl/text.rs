// SPDX-License-Identifier: Apache-2.0
//! Replies of the daemon as text for people.

use super::unserved;
use crate::clock;
use crate::values::Size;
use backend::quoted;
use indicatif::HumanBytes;
use serde_json::{Value, json};
use std::fmt::Write as _;
use std::io::Write as _;
use std::path::Path;

/// The text of a string, or the JSON of another value; `-` for null.
pub(super) fn word(value: &Value) -> String {
    match value {
        Value::String(text) => text.clone(),
        Value::Null => "-".to_owned(),
        other => other.to_string(),
    }
}

/// The reply to a command that has no table.
pub(super) fn done(reply: &Value) -> String {
    if let Some(queues) = reply["moved_queues"].as_u64() {
        return format!("done; {queues} running queues were moved\n");
    }
    if let Some(bytes) = reply["capacity_bytes"].as_u64() {
        return format!("done; the disk has {bytes} bytes ({})\n", Size(bytes));
    }
    if let (Some(version), Some(us)) = (reply["version"].as_str(), reply["pause_us"].as_u64()) {
        let ms = us as f64 / 1000.0;
        return format!("done; version {version} runs, after a pause of {ms:.1} ms\n");
    }
    if let Some(bytes) = reply["copied_bytes"].as_u64() {
        let shared = match reply["shared"].as_bool() {
            Some(true) => ", and shares its space with the image",
            _ => "",
        };
        return format!("done; the copy has {bytes} bytes ({}){shared}\n", Size(bytes));
    }
    match reply["changed"].as_bool() {
        Some(false) => format!("nothing to do{}\n", saved_in(reply)),
        _ => format!("done{}\n", saved_in(reply)),
    }
}

/// The end of the text about a change that was saved.
pub(super) fn saved_in(reply: &Value) -> String {
    let file = reply["config"].as_str();
    file.map_or_else(String::new, |file| format!("; saved in {file}"))
}

/// The reply to an incremental backup.
pub(super) fn increment(reply: &Value) -> String {
    let bytes = reply["copied_bytes"].as_u64().unwrap_or_default();
    format!("done; {bytes} bytes ({}) of changed parts were copied\n", Size(bytes))
}

/// The bitmaps of a disk, one in each line.
pub(super) fn bitmaps(reply: &Value) -> String {
    let head = ["BITMAP", "PART", "CHANGED", "SINCE", "LAST BACKUP", "STATE"].map(String::from);
    let mut rows = vec![head];
    for bitmap in reply["bitmaps"].as_array().into_iter().flatten() {
        let size = |key: &str| bitmap[key].as_u64().map_or("-".to_owned(), |n| Size(n).to_string());
        let state = match (bitmap["problem"].as_str(), bitmap["busy"] == true) {
            (Some(problem), _) => problem,
            (None, true) => "being backed up",
            (None, false) => "ready",
        };
        rows.push([
            word(&bitmap["name"]),
            size("part_bytes"),
            size("changed_bytes"),
            word(&bitmap["since"]),
            word(&bitmap["backup"]),
            state.to_owned(),
        ]);
    }
    table(&rows)
}

/// The work in progress, one in each line.
pub(super) fn jobs(reply: &Value) -> String {
    let head = ["DISK", "JOB", "STATE", "DONE", "OF", "RATE", "LIMIT", "SINCE", "TARGET"];
    let mut rows = vec![head.map(String::from)];
    for job in reply["jobs"].as_array().into_iter().flatten() {
        let number = |key: &str| job[key].as_u64().unwrap_or_default();
        rows.push([
            word(&job["disk"]),
            word(&job["kind"]),
            word(&job["state"]),
            percent(number("done_bytes"), number("total_bytes")),
            Size(number("total_bytes")).to_string(),
            format!("{}/s", HumanBytes(number("bytes_per_s"))),
            job["bandwidth"]
                .as_u64()
                .map_or("-".to_owned(), |rate| format!("{}/s", HumanBytes(rate))),
            word(&job["since"]),
            word(&job["target"]),
        ]);
    }
    table(&rows)
}

/// Work in progress in one line.
pub(crate) fn job(job: &Value) -> String {
    let number = |key: &str| job[key].as_u64().unwrap_or_default();
    let done = percent(number("done_bytes"), number("total_bytes"));
    let rate = HumanBytes(number("bytes_per_s"));
    let (kind, target, state) = (word(&job["kind"]), word(&job["target"]), word(&job["state"]));
    format!("{kind} to {target}: {state}, {done}, {rate}/s")
}

/// A part of a number in percent.
fn percent(part: u64, all: u64) -> String {
    let percent = (u128::from(part) * 100).checked_div(all.into()).unwrap_or(100);
    format!("{percent}%")
}

/// A time, and the time since.
pub(super) fn since(time: &Value) -> String {
    match clock::age(&word(time)) {
        Some(age) => format!("{} ({age})", word(time)),
        None => word(time),
    }
}

/// The reply to `snapshot`.
pub(super) fn snapshot(reply: &Value) -> String {
    let risk = match reply["marked"].as_bool() {
        Some(false) => "the image has no mark: make sure that no program writes to it\n",
        _ => "",
    };
    moved(reply, "overlay") + risk
}

/// The reply to `commit`.
pub(super) fn commit(reply: &Value) -> String {
    let merged = word(&reply["merged"]);
    moved(reply, "image") + &format!("{merged} is no longer needed: remove it\n")
}

/// The reply to the completion of a mirror.
pub(super) fn mirrored(reply: &Value) -> String {
    let before = word(&reply["before"]);
    let rest = match reply["marked"].as_bool() {
        Some(true) => {
            format!("{before} has the content of that moment, and can no longer be started\n")
        }
        _ => format!(
            "{before} has no mark, and its content is old: make sure that no disk is started with it\n"
        ),
    };
    moved(reply, "image") + &rest
}

/// The reply to the begin of a mirror.
pub(super) fn mirror_begun(_: &Value) -> String {
    "done; the copy has begun: mirror --complete makes the guest go on in the new storage\n"
        .to_owned()
}

/// The same, after the first copy.
pub(super) fn mirror_is_ready(_: &Value) -> String {
    "done; everything was copied: mirror --complete makes the guest go on in the new storage\n"
        .to_owned()
}

/// The mirror of a disk.
pub(super) fn mirror(reply: &Value) -> String {
    let mirror = &reply["mirror"];
    if mirror.is_null() {
        let ended = reply["ended"].as_str().map(|told| format!("the last one has ended: {told}\n"));
        return format!("there is no mirror\n{}", ended.unwrap_or_default());
    }
    format!("target      {}\nstate       {}\n", word(&mirror["target"]), mirror_state(mirror))
}

/// The state of a mirror in words.
fn mirror_state(mirror: &Value) -> String {
    let size = |name: &str| Size(mirror[name].as_u64().unwrap_or_default());
    format!(
        "{}: {} of {} copied, {} changed since",
        word(&mirror["state"]),
        size("copied_bytes"),
        size("total_bytes"),
        size("changed_bytes"),
    )
}

/// A disk that goes on in another image, which is this member of the reply.
fn moved(reply: &Value, image: &str) -> String {
    let (image, options) = (word(&reply[image]), word(&reply["options"]));
    let ms = reply["pause_us"].as_u64().unwrap_or_default() as f64 / 1000.0;
    let next = match reply["config"].as_str() {
        Some(file) => format!("{file} has the options of its next start: {options}"),
        None => format!("its next start needs {options}"),
    };
    format!("done; the guest goes on in {image}, after a pause of {ms:.1} ms\n{next}\n")
}

/// The files of a disk, one in each line.
pub(super) fn chain(reply: &Value) -> String {
    let mut rows = vec![["FILE", "FORMAT", "SIZE", "ON DISK"].map(String::from)];
    for file in reply["files"].as_array().into_iter().flatten() {
        let size = |key: &str| file[key].as_u64().map_or("-".to_owned(), |n| Size(n).to_string());
        let (path, format) = (word(&file["path"]), word(&file["format"]));
        rows.push([path, format, size("virtual_bytes"), size("disk_bytes")]);
    }
    table(&rows)
}

/// The discards of a disk, and its files, one in each line.
pub(super) fn discard_stats(reply: &Value) -> String {
    let size = |value: &Value| value.as_u64().map_or("-".to_owned(), |n| Size(n).to_string());
    let mut rows = vec![["FILE", "FORMAT", "SIZE", "ALLOCATED"].map(String::from)];
    for file in reply["files"].as_array().into_iter().flatten() {
        let (path, format) = (word(&file["path"]), word(&file["format"]));
        rows.push([path, format, size(&file["virtual_bytes"]), size(&file["allocated_bytes"])]);
    }
    let files = if rows.len() > 1 { table(&rows) } else { String::new() };
    format!(
        "size        {}\ndiscards    {} requests, {}\nunmapped    {}\n{files}",
        size(&reply["virtual_bytes"]),
        reply["discards"],
        size(&reply["discarded_bytes"]),
        size(&reply["unmapped_bytes"]),
    )
}

/// The disks, one in each line.
pub(super) fn list(reply: &Value) -> String {
    let mut rows =
        vec![["NAME", "STATE", "FRONT-END", "PLANE", "SIZE", "GROUP", "SOCKET"].map(String::from)];
    for disk in reply["disks"].as_array().into_iter().flatten() {
        let front_end = match disk["front_end_connected"].as_bool() {
            Some(true) => "connected",
            Some(false) => "none",
            None => "-",
        };
        let size = disk["capacity_bytes"].as_u64();
        rows.push([
            word(&disk["name"]),
            word(&disk["state"]),
            front_end.to_owned(),
            word(&disk["data_plane"]),
            size.map_or("-".to_owned(), |size| Size(size).to_string()),
            word(&disk["limits"]["group"]),
            word(&disk["socket"]),
        ]);
    }
    table(&rows) + &unserved::below_list(reply)
}

/// The reply to `save`.
pub(super) fn saved(reply: &Value) -> String {
    format!("done; the next start of the daemon serves the disk of {}\n", word(&reply["config"]))
}

/// A value as a word of a command line.
fn shell_word(value: &Value) -> String {
    quoted(Path::new(&word(value)))
}

/// The options of a disk that are no defaults, and their source.
fn options_text(status: &Value) -> String {
    let differing = crate::disk_options::differing(&status["options"]);
    let options = differing
        .iter()
        .map(|(name, value)| format!("{}={}", name.replace('_', "-"), shell_word(value)));
    options.collect::<Vec<_>>().join(" ")
}

/// The end of a removal.
pub(super) fn removed(reply: &Value) -> String {
    match (reply["given_up"] == true, reply["config"].as_str()) {
        (false, None) => done(reply),
        (false, Some(file)) => {
            format!("done; its file {file} stays, and a reload adds the disk again; --save removes it\n")
        }
        (true, _) => "given up: its image stays in use, and the storage may write to the memory of the guest, until \
                 the storage answers\n"
            .to_owned(),
    }
}

/// Prints the warnings of a reply on standard error, as objects beside JSON.
pub(super) fn warn(reply: &Value, as_json: bool) {
    for warning in reply["warnings"].as_array().into_iter().flatten() {
        // A failed write to stderr has no remedy.
        let _ = match as_json {
            true => writeln!(std::io::stderr(), "{}", json!({"warning": warning})),
            false => writeln!(std::io::stderr(), "vhost-blk: warning: {}", word(warning)),
        };
    }
}

/// The treatment of each disk at a reload.
pub(super) fn changes(reply: &Value) -> String {
    let changes = reply["changes"].as_array();
    let mut text = String::new();
    for change in changes.into_iter().flatten() {
        let _ = write!(text, "{}: {}", word(&change["disk"]), word(&change["outcome"]));
        let reason = change["reason"].as_str().map(|reason| format!(": {reason}"));
        text += &reason.unwrap_or_default();
        text += "\n";
        for warning in change["warnings"].as_array().into_iter().flatten() {
            let _ = writeln!(text, "{}: warning: {}", word(&change["disk"]), word(warning));
        }
    }
    if text.is_empty() { "nothing to do\n".to_owned() } else { text }
}

/// An event in a line.
pub(super) fn event(event: &Value) -> String {
    let disk = event["disk"].as_str().unwrap_or("-");
    let mut text = format!("{} {disk} {}", word(&event["time"]), word(&event["event"]));
    for (name, value) in event.as_object().into_iter().flatten() {
        if !["time", "disk", "event"].contains(&&**name) {
            let _ = write!(text, " {name}={}", word(value));
        }
    }
    text + "\n"
}

/// Columns of equal width.
pub(crate) fn table<R: AsRef<[String]>>(rows: &[R]) -> String {
    let columns = rows.first().map_or(0, |row| row.as_ref().len());
    let width = |at: usize| rows.iter().map(|row| row.as_ref()[at].len()).max().unwrap_or(0);
    let widths: Vec<usize> = (0..columns).map(width).collect();
    let mut text = String::new();
    for row in rows {
        let cells = row.as_ref().iter().zip(&widths);
        let line: String = cells.map(|(cell, width)| format!("{cell:<width$}  ")).collect();
        text += line.trim_end();
        text += "\n";
    }
    text
}

pub(super) fn limits_text(limits: &Value) -> String {
    let iops = limits["iops"].as_u64().map(|iops| format!("{iops} requests/s"));
    let bytes = limits["bandwidth"].as_u64().map(|bytes| format!("{}/s", exact_bytes(bytes)));
    let rates = match iops.into_iter().chain(bytes).collect::<Vec<_>>() {
        none if none.is_empty() => "none".to_owned(),
        some => format!("{}, burst {} ms", some.join(", "), limits["burst_ms"]),
    };
    match limits["group"].as_str() {
        Some(group) => format!("{rates}, of the group {group}"),
        None => rates,
    }
}

/// Bytes with their largest whole unit, such as `20 MiB`.
fn exact_bytes(bytes: u64) -> String {
    let size = Size(bytes).to_string();
    match size.find(|c: char| c.is_ascii_alphabetic()) {
        Some(at) => format!("{} {}iB", &size[..at], &size[at..]),
        None => format!("{size} B"),
    }
}

fn failure_text(status: &Value, last: &Value, at: &Value) -> String {
    let counts = status["failures"].as_object().into_iter().flatten();
    let all: u64 = counts.filter_map(|(_, count)| count.as_u64()).sum();
    let place = last["sector"].as_u64().map(|sector| format!(" at sector {sector}"));
    let operation = last["operation"].as_str().unwrap_or("a request");
    let place = place.unwrap_or_default();
    let (at, reason) = (word(at), word(&last["reason"]));
    format!("{all} requests; last at {at}: {operation}{place}: {reason}")
}

fn state_text(status: &Value) -> String {
    match (status["halted"]["reason"].as_str(), status["paused"] == true) {
        (Some(why), false) => format!("halted since {}: {why}", since(&status["halted"]["since"])),
        (Some(why), true) => {
            format!("paused, and halted since {}: {why}", since(&status["halted"]["since"]))
        }
        (None, true) => "paused: no request is taken".to_owned(),
        (None, false) => "serving".to_owned(),
    }
}

/// The state of a disk.
pub(super) fn status(status: &Value) -> String {
    let word = |name: &str| word(&status[name]);
    let either = |name: &str, yes, no| if status[name] == true { yes } else { no };
    let mut text = String::new();
    let mut line = |name: &str, value: String| {
        writeln!(text, "{name:<12}{value}").expect("a string grows");
    };
    line("name", word("name"));
    line("disk", word("disk"));
    line("size", format!("{} bytes", word("capacity_bytes")));
    line("state", state_text(status));
    if let Some(queues) = status["stalled_queues"].as_array().filter(|list| !list.is_empty()) {
        let queues: Vec<_> = queues.iter().map(Value::to_string).collect();
        line("stalled", format!("the storage does not answer, queues {}", queues.join(", ")));
    }
    if let Some(last) = status["last_failure"].as_object() {
        line("failed", failure_text(status, &last["failure"], &last["at"]));
    }
    if let Some(reason) = status["storage_gone"]["reason"].as_str() {
        let since = since(&status["storage_gone"]["since"]);
        line("storage", format!("{reason}, since {since}"));
    }
    if let Some(target) = status["mirror"]["target"].as_str() {
        line("mirror", format!("to {target}, {}", mirror_state(&status["mirror"])));
    }
    line("limits", limits_text(&status["limits"]));
    line("data plane", format!("{} ({})", word("data_plane"), word("why")));
    match status["origin"].as_str() {
        Some("directory") => line("origin", "a file of --config-dir".into()),
        Some(_) => line("origin", "a command".into()),
        None => {}
    }
    if status["options"].is_object() {
        line("options", options_text(status));
    }
    line("front-end", either("front_end_connected", "connected", "none").into());
    line("features", word("features"));
    line("cache", either("writeback", "writeback", "writethrough").into());
    for queue in status["queues"].as_array().into_iter().flatten() {
        let counts = ["chains", "refused", "kicks", "calls"];
        let counts =
            counts.iter().filter_map(|name| Some(format!(", {} {name}", queue.get(name)?)));
        let state = match queue["runs_on"].as_str() {
            Some(plane) => format!("runs on {plane}, {} descriptors", queue["size"]),
            None => "stopped".to_owned(),
        };
        line(&format!("queue {}", queue["index"]), state + &counts.collect::<String>());
    }
    for (name, told) in status["kernel"].as_object().into_iter().flatten() {
        line("kernel", format!("{name}: {}", told.as_str().unwrap_or_default()));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn a_status_is_told_line_by_line() {
        let told = json!({
            "name": "a", "disk": "file a.img (direct)", "capacity_bytes": 4096, "paused": false,
            "limits": {"iops": 1000, "bandwidth": 50 << 20, "burst_ms": 100},
            "data_plane": "uring", "why": "--data-plane says so",
            "front_end_connected": true, "features": "0x3", "writeback": false,
            "queues": [
                {"index": 0, "runs_on": "uring", "size": 256, "chains": 7, "refused": 0,
                 "kicks": 3, "calls": 2},
                {"index": 1, "runs_on": null, "size": 0},
            ],
            "kernel": {"backend": "file", "queue0": "running chains=3"},
        });
        let expected = "\
name        a
disk        file a.img (direct)
size        4096 bytes
state       serving
limits      1000 requests/s, 50 MiB/s, burst 100 ms
data plane  uring (--data-plane says so)
front-end   connected
features    0x3
cache       writethrough
queue 0     runs on uring, 256 descriptors, 7 chains, 0 refused, 3 kicks, 2 calls
queue 1     stopped
kernel      backend: file
kernel      queue0: running chains=3
";
        assert_eq!(status(&told), expected);
    }

    #[test]
    fn a_halt_and_a_stall_are_told() {
        let mut told = json!({
            "paused": true,
            "halted": {"reason": "a flush failed: no space", "since": "2026-11-25T11:30:12Z"},
            "stalled_queues": [1, 3],
        });
        let text = status(&told);
        let (begin, end) = ("2026-11-25T11:30:12Z (", "): a flush failed: no space\n");
        let line = text.lines().nth(3).unwrap();
        assert!(
            line.starts_with(&format!("state       paused, and halted since {begin}")),
            "{text}"
        );
        assert!(text.contains(end), "{text}");
        assert!(text.contains("the storage does not answer, queues 1, 3\n"), "{text}");
        told["storage_gone"] = json!({"reason": "its block device has gone", "since": "T"});
        assert!(status(&told).contains("storage     its block device has gone, since T\n"));
        told["paused"] = false.into();
        assert!(status(&told).contains(&format!("state       halted since {begin}")), "{text}");
    }
}
