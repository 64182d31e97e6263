// SPDX-License-Identifier: Apache-2.0
//! Parses the kernel's counters in `fdinfo` of the open device: a line for each queue of the form
//! `queueN: STATE name=count name=count ...`, and lines for the whole device.

/// The lines of the module, without the lines that every open file has.
pub(super) fn of_fdinfo(text: &str) -> Vec<(String, String)> {
    const OF_EVERY_FILE: [&str; 4] = ["pos", "flags", "mnt_id", "ino"];
    let pairs = text.lines().filter_map(|line| line.split_once(':'));
    let pairs = pairs.map(|(name, value)| (name.trim().to_owned(), value.trim().to_owned()));
    pairs.filter(|(name, _)| !OF_EVERY_FILE.contains(&name.as_str())).collect()
}

/// The counters of one queue in `lines`, by name, and `faulted` from its state.
pub(super) fn of_queue(lines: &[(String, String)], index: u16) -> Vec<(String, u64)> {
    let name = format!("queue{index}");
    let Some((_, line)) = lines.iter().find(|(known, _)| *known == name) else { return Vec::new() };
    let pairs = line.split_whitespace().filter_map(|word| word.split_once('='));
    let counts = pairs.filter_map(|(name, count)| Some((name.to_owned(), count.parse().ok()?)));
    let faulted = line.split_whitespace().next() == Some("faulted");
    counts.chain([("faulted".to_owned(), faulted.into())]).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::stats::QueueStats;

    #[test]
    fn the_lines_of_a_queue_are_taken_apart() {
        let text = "pos:\t0\nflags:\t02100002\nmnt_id:\t27\nino:\t5\nbackend:\tfile\n\
                    queue0:\trunning size=128 chains=1 kicks=9\n\
                    queue1:\tfaulted size=128 inflight=-1 chains=17 refused=2 kicks=3 calls=4\n\
                    latency1_us:\t8=15 16=2 \n";
        let lines = of_fdinfo(text);
        let names: Vec<&str> = lines.iter().map(|(name, _)| name.as_str()).collect();
        assert_eq!(names, ["backend", "queue0", "queue1", "latency1_us"]);
        let counts = of_queue(&lines, 1);
        assert_eq!(counts.first().unwrap(), &("size".to_owned(), 128));
        let expected =
            QueueStats { chains: 17, refused: 2, kicks: 3, calls: 4, ..QueueStats::default() };
        assert_eq!(QueueStats::of_counters(&counts), expected);
        assert_eq!(counts.last().unwrap(), &("faulted".to_owned(), 1));
        assert_eq!(of_queue(&lines, 0).last().unwrap(), &("faulted".to_owned(), 0));
        assert_eq!(of_queue(&lines, 2), []);
    }

    #[test]
    fn a_real_files_fdinfo_has_nothing_of_ours() {
        use std::os::fd::AsRawFd;
        let file = tempfile::tempfile().unwrap();
        let path = format!("/proc/self/fdinfo/{}", file.as_raw_fd());
        assert_eq!(of_fdinfo(&std::fs::read_to_string(path).unwrap()), []);
    }
}
