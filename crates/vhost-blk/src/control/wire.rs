// SPDX-License-Identifier: Apache-2.0
//! The JSON of the control socket.

use data_plane::{Histogram, Limits, Operation, PlaneKind, QueueReport};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};
use std::io::{self, Write};
use std::num::NonZeroU64;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::time::Duration;
use vhost_user::{Command, QueueStatus, Status};

/// A data plane by name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum PlaneName {
    /// The kernel module.
    Kernel,
    /// The daemon's own io_uring threads.
    Uring,
}

impl From<PlaneName> for PlaneKind {
    fn from(name: PlaneName) -> Self {
        match name {
            PlaneName::Kernel => PlaneKind::Kernel,
            PlaneName::Uring => PlaneKind::Uring,
        }
    }
}

/// A line to the daemon.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "command", rename_all = "lowercase", deny_unknown_fields)]
pub enum Request {
    /// Gets the state of the device.
    Status {},
    /// Moves the running queues.
    Switch {
        /// The new data plane.
        plane: PlaneName,
    },
    /// Enlarges the disk.
    Resize {
        /// The new size in bytes; without it, the present size of the storage.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        bytes: Option<u64>,
    },
    /// Takes no request until the resume.
    Pause {},
    /// Ends a pause.
    Resume {},
    /// Replaces the limits of the disk. A missing one is none.
    Limit {
        /// Requests per second.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        iops: Option<NonZeroU64>,
        /// Bytes per second.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        bandwidth: Option<NonZeroU64>,
        /// Burst in milliseconds, 10 to 3600000.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        burst_ms: Option<u32>,
    },
    /// Replaces the program.
    Upgrade {
        /// The new program; without it, the present file of the running one.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        program: Option<PathBuf>,
    },
}

/// A request by its recipient.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Order {
    /// A command to the device.
    Device(Command),
    /// An upgrade to this program.
    Upgrade(Option<PathBuf>),
}

impl From<Request> for Order {
    fn from(request: Request) -> Self {
        Order::Device(match request {
            Request::Upgrade { program } => return Order::Upgrade(program),
            Request::Status {} => Command::Status,
            Request::Switch { plane } => Command::Switch(plane.into()),
            Request::Resize { bytes } => Command::Resize(bytes),
            Request::Pause {} => Command::Pause,
            Request::Resume {} => Command::Resume,
            Request::Limit { iops, bandwidth, burst_ms } => {
                let burst = burst_ms.map_or(Limits::BURST_DEFAULT, |burst_ms| {
                    Duration::from_millis(burst_ms.into())
                        .clamp(Limits::BURST_MIN, Limits::BURST_MAX)
                });
                Command::Limit(Limits { iops, bytes: bandwidth, burst })
            }
        })
    }
}

/// A line from the daemon.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Answer {
    /// The request succeeded.
    pub ok: bool,
    /// The error of a failed request.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
    /// The answer to `status`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub status: Option<Value>,
    /// The answer to `switch`: number of moved queues.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub moved_queues: Option<usize>,
    /// The answer to `resize`: capacity of the disk.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub capacity_bytes: Option<u64>,
    /// The answer to `pause` and `resume`: `false` if the disk was in that state before.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub changed: Option<bool>,
    /// The answer to `upgrade`: version of the new program.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub version: Option<String>,
    /// The answer to `upgrade`: time in microseconds during which no request was taken.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pause_us: Option<u64>,
}

impl Answer {
    /// The answer to a failed request.
    pub fn refused(why: impl Into<String>) -> Self {
        Answer { error: Some(why.into()), ..Answer::default() }
    }

    /// Sends the answer as one line.
    ///
    /// # Errors
    /// The error of the system call.
    pub fn write(&self, mut stream: &UnixStream) -> io::Result<()> {
        let mut line = serde_json::to_vec(self)?;
        line.push(b'\n');
        stream.write_all(&line)
    }
}

impl From<vhost_user::Answer> for Answer {
    fn from(answer: vhost_user::Answer) -> Self {
        let done = Answer { ok: true, ..Answer::default() };
        match answer {
            vhost_user::Answer::Status(status) => {
                Answer { status: Some(status_value(&status)), ..done }
            }
            vhost_user::Answer::Switched(queues) => Answer { moved_queues: Some(queues), ..done },
            vhost_user::Answer::Resized(bytes) => Answer { capacity_bytes: Some(bytes), ..done },
            vhost_user::Answer::Changed(changed) => Answer { changed: Some(changed), ..done },
            vhost_user::Answer::Refused(why) => Answer::refused(why),
        }
    }
}

fn status_value(status: &Status) -> Value {
    let queues = status.queues.iter().enumerate().map(|(index, queue)| queue_value(index, queue));
    let mut value = json!({
        "version": env!("CARGO_PKG_VERSION"),
        "pid": std::process::id(),
        "disk": status.disk,
        "data_plane": status.plane.to_string(),
        "why": status.why,
        "capacity_bytes": status.capacity_bytes,
        "front_end_connected": status.connected,
        "paused": status.paused,
        "limits": {
            "iops": status.limits.iops,
            "bandwidth": status.limits.bytes,
            "burst_ms": status.limits.burst.as_millis() as u64,
        },
        "features": format!("{:#x}", status.features),
        "writeback": status.writeback,
        "queues": queues.collect::<Vec<_>>(),
    });
    if !status.kernel_counters.is_empty() {
        let lines = status.kernel_counters.iter();
        let lines: Map<_, _> = lines.map(|(name, text)| (name.clone(), json!(text))).collect();
        value["kernel"] = Value::Object(lines);
    }
    value
}

fn queue_value(index: usize, queue: &QueueStatus) -> Value {
    let mut value = json!({
        "index": index,
        "runs_on": queue.plane.map(|plane| plane.to_string()),
        "size": queue.size,
    });
    for (name, count) in queue.running.iter().flat_map(QueueReport::counters) {
        value[name] = count.into();
    }
    let latencies = Operation::ALL.map(|operation| {
        let histogram = queue.total.latencies.of(operation);
        (operation.name().to_owned(), latency_value(histogram))
    });
    value["latency"] = Value::Object(latencies.into_iter().collect());
    value
}

/// Number and mean of requests, and the bounds below which half and 99 % of them are.
fn latency_value(histogram: &Histogram) -> Value {
    let count = histogram.count();
    let mean = histogram.sum_us.checked_div(count);
    let below = |percent: u64| {
        let wanted = (count * percent).div_ceil(100);
        let mut seen = 0;
        let full = |requests: &u64| {
            seen += requests;
            seen >= wanted
        };
        let bound = histogram.buckets.iter().position(full).and_then(Histogram::bound)?;
        (count > 0).then_some(bound.as_micros() as u64)
    };
    json!({"count": count, "mean_us": mean, "p50_below_us": below(50), "p99_below_us": below(99)})
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(text: &str) -> Result<Request, serde_json::Error> {
        serde_json::from_str(text)
    }

    #[test]
    fn requests_are_read_as_they_are_documented() {
        assert_eq!(parsed(r#"{"command":"status"}"#).unwrap(), Request::Status {});
        let switch = parsed(r#"{"command":"switch","plane":"uring"}"#).unwrap();
        assert_eq!(Order::from(switch), Order::Device(Command::Switch(PlaneKind::Uring)));
        let order = |text| Order::from(parsed(text).unwrap());
        let resize = |bytes| Order::Device(Command::Resize(bytes));
        assert_eq!(order(r#"{"command":"resize","bytes":4096}"#), resize(Some(4096)));
        assert_eq!(order(r#"{"command":"resize"}"#), resize(None));
        assert_eq!(order(r#"{"command":"upgrade"}"#), Order::Upgrade(None));
        let upgrade = order(r#"{"command":"upgrade","program":"/a"}"#);
        assert_eq!(upgrade, Order::Upgrade(Some("/a".into())));
    }

    #[test]
    fn requests_with_a_mistake_are_not_guessed_at() {
        for text in [
            "",
            "status",
            r#"{"command":"stop"}"#,
            r#"{"command":"switch"}"#,
            r#"{"command":"switch","plane":"auto"}"#,
            r#"{"command":"switch","plane":"kernel","force":true}"#,
            r#"{"command":"status"} x"#,
            r#"{"command":"resize","bytes":-1}"#,
            r#"{"command":"resize","bytes":"1G"}"#,
            r#"{"command":"pause","seconds":1}"#,
        ] {
            assert!(parsed(text).is_err(), "{text}");
        }
    }

    #[test]
    fn latencies_are_told_by_the_bounds_of_their_buckets() {
        let mut histogram = Histogram::default();
        let nothing = json!({
            "count": 0, "mean_us": null, "p50_below_us": null, "p99_below_us": null
        });
        assert_eq!(latency_value(&histogram), nothing);
        (histogram.buckets[4], histogram.buckets[10], histogram.sum_us) = (98, 2, 4000);
        let told = json!({"count": 100, "mean_us": 40, "p50_below_us": 16, "p99_below_us": 1024});
        assert_eq!(latency_value(&histogram), told);
        histogram.buckets[23] = 100;
        assert_eq!(latency_value(&histogram)["p99_below_us"], Value::Null);
    }

    #[test]
    fn an_answer_has_only_what_belongs_to_it() {
        let refused = serde_json::to_string(&Answer::refused("no")).unwrap();
        assert_eq!(refused, r#"{"ok":false,"error":"no"}"#);
        let switched = Answer::from(vhost_user::Answer::Switched(2));
        assert_eq!(serde_json::to_string(&switched).unwrap(), r#"{"ok":true,"moved_queues":2}"#);
    }
}
