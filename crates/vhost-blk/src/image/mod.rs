// SPDX-License-Identifier: Apache-2.0
//! Commands about images that no disk serves.

pub mod check;
pub mod convert;
pub mod info;
pub(crate) mod place;
pub(crate) mod progress;
mod share;

pub(crate) use place::inherit;

/// A number of bytes for people, such as `1.5 GiB`.
fn readable_bytes(bytes: u64) -> String {
    let (mut count, mut unit) = (bytes as f64, 0);
    while count >= 1024.0 && unit < 6 {
        (count, unit) = (count / 1024.0, unit + 1);
    }
    let name = ["bytes", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"][unit];
    match unit > 0 && count.fract() > 0.0 {
        true => format!("{count:.1} {name}"),
        false => format!("{count} {name}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_are_told_in_their_unit() {
        let cases = [(0, "0 bytes"), (1023, "1023 bytes"), (1 << 20, "1 MiB"), (1536, "1.5 KiB")];
        for (bytes, text) in cases {
            assert_eq!(readable_bytes(bytes), text);
        }
    }
}
