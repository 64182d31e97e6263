// SPDX-License-Identifier: Apache-2.0
//! `vhost-blk ctl trace`.

use super::ask::Stream;
use super::text::event;
use super::{print_message, reconnected};
use crate::failure::Failure;
use crate::values::{self, SlowerThan};
use clap::Args;
use serde_json::{Value, json};
use std::io::Write;
use std::path::Path;
use std::time::Duration;

/// Arguments of `vhost-blk ctl trace`.
#[derive(Args, Clone, Debug)]
pub struct TraceArgs {
    /// The disk; all disks if it is left out
    #[arg(value_parser = values::disk_name)]
    pub name: Option<String>,
    /// Time of a slow request in milliseconds: 0.001 to 3600000
    #[arg(long, value_name = "MS", default_value = "20", value_parser = values::slower_than)]
    pub slower_than: SlowerThan,
    /// Stop after N slow requests
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    pub count: Option<u64>,
}

impl TraceArgs {
    /// Prints slow requests until the disk has gone, `count` of them are printed, or the daemon stops.
    pub(super) fn follow(
        &self,
        path: &Path,
        patience: Option<Duration>,
        as_json: bool,
    ) -> Result<(), Failure> {
        let slower_than_us = self.slower_than.0.as_micros() as u64;
        let parameters = json!({"name": self.name, "slower_than_us": slower_than_us});
        let mut left = self.count;
        let each = |reply: &Value| {
            warn_of_untraced(&reply["untraced"], as_json);
            let request = &reply["request"];
            let is_read = print_message(&reply["event"], as_json, event)?
                && print_message(request, as_json, text)?;
            if let Some(left) = left.as_mut().filter(|_| request["total_us"].is_u64()) {
                *left -= 1;
            }
            Ok(is_read && left != Some(0))
        };
        let (what, method) = ("trace requests", "Trace");
        let stream = Stream { path, patience, what, method, parameters };
        stream.follow(each, || reconnected(as_json))
    }
}

/// Says which disks are not traced.
fn warn_of_untraced(untraced: &Value, as_json: bool) {
    let names: Vec<&str> =
        untraced.as_array().into_iter().flatten().filter_map(Value::as_str).collect();
    if !names.is_empty() {
        let names = names.join(", ");
        let line = "run in the kernel, whose module is too old to trace them; load the one that \
                    belongs to this program, or move them: vhost-blk ctl switch NAME uring";
        let line = format!("the queues of {names} {line}");
        // A failed write to stderr has no remedy.
        let _ = match as_json {
            true => {
                writeln!(std::io::stderr(), "{}", json!({"warning": line, "untraced": untraced}))
            }
            false => writeln!(std::io::stderr(), "vhost-blk: {line}"),
        };
    }
}

/// A slow request as a line for people, with times in milliseconds.
fn text(request: &Value) -> String {
    let word = |name: &str| request[name].as_str().unwrap_or("-");
    if let Some(lost) = request["lost"].as_u64() {
        return format!("{} {lost} slow requests are not shown\n", word("time"));
    }
    let ms = |name: &str| format!("{:.3}", request[name].as_u64().unwrap_or(0) as f64 / 1e3);
    let sector = request["sector"].as_u64();
    let place = sector.map_or_else(String::new, |sector| format!(" sector={sector}"));
    let failed = if request["failed"] == true { " failed" } else { "" };
    let is_known = request["ring_us"].is_u64();
    let ring = if is_known { format!("<={}", ms("ring_us")) } else { "=-".to_owned() };
    format!(
        "{} {} queue={} {}{place} bytes={} total={} ring{ring} limit={} submit={} storage={} \
         used={}{failed}\n",
        word("time"),
        word("disk"),
        request["queue"],
        word("operation"),
        request["bytes"],
        ms("total_us"),
        ms("limit_us"),
        ms("submit_us"),
        ms("storage_us"),
        ms("used_us"),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_slow_request_is_a_line_with_milliseconds() {
        let mut request = json!({
            "time": "T", "disk": "a", "queue": 1, "operation": "read", "sector": 8, "bytes": 4096,
            "failed": false, "total_us": 51_250, "ring_us": null, "limit_us": 0, "submit_us": 17,
            "storage_us": 51_230, "used_us": 3,
        });
        let stages = "limit=0.000 submit=0.017 storage=51.230 used=0.003";
        let begin = "T a queue=1 read sector=8 bytes=4096";
        assert_eq!(text(&request), format!("{begin} total=51.250 ring=- {stages}\n"));
        (request["ring_us"], request["total_us"]) = (4200.into(), 55_450.into());
        let line = format!("{begin} total=55.450 ring<=4.200 {stages}");
        assert_eq!(text(&request), format!("{line}\n"));
        request["failed"] = true.into();
        assert_eq!(text(&request), format!("{line} failed\n"));
        assert_eq!(text(&json!({"time": "T", "lost": 3})), "T 3 slow requests are not shown\n");
    }
}
