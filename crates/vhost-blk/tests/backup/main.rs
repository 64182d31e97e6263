// SPDX-License-Identifier: Apache-2.0
//! `vhost-blk ctl backup` of disks that guests write.

mod cancelled;
#[path = "../common/mod.rs"]
mod common;
mod content;
mod export;
mod export_failures;
mod hangs;
mod huge;
mod incremental;
mod kept;
#[path = "../../../vhost-user/tests/common/load.rs"]
#[allow(dead_code, unreachable_pub, reason = "each test program uses its part")]
mod load;
#[path = "../common/moments.rs"]
mod moments;
mod operations;
#[path = "../common/rig.rs"]
#[allow(dead_code, reason = "each test program uses its part")]
mod rig;
#[path = "../common/served.rs"]
mod served;
mod server;
mod shared;

use common::{Place, pattern, stdout, wait_until};
use kit::mount;
use rig::Raw;
use serde_json::{Value, json};
use served::Served;
use std::path::Path;

const MIB: u64 = 1 << 20;
/// Bytes per second with which a backup of 8 MiB ends in no test.
const SLOW: u64 = 16 << 10;

/// A client that waits for a backup.
struct Client(Raw);

impl Client {
    /// Orders a backup and waits for its moment.
    #[track_caller]
    fn start(control: &Path, target: &Path, options: Value) -> Client {
        let mut raw = Raw::connect(control);
        let mut parameters = options;
        parameters["target"] = target.to_str().unwrap().into();
        let call = json!({"method": "io.vhostblk.Backup", "parameters": parameters, "more": true});
        let first = raw.call(&call.to_string());
        assert_eq!(first["continues"], true, "{first}");
        Client(raw)
    }

    /// The last reply.
    fn finish(&mut self) -> Value {
        loop {
            let reply = self.0.receive();
            if reply["continues"] != true {
                return reply;
            }
        }
    }
}

/// Fills the image with data that differs from sector to sector.
fn fill(image: &Path) -> Vec<u8> {
    let bytes = std::fs::metadata(image).unwrap().len();
    let content: Vec<u8> = (0..bytes / 512).flat_map(|sector| pattern(512, sector)).collect();
    std::fs::write(image, &content).unwrap();
    content
}

fn is_backed_up(served: &Served) -> bool {
    served.status()["disk"].to_string().contains("backed up")
}

/// Waits until the backup is over, for the disk and for the next one, too.
#[track_caller]
fn wait_for_end(served: &Served) {
    wait_until("the backup ends", || {
        let jobs = stdout(&served.ctl(&["--json", "jobs"]));
        !is_backed_up(served) && parts(&served.place).is_empty() && jobs == "[]\n"
    });
}

/// Incomplete images in the directory of the place.
fn parts(place: &Place) -> Vec<String> {
    parts_of(place.dir.path())
}

/// Incomplete images in a directory.
fn parts_of(directory: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(directory).unwrap();
    let names = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap());
    names.filter(|name| name.ends_with(".part")).collect()
}

/// The first sector in which the contents differ.
#[track_caller]
fn assert_same(copy: &[u8], content: &[u8]) {
    assert_eq!(copy.len(), content.len());
    let differs = copy.chunks(512).zip(content.chunks(512)).position(|(a, b)| a != b);
    assert_eq!(differs, None, "a sector of the copy");
}
