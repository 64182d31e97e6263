// SPDX-License-Identifier: Apache-2.0
//! QEMU's programs: they make and change closed images, and judge them.

use crate::common::{self, qemu, qemu_ok};
use crate::steps::Format;
use serde_json::Value;
use std::fs;
use std::path::Path;

impl Format {
    fn options(self) -> String {
        format!(
            "cluster_size={},refcount_bits={}",
            1 << self.cluster_bits,
            1 << self.refcount_order
        )
    }
}

/// Makes an empty image; `below` is its backing file and that file's format.
pub(crate) fn create(
    directory: &Path,
    name: &str,
    format: Format,
    below: Option<(&str, &str)>,
    size_bytes: u64,
    more: &str,
) {
    let (options, size) = (format.options() + more, size_bytes.to_string());
    let create = ["create", "-qf", "qcow2", "-o", &options];
    let below = below.map(|(backing, format)| ["-b", backing, "-F", format]);
    let below = below.as_ref().map_or(&[][..], |words| &words[..]);
    qemu_ok("qemu-img", directory, &[&create[..], below, &[name, &size]].concat());
}

/// Makes an image of compressed clusters from a raw file.
pub(crate) fn compress(directory: &Path, raw: &str, name: &str, format: Format) {
    let options = format.options();
    let convert = ["convert", "-c", "-f", "raw", "-O", "qcow2", "-o", &options, raw, name];
    qemu_ok("qemu-img", directory, &convert);
}

/// Runs a command of `qemu-io` on a closed image. Returns false if QEMU refuses it.
pub(crate) fn io(directory: &Path, name: &str, command: &str) -> bool {
    qemu("qemu-io", directory, &["-d", "unmap", "-f", "qcow2", "-c", command, name])
        .status
        .success()
}

/// The content of a part of a closed disk.
pub(crate) fn read(directory: &Path, name: &str) -> Vec<u8> {
    common::content(&directory.join(name))
}

/// Checks a closed image: the tables, without a leak unless `may_leak`, the content, and the place of all data.
pub(crate) fn judge(directory: &Path, name: &str, content: &[u8], may_leak: bool) {
    let path = directory.join(name);
    let verdict = common::compare(&path);
    assert!(verdict == 0 || may_leak && verdict == 3, "qemu-img check {name}: {verdict}");
    let found = read(directory, name);
    assert_eq!(found.len(), content.len(), "{name}");
    assert_same(&found, content, 0, name);
    let map = qemu_ok("qemu-img", directory, &["map", "-f", "qcow2", "--output=json", name]);
    let map: Value = serde_json::from_str(&map).expect("a map");
    let file = fs::read(&path).expect("the image");
    for extent in map.as_array().expect("a list") {
        let number = |key: &str| extent[key].as_u64().map(|number| number as usize);
        let (start, length) =
            (number("start").expect("a start"), number("length").expect("a length"));
        let wanted = &content[start..start + length];
        if extent["zero"] == true {
            assert!(wanted.iter().all(|byte| *byte == 0), "{name}: {extent} has data");
        }
        if let (Some(0), Some(offset), true) =
            (number("depth"), number("offset"), extent["data"] == true)
        {
            // The file may end within a cluster.
            let end = (offset + length).min(file.len());
            assert_same(&file[offset..end], &wanted[..end - offset], start, name);
        }
    }
}

/// Panics at the first sector that differs.
#[track_caller]
pub(crate) fn assert_same(found: &[u8], wanted: &[u8], from: usize, what: &str) {
    let differs = found.chunks(512).zip(wanted.chunks(512)).position(|(one, other)| one != other);
    if let Some(sector) = differs {
        let (at, byte) = (from / 512 + sector, sector * 512);
        panic!("{what}: sector {at} begins with {}, not {}", found[byte], wanted[byte]);
    }
}
