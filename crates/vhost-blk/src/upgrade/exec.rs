// SPDX-License-Identifier: Apache-2.0
//! Replaces the program of this process.
// UNSAFETY: `std` resets signals before its `exec`, also if that fails and this program goes on;
// descriptor flags by number have no safe form.
#![expect(unsafe_code)]

use std::collections::HashSet;
use std::ffi::{CString, OsString};
use std::io;
use std::os::fd::RawFd;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::Path;
use std::{fs, ptr};

/// Executes `program` with exactly the descriptors `pass` and the standard ones, and with `variable`
/// in its environment. Returns only if that fails; then no descriptor is passed any more.
pub(super) fn exec(
    program: &Path,
    args: &[OsString],
    variable: (&str, &str),
    pass: &HashSet<RawFd>,
) -> io::Error {
    let outcome = pass_only(pass).and_then(|()| execve(program, args, variable));
    let error = outcome.expect_err("exec does not return");
    if let Err(error) = pass_only(&HashSet::new()) {
        tracing::error!(%error, "a later child would inherit descriptors");
    }
    error
}

/// Makes a new program inherit exactly `pass`, beside the standard descriptors.
fn pass_only(pass: &HashSet<RawFd>) -> io::Result<()> {
    for entry in fs::read_dir("/proc/self/fd")? {
        let name = entry?.file_name();
        let Some(fd) = name.to_str().and_then(|name| name.parse::<RawFd>().ok()) else { continue };
        if fd > libc::STDERR_FILENO {
            let flags = if pass.contains(&fd) { 0 } else { libc::FD_CLOEXEC };
            // The descriptor of the directory itself, or of another thread, may be closed by now.
            // SAFETY: sets a flag of a descriptor; no memory is involved.
            unsafe { libc::fcntl(fd, libc::F_SETFD, flags) };
        }
    }
    Ok(())
}

fn execve(program: &Path, args: &[OsString], variable: (&str, &str)) -> io::Result<()> {
    let text = |bytes: Vec<u8>| CString::new(bytes).map_err(io::Error::from);
    let program = text(program.as_os_str().as_bytes().to_vec())?;
    let args: Vec<CString> =
        args.iter().map(|arg| text(arg.clone().into_vec())).collect::<io::Result<_>>()?;
    let (name, value) = variable;
    let kept = std::env::vars_os().filter(|(key, _)| key != name);
    let mut environment: Vec<CString> = kept
        .map(|(key, value)| text([key.as_bytes(), b"=", value.as_bytes()].concat()))
        .collect::<io::Result<_>>()?;
    environment.push(text(format!("{name}={value}").into_bytes())?);
    let pointers = |list: &[CString]| -> Vec<*const libc::c_char> {
        list.iter().map(|text| text.as_ptr()).chain([ptr::null()]).collect()
    };
    let (arg_list, environment_list) = (pointers(&args), pointers(&environment));
    // SAFETY: the lists end with a null pointer and point to C strings that outlive the call.
    unsafe { libc::execve(program.as_ptr(), arg_list.as_ptr(), environment_list.as_ptr()) };
    Err(io::Error::last_os_error())
}
