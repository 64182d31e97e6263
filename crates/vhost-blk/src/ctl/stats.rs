// SPDX-License-Identifier: Apache-2.0
//! The counters of the queues of a disk as text for people.

use super::text::{limits_text, table, word};
use serde_json::Value;

/// A column: its heading, and the place and the form of its value in a queue.
type Column = (&'static str, &'static str, fn(&Value) -> String);

/// The requests of each queue.
const REQUESTS: [Column; 12] = [
    ("QUEUE", "/index", word),
    ("REQUESTS", "/chains", word),
    ("FAILED", "/failed", word),
    ("REFUSED", "/refused", word),
    ("READ", "/read_bytes", word),
    ("WRITTEN", "/write_bytes", word),
    ("KICKS", "/kicks", word),
    ("CALLS", "/calls", word),
    ("COALESCED", "/coalesced", word),
    ("LIMITED", "/throttled", word),
    ("READ-P99-US", "/latency/read/p99_below_us", word),
    ("WRITE-P99-US", "/latency/write/p99_below_us", word),
];

/// The work of its thread, and its errors by kind.
const THREADS: [Column; 13] = [
    ("QUEUE", "/index", word),
    ("SUPPRESSED", "/suppressed", word),
    ("RECOVERED", "/recovered", word),
    ("POLLS", "/polls", word),
    ("POLL-HITS", "/polls_won", word),
    ("POLL-S", "/poll_ns", seconds),
    ("BATCH", "/batch_size", word),
    ("HOLDS-CALLS", "/coalescing", yes_or_no),
    ("IO-ERRORS", "/failed_io", word),
    ("NO-SPACE", "/failed_no_space", word),
    ("READ-ONLY", "/failed_read_only", word),
    ("REMOVED", "/failed_removed", word),
    ("TIMEOUTS", "/failed_timeout", word),
];

/// The counters of the queues of a disk: two tables with a line for each queue.
pub(super) fn stats(reply: &Value) -> String {
    let queues = reply["queues"].as_array().map(Vec::as_slice).unwrap_or_default();
    let (requests, threads) = (of(&REQUESTS, queues), of(&THREADS, queues));
    format!("{requests}\n{threads}\nlimits      {}\n", limits_text(&reply["limits"]))
}

/// The same, under the name of the disk.
pub(super) fn named(reply: &Value) -> String {
    format!("disk {}\n{}", word(&reply["name"]), stats(reply))
}

fn of(columns: &[Column], queues: &[Value]) -> String {
    let names = columns.iter().map(|(name, ..)| (*name).to_owned()).collect::<Vec<String>>();
    let text = |queue: &Value, (_, place, form): &Column| {
        form(queue.pointer(place).unwrap_or(&Value::Null))
    };
    let row = |queue| columns.iter().map(|column| text(queue, column)).collect();
    let rows: Vec<Vec<String>> = [names].into_iter().chain(queues.iter().map(row)).collect();
    table(&rows)
}

fn seconds(nanos: &Value) -> String {
    nanos.as_u64().map_or_else(|| word(nanos), |nanos| format!("{:.3}", nanos as f64 / 1e9))
}

fn yes_or_no(flag: &Value) -> String {
    match flag.as_u64() {
        None => "-",
        Some(0) => "no",
        Some(_) => "yes",
    }
    .to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn each_queue_has_its_requests_and_the_work_of_its_thread() {
        let running = json!({
            "index": 0, "chains": 9, "failed": 1, "refused": 0, "read_bytes": 4096, "write_bytes": 0,
            "kicks": 7, "calls": 5, "coalesced": 2, "throttled": 0, "suppressed": 3, "recovered": 4,
            "polls": 8, "polls_won": 6, "poll_ns": 1_234_567_890, "batch_size": 16, "coalescing": 1,
            "failed_io": 0, "failed_no_space": 1, "failed_read_only": 0, "failed_removed": 0,
            "failed_timeout": 0, "latency": {"read": {"p99_below_us": 64}},
        });
        let mut stopped = running.clone();
        stopped["index"] = 1.into();
        (stopped["batch_size"], stopped["coalescing"]) = (Value::Null, Value::Null);
        let told = stats(&json!({"queues": [running, stopped], "limits": {}}));
        let expected = "\
QUEUE  REQUESTS  FAILED  REFUSED  READ  WRITTEN  KICKS  CALLS  COALESCED  LIMITED  READ-P99-US  WRITE-P99-US
0      9         1       0        4096  0        7      5      2          0        64           -
1      9         1       0        4096  0        7      5      2          0        64           -

QUEUE  SUPPRESSED  RECOVERED  POLLS  POLL-HITS  POLL-S  BATCH  HOLDS-CALLS  IO-ERRORS  NO-SPACE  READ-ONLY  REMOVED  TIMEOUTS
0      3           4          8      6          1.235   16     yes          0          1         0          0        0
1      3           4          8      6          1.235   -      -            0          1         0          0        0

limits      none
";
        assert_eq!(told, expected);
    }
}
