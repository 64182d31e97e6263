// SPDX-License-Identifier: Apache-2.0
//! Standard output of the commands.
//!
//! The exit code of a command describes its work. A reader that has closed the pipe, such as `head -1`, is
//! therefore no error. Any other failed write is one, for example on a full file system.

use crate::failure::Failure;
use std::io::{self, ErrorKind, Write};

/// Prints the output of a command.
///
/// # Errors
/// [`Failure`] if it cannot be written, except to a closed pipe.
pub(crate) fn print(text: impl AsRef<[u8]>) -> Result<(), Failure> {
    print_next(text).map(|_| ())
}

/// Prints a part of a stream. Returns whether the reader takes more of it.
///
/// # Errors
/// As [`print()`].
pub(crate) fn print_next(text: impl AsRef<[u8]>) -> Result<bool, Failure> {
    write_to(&mut io::stdout(), text.as_ref())
}

fn write_to(output: &mut impl Write, text: &[u8]) -> Result<bool, Failure> {
    match output.write_all(text).and_then(|()| output.flush()) {
        Ok(()) => Ok(true),
        Err(error) if error.kind() == ErrorKind::BrokenPipe => Ok(false),
        Err(error) => Err(Failure::run("write the output", error, "check where stdout goes")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::File;

    #[test]
    fn a_closed_pipe_ends_a_stream_and_a_full_device_is_an_error() {
        let (reader, mut writer) = io::pipe().unwrap();
        assert!(write_to(&mut writer, b"first\n").unwrap());
        drop(reader);
        assert!(!write_to(&mut writer, b"second\n").unwrap());
        let mut full = File::options().write(true).open("/dev/full").unwrap();
        let refused = write_to(&mut full, b"lost\n").unwrap_err();
        assert!(refused.cause().contains("No space left"), "{}", refused.cause());
    }
}
