// SPDX-License-Identifier: Apache-2.0
//! A daemon that is killed in a mirror leaves the old storage or the new one, with every write that the
//! guest has a completion of.

use crate::moments::Moments;
use crate::rig::Rig;
use crate::stamped::Writer;
use crate::{add, begin, check_after_kill, fill, guest, image, moved_to, parts};
use std::fs;

const KILLS: u64 = 16;

#[test]
fn a_kill_at_any_moment_leaves_the_old_storage_or_the_new_one_with_all_acknowledged_writes() {
    for format in ["raw", "qcow2"] {
        let mut rig = Rig::new();
        image(&rig, "0", format);
        let options = |name: &str| format!("--blk-file {name} --format {format}");
        add(&rig, "a", &options("0"));
        let mut moments = Moments::of(|| drop(rig.ok("mirror a --to 1 --complete")));
        let mut name = "1".to_owned();
        for n in 2..KILLS / 2 + 2 {
            let writer = Writer::start(guest(&rig, "a"));
            writer.wait_for_two_rounds();
            let mut client = begin(&rig, &format!("mirror a --to {n} --complete"));
            moments.wait();
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
            moments.learn(is_moved);
            add(&rig, "a", &options(&name));
            written.check(&mut guest(&rig, "a"));
            // A kill leaves an incomplete file, or one that has its name and is not used. The next mirror to
            // that place removes the first one.
            if !is_moved {
                let _ = fs::remove_file(rig.path(&n.to_string()));
                rig.ok(&format!("mirror a --to {n} --wait"));
                rig.ok("mirror a --cancel");
            }
            assert_eq!(parts(&rig), [""; 0]);
            if format == "qcow2" {
                check_after_kill(&rig.path(&name));
            }
        }
        moments.assert_both();
    }
}

#[test]
fn the_incomplete_file_of_a_killed_daemon_goes_with_the_next_mirror_and_one_in_use_stays() {
    let mut rig = Rig::new();
    image(&rig, "a.img", "raw");
    image(&rig, "other.img", "raw");
    add(&rig, "a", "--blk-file a.img");
    fill(&mut guest(&rig, "a"), 1);
    // 16 MiB at this rate take longer than this test.
    rig.ok("mirror a --to b --bandwidth 64K");
    assert_eq!(parts(&rig).len(), 1);
    rig.daemon.signal(libc::SIGKILL);
    rig.daemon.wait();
    let left = parts(&rig);
    assert_eq!(left.len(), 1);
    rig.restart(&[]);
    add(&rig, "a", "--blk-file a.img");
    add(&rig, "other", "--blk-file other.img");
    // The names of other programs are not touched.
    for name in [".b.part", ".b.abc.mirror.part", ".bb.abcdef.mirror.part", ".b.abcdef.part"] {
        fs::write(rig.path(name), "").unwrap();
    }
    rig.ok("mirror a --to b --bandwidth 64K");
    let present = parts(&rig);
    assert!(!present.contains(&left[0]), "{present:?}");
    assert_eq!(present.len(), 5, "{present:?}");
    rig.ok("mirror a --cancel");
    rig.ok("mirror a --to b --wait");
    // A second one for the same place leaves the first one alone.
    rig.ok("mirror other --to b --wait");
    assert_eq!(parts(&rig).len(), 6);
    rig.ok("mirror other --complete");
    assert_eq!(parts(&rig).len(), 5);
    let line = rig.refused("mirror a --complete", 1);
    assert!(line.contains("exists by now; move it away"), "{line}");
    rig.ok("mirror a --cancel");
    assert_eq!(parts(&rig).len(), 4);
}
