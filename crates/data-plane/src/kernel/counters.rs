// SPDX-License-Identifier: Apache-2.0
//! The kernel's counters as it tells them in `fdinfo` of the open device.

use crate::QueueStats;

/// The lines of the module, without those that every open file has.
pub(super) fn of_fdinfo(text: &str) -> Vec<(String, String)> {
    const OF_EVERY_FILE: [&str; 4] = ["pos", "flags", "mnt_id", "ino"];
    let pairs = text.lines().filter_map(|line| line.split_once(':'));
    let pairs = pairs.map(|(name, value)| (name.trim().to_owned(), value.trim().to_owned()));
    pairs.filter(|(name, _)| !OF_EVERY_FILE.contains(&name.as_str())).collect()
}

/// The counters of one queue, as far as the two planes count the same.
pub(super) fn of_queue(counters: &[(String, String)], index: u16) -> QueueStats {
    let of = |what: &str| {
        let name = format!("queue-{index}-{what}");
        let found = counters.iter().find(|(known, _)| *known == name);
        found.and_then(|(_, value)| value.parse().ok()).unwrap_or(0)
    };
    QueueStats {
        chains: of("chains"),
        refused: of("refused"),
        kicks: of("kicks"),
        calls: of("calls"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_modules_own_lines_are_kept() {
        let text = "pos:\t0\nflags:\t02100002\nmnt_id:\t27\nino:\t5\nqueue-0-chains:\t17\n";
        assert_eq!(of_fdinfo(text), [("queue-0-chains".to_owned(), "17".to_owned())]);
    }

    #[test]
    fn a_real_files_fdinfo_has_nothing_of_ours() {
        use std::os::fd::AsRawFd;
        let file = tempfile::tempfile().unwrap();
        let path = format!("/proc/self/fdinfo/{}", file.as_raw_fd());
        assert_eq!(of_fdinfo(&std::fs::read_to_string(path).unwrap()), []);
    }
}
