// SPDX-License-Identifier: Apache-2.0
//! The words of `vhost-blk ctl resize`.

use crate::failure::Failure;
use crate::values::{self, Size};
use serde_json::{Value, json};

/// Name and size among the words of `resize`.
pub(super) fn parameters(words: &[String]) -> Result<Value, Failure> {
    let usage = |why: String| {
        let remedy = "give [NAME] [SIZE], such as 40G; see vhost-blk ctl resize --help";
        Failure::usage("resize the disk", why, remedy)
    };
    let size = |text: &String| -> Result<u64, Failure> {
        values::size(text).map(|Size(bytes)| bytes).map_err(|why| usage(format!("{text}: {why}")))
    };
    let name = |text: &String| -> Result<String, Failure> {
        values::disk_name(text).map_err(|why| usage(format!("{text}: {why}")))
    };
    Ok(match words {
        [] => json!({}),
        [one] => match size(one) {
            Ok(bytes) => json!({"bytes": bytes}),
            // A word that begins as a number is a wrong size rather than a name.
            Err(failure) if !one.starts_with(|c: char| c.is_ascii_alphabetic()) => {
                return Err(failure);
            }
            Err(_) => json!({"name": name(one)?}),
        },
        [first, second, ..] => json!({"name": name(first)?, "bytes": size(second)?}),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_words_of_resize_are_name_and_size_or_one_of_them() {
        let of =
            |words: &[&str]| parameters(&words.iter().map(|w| w.to_string()).collect::<Vec<_>>());
        assert_eq!(of(&[]).unwrap(), json!({}));
        assert_eq!(of(&["4K"]).unwrap(), json!({"bytes": 4096}));
        assert_eq!(of(&["db"]).unwrap(), json!({"name": "db"}));
        assert_eq!(of(&["4K", "8K"]).unwrap(), json!({"name": "4K", "bytes": 8192}));
        for wrong in [&["1X"][..], &["-1"], &[""], &["a", "b"], &["a/b"], &["a", ""]] {
            assert!(of(wrong).is_err(), "{wrong:?}");
        }
    }
}
