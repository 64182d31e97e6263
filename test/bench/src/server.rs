// SPDX-License-Identifier: Apache-2.0
//! The compared servers: ours, qemu-storage-daemon in its variants, and peers.

use std::fmt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use kit::daemon::Daemon;

use crate::{cpu, disk};

/// Our server's name.
pub const OURS: &str = "ours";
/// Our server on a qcow2 image with the content of the file.
pub const OURS_QCOW2: &str = "ours, qcow2";
/// Our server on the same image with its clusters in random order.
pub const OURS_FRAGMENTED: &str = "ours, fragmented qcow2";

/// True for a subject of this project, in any part.
pub fn is_ours(name: &str) -> bool {
    name == OURS || name.starts_with("ours, ") || name.starts_with("vhost-blk ")
}

/// Begin of the names of variants of qemu-storage-daemon on that image.
const QSD_QCOW2: &str = "qsd qcow2 ";
/// The same, with its clusters in random order.
const QSD_FRAGMENTED: &str = "qsd fragmented qcow2 ";
/// Least size of a disk whose image is also measured with its clusters in random order: so many clusters are
/// no small part of a table.
pub const FRAGMENTED_MIN: u64 = 1 << 30;
/// Begin of the names of fio on the same file, without any server.
pub const BARE: &str = "bare fio";

/// True for the name of a variant of bare fio.
pub fn is_bare(name: &str) -> bool {
    name.starts_with(BARE)
}

/// True for the name of a variant of qemu-storage-daemon on the same storage as ours.
pub fn is_qsd(name: &str) -> bool {
    name.starts_with("qsd ") && !is_qsd_qcow2(name) && !is_qsd_fragmented(name)
}

/// True for the name of a variant of qemu-storage-daemon on a qcow2 image with its clusters in random order.
pub fn is_qsd_fragmented(name: &str) -> bool {
    name.starts_with(QSD_FRAGMENTED)
}

/// True for the name of a variant of qemu-storage-daemon on a qcow2 image.
pub fn is_qsd_qcow2(name: &str) -> bool {
    name.starts_with(QSD_QCOW2)
}

/// Backing storage of a server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Storage {
    /// A file on a tmpfs, opened with O_DIRECT.
    File,
    /// A file on the file system of a real disk, opened with O_DIRECT.
    Disk,
    /// Nothing: requests complete at once.
    Null,
}

impl fmt::Display for Storage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::File => "file",
            Self::Disk => "disk",
            Self::Null => "null",
        })
    }
}

/// A server to start, or one that runs.
#[derive(Clone, Debug)]
pub struct Spec {
    /// Name in the tables.
    pub name: String,
    /// Program and arguments; none for a peer.
    command: Option<(String, Vec<String>)>,
    socket: PathBuf,
}

/// A running server, ready for measurement.
#[derive(Debug)]
pub struct Server {
    /// Name in the tables.
    pub name: String,
    /// Path of its socket.
    pub socket: String,
    /// Process id.
    pub pid: u32,
    /// The command line that started it, or the place where it was found.
    pub command_line: String,
    daemon: Option<Daemon>,
}

/// Paths and sizes for the command lines.
#[derive(Clone, Debug)]
pub struct Settings {
    /// `vhost-blk` program; none: only peers are measured.
    pub ours: Option<PathBuf>,
    /// Further arguments of `vhost-blk serve`.
    pub ours_args: Vec<String>,
    /// qemu-storage-daemon program; none: not installed or not wanted.
    pub qsd: Option<String>,
    /// Bytes of the disks.
    pub size_bytes: u64,
    /// The disk file on a tmpfs; empty: none.
    pub file: PathBuf,
    /// The disk file on a real disk; empty: none.
    pub disk: PathBuf,
    /// Each file has a fully allocated qcow2 image beside it, with the same content.
    pub qcow2: bool,
    /// Directory for sockets and logs.
    pub directory: PathBuf,
    /// Number of queues that servers offer.
    pub queues: u16,
}

impl Settings {
    /// The file behind a kind of storage.
    pub fn file_of(&self, storage: Storage) -> Option<&Path> {
        match storage {
            Storage::File => Some(&self.file),
            Storage::Disk => Some(&self.disk),
            Storage::Null => None,
        }
    }

    /// All servers of one kind of storage, without peers.
    pub fn specs(&self, storage: Storage) -> Vec<Spec> {
        let mut specs = Vec::new();
        if let Some(program) = &self.ours {
            specs.push(self.ours(program, storage));
            let images = self.images_of(storage).into_iter();
            specs.extend(
                images.map(|(ours, _, image)| self.ours_on(program, ours, storage, &image)),
            );
        }
        if let Some(program) = &self.qsd {
            let variants: &[(&str, &str)] = match storage {
                Storage::Null => &[("qsd null-co", "")],
                Storage::File | Storage::Disk => &[
                    ("qsd native", "native"),
                    ("qsd io_uring", "io_uring"),
                    ("qsd threads", "threads"),
                ],
            };
            for (name, aio) in variants {
                specs.push(self.qsd(program, name, storage, None, aio, false));
                let name = format!("{name} +iothread");
                specs.push(self.qsd(program, &name, storage, None, aio, true));
            }
            for (_, qsd, image) in self.images_of(storage) {
                specs.extend(self.qsd_on(program, qsd, storage, &image));
            }
        }
        specs
    }

    /// The servers of a qcow2 image that is not that of a storage.
    pub fn specs_of_image(&self, storage: Storage, image: &Path) -> Vec<Spec> {
        let ours = self.ours.iter().map(|ours| self.ours_on(ours, OURS_QCOW2, storage, image));
        let qsd = self.qsd.iter().flat_map(|qsd| self.qsd_on(qsd, QSD_QCOW2, storage, image));
        ours.chain(qsd).collect()
    }

    /// The qcow2 images of a kind of storage, with the name of our server and the begin of qemu-storage-daemon's.
    fn images_of(&self, storage: Storage) -> Vec<(&'static str, &'static str, PathBuf)> {
        let mut images = Vec::new();
        if let Some(file) = self.file_of(storage).filter(|_| self.qcow2) {
            images.push((OURS_QCOW2, QSD_QCOW2, disk::image_beside(file)));
            if self.has_fragmented() {
                images.push((OURS_FRAGMENTED, QSD_FRAGMENTED, disk::fragmented_beside(file)));
            }
        }
        images
    }

    /// True if the images are also measured with their clusters in random order.
    pub fn has_fragmented(&self) -> bool {
        self.qcow2 && self.size_bytes >= FRAGMENTED_MIN
    }

    fn qsd_on(&self, program: &str, begin: &str, storage: Storage, image: &Path) -> [Spec; 2] {
        ["native", "io_uring"].map(|aio| {
            let name = format!("{begin}{aio} +iothread");
            self.qsd(program, &name, storage, Some(image), aio, true)
        })
    }

    fn socket(&self, storage: Storage, name: &str) -> PathBuf {
        self.directory.join(format!("{storage}-{}.sock", name.replace([' ', '+', ','], "-")))
    }

    fn ours(&self, program: &Path, storage: Storage) -> Spec {
        let served = match self.file_of(storage) {
            Some(file) => vec![format!("--blk-file={}", file.display())],
            None => vec!["--backend=null".to_owned(), format!("--size={}", self.size_bytes)],
        };
        self.our_spec(program, OURS, storage, served)
    }

    fn ours_on(&self, program: &Path, name: &str, storage: Storage, image: &Path) -> Spec {
        let image = format!("--blk-file={}", image.display());
        self.our_spec(program, name, storage, vec!["--format=qcow2".to_owned(), image])
    }

    fn our_spec(&self, program: &Path, name: &str, storage: Storage, served: Vec<String>) -> Spec {
        let socket = self.socket(storage, name);
        let mut args = vec![
            "serve".to_owned(),
            format!("--socket-path={}", socket.display()),
            format!("--num-queues={}", self.queues),
        ];
        args.extend(served);
        args.extend(self.ours_args.iter().cloned());
        let command = Some((program.display().to_string(), args));
        Spec { name: name.to_owned(), command, socket }
    }

    fn qsd(
        &self,
        program: &str,
        name: &str,
        storage: Storage,
        image: Option<&Path>,
        aio: &str,
        thread: bool,
    ) -> Spec {
        let socket = self.socket(storage, name);
        let (node, file) = match image {
            Some(image) => ("below", Some(image)),
            None => ("disk", self.file_of(storage)),
        };
        let blockdev = match file {
            // Like our null disk: a read leaves its buffers unchanged.
            None => {
                format!("driver=null-co,node-name=disk,size={},read-zeroes=off", self.size_bytes)
            }
            // All servers share the file in turn, and only one of them may hold the lock.
            Some(file) => format!(
                "driver=file,node-name={node},filename={},aio={aio},cache.direct=on,locking=off",
                file.display()
            ),
        };
        let mut export = format!(
            "type=vhost-user-blk,id=export,node-name=disk,addr.type=unix,addr.path={},\
             writable=on,num-queues={}",
            socket.display(),
            self.queues
        );
        let mut args = vec!["--blockdev".to_owned(), blockdev];
        if image.is_some() {
            let format = format!("driver=qcow2,node-name=disk,file={node}");
            args.extend(["--blockdev".to_owned(), format]);
        }
        if thread {
            args.extend(["--object".to_owned(), "iothread,id=thread".to_owned()]);
            export.push_str(",iothread=thread");
        }
        args.extend(["--export".to_owned(), export]);
        let command = Some((program.to_owned(), args));
        Spec { name: name.to_owned(), command, socket }
    }
}

impl Spec {
    /// A server that runs already.
    pub fn peer(name: &str, socket: &str) -> Self {
        let (name, socket) = (name.to_owned(), socket.into());
        Self { name, command: None, socket }
    }

    /// True if the server is measured with two queues: ours, and for comparison the variant of
    /// qemu-storage-daemon with its own thread.
    pub fn scales(&self) -> bool {
        [OURS, "qsd native +iothread", "qsd null-co +iothread"].contains(&self.name.as_str())
    }

    /// Starts the server and moves it to its CPUs; a peer is only looked up and left in place.
    pub fn start(&self, cpus: &[usize]) -> Result<Server> {
        let socket = self.socket.display().to_string();
        let name = self.name.clone();
        let Some((program, args)) = &self.command else {
            let pid = listener_pid(&socket)?;
            let command_line = format!("(runs already, pid {pid}, socket {socket})");
            return Ok(Server { name, socket, pid, command_line, daemon: None });
        };
        ensure!(UnixStream::connect(&self.socket).is_err(), "another server listens on {socket}");
        let args = [program.clone()].into_iter().chain(args.iter().cloned()).collect();
        let daemon = Daemon::start(args, &self.socket, &self.socket.with_extension("log"))?;
        let pid = daemon.id();
        cpu::pin_process(pid, cpus)?;
        let command_line = daemon.command_line();
        Ok(Server { name, socket, pid, command_line, daemon: Some(daemon) })
    }
}

impl Server {
    /// Moves a server that was started here, and threads that it has started for a connection.
    pub fn pin(&self, cpus: &[usize]) -> Result<()> {
        if self.daemon.is_some() { cpu::pin_process(self.pid, cpus) } else { Ok(()) }
    }
}

/// The process that listens on a socket, as the kernel recorded it.
pub fn listener_pid(socket: &str) -> Result<u32> {
    let stream =
        UnixStream::connect(socket).with_context(|| format!("cannot connect to {socket}"))?;
    let peer = rustix::net::sockopt::socket_peercred(&stream)?;
    Ok(peer.pid.as_raw_nonzero().get() as u32)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn settings() -> Settings {
        Settings {
            ours: Some("vhost-blk".into()),
            ours_args: vec!["--threads=1".to_owned()],
            qsd: Some("qemu-storage-daemon".to_owned()),
            size_bytes: 1 << 30,
            file: "file".into(),
            disk: "disk".into(),
            qcow2: false,
            directory: "directory".into(),
            queues: 2,
        }
    }

    #[test]
    fn a_file_is_served_by_ours_and_six_variants_of_qsd() {
        let names: Vec<_> = settings().specs(Storage::File).into_iter().map(|s| s.name).collect();
        let expected = [
            "ours",
            "qsd native",
            "qsd native +iothread",
            "qsd io_uring",
            "qsd io_uring +iothread",
            "qsd threads",
            "qsd threads +iothread",
        ];
        assert_eq!(names, expected);
        assert_eq!(settings().specs(Storage::Disk).len(), expected.len());
    }

    #[test]
    fn a_qcow2_image_is_served_by_ours_and_two_variants_of_qsd_more() {
        let with = Settings { qcow2: true, size_bytes: FRAGMENTED_MIN - 1, ..settings() };
        let names = |settings: &Settings, storage| -> Vec<String> {
            settings.specs(storage).into_iter().map(|spec| spec.name).collect()
        };
        let raw = names(&settings(), Storage::File);
        let mut more = names(&with, Storage::File);
        more.retain(|name| !raw.contains(name));
        assert_eq!(
            more,
            [OURS_QCOW2, "qsd qcow2 native +iothread", "qsd qcow2 io_uring +iothread"]
        );
        assert_eq!(names(&with, Storage::Null), names(&settings(), Storage::Null));
        let large = Settings { size_bytes: FRAGMENTED_MIN, ..with.clone() };
        let all = names(&large, Storage::File);
        assert_eq!(all.iter().filter(|name| is_qsd_fragmented(name)).count(), 2);
        assert!(all.contains(&OURS_FRAGMENTED.to_owned()));
        let raw_only = |name: &&String| is_qsd(name);
        assert_eq!(all.iter().filter(raw_only).count(), raw.iter().filter(raw_only).count());
    }

    #[test]
    fn a_server_does_not_start_on_the_socket_of_one_that_runs() {
        let directory = tempfile::tempdir().unwrap();
        let settings = Settings { directory: directory.path().to_owned(), ..settings() };
        let spec = &settings.specs(Storage::Null)[0];
        let _running = std::os::unix::net::UnixListener::bind(&spec.socket).unwrap();
        let error = format!("{:#}", spec.start(&[]).unwrap_err());
        assert!(error.contains("another server listens"), "{error}");
    }

    #[test]
    fn sockets_of_all_servers_differ() {
        let settings = Settings { qcow2: true, ..settings() };
        let mut specs = settings.specs(Storage::File);
        specs.extend(settings.specs(Storage::Null));
        specs.extend(settings.specs(Storage::Disk));
        let mut sockets: Vec<_> = specs.iter().map(|s| s.socket.clone()).collect();
        let count = sockets.len();
        sockets.sort();
        sockets.dedup();
        assert_eq!(sockets.len(), count);
    }
}
