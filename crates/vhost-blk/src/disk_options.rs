// SPDX-License-Identifier: Apache-2.0
//! The options of a disk as a JSON object: `DiskOptions` of the control protocol, which a program
//! also passes to its successor. The parser is that of the configuration file.

use crate::config;
use crate::failure::Failure;
use crate::options::DiskArgs;
use crate::values::{OnOff, word};
use serde_json::{Map, Value};
use std::convert::Infallible;
use std::path::{Path, PathBuf};

/// The options of `disk`; `convert` turns its paths into text.
///
/// # Errors
/// The error of `convert`.
pub fn of_disk<E>(
    disk: &DiskArgs,
    convert: impl Fn(&Path) -> Result<String, E>,
) -> Result<Value, E> {
    let on = |value: OnOff| Some(value.is_on().into());
    let path = |path: &Option<PathBuf>| -> Result<Option<Value>, E> {
        path.as_deref().map(|path| convert(path).map(Value::from)).transpose()
    };
    let text = |text: &Option<String>| text.clone().map(Value::from);
    let DiskArgs { socket_group, socket_mode, socket_path, backend, blk_file, cache, .. } = disk;
    let DiskArgs { direct, discard, lock, logical_block_size, read_only, serial, size, .. } = disk;
    let DiskArgs { wrap, limit_bandwidth, limit_burst, limit_iops, num_queues, .. } = disk;
    let DiskArgs { packed, queue_size, data_plane, allow_backing, format, .. } = disk;
    let DiskArgs { incoming, io_timeout, on_error, on_read_error, limit_group, .. } = disk;
    let given: [(&str, Option<Value>); 28] = [
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
        ("on_read_error", on_read_error.map(|policy| word(policy).into())),
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

/// The options that are no defaults.
pub fn differing(options: &Value) -> Map<String, Value> {
    let plain = toml::Table::from_iter([("blk-file".to_owned(), "/".into())]);
    let same = |path: &Path| Ok::<_, Infallible>(path.display().to_string());
    let defaults = config::disk_of_table("the defaults", &plain).ok();
    let defaults = defaults.map(|args| {
        let Ok(defaults) = of_disk(&args, same);
        defaults
    });
    let is_default = |name: &str, value: &Value| {
        name != "blk_file" && defaults.as_ref().is_some_and(|all| all[name] == *value)
    };
    let given = options.as_object().into_iter().flatten();
    let given = given.filter(|(name, value)| !is_default(name, value) && !value.is_null());
    given.map(|(name, value)| (name.clone(), value.clone())).collect()
}

/// The disk with these options.
///
/// # Errors
/// [`Failure`] if a name or value is wrong, options contradict each other, or `options` is no
/// object.
pub fn to_disk(source: &str, options: &Value) -> Result<DiskArgs, Failure> {
    config::disk_of_table(
        source,
        &table(options).ok_or_else(|| {
            Failure::usage(format!("use {source}"), "they are no table", "give an object")
        })?,
    )
}

/// The options as the table of a configuration file. One with a control character is wrong: it could forge lines of the
/// log.
pub fn table(options: &Value) -> Option<toml::Table> {
    let given: Map<String, Value> = options.as_object()?.clone();
    let has_control =
        |value: &Value| value.as_str().is_some_and(|it| it.contains(char::is_control));
    if given.values().any(has_control) {
        return None;
    }
    let given = given.into_iter().filter(|(_, value)| !value.is_null());
    let entry = |(name, value): (String, Value)| {
        toml::Value::try_from(value).ok().map(|value| (name.replace('_', "-"), value))
    };
    given.map(entry).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::{Args, Command, FromArgMatches};

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
             --io-timeout 2.5 --on-error enospc --on-read-error stop",
            "--blk-file a --socket-path ../s --incoming on --format raw",
            "--blk-file /a --socket-path /s --io-timeout 0.123456789 --limit-burst 3599.999999999",
        ] {
            let disk = parsed(line);
            let same = |path: &Path| Ok::<_, Infallible>(path.to_str().unwrap().to_owned());
            let options = of_disk(&disk, same).unwrap();
            assert_eq!(to_disk("a test", &options).unwrap(), disk, "{line}");
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
