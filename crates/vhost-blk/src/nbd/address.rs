// SPDX-License-Identifier: Apache-2.0
//! The address of an export, in the forms that QEMU and libnbd know.

use percent_encoding::{AsciiSet, CONTROLS, percent_decode_str, utf8_percent_encode};
use serde::{Deserialize, Serialize};
use std::fmt;
use std::path::{Path, PathBuf};

/// Longest name of an export: the protocol has this bound.
const EXPORT_BYTES_MAX: usize = 4096;

/// Bytes of a name or a path that are not themselves in a URI.
const QUOTED: &AsciiSet = &CONTROLS.add(b' ').add(b'"').add(b'#').add(b'%').add(b'&').add(b'?');

const FORMS: &str = "give nbd:unix:PATH or nbd+unix:///EXPORT?socket=PATH";

/// An export behind a Unix socket. Displays as a URI: `nbd+unix:///EXPORT?socket=PATH`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Address {
    /// Path of the socket.
    pub socket: PathBuf,
    /// Name of the export; the empty one is the server's default.
    pub export: String,
}

impl Address {
    /// Reads an address; `None`: the text is none of NBD.
    ///
    /// # Errors
    /// The cause with the remedy.
    pub fn of(text: &str) -> Option<Result<Address, String>> {
        if let Some(rest) = text.strip_prefix("nbd:") {
            return Some(of_words(rest));
        }
        if let Some(rest) = text.strip_prefix("nbd+unix:") {
            return Some(of_uri(rest));
        }
        let is_other = ["nbd://", "nbds:", "nbds+unix:", "nbd+vsock:"];
        let is_other = is_other.iter().any(|scheme| text.starts_with(scheme));
        is_other
            .then(|| Err(format!("only NBD over a Unix socket, without TLS, is known; {FORMS}")))
    }

    /// The address with an absolute path of the socket.
    ///
    /// # Errors
    /// The error of the system call.
    pub fn absolute(self) -> std::io::Result<Address> {
        Ok(Address { socket: std::path::absolute(self.socket)?, ..self })
    }
}

/// `unix:PATH[:exportname=EXPORT]`.
fn of_words(rest: &str) -> Result<Address, String> {
    let Some(rest) = rest.strip_prefix("unix:") else {
        return Err(format!("only NBD over a Unix socket is known; {FORMS}"));
    };
    let (socket, export) = rest.split_once(":exportname=").unwrap_or((rest, ""));
    checked(socket, export)
}

/// `//[/EXPORT]?socket=PATH`.
fn of_uri(rest: &str) -> Result<Address, String> {
    let parts = rest.strip_prefix("//").and_then(|rest| rest.split_once('?'));
    let Some((export, query)) = parts else {
        return Err(format!("it names no socket; {FORMS}"));
    };
    if !export.is_empty() && !export.starts_with('/') {
        return Err(format!("it names a host, and a Unix socket has none; {FORMS}"));
    }
    let [("socket", socket)] =
        query.split('&').filter_map(|part| part.split_once('=')).collect::<Vec<_>>()[..]
    else {
        return Err(format!("it has other parameters than one socket; {FORMS}"));
    };
    let decoded = |text: &str| {
        let decoded = percent_decode_str(text).decode_utf8();
        decoded.map(String::from).map_err(|_| format!("it is not UTF-8; {FORMS}"))
    };
    checked(&decoded(socket)?, &decoded(export.strip_prefix('/').unwrap_or(""))?)
}

fn checked(socket: &str, export: &str) -> Result<Address, String> {
    if socket.is_empty() {
        return Err(format!("it names no socket; {FORMS}"));
    }
    if export.len() > EXPORT_BYTES_MAX {
        return Err(format!(
            "the name of the export has more than {EXPORT_BYTES_MAX} bytes; give a shorter one"
        ));
    }
    Ok(Address { socket: Path::new(socket).to_owned(), export: export.to_owned() })
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let socket = self.socket.to_string_lossy();
        let quoted = |text| utf8_percent_encode(text, QUOTED);
        write!(f, "nbd+unix:///{}?socket={}", quoted(&self.export), quoted(&socket))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parts(text: &str) -> (String, String) {
        let address = Address::of(text).expect("it is of NBD").expect("it is one");
        (address.socket.to_str().unwrap().to_owned(), address.export)
    }

    #[test]
    fn an_address_is_read_in_the_forms_of_qemu_and_libnbd() {
        let of = |socket: &str, export: &str| (socket.to_owned(), export.to_owned());
        assert_eq!(parts("nbd:unix:/a/b.sock"), of("/a/b.sock", ""));
        assert_eq!(parts("nbd:unix:a:exportname=x y"), of("a", "x y"));
        assert_eq!(parts("nbd+unix://?socket=/a"), of("/a", ""));
        assert_eq!(parts("nbd+unix:///?socket=/a"), of("/a", ""));
        assert_eq!(parts("nbd+unix:///x%20y/z?socket=/a%25b"), of("/a%b", "x y/z"));
        assert!(Address::of("/nbd:unix:a").is_none() && Address::of("nbd").is_none());
    }

    #[test]
    fn an_address_is_read_again_as_it_is_shown() {
        for (socket, export) in [("/a b/c%d?e&f=g#h\"i", "x ?&%=/y"), ("/ä", "ö"), ("/a", "")] {
            let address = Address { socket: socket.into(), export: export.into() };
            assert_eq!(Address::of(&address.to_string()), Some(Ok(address)));
        }
    }

    #[test]
    fn other_addresses_of_nbd_are_refused_with_the_form_that_is_known() {
        let long = format!("nbd:unix:/a:exportname={}", "x".repeat(EXPORT_BYTES_MAX + 1));
        for text in [
            "nbd:localhost:10809",
            "nbd://localhost",
            "nbds+unix:///?socket=/a",
            "nbd+unix://host/?socket=/a",
            "nbd+unix:///",
            "nbd+unix:///?socket=",
            "nbd+unix:///?socket=/a&tls-certificates=/b",
            "nbd+unix:///%ff?socket=/a",
            "nbd:unix:",
            &long,
        ] {
            let why = Address::of(text).expect("it is of NBD").expect_err(text);
            assert!(why.contains("; give "), "{why}");
        }
    }
}
