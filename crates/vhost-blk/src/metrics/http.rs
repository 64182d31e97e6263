// SPDX-License-Identifier: Apache-2.0
//! One HTTP/1.1 request (RFC 9112) and its answer. Each connection carries one.

use socket2::Socket;
use std::io::{self, Read, Write};
use std::net::Shutdown;
use std::time::{Duration, Instant};

/// The media type of the page.
const MEDIA_TYPE: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";
/// Maximum bytes of a request's head.
const HEAD_BYTES_MAX: usize = 8192;
/// Maximum header fields of a request.
const FIELDS_MAX: usize = 64;
/// Maximum time to read a request, and maximum time to send the answer.
const PATIENCE: Duration = Duration::from_secs(2);
/// Status line of the answer to a method that does not read.
const NOT_ALLOWED: &str = "405 Method Not Allowed";

/// The target of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Asked {
    /// The page.
    Page,
    /// The head of the answer with the page.
    Head,
    /// Something that this server does not have: the status line of the answer.
    Other(&'static str),
}

/// Reads a request from `client` and answers it. `page` makes the page.
pub(super) fn answer(client: &Socket, page: impl FnOnce() -> String) -> io::Result<()> {
    let asked = read(client, Instant::now() + PATIENCE)?;
    let text = compose(asked, page);
    let deadline = Instant::now() + PATIENCE;
    write(client, text.as_bytes(), deadline)?;
    // The answer has arrived, or the client no longer wants it.
    let _ = discard_rest(client, deadline);
    Ok(())
}

fn compose(asked: Asked, page: impl FnOnce() -> String) -> String {
    let (status, media_type, body) = match asked {
        Asked::Other(status) => (status, "text/plain", format!("{status}; GET /metrics\n")),
        Asked::Page | Asked::Head => ("200 OK", MEDIA_TYPE, page()),
    };
    let allow = if status == NOT_ALLOWED { "Allow: GET, HEAD\r\n" } else { "" };
    let mut text = format!(
        "HTTP/1.1 {status}\r\n{allow}Content-Type: {media_type}\r\nContent-Length: {}\r\n\
         Connection: close\r\n\r\n",
        body.len()
    );
    if asked != Asked::Head {
        text += &body;
    }
    text
}

/// The time left until `deadline`: at least a millisecond, because a socket takes 0 as no limit.
fn left(deadline: Instant) -> io::Result<Duration> {
    let left = deadline.saturating_duration_since(Instant::now());
    if left < Duration::from_millis(1) { Err(io::ErrorKind::TimedOut.into()) } else { Ok(left) }
}

/// Sends all of `text` before `deadline`.
fn write(mut client: &Socket, mut text: &[u8], deadline: Instant) -> io::Result<()> {
    while !text.is_empty() {
        client.set_write_timeout(Some(left(deadline)?))?;
        match client.write(text)? {
            0 => return Err(io::ErrorKind::WriteZero.into()),
            bytes => text = &text[bytes..],
        }
    }
    Ok(())
}

/// Reads until the client closes: a close before that would reset the connection, and the client
/// could lose the answer.
fn discard_rest(client: &Socket, deadline: Instant) -> io::Result<()> {
    client.shutdown(Shutdown::Write)?;
    while read_part(client, &mut [0; 1024], deadline)? > 0 {}
    Ok(())
}

/// Reads up to `deadline`. 0 bytes: the end of the stream.
fn read_part(mut client: &Socket, part: &mut [u8], deadline: Instant) -> io::Result<usize> {
    client.set_read_timeout(Some(left(deadline)?))?;
    client.read(part)
}

/// Reads the head of a request.
fn read(client: &Socket, deadline: Instant) -> io::Result<Asked> {
    let mut head = Vec::new();
    loop {
        let mut part = [0; 1024];
        match read_part(client, &mut part, deadline)? {
            0 => return Err(io::ErrorKind::UnexpectedEof.into()),
            bytes => head.extend_from_slice(&part[..bytes]),
        }
        if let Some(asked) = parse(&head) {
            return Ok(asked);
        }
    }
}

/// Parses the head of a request; `None`: it is incomplete.
fn parse(head: &[u8]) -> Option<Asked> {
    let mut fields = [httparse::EMPTY_HEADER; FIELDS_MAX];
    let mut request = httparse::Request::new(&mut fields);
    match request.parse(head) {
        Ok(httparse::Status::Complete(_)) => {}
        Ok(httparse::Status::Partial) if head.len() < HEAD_BYTES_MAX => return None,
        Ok(httparse::Status::Partial) | Err(httparse::Error::TooManyHeaders) => {
            return Some(Asked::Other("431 Request Header Fields Too Large"));
        }
        Err(_) => return Some(Asked::Other("400 Bad Request")),
    }
    let path = request.path.unwrap_or_default();
    let path = path.split_once('?').map_or(path, |(path, _)| path);
    Some(match (request.method, path) {
        (Some("GET"), "/metrics") => Asked::Page,
        (Some("HEAD"), "/metrics") => Asked::Head,
        (Some("GET" | "HEAD"), _) => Asked::Other("404 Not Found"),
        _ => Asked::Other(NOT_ALLOWED),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_are_told_apart() {
        let of = |line: &str| parse(format!("{line} HTTP/1.1\r\nHost: a\r\n\r\n").as_bytes());
        assert_eq!(of("GET /metrics"), Some(Asked::Page));
        assert_eq!(of("GET /metrics?name=a"), Some(Asked::Page));
        assert_eq!(of("HEAD /metrics"), Some(Asked::Head));
        assert_eq!(of("GET /"), Some(Asked::Other("404 Not Found")));
        assert_eq!(of("POST /metrics"), Some(Asked::Other(NOT_ALLOWED)));
        assert_eq!(parse(b"GET /metrics HTTP/1.1\r\nHo"), None);
        assert_eq!(parse(b"\0\x01"), Some(Asked::Other("400 Bad Request")));
    }

    #[test]
    fn a_head_that_does_not_end_is_refused() {
        let too_large = Some(Asked::Other("431 Request Header Fields Too Large"));
        let long = format!("GET /{}", "a".repeat(HEAD_BYTES_MAX));
        assert_eq!(parse(long.as_bytes()), too_large);
        let many = "GET / HTTP/1.1\r\n".to_owned() + &"a: b\r\n".repeat(FIELDS_MAX + 1);
        assert_eq!(parse(many.as_bytes()), too_large);
    }
}
