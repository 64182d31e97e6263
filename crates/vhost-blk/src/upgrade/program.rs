// SPDX-License-Identifier: Apache-2.0
//! The new program: its path, and its check before anything stops.

use super::UpgradeError;
use super::state::ProgramState;
use std::ffi::OsString;
use std::fs::{self, File};
use std::io::{self, Read, Seek, SeekFrom};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus};
use std::time::{Duration, Instant};

/// The command of the check.
pub const CHECK_COMMAND: &str = "upgrade-check";

/// The answer of a program that can take over, on its standard output. Another program that succeeds whatever its
/// arguments are would end the daemon.
pub const CHECK_ANSWER: &str = "vhost-blk: can take over\n";

/// Maximum duration of the check.
const CHECK_MAX: Duration = Duration::from_secs(10);
const CHECK_POLL: Duration = Duration::from_millis(2);
/// Maximum part of the check's output that is shown.
const SHOWN_BYTES_MAX: u64 = 1000;
/// The kernel adds this to the name of a running program whose file was replaced.
const DELETED: &[u8] = b" (deleted)";

/// The path of the program to upgrade to, by default the present file of this program.
pub(super) fn choose(wanted: Option<&Path>) -> Result<PathBuf, UpgradeError> {
    let path = match wanted {
        Some(path) if path.is_absolute() => path.to_owned(),
        Some(path) => return Err(unsuited(path, "the path is not absolute")),
        None => installed(fs::read_link("/proc/self/exe").map_err(UpgradeError::System)?),
    };
    examine(&path)?;
    Ok(path)
}

/// The path of a program that may have been replaced while it runs.
fn installed(exe: PathBuf) -> PathBuf {
    let bytes = exe.as_os_str().as_bytes();
    match bytes.strip_suffix(DELETED) {
        Some(name) => PathBuf::from(OsString::from_vec(name.to_vec())),
        None => exe,
    }
}

/// Refuses a program that other users could have changed.
fn examine(path: &Path) -> Result<(), UpgradeError> {
    let meta = fs::metadata(path).map_err(|error| unsuited(path, error))?;
    let me = rustix::process::geteuid().as_raw();
    if !meta.is_file() {
        return Err(unsuited(path, "it is no regular file"));
    }
    if meta.mode() & 0o111 == 0 {
        return Err(unsuited(path, "it is not executable"));
    }
    if meta.mode() & 0o022 != 0 {
        return Err(unsuited(path, "its group or others may write it"));
    }
    if ![0, me].contains(&meta.uid()) {
        return Err(unsuited(path, "it belongs to another user"));
    }
    Ok(())
}

fn unsuited(path: &Path, why: impl ToString) -> UpgradeError {
    UpgradeError::Program { path: path.into(), why: why.to_string() }
}

/// Has the program check the options of this process and a `state`.
pub(super) fn check(
    program: &Path,
    args: &[OsString],
    state: &ProgramState,
) -> Result<(), UpgradeError> {
    use rustix::fs::{MemfdFlags, memfd_create};
    let input = state.write().map_err(UpgradeError::System)?;
    // Files, so that no descendant of the program can make the reader wait.
    let file = || {
        let file = memfd_create("vhost-blk-check", MemfdFlags::CLOEXEC);
        file.map(File::from).map_err(|error| UpgradeError::System(error.into()))
    };
    let (answer, output) = (file()?, file()?);
    let child = Command::new(program)
        .arg(CHECK_COMMAND)
        .args(&args[1..])
        .env_remove("NOTIFY_SOCKET")
        .stdin(input)
        .stdout(answer.try_clone().map_err(UpgradeError::System)?)
        .stderr(output.try_clone().map_err(UpgradeError::System)?)
        .spawn()
        .map_err(|error| unsuited(program, error))?;
    let status = wait(child, CHECK_MAX).map_err(UpgradeError::System)?;
    let is_success = status.is_some_and(|status| status.success());
    if is_success && content(answer)? == CHECK_ANSWER {
        return Ok(());
    }
    let told = match is_success {
        true => "it has not answered the check, so it is another program, or too old".to_owned(),
        false => content(output)?.trim().replace('\n', " "),
    };
    let ended = match status {
        Some(status) => status.to_string(),
        None => format!("no end in {} s", CHECK_MAX.as_secs()),
    };
    Err(UpgradeError::Check { path: program.into(), ended, told })
}

/// The first bytes of a file.
fn content(mut file: File) -> Result<String, UpgradeError> {
    let mut bytes = Vec::new();
    let read = file
        .seek(SeekFrom::Start(0))
        .and_then(|_| file.take(SHOWN_BYTES_MAX).read_to_end(&mut bytes));
    read.map_err(UpgradeError::System)?;
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

/// Waits for the end of the check; `None`: it took too long and was killed. It may be in a system call that a signal
/// does not end: then it goes when its storage answers.
fn wait(mut child: Child, limit: Duration) -> io::Result<Option<ExitStatus>> {
    let end = Instant::now() + limit;
    loop {
        if let Some(status) = child.try_wait()? {
            return Ok(Some(status));
        }
        if Instant::now() > end {
            child.kill()?;
            reap(child);
            return Ok(None);
        }
        std::thread::sleep(CHECK_POLL);
    }
}

/// Waits for a killed child on a thread of its own. Without a thread, the child stays as a zombie.
fn reap(mut child: Child) {
    let (pid, body) = (child.id(), move || drop(child.wait()));
    if let Err(error) = std::thread::Builder::new().name("reap".into()).spawn(body) {
        tracing::warn!(pid, %error, "the killed check of an upgrade stays as a zombie");
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn a_replaced_program_is_found_at_its_old_path() {
        assert_eq!(installed("/usr/bin/a (deleted)".into()), Path::new("/usr/bin/a"));
        assert_eq!(installed("/usr/bin/a".into()), Path::new("/usr/bin/a"));
    }

    #[test]
    fn a_program_that_others_can_change_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("program");
        fs::write(&path, "").unwrap();
        for (mode, word) in [(0o600, "executable"), (0o777, "write"), (0o775, "write")] {
            fs::set_permissions(&path, fs::Permissions::from_mode(mode)).unwrap();
            let why = choose(Some(&path)).unwrap_err().to_string();
            assert!(why.contains(word), "{why}");
        }
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
        choose(Some(&path)).unwrap();
        for path in [dir.path(), Path::new("program"), &dir.path().join("missing")] {
            choose(Some(path)).unwrap_err();
        }
    }
}
