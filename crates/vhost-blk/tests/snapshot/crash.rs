// SPDX-License-Identifier: Apache-2.0
//! A daemon that is killed while it takes a snapshot leaves the old chain or the new one, with every
//! write that the guest was told is done.

use crate::common::program;
use crate::rig::Rig;
use crate::{QUEUES, add, guest, image, mark};
use driver::{Device, Request};
use std::collections::{BTreeMap, HashMap};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant, SystemTime};

const KILLS: u64 = 24;
const DEPTH: usize = 8;
const SECTORS: u64 = 1024;

/// Writes of a guest by sector: the number of the last one that was acknowledged, and of one that was
/// not.
#[derive(Default)]
struct Written {
    acknowledged: BTreeMap<u64, u64>,
    sent: BTreeMap<u64, u64>,
}

fn stamp(n: u64) -> Vec<u8> {
    n.to_le_bytes().repeat(64)
}

/// Writes until `stop`, which is set after the death of the daemon.
fn write_on(mut device: Device, stop: &AtomicBool, done: &AtomicU64) -> Written {
    let layout = device.layout();
    let (mut written, mut in_flight, mut next) = (Written::default(), HashMap::new(), 1);
    let mut is_full = false;
    loop {
        is_full &= !in_flight.is_empty();
        while !is_full && in_flight.len() < DEPTH {
            let sector = next % SECTORS;
            match device.queue(0).submit(&Request::write(sector, &stamp(next)), &layout) {
                Ok(id) => in_flight.insert(id, next),
                // The memory for requests begins anew when none is in flight.
                Err(driver::Error::NoScratch(_)) => {
                    is_full = true;
                    break;
                }
                Err(why) => panic!("{why}"),
            };
            written.sent.insert(sector, next);
            next += 1;
        }
        match device.queue(0).try_collect().unwrap() {
            Some((id, completion)) => {
                assert_eq!(completion.status, Some(0));
                let n = in_flight.remove(&id).expect("each request completes once");
                written.acknowledged.insert(n % SECTORS, n);
                done.fetch_add(1, Ordering::Relaxed);
            }
            None if stop.load(Ordering::Acquire) => return written,
            None => std::thread::yield_now(),
        }
    }
}

/// Begins a snapshot of the disk `a`.
fn begin(rig: &Rig, overlay: &str) -> Child {
    let mut command = program();
    command.current_dir(rig.place.dir.path()).args(["ctl", "--control-path", "ctl"]);
    command.args(["snapshot", "a", "--to", overlay]);
    command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap()
}

#[test]
fn a_kill_at_any_moment_leaves_the_old_chain_or_the_new_one_with_all_acknowledged_writes() {
    let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap();
    let seed = since.as_nanos() as u64;
    println!("seed {seed}");
    let (mut state, mut old_chains) = (seed | 1, 0);
    let mut random = |below: u64| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 11) % below
    };
    for format in ["raw", "qcow2"] {
        let mut rig = Rig::new();
        image(&rig, "a.img", format);
        let first = format!("--blk-file a.img --format {format}");
        add(&rig, "a", &first);
        let begun = Instant::now();
        assert!(begin(&rig, "0").wait().unwrap().success());
        let usual_us = begun.elapsed().as_micros() as u64;
        let over =
            |name: &str| format!("--blk-file {name} --format qcow2 --allow-backing same-dir");
        let (mut path, mut options) = ("0".to_owned(), over("0"));
        for n in 1..=KILLS / 2 {
            let (stop, done) = (AtomicBool::new(false), AtomicU64::new(0));
            let device = guest(&rig, "a");
            let written = std::thread::scope(|scope| {
                let writer = scope.spawn(|| write_on(device, &stop, &done));
                rig.place.wait_until("writes", || done.load(Ordering::Relaxed) > 2 * SECTORS);
                let overlay = n.to_string();
                let mut client = begin(&rig, &overlay);
                std::thread::sleep(Duration::from_micros(random(usual_us * 3)));
                rig.daemon.signal(libc::SIGKILL);
                rig.daemon.wait();
                stop.store(true, Ordering::Release);
                let _ = client.wait(); // it succeeds if the snapshot was complete
                writer.join().unwrap()
            });
            rig.restart(&[]);
            let overlay = n.to_string();
            let is_marked = mark(&rig.path(&path)).is_some();
            if is_marked {
                let words = format!("add a --socket-path a.sock --num-queues {QUEUES} {options}");
                let line = rig.refused(&words, 1);
                assert!(line.contains("it is the backing file of"), "{line}");
                (path, options) = (overlay.clone(), over(&overlay));
            }
            old_chains += u64::from(!is_marked);
            add(&rig, "a", &options);
            let mut device = guest(&rig, "a");
            for (sector, &n) in &written.acknowledged {
                let mut data = [0; 512];
                device.read(*sector, &mut data).unwrap();
                let found = u64::from_le_bytes(data[..8].try_into().unwrap());
                assert!(data[..] == stamp(found)[..], "sector {sector} is torn");
                let expected = [n, written.sent[sector]];
                assert!(expected.contains(&found), "{found} in place of {expected:?}");
            }
            // A kill may leak clusters (3), and leaves no error.
            let checked =
                Command::new("qemu-img").args(["check", "-qU"]).arg(rig.path(&path)).output();
            let checked = checked.unwrap();
            assert!(matches!(checked.status.code(), Some(0 | 3)), "{checked:?}");
        }
    }
    println!("{old_chains} of {KILLS} kills left the old chain");
}
