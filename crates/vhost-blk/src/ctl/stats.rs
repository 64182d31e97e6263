// SPDX-License-Identifier: Apache-2.0
//! The counters of the queues of a disk as text for people.

use super::text::{limits_text, table, word};
use serde_json::Value;

/// A column: its heading, and its text for a queue.
type Column = (&'static str, fn(&Value) -> String);

/// The requests of each queue.
const REQUESTS: [Column; 12] = [
    ("QUEUE", |queue| word(&queue["index"])),
    ("REQUESTS", |queue| word(&queue["chains"])),
    ("FAILED", |queue| word(&queue["failed"])),
    ("REFUSED", |queue| word(&queue["refused"])),
    ("READ", |queue| word(&queue["read_bytes"])),
    ("WRITTEN", |queue| word(&queue["write_bytes"])),
    ("KICKS", |queue| word(&queue["kicks"])),
    ("CALLS", |queue| word(&queue["calls"])),
    ("COALESCED", |queue| word(&queue["coalesced"])),
    ("LIMITED", |queue| word(&queue["throttled"])),
    ("READ-P99-US", |queue| word(&queue["latency"]["read"]["p99_below_us"])),
    ("WRITE-P99-US", |queue| word(&queue["latency"]["write"]["p99_below_us"])),
];

/// The work of its thread, and its errors by kind.
const THREADS: [Column; 13] = [
    ("QUEUE", |queue| word(&queue["index"])),
    ("SUPPRESSED", |queue| word(&queue["suppressed"])),
    ("RECOVERED", |queue| word(&queue["recovered"])),
    ("POLLS", |queue| word(&queue["polls"])),
    ("POLL-HITS", |queue| word(&queue["polls_won"])),
    ("POLL-S", |queue| seconds(&queue["poll_ns"])),
    ("BATCH", |queue| word(&queue["batch_size"])),
    ("HOLDS-CALLS", |queue| yes_or_no(&queue["coalescing"])),
    ("IO-ERRORS", |queue| word(&queue["failed_io"])),
    ("NO-SPACE", |queue| word(&queue["failed_no_space"])),
    ("READ-ONLY", |queue| word(&queue["failed_read_only"])),
    ("REMOVED", |queue| word(&queue["failed_removed"])),
    ("TIMEOUTS", |queue| word(&queue["failed_timeout"])),
];

/// The counters of the queues of a disk: two tables with a line for each queue.
pub(super) fn stats(reply: &Value) -> String {
    let queues = reply["queues"].as_array().map(Vec::as_slice).unwrap_or_default();
    let (requests, threads) = (of(&REQUESTS, queues), of(&THREADS, queues));
    format!("{requests}\n{threads}\nlimits      {}\n", limits_text(&reply["limits"]))
}

fn of(columns: &[Column], queues: &[Value]) -> String {
    let names = columns.iter().map(|(name, _)| (*name).to_owned()).collect::<Vec<String>>();
    let row = |queue| columns.iter().map(|(_, text)| text(queue)).collect();
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
