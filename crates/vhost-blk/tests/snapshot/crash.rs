// SPDX-License-Identifier: Apache-2.0
//! A daemon that is killed while it takes a snapshot leaves the old chain or the new one, with every
//! write that the guest has a completion of.

use crate::moments::Moments;
use crate::rig::Rig;
use crate::stamped::Writer;
use crate::{QUEUES, add, begin, check_after_kill, guest, image, mark};

const KILLS: u64 = 24;

#[test]
fn a_kill_at_any_moment_leaves_the_old_chain_or_the_new_one_with_all_acknowledged_writes() {
    for format in ["raw", "qcow2"] {
        let mut rig = Rig::new();
        image(&rig, "a.img", format);
        let first = format!("--blk-file a.img --format {format}");
        add(&rig, "a", &first);
        let mut moments = Moments::of(|| drop(rig.ok("snapshot a --to 0")));
        let over =
            |name: &str| format!("--blk-file {name} --format qcow2 --allow-backing same-dir");
        let (mut path, mut options) = ("0".to_owned(), over("0"));
        for n in 1..=KILLS / 2 {
            let writer = Writer::start(guest(&rig, "a"));
            writer.wait_for_two_rounds();
            let mut client = begin(&rig, &format!("snapshot a --to {n}"));
            moments.wait();
            rig.daemon.signal(libc::SIGKILL);
            rig.daemon.wait();
            let written = writer.stop();
            let _ = client.wait(); // it succeeds if the snapshot was complete
            rig.restart(&[]);
            let overlay = n.to_string();
            let is_marked = mark(&rig.path(&path)).is_some();
            if is_marked {
                let words = format!("add a --socket-path a.sock --num-queues {QUEUES} {options}");
                let line = rig.refused(&words, 1);
                assert!(line.contains("it is the backing file of"), "{line}");
                (path, options) = (overlay.clone(), over(&overlay));
            }
            moments.learn(is_marked);
            add(&rig, "a", &options);
            written.check(&mut guest(&rig, "a"));
            check_after_kill(&rig.path(&path));
        }
        moments.assert_both();
    }
}
