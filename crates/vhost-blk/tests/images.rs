// SPDX-License-Identifier: Apache-2.0
//! Image formats on the command line, and a qcow2 disk as a guest sees it.

mod common;

use common::{Daemon, finish, one_line, program};
use driver::{Device, Options};
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

fn qemu_img(directory: &Path, args: &[&str]) -> String {
    let ran = Command::new("qemu-img").current_dir(directory).args(args).output();
    let ran = ran.expect("qemu-img runs; scripts/setup.sh installs it");
    let text = String::from_utf8_lossy(&[ran.stdout, ran.stderr].concat()).into_owned();
    assert!(ran.status.success(), "qemu-img {args:?}: {text}");
    text
}

fn refusal(directory: &Path, options: &[&str]) -> String {
    let mut command = program();
    command.current_dir(directory).args(["serve", "--socket-path", "s"]).args(options);
    let ran = command.output().expect("the program runs");
    assert!(!ran.status.success(), "it serves {options:?}");
    String::from_utf8_lossy(&ran.stderr).into_owned()
}

#[test]
fn the_format_of_an_image_is_never_guessed() {
    let directory = tempfile::tempdir().expect("a directory");
    let at = directory.path();
    qemu_img(at, &["create", "-qf", "qcow2", "base", "8M"]);
    qemu_img(at, &["create", "-qf", "qcow2", "-b", "base", "-F", "qcow2", "top", "8M"]);
    std::fs::write(at.join("raw"), vec![0; 1 << 20]).expect("a file");
    let cases: [(&[&str], &str); 4] = [
        (&["--blk-file", "base"], "it begins like a qcow2 image; give --format qcow2"),
        (&["--blk-file", "raw", "--format", "qcow2", "--read-only"], "not a qcow2 image"),
        (&["--blk-file", "top", "--format", "qcow2", "--read-only"], "--allow-backing"),
        (
            &["--blk-file", "base", "--format", "qcow2", "--read-only", "--data-plane", "kernel"],
            "qcow2 image",
        ),
    ];
    for (options, why) in cases {
        let text = refusal(at, options);
        assert!(text.contains(why), "{options:?}: {text}");
    }
}

#[test]
fn a_guest_writes_to_an_overlay_and_qemu_reads_it() {
    let directory = tempfile::tempdir().expect("a directory");
    let at = directory.path();
    std::fs::write(at.join("base"), vec![0x5a; 8 << 20]).expect("a base");
    qemu_img(at, &["create", "-qf", "qcow2", "-b", "base", "-F", "raw", "top", "8M"]);
    let socket = at.join("disk.sock");
    let mut command = program();
    command.args([
        "serve",
        "--format",
        "qcow2",
        "--allow-backing",
        "same-dir",
        "--num-queues",
        "1",
    ]);
    command.arg("--blk-file").arg(at.join("top")).arg("--socket-path").arg(&socket);
    let mut daemon = Daemon::start(&mut command, &socket);
    let options = Options { limit: Duration::from_secs(60), ..Options::default() };
    let mut guest = Device::connect(&socket, &options).expect("a device");
    guest.write(2049, &[7; 4096]).expect("the write succeeds");
    let mut data = vec![0; 8192];
    guest.read(2048, &mut data).expect("the read succeeds");
    assert!(data[..512].iter().chain(&data[4608..]).all(|byte| *byte == 0x5a));
    assert!(data[512..4608].iter().all(|byte| *byte == 7));
    drop(guest);
    daemon.signal(libc::SIGKILL);
    daemon.wait();
    // The kill has leaked the reserved clusters, and QEMU finds nothing else.
    let checked = Command::new("qemu-img").current_dir(at).args(["check", "-U", "top"]).output();
    assert_eq!(checked.expect("qemu-img runs").status.code(), Some(3));
    qemu_img(at, &["convert", "-U", "-O", "raw", "top", "content"]);
    let content = std::fs::read(at.join("content")).expect("the content");
    let end = 2049 * 512 + 4096;
    assert!(content[2049 * 512..end].iter().all(|byte| *byte == 7));
    assert!(content[..2049 * 512].iter().chain(&content[end..]).all(|byte| *byte == 0x5a));
}

/// A disk of 4-KiB clusters whose refcounts have 16 bits: two leaked clusters after its end.
fn leak(image: &Path) {
    let file = File::options().read(true).write(true).open(image).expect("it opens");
    let read = |at| {
        let mut word = [0; 8];
        file.read_exact_at(&mut word, at).expect("a word");
        u64::from_be_bytes(word)
    };
    let clusters = file.metadata().expect("a size").len().div_ceil(4096);
    file.set_len((clusters + 2) << 12).expect("it grows");
    file.write_all_at(&[0, 1, 0, 1], read(read(48)) + clusters * 2).expect("it is written");
}

#[test]
fn a_start_after_a_kill_frees_leaked_clusters_and_one_after_a_stop_does_not_look() {
    let directory = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).expect("a directory");
    let at = directory.path();
    qemu_img(at, &["create", "-qf", "qcow2", "-o", "cluster_size=4k", "image", "8M"]);
    let (image, socket) = (at.join("image"), at.join("s"));
    let serve = || {
        let mut command = program();
        command.args(["serve", "--format", "qcow2", "--num-queues", "1", "--blk-file"]);
        command.arg(&image).arg("--socket-path").arg(&socket);
        Daemon::start(&mut command, &socket)
    };
    for (signal, is_freed) in [(libc::SIGKILL, true), (libc::SIGTERM, false)] {
        let mut daemon = serve();
        let options = Options { limit: Duration::from_secs(60), ..Options::default() };
        let mut guest = Device::connect(&socket, &options).expect("a device");
        guest.write(2048, &[7; 4096]).expect("the write succeeds");
        drop(guest);
        daemon.signal(signal);
        daemon.wait();
        leak(&image);
        let mut daemon = serve();
        daemon.signal(libc::SIGTERM);
        daemon.wait();
        let told = daemon.rest_of_stderr();
        // The kill leaks those that were reserved, and `leak` two more.
        let line = "it was not closed properly; 252 leaked clusters (1032192 bytes) were freed";
        assert_eq!(told.contains(line), is_freed, "{told}");
        let checked = Command::new("qemu-img").current_dir(at).args(["check", "image"]).output();
        let code = checked.expect("qemu-img runs").status.code();
        assert_eq!(code, Some(if is_freed { 0 } else { 3 }));
    }
}

#[test]
fn a_created_image_is_sound_and_is_served() {
    let directory = tempfile::tempdir().expect("a directory");
    let at = directory.path();
    std::fs::write(at.join("base"), vec![0x5a; 8 << 20]).expect("a base");
    let cases: [&[&str]; 5] = [
        &["8M"],
        &["--cluster-size", "4K", "8M"],
        &["--preallocation", "metadata", "--cluster-size", "2M", "8M"],
        &["--preallocation", "full", "8M"],
        &["--backing", "base", "--backing-format", "raw"],
    ];
    for (number, options) in cases.iter().enumerate() {
        let image = at.join(format!("new{number}"));
        let mut create = program();
        create.args(["create", "--format", "qcow2"]).arg(&image).args(*options);
        let made = finish(&mut create);
        assert!(made.status.success(), "{options:?}: {made:?}");
        qemu_img(at, &["check", "-q", &format!("new{number}")]);
        let socket = at.join(format!("s{number}"));
        let mut command = program();
        command.args(["serve", "--format", "qcow2", "--allow-backing", "same-dir"]);
        command.arg("--num-queues").arg("1").arg("--blk-file").arg(&image);
        command.arg("--socket-path").arg(&socket);
        let _daemon = Daemon::start(&mut command, &socket);
        let options = Options { limit: Duration::from_secs(60), ..Options::default() };
        let mut guest = Device::connect(&socket, &options).expect("a device");
        guest.write(16, &[7; 4096]).expect("the write succeeds");
        let mut data = vec![0; 8192];
        guest.read(16, &mut data).expect("the read succeeds");
        let below = if number == 4 { 0x5a } else { 0 };
        assert!(data[..4096].iter().all(|byte| *byte == 7), "image {number}");
        assert!(data[4096..].iter().all(|byte| *byte == below), "image {number}");
    }
}

#[test]
fn a_wrong_qcow2_image_is_not_created() {
    let directory = tempfile::tempdir().expect("a directory");
    let at = directory.path();
    std::fs::write(at.join("base"), "precious").expect("a file");
    let backing = &["--backing", "base", "--backing-format", "raw"];
    let cases: [(&[&str], i32, &str); 8] = [
        (&["--format", "qcow2", "base", "8M"], 1, "exists already"),
        (&["--format", "qcow2", "new"], 2, "SIZE"),
        (&["--format", "qcow2", "--cluster-size", "5K", "new", "8M"], 2, "power of 2"),
        (&["--format", "qcow2", "--cluster-size", "4K", "new", "9T"], 2, "not possible"),
        (&["--format", "qcow2", "--backing", "base", "new"], 2, "--backing-format"),
        (
            &["--format", "qcow2", "--backing", "none", "--backing-format", "raw", "new"],
            1,
            "No such file",
        ),
        (
            &["--format", "qcow2", "--backing", "base", "--backing-format", "qcow2", "new"],
            1,
            "not a qcow2 image",
        ),
        (&["--preallocation", "metadata", "new", "8M"], 2, "--format qcow2"),
    ];
    for (options, code, why) in cases {
        let line = one_line(&finish(program().current_dir(at).arg("create").args(options)), code);
        assert!(line.contains(why), "{options:?}: {line}");
    }
    let full = ["create", "--format", "qcow2", "--preallocation", "full", "new"];
    one_line(&finish(program().current_dir(at).args(full).args(backing)), 2);
    let raw = finish(program().current_dir(at).args(["create", "new", "8M"]).args(backing));
    one_line(&raw, 2);
    assert_eq!(std::fs::read_dir(at).expect("the directory").count(), 1);
    assert_eq!(std::fs::read(at.join("base")).expect("the file"), b"precious");
}
