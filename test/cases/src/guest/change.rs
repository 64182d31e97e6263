// SPDX-License-Identifier: Apache-2.0
//! Changes to the disk while it is used.

use anyhow::{Context as _, Result, ensure};
use rustix::net::netlink::{KOBJECT_UEVENT, SocketAddrNetlink};
use rustix::net::{AddressFamily, RecvFlags, SocketFlags, SocketType, bind, recv, socket_with};
use std::fs::OpenOptions;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;
use std::time::Instant;

use crate::case::cases;
use crate::guest::load::Errors;
use crate::guest::load::everything::Everything;
use crate::guest::machine::backing::Backing;
use crate::guest::machine::disk::{Disk, Plug};
use crate::guest::mode::Mode;
use crate::guest::system::{LIMIT, wait_for, write};
use crate::guest::{Context, Modes};

cases! { Guest;
    "guest-resize", Modes::of(Mode::ALL).at_every_change(&[Mode::Bio]).and_long(),
        "a disk that gets another size under load has it for the kernel, which tells the world",
        resize;
    "guest-resize-daemon", Modes::of(Mode::ALL).at_every_change(&[Mode::Bio]).and_long(),
        "a disk of this project's daemon grows under load, and after a pause, and the kernel sees it at once",
        resize_daemon;
    "guest-cache-type", Modes::of(Mode::ALL).at_every_change(&[Mode::Bio]).and_long(),
        "the cache is switched between write-back and write-through under load",
        cache_type;
    "guest-cache-type-raced", Modes::of(Mode::OURS),
        "the cache is switched by two at a time, and the disk resized: device and block layer agree after",
        cache_type_raced;
}

/// Size of the disk in a round; it always includes the part that the load uses.
fn bytes_in(round: u32) -> u64 {
    (Everything::DISK_MIB + 1 + u64::from(round) * 7 % 61) << 20
}

/// Receives the kernel's messages about devices.
struct Uevents(OwnedFd);

impl Uevents {
    fn listen() -> Result<Self> {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let kind = SocketType::DGRAM;
        let socket = socket_with(AddressFamily::NETLINK, kind, flags, Some(KOBJECT_UEVENT))?;
        bind(&socket, &SocketAddrNetlink::new(0, 1)).context("uevents")?;
        Ok(Self(socket))
    }

    /// Waits for a message that contains both words.
    fn wait_for(&self, words: [&str; 2]) -> Result<()> {
        let mut buffer = [0; 8192];
        let end = Instant::now() + LIMIT;
        while Instant::now() < end {
            match recv(&self.0, &mut buffer, RecvFlags::empty()) {
                Ok((bytes, _)) => {
                    let text = String::from_utf8_lossy(&buffer[..bytes]).replace('\0', "\n");
                    if words.iter().all(|word| text.lines().any(|line| line == *word)) {
                        return Ok(());
                    }
                }
                Err(rustix::io::Errno::AGAIN) => {
                    std::thread::sleep(std::time::Duration::from_millis(5));
                }
                Err(why) => return Err(why.into()),
            }
        }
        anyhow::bail!("the kernel did not tell of {words:?}")
    }
}

fn resize(context: &Context) -> Result<()> {
    let disk = Disk::plug(&context.machine, &Plug::file(Everything::DISK_MIB))?;
    let name = disk.wait_for_block()?;
    let events = Uevents::listen()?;
    let mut load = Everything::start(context, &disk, Errors::Fail)?;
    for round in 0..context.effort.rounds {
        let bytes = bytes_in(round);
        disk.resize(bytes)?;
        wait_for("the new size", || (disk.bytes().ok()? == bytes).then_some(()))?;
        events.wait_for([&format!("DEVNAME={name}"), "RESIZE=1"])?;
        load.goes_on()?;
    }
    load.finish()
}

fn resize_daemon(context: &Context) -> Result<()> {
    let args = vec!["--num-queues=4".to_owned()];
    let bytes_at = |round: u32| (Everything::DISK_MIB + u64::from(round)) << 20;
    let disk =
        Disk::plug(&context.machine, &Plug::of(Backing::Daemon { bytes: bytes_at(0), args }))?;
    let name = disk.wait_for_block()?;
    let events = Uevents::listen()?;
    let mut load = Everything::start(context, &disk, Errors::Fail)?;
    for round in 1..=context.effort.rounds {
        let paused = round % 2 == 0;
        if paused {
            disk.control(&["pause"])?;
        }
        disk.resize(bytes_at(round))?;
        if paused {
            disk.control(&["resume"])?;
        }
        wait_for("the new size", || (disk.bytes().ok()? == bytes_at(round)).then_some(()))?;
        events.wait_for([&format!("DEVNAME={name}"), "RESIZE=1"])?;
        load.goes_on()?;
    }
    let last = OpenOptions::new().read(true).write(true).open(disk.path()?)?;
    let (offset, data) = (bytes_at(context.effort.rounds) - 4096, [0x5a; 4096]);
    last.write_all_at(&data, offset)?;
    last.sync_all()?;
    load.finish()
}

fn cache_type(context: &Context) -> Result<()> {
    let disk = Disk::plug(&context.machine, &Plug::file(Everything::DISK_MIB))?;
    let mut load = Everything::start(context, &disk, Errors::Fail)?;
    for round in 0..context.effort.rounds {
        let (wanted, queue) =
            [("write through", "write through"), ("write back", "write back")][round as usize % 2];
        disk.set("cache_type", wanted)?;
        ensure!(disk.attribute("cache_type")? == wanted, "cache_type is not {wanted}");
        let seen = disk.attribute("queue/write_cache")?;
        ensure!(seen == queue, "the block layer takes the cache for {seen}");
        load.goes_on()?;
    }
    let refused = disk.set("cache_type", "write nothing");
    ensure!(refused.is_err(), "a cache type that there is not was accepted");
    load.finish()
}

/// Number of times that each of the two sides switches the cache before they are compared.
const SWITCHES: u32 = 20;

fn cache_type_raced(context: &Context) -> Result<()> {
    let disk = Disk::plug(&context.machine, &Plug::file(Everything::DISK_MIB))?;
    let mut load = Everything::start(context, &disk, Errors::Fail)?;
    let path = disk.sysfs()?.join("cache_type");
    let switch = |from: u32| {
        let modes = ["write through", "write back"];
        (from..from + SWITCHES).try_for_each(|n| write(&path, modes[n as usize % 2]))
    };
    for round in 0..context.effort.rounds {
        std::thread::scope(|scope| {
            let other = scope.spawn(|| switch(1));
            // A change of the configuration makes the driver also read the cache's mode.
            disk.resize(bytes_in(round))?;
            switch(0)?;
            other.join().expect("no panic")
        })?;
        let (device, queue) = (disk.attribute("cache_type")?, disk.attribute("queue/write_cache")?);
        ensure!(device == queue, "the device has {device}, the block layer {queue}: round {round}");
        load.goes_on()?;
    }
    load.finish()
}
