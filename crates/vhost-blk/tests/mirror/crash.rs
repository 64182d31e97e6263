// SPDX-License-Identifier: Apache-2.0
//! A daemon that is killed in a mirror leaves the old storage or the new one, with every write that the
//! guest was told is done.

use crate::rig::Rig;
use crate::stamped::{Random, Writer};
use crate::{add, begin, check_after_kill, guest, image, moved_to, parts};
use std::fs;
use std::time::{Duration, Instant};

const KILLS: u64 = 16;

#[test]
fn a_kill_at_any_moment_leaves_the_old_storage_or_the_new_one_with_all_acknowledged_writes() {
    let (mut random, mut old_storages) = (Random::new(), 0);
    for format in ["raw", "qcow2"] {
        let mut rig = Rig::new();
        image(&rig, "0", format);
        let options = |name: &str| format!("--blk-file {name} --format {format}");
        add(&rig, "a", &options("0"));
        let begun = Instant::now();
        assert!(begin(&rig, "mirror a --to 1 --complete").wait().unwrap().success());
        let usual_us = begun.elapsed().as_micros() as u64;
        let mut name = "1".to_owned();
        for n in 2..KILLS / 2 + 2 {
            let writer = Writer::start(guest(&rig, "a"));
            writer.wait_for_two_rounds();
            let mut client = begin(&rig, &format!("mirror a --to {n} --complete"));
            std::thread::sleep(Duration::from_micros(random.below(usual_us * 2)));
            rig.daemon.signal(libc::SIGKILL);
            rig.daemon.wait();
            let written = writer.stop();
            let _ = client.wait(); // it succeeds if the mirror was complete
            rig.restart(&[]);
            let is_moved = moved_to(&rig.path(&name)).is_some();
            if is_moved {
                let line =
                    rig.refused(&format!("add a --socket-path a.sock {}", options(&name)), 1);
                assert!(line.contains("its disk was mirrored to"), "{line}");
                name = n.to_string();
            }
            old_storages += u64::from(!is_moved);
            // A kill leaves an incomplete file, which does not have the name of the target.
            for part in parts(&rig) {
                fs::remove_file(rig.path(&part)).unwrap();
            }
            add(&rig, "a", &options(&name));
            written.check(&mut guest(&rig, "a"));
            if format == "qcow2" {
                check_after_kill(&rig.path(&name));
            }
        }
    }
    println!("{old_storages} of {KILLS} kills left the old storage");
}
