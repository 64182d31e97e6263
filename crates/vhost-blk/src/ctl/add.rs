// SPDX-License-Identifier: Apache-2.0
//! `vhost-blk ctl add`: the options of a disk for the daemon.

use super::word;
use crate::failure::Failure;
use crate::options::DiskArgs;
use crate::values::{self, OnOff};
use clap::Args;
use serde_json::{Map, Value, json};
use std::fs::OpenOptions;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

/// Arguments of `vhost-blk ctl add`.
#[derive(Args, Clone, Debug)]
#[command(next_display_order = None)]
pub struct AddArgs {
    /// The name of the new disk
    #[arg(value_parser = values::disk_name)]
    pub name: String,
    /// Open the image here and pass it to the daemon, which need not be able to see its path
    #[arg(long, help_heading = "Disk")]
    pub pass_file: bool,
    /// Options of the disk.
    #[command(flatten)]
    pub disk: DiskArgs,
}

impl AddArgs {
    /// The parameters of the call, and the image to pass.
    pub(super) fn parameters(&self) -> Result<(Value, Option<OwnedFd>), Failure> {
        self.disk.check()?;
        let image = match (self.pass_file, &self.disk.blk_file) {
            (true, Some(path)) => Some(self.open(path)?),
            (true, None) => {
                return Err(Failure::usage(
                    "pass the image",
                    "none is given",
                    "give --blk-file PATH, or drop --pass-file",
                ));
            }
            (false, _) => None,
        };
        let index = image.as_ref().map(|_| 0);
        Ok((json!({"name": self.name, "options": options(&self.disk)?, "image": index}), image))
    }

    fn open(&self, path: &Path) -> Result<OwnedFd, Failure> {
        let mut open = OpenOptions::new();
        open.read(true).write(!self.disk.read_only.is_on());
        open.open(path).map(OwnedFd::from).map_err(|error| {
            Failure::run(format!("open {}", path.display()), error, "check the path and its mode")
        })
    }
}

/// The options as the daemon takes them (`DiskOptions`). Paths become absolute: the daemon has
/// another working directory.
fn options(disk: &DiskArgs) -> Result<Value, Failure> {
    let on = |value: OnOff| Some(value.is_on().into());
    let path = |path: &Option<PathBuf>| path.as_deref().map(absolute).transpose();
    let text = |text: &Option<String>| text.clone().map(Value::from);
    let DiskArgs { socket_group, socket_mode, socket_path, backend, blk_file, cache, .. } = disk;
    let DiskArgs { direct, discard, lock, logical_block_size, read_only, serial, size, .. } = disk;
    let DiskArgs { wrap, limit_bandwidth, limit_burst, limit_iops, num_queues, .. } = disk;
    let DiskArgs { packed, queue_size, data_plane, allow_backing, format, .. } = disk;
    let DiskArgs { incoming, io_timeout, on_error, limit_group, .. } = disk;
    let given: [(&str, Option<Value>); 27] = [
        ("socket_group", text(socket_group)),
        ("socket_mode", socket_mode.map(|mode| format!("{mode:04o}").into())),
        ("socket_path", path(socket_path)?),
        ("allow_backing", Some(word(*allow_backing).into())),
        ("backend", Some(word(*backend).into())),
        ("blk_file", path(blk_file)?),
        ("cache", Some(word(*cache).into())),
        ("direct", on(*direct)),
        ("discard", on(*discard)),
        ("format", format.map(|format| word(format).into())),
        ("incoming", on(*incoming)),
        ("io_timeout", io_timeout.map(|limit| limit.0.as_secs_f64().into())),
        ("on_error", Some(word(*on_error).into())),
        ("lock", Some(word(*lock).into())),
        ("logical_block_size", logical_block_size.map(Value::from)),
        ("read_only", on(*read_only)),
        ("serial", Some(serial.clone().into())),
        ("size", size.map(|size| size.0.to_string().into())),
        ("wrap", Some(wrap.clone().into())),
        ("limit_bandwidth", limit_bandwidth.map(|bytes| bytes.to_string().into())),
        ("limit_burst", Some(limit_burst.0.as_secs_f64().into())),
        ("limit_group", text(limit_group)),
        ("limit_iops", limit_iops.map(|iops| iops.get().into())),
        ("num_queues", num_queues.map(Value::from)),
        ("packed", on(*packed)),
        ("queue_size", Some((*queue_size).into())),
        ("data_plane", Some(word(*data_plane).into())),
    ];
    let given = given.into_iter().filter_map(|(name, value)| Some((name.to_owned(), value?)));
    Ok(Value::Object(given.collect::<Map<_, _>>()))
}

fn absolute(path: &Path) -> Result<Value, Failure> {
    let failed = |why: &dyn std::fmt::Display| {
        Failure::usage(format!("use {}", path.display()), why, "give another path")
    };
    let absolute = std::path::absolute(path).map_err(|error| failed(&error))?;
    match absolute.to_str() {
        Some(text) => Ok(text.into()),
        None => Err(failed(&"it is not UTF-8")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config;
    use clap::{Command, FromArgMatches};

    fn parsed(line: &str) -> DiskArgs {
        let command = DiskArgs::augment_args(Command::new("disk").no_binary_name(true));
        DiskArgs::from_arg_matches(&command.get_matches_from(line.split_whitespace())).unwrap()
    }

    #[test]
    fn all_options_arrive() {
        for line in [
            "--blk-file /a --socket-path /s",
            "--backend mem --size 1G --socket-path /s --read-only --wrap delay:us=1 \
             --wrap limit:iops=5",
            "--blk-file /a --cache writethrough --data-plane uring --direct off --discard off \
             --limit-bandwidth 5M --limit-burst 0.25 --limit-group g --limit-iops 7 --lock off \
             --logical-block-size 4096 --num-queues 3 --packed off --queue-size 64 --serial ab \
             --socket-group 0 --socket-mode 640 --socket-path /s",
            "--blk-file /a --socket-path /s --format qcow2 --allow-backing same-dir \
             --io-timeout 2.5 --on-error enospc",
            "--blk-file /a --socket-path /s --incoming on --format raw",
        ] {
            let disk = parsed(line);
            let table = toml::Table::try_from(options(&disk).unwrap()).unwrap();
            let table = table.into_iter().map(|(key, value)| (key.replace('_', "-"), value));
            let arrived = config::disk_of_table("a test", &table.collect()).unwrap();
            assert_eq!(arrived, disk, "{line}");
        }
    }

    #[test]
    fn the_interface_describes_all_options() {
        let command = DiskArgs::augment_args(Command::new("disk"));
        let mut names: Vec<String> =
            config::known_keys(&command).iter().map(|key| key.replace('-', "_")).collect();
        let description = crate::control::protocol::DESCRIPTION;
        let fields = description.split("type DiskOptions (").nth(1).unwrap();
        let fields = fields.split("\n)").next().unwrap().lines().filter(|line| line.contains(':'));
        let mut told: Vec<String> =
            fields.map(|line| line.trim().split(':').next().unwrap().to_owned()).collect();
        names.sort();
        told.sort();
        assert_eq!(told, names);
    }
}
