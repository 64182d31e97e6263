// SPDX-License-Identifier: Apache-2.0
//! Servers of NBD, for the targets of backups.

use crate::common::{Daemon, Place, pattern};
use std::path::{Path, PathBuf};
use std::process::Command;

/// A server, its image, and the address of its export.
pub(crate) struct Server {
    pub(crate) process: Daemon,
    pub(crate) image: PathBuf,
    pub(crate) address: String,
}

/// An image full of data that no disk has.
pub(crate) fn dirty_image(place: &Place, name: &str, bytes: u64) -> PathBuf {
    let image = place.path(name);
    let content = (0..bytes / 512).flat_map(|sector| pattern(512, sector ^ 0xdead_beef));
    std::fs::write(&image, content.collect::<Vec<u8>>()).unwrap();
    image
}

/// qemu-nbd of an image, with more options.
pub(crate) fn qemu(place: &Place, image: &Path, format: &str, options: &[&str]) -> Server {
    let socket = socket_of(place, image);
    let mut command = Command::new("qemu-nbd");
    command.args(["--persistent", "--shared=0", "--discard=unmap", "--format", format]);
    command.arg(format!("--socket={}", socket.display())).args(options).arg(image);
    served(command, image, &socket)
}

/// nbdkit of an image, with filters and their parameters.
pub(crate) fn nbdkit(place: &Place, image: &Path, filters: &[&str], options: &[&str]) -> Server {
    let socket = socket_of(place, image);
    let mut command = Command::new("nbdkit");
    command.args(["--foreground", "--exit-with-parent", "--unix"]).arg(&socket);
    command.args(filters).arg("file").arg(image).args(options);
    served(command, image, &socket)
}

/// nbdkit whose plugin is made of two commands: it has neither FLUSH nor WRITE_ZEROES.
pub(crate) fn simple(place: &Place, image: &Path) -> Server {
    let socket = socket_of(place, image);
    let (shown, bytes) = (image.display(), std::fs::metadata(image).unwrap().len());
    let read = format!("dd if={shown} iflag=skip_bytes,count_bytes skip=$4 count=$3 status=none");
    let write = format!("dd of={shown} oflag=seek_bytes conv=notrunc seek=$4 status=none");
    let mut command = Command::new("nbdkit");
    command.args(["--foreground", "--exit-with-parent", "--unix"]).arg(&socket).arg("eval");
    command.arg(format!("get_size=echo {bytes}"));
    command.arg(format!("pread={read}")).arg(format!("pwrite={write}"));
    served(command, image, &socket)
}

fn socket_of(place: &Place, image: &Path) -> PathBuf {
    let socket = place.path(&format!("{}.nbd", image.file_name().unwrap().to_str().unwrap()));
    let _ = std::fs::remove_file(&socket); // of a server that was killed
    socket
}

fn served(mut command: Command, image: &Path, socket: &Path) -> Server {
    let process = Daemon::start(&mut command, socket);
    let address = format!("nbd:unix:{}", socket.display());
    Server { process, image: image.to_owned(), address }
}

impl Server {
    /// The first bytes of the image of a raw server.
    pub(crate) fn content(&self, bytes: usize) -> Vec<u8> {
        let mut content = std::fs::read(&self.image).unwrap();
        content.truncate(bytes);
        content
    }
}
