// SPDX-License-Identifier: Apache-2.0
//! Other block devices on top of the disk.

use anyhow::Result;
use kit::file_system::FileSystem;
use kit::system::{modprobe, run, run_quietly};

use super::data::verify_all;
use super::file_systems::exercise;
use crate::case::cases;
use crate::guest::machine::disk::{Disk, Plug};
use crate::guest::mode::Mode;
use crate::guest::{Context, Modes};

cases! { Guest;
    "guest-crypt", Modes::of(Mode::INTERRUPTS).at_every_change(&[Mode::Bio]).and_long(),
        "below dm-crypt the disk holds what was written, and a file system lives on it",
        crypt;
    "guest-raid1", Modes::of(Mode::INTERRUPTS),
        "two disks below an md mirror hold the same, and what was written",
        |context| raid(context, "1");
    "guest-raid0", Modes::of(Mode::INTERRUPTS),
        "two disks below an md stripe hold what was written",
        |context| raid(context, "0");
}

/// An arbitrary key.
const KEY: &str = "000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f";
const CRYPT: &str = "cases";
const ARRAY: &str = "/dev/md77";

struct Crypt;

impl Crypt {
    fn new(disk: &Disk<'_>) -> Result<Self> {
        modprobe("dm_crypt", &[])?;
        let _ = modprobe("xts", &[]); // Built in if it is no module.
        let (sectors, device) = (disk.number("size")?, disk.path()?);
        let table = format!("0 {sectors} crypt aes-xts-plain64 {KEY} 0 {device} 0");
        run("dmsetup", &["create", "--noudevsync", CRYPT, "--table", &table])?;
        Ok(Crypt)
    }
}

impl Drop for Crypt {
    fn drop(&mut self) {
        run_quietly("dmsetup", &["remove", "--noudevsync", "--retry", CRYPT]);
    }
}

fn crypt(context: &Context) -> Result<()> {
    let disk = Disk::plug(&context.machine, &Plug::file(256))?;
    let crypt = Crypt::new(&disk)?;
    run("dmsetup", &["mknodes", CRYPT])?;
    let device = format!("/dev/mapper/{CRYPT}");
    verify_all(context, &device, 512)?;
    exercise(context, &device, FileSystem::Ext4)?;
    drop(crypt);
    Ok(())
}

struct Array;

impl Array {
    fn new(level: &str, devices: &[&str]) -> Result<Self> {
        modprobe(if level == "0" { "raid0" } else { "raid1" }, &[])?;
        let level = format!("--level={level}");
        let mut words = vec!["--create", ARRAY, "--run", "--force", "--metadata=1.2", &level];
        words.push("--raid-devices=2");
        words.extend(devices);
        run("mdadm", &words)?;
        Ok(Array)
    }
}

impl Drop for Array {
    fn drop(&mut self) {
        run_quietly("mdadm", &["--stop", ARRAY]);
    }
}

fn raid(context: &Context, level: &str) -> Result<()> {
    let disks = [
        Disk::plug(&context.machine, &Plug::file(256))?,
        Disk::plug(&context.machine, &Plug::file(256))?,
    ];
    let paths = [disks[0].path()?, disks[1].path()?];
    let array = Array::new(level, &[&paths[0], &paths[1]])?;
    // mdadm returns an error if there was nothing to wait for.
    run_quietly("mdadm", &["--wait", ARRAY]);
    verify_all(context, ARRAY, 512)?;
    exercise(context, ARRAY, FileSystem::Ext4)?;
    if level == "1" {
        drop(array);
        let same = |skip: &str| run("cmp", &["-i", skip, "-n", "16777216", &paths[0], &paths[1]]);
        // After the superblock and its bitmap, which differ.
        same("2097152")?;
    }
    Ok(())
}
