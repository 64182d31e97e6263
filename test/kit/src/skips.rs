// SPDX-License-Identifier: Apache-2.0
//! The expected skips. Any other skip fails, so that a test that stops running is noticed.

/// Path of the list in the repository.
pub const FILE: &str = "scripts/expected-skips.txt";

const LIST: &str = include_str!("../../../scripts/expected-skips.txt");

/// True if the list has this test, at this place, with this reason.
pub fn is_expected(place: &str, name: &str, reason: &str) -> bool {
    entries(LIST).any(|entry| entry.covers(place, name, reason))
}

/// A line `PLACE NAME REASON`. A `*` at the start or end of a name stands for any text.
struct Entry<'a> {
    place: &'a str,
    name: &'a str,
    reason: &'a str,
}

impl Entry<'_> {
    fn covers(&self, place: &str, name: &str, reason: &str) -> bool {
        let is_named = match (self.name.strip_suffix('*'), self.name.strip_prefix('*')) {
            (Some(prefix), _) => name.starts_with(prefix),
            (None, Some(suffix)) => name.ends_with(suffix),
            (None, None) => name == self.name,
        };
        self.place == place && is_named && reason.contains(self.reason)
    }
}

fn entries(list: &str) -> impl Iterator<Item = Entry<'_>> {
    list.lines().filter(|line| !line.starts_with('#')).filter_map(|line| {
        let mut words = line.splitn(3, ' ');
        Some(Entry { place: words.next()?, name: words.next()?, reason: words.next()? })
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn place_name_and_reason_must_all_match() {
        let list = "# places\n6.12 faults-* this kernel has no\n";
        let covers = |place, name, reason| {
            entries(list).any(|entry: Entry<'_>| entry.covers(place, name, reason))
        };
        assert!(covers("6.12", "faults-slab", "this kernel has no failslab"));
        assert!(!covers("debug", "faults-slab", "this kernel has no failslab"));
        assert!(!covers("6.12", "charge", "this kernel has no failslab"));
        assert!(!covers("6.12", "faults-slab", "the module is not loaded"));
    }

    #[test]
    fn path_lengths_that_were_kept_on_another_kernel_are_expected_of_both_steps() {
        for step in ["path_lengths", "path_lengths_of_the_guest_driver"] {
            assert!(is_expected("step", step, "path lengths were kept on 6.12.1, this is 6.12.2"));
        }
    }

    #[test]
    fn each_line_of_the_list_has_a_place_a_name_and_a_reason() {
        let lines = LIST.lines().filter(|line| !line.starts_with('#') && !line.is_empty());
        for line in lines {
            assert_eq!(entries(line).count(), 1, "{line}");
            let place = line.split(' ').next().unwrap();
            assert!(["6.12", "debug", "sid", "cargo", "step"].contains(&place), "{line}");
        }
    }
}
