// SPDX-License-Identifier: Apache-2.0
//! Storage of a disk's blocks, and the program that serves it.

use std::path::Path;

use anyhow::{Context, Result};
use serde_json::{Map, Value, json};

use super::Machine;
use crate::guest::system::wait_for;
use kit::disks::{Ask, Lie};

/// Kinds of storage.
#[derive(Clone, Debug)]
pub(crate) enum Backing {
    /// A disk of QEMU on a file in memory.
    File { bytes: u64 },
    /// Like `File`, limited to `iops` requests per second.
    Throttled { bytes: u64, iops: u64 },
    /// A disk of QEMU that reads as zeros and takes `latency_ns` for each request. Optional limits
    /// throttle it; they are properties of QEMU's `ThrottleLimits`.
    Null { bytes: u64, latency_ns: u64, limits: Option<Value> },
    /// Like `File`, but requests of a kind (`read`, `write`, `flush`) fail, from `sector` on or
    /// anywhere.
    Failing { bytes: u64, kind: &'static str, sector: Option<u64> },
    /// This project's daemon on a file in memory.
    Daemon { bytes: u64, args: Vec<String> },
    /// A disk that records all writes. A power cut tears no physical block of it.
    Journal { bytes: u64, physical_block_bytes: u32 },
    /// Like `File`, but QEMU refuses writes.
    ReadOnly { bytes: u64 },
    /// A device that lies after its first `after` requests.
    Liar { lie: Lie, after: u32, seed: u64 },
}

/// Storage that is ready for a device.
#[derive(Debug, Default)]
pub(crate) struct Ready {
    /// QEMU's block nodes, outermost last.
    nodes: Vec<String>,
    /// QEMU's connection to a socket.
    chardev: Option<String>,
    /// Name of the disk that the helper serves.
    served: Option<String>,
    image: Option<String>,
    group: Option<String>,
}

impl Backing {
    /// Makes the storage ready for a device.
    pub(crate) fn ready(&self, machine: &Machine) -> Result<Ready> {
        let mut ready = Ready::default();
        let made = self.build(machine, &mut ready);
        if made.is_err() {
            ready.remove_quietly(machine);
        }
        made.map(|()| ready)
    }

    fn build(&self, machine: &Machine, ready: &mut Ready) -> Result<()> {
        match self {
            Backing::File { bytes } => ready.add_file(machine, *bytes),
            Backing::Throttled { bytes, iops } => {
                ready.add_file(machine, *bytes)?;
                ready.add_throttle(machine, &json!({ "iops-total": iops }))
            }
            Backing::Null { bytes, latency_ns, limits } => {
                let options = json!({
                    "driver": "null-co", "size": bytes, "latency-ns": latency_ns,
                    "read-zeroes": true,
                });
                ready.add_node(machine, options)?;
                limits.as_ref().map_or(Ok(()), |limits| ready.add_throttle(machine, limits))
            }
            Backing::Failing { bytes, kind, sector } => {
                ready.add_file(machine, *bytes)?;
                let mut rule = json!({ "event": "none", "iotype": kind, "errno": 5 });
                if let Some(sector) = sector {
                    rule["sector"] = json!(sector);
                }
                let below = ready.nodes.last().context("a node was added")?.clone();
                let options =
                    json!({ "driver": "blkdebug", "image": below, "inject-error": [rule] });
                ready.add_node(machine, options)
            }
            Backing::Daemon { bytes, args } => ready.add_daemon(machine, *bytes, args),
            Backing::Journal { bytes, physical_block_bytes } => {
                let (bytes, physical_block_bytes) = (*bytes, *physical_block_bytes);
                let name = machine.fresh_name("journal");
                let ask = Ask::Journal { name: name.clone(), bytes, physical_block_bytes };
                ready.serve(machine, &ask, name)
            }
            Backing::ReadOnly { bytes } => {
                let filename = ready.add_image(machine, *bytes)?;
                let options = json!({ "driver": "file", "filename": filename, "read-only": true });
                ready.add_node(machine, options)
            }
            Backing::Liar { lie, after, seed } => {
                let name = machine.fresh_name("liar");
                let (lie, after, seed) = (*lie, *after, *seed);
                let ask = Ask::Liar { name: name.clone(), lie, after, seed };
                ready.serve(machine, &ask, name)
            }
        }
    }
}

impl Ready {
    fn add_node(&mut self, machine: &Machine, mut options: Value) -> Result<()> {
        let name = machine.fresh_name("node");
        options["node-name"] = json!(name);
        machine.qemu("blockdev-add", options)?;
        self.nodes.push(name);
        Ok(())
    }

    fn add_image(&mut self, machine: &Machine, bytes: u64) -> Result<std::path::PathBuf> {
        let name = machine.fresh_name("image");
        let path = machine.ask_path(&Ask::Image { name: name.clone(), bytes })?;
        self.image = Some(name);
        Ok(path)
    }

    fn add_file(&mut self, machine: &Machine, bytes: u64) -> Result<()> {
        let path = self.add_image(machine, bytes)?;
        self.add_image_node(machine, &path)
    }

    fn add_image_node(&mut self, machine: &Machine, path: &Path) -> Result<()> {
        let options = json!({ "driver": "file", "filename": path, "discard": "unmap" });
        self.add_node(machine, options)
    }

    fn add_throttle(&mut self, machine: &Machine, limits: &Value) -> Result<()> {
        let group = machine.fresh_name("group");
        let object = json!({ "qom-type": "throttle-group", "id": group, "limits": limits });
        machine.qemu("object-add", object)?;
        self.group = Some(group.clone());
        let below = self.nodes.last().context("a node was added")?.clone();
        let options = json!({ "driver": "throttle", "throttle-group": group, "file": below });
        self.add_node(machine, options)
    }

    fn add_daemon(&mut self, machine: &Machine, bytes: u64, args: &[String]) -> Result<()> {
        let image = self.add_image(machine, bytes)?;
        let name = machine.fresh_name("daemon");
        let mut args = args.to_vec();
        args.push(format!("--blk-file={}", image.display()));
        self.serve(machine, &Ask::Daemon { name: name.clone(), args }, name)
    }

    fn serve(&mut self, machine: &Machine, ask: &Ask, name: String) -> Result<()> {
        let socket = machine.ask_path(ask)?;
        self.served = Some(name);
        let chardev = machine.fresh_name("chardev");
        let address = json!({ "type": "unix", "data": { "path": socket } });
        let backend = json!({ "type": "socket", "data": { "addr": address, "server": false } });
        machine.qemu("chardev-add", json!({ "id": chardev, "backend": backend }))?;
        self.chardev = Some(chardev);
        Ok(())
    }

    /// Properties of QEMU's device for this storage.
    pub(crate) fn device(&self) -> Map<String, Value> {
        let mut device = Map::new();
        match (&self.chardev, self.nodes.last()) {
            (Some(chardev), _) => {
                device.insert("driver".to_owned(), json!("vhost-user-blk-pci"));
                device.insert("chardev".to_owned(), json!(chardev));
            }
            (None, node) => {
                device.insert("driver".to_owned(), json!("virtio-blk-pci"));
                device.insert("drive".to_owned(), json!(node));
                device.insert("iothread".to_owned(), json!("disks"));
            }
        }
        device
    }

    /// True if the device is QEMU's own.
    pub(crate) fn is_qemus(&self) -> bool {
        self.chardev.is_none()
    }

    /// Adds a disk on an existing image.
    pub(crate) fn of_image(machine: &Machine, path: &Path) -> Result<Self> {
        let mut ready = Ready::default();
        ready.add_image_node(machine, path)?;
        Ok(ready)
    }

    /// The disk's name in the helper.
    pub(crate) fn served(&self) -> Option<&str> {
        self.served.as_deref()
    }

    /// The innermost block node of QEMU.
    pub(crate) fn innermost(&self) -> Option<&str> {
        self.nodes.first().map(String::as_str)
    }

    /// Removes the storage; the device is gone or about to go.
    pub(crate) fn remove(&mut self, machine: &Machine) -> Result<()> {
        while let Some(node) = self.nodes.pop() {
            retry(machine, "blockdev-del", json!({ "node-name": node }))?;
        }
        if let Some(group) = self.group.take() {
            retry(machine, "object-del", json!({ "id": group }))?;
        }
        if let Some(chardev) = self.chardev.take() {
            retry(machine, "chardev-remove", json!({ "id": chardev }))?;
        }
        if let Some(name) = self.served.take() {
            machine.ask(&Ask::Stop { name })?;
        }
        if let Some(name) = self.image.take() {
            machine.ask(&Ask::RemoveImage { name })?;
        }
        Ok(())
    }

    fn remove_quietly(&mut self, machine: &Machine) {
        if let Err(why) = self.remove(machine) {
            eprintln!("clean-up: {why:#}");
        }
    }
}

/// Repeats a command until QEMU accepts it: resources of a device are busy until the device is
/// gone.
fn retry(machine: &Machine, command: &str, arguments: Value) -> Result<()> {
    let mut why = String::new();
    let done = wait_for(&format!("QEMU to take {command}"), || {
        match machine.try_qemu(command, arguments.clone()) {
            Ok(Ok(_)) => Some(Ok(())),
            Ok(Err(reason)) => {
                why = reason;
                None
            }
            Err(error) => Some(Err(error)),
        }
    });
    match done {
        Ok(result) => result,
        Err(error) => Err(error.context(why)),
    }
}
