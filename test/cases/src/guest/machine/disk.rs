// SPDX-License-Identifier: Apache-2.0
//! A plugged disk.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use kit::stat::Stat;
use kit::system::cpu_list;
use serde_json::{Map, Value, json};

use super::Machine;
use super::backing::{Backing, Ready};
use super::slot::Slot;
use crate::guest::system::{read, read_number, wait_for, write};
use kit::disks::Ask;

/// Properties of a disk to plug.
#[derive(Clone, Debug)]
pub(crate) struct Plug {
    /// Storage of the disk.
    pub(crate) backing: Backing,
    /// Number of request queues.
    pub(crate) queues: u16,
    /// Descriptors per queue.
    pub(crate) queue_size: u16,
    /// Other properties of QEMU's device.
    pub(crate) more: Map<String, Value>,
}

impl Plug {
    /// A disk with four queues of 128 descriptors.
    pub(crate) fn of(backing: Backing) -> Self {
        Self { backing, queues: 4, queue_size: 128, more: Map::new() }
    }

    /// A disk on a file in memory.
    pub(crate) fn file(mib: u64) -> Self {
        Self::of(Backing::File { bytes: mib << 20 })
    }

    /// Sets the number of queues.
    pub(crate) fn queues(mut self, queues: u16) -> Self {
        self.queues = queues;
        self
    }

    /// Sets the size of the queues.
    pub(crate) fn queue_size(mut self, queue_size: u16) -> Self {
        self.queue_size = queue_size;
        self
    }

    /// Adds a property.
    pub(crate) fn with(mut self, name: &str, value: impl Into<Value>) -> Self {
        self.more.insert(name.to_owned(), value.into());
        self
    }
}

/// Kind of removal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Way {
    /// QEMU asks for the removal, and the kernel releases the disk.
    Orderly,
    /// Surprise removal: the disk is gone before the kernel knows.
    Surprise,
}

/// A disk in a slot; dropping it unplugs it.
#[derive(Debug)]
pub(crate) struct Disk<'a> {
    machine: &'a Machine,
    slot: Slot,
    /// Directory of the disk's PCI function, once it exists.
    pci: PathBuf,
    id: String,
    ready: Ready,
    plugged: bool,
}

impl<'a> Disk<'a> {
    /// Plugs a disk and waits for its block device.
    pub(crate) fn plug(machine: &'a Machine, plug: &Plug) -> Result<Self> {
        let disk = Self::plug_device(machine, plug)?;
        disk.wait_for_block()?;
        Ok(disk)
    }

    /// Plugs a device, which the driver may refuse.
    pub(crate) fn plug_device(machine: &'a Machine, plug: &Plug) -> Result<Self> {
        Self::plug_ready(machine, plug.backing.ready(machine)?, plug)
    }

    /// Plugs a disk on an existing image.
    pub(crate) fn plug_image(machine: &'a Machine, path: &Path) -> Result<Self> {
        let plug = Plug::file(0);
        let disk = Self::plug_ready(machine, Ready::of_image(machine, path)?, &plug)?;
        disk.wait_for_block()?;
        Ok(disk)
    }

    fn plug_ready(machine: &'a Machine, ready: Ready, plug: &Plug) -> Result<Self> {
        let free = Slot::free()?;
        // Another slot each time, because the kernel keeps a slot busy for a second after it was
        // emptied.
        let index = machine.plugged() % free.len().max(1);
        let slot = free.into_iter().nth(index).context("no slot is free")?;
        let id = machine.fresh_name("disk");
        let mut device = ready.device();
        device.insert("id".to_owned(), json!(id));
        device.insert("bus".to_owned(), json!(slot.bus()));
        device.insert("num-queues".to_owned(), json!(plug.queues));
        device.insert("queue-size".to_owned(), json!(plug.queue_size));
        if ready.is_qemus() {
            device.insert("serial".to_owned(), json!(serial_of(&id)));
        }
        device.extend(plug.more.clone());
        let mut disk = Self { machine, slot, pci: PathBuf::new(), id, ready, plugged: false };
        disk.slot.prepare()?;
        machine.qemu("device_add", Value::Object(device))?;
        disk.plugged = true;
        disk.pci = disk.slot.wait_until_filled()?;
        Ok(disk)
    }

    /// Directory of the disk's PCI function.
    pub(crate) fn pci(&self) -> &Path {
        &self.pci
    }

    /// True if the kernel's hot-plug driver handles this disk.
    pub(crate) fn is_hot_plugged(&self) -> bool {
        self.slot.is_hot_plugged()
    }

    /// Directory and name of the disk's virtio device.
    pub(crate) fn virtio(&self) -> Result<(PathBuf, String)> {
        let pci = self.pci();
        wait_for("a virtio device", || child(pci, "virtio")).map(|name| (pci.join(&name), name))
    }

    /// True if the driver has accepted the feature with this bit number.
    pub(crate) fn has_feature(&self, bit: u32) -> Result<bool> {
        let (virtio, _) = self.virtio()?;
        Ok(read(virtio.join("features"))?.chars().nth(bit as usize) == Some('1'))
    }

    /// Name of the block device, while it exists.
    pub(crate) fn block(&self) -> Option<String> {
        let (virtio, _) = self.virtio().ok()?;
        child(&virtio.join("block"), "vd")
    }

    /// Waits for the block device, until the driver's probe is over.
    pub(crate) fn wait_for_block(&self) -> Result<String> {
        let name = wait_for("the disk's block device", || {
            let name = self.block()?;
            Path::new("/dev").join(&name).exists().then_some(name)
        })?;
        // The node exists before the kernel has read the partitions, and before /sys/block has the
        // disk. After the probe, binding a bound device is refused.
        ensure!(self.bind().is_err(), "{name} was not bound");
        Ok(name)
    }

    /// Path of the block device's node.
    pub(crate) fn path(&self) -> Result<String> {
        let name = self.block().context("the disk has no block device")?;
        Ok(format!("/dev/{name}"))
    }

    /// Directory of the disk below /sys/block.
    pub(crate) fn sysfs(&self) -> Result<PathBuf> {
        let name = self.block().context("the disk has no block device")?;
        Ok(Path::new("/sys/block").join(name))
    }

    /// An attribute below /sys/block/NAME.
    pub(crate) fn attribute(&self, name: &str) -> Result<String> {
        read(self.sysfs()?.join(name))
    }

    /// A numeric attribute below /sys/block/NAME.
    pub(crate) fn number(&self, name: &str) -> Result<u64> {
        read_number(self.sysfs()?.join(name))
    }

    /// The kernel's statistics of the disk.
    pub(crate) fn stat(&self) -> Result<Stat> {
        Stat::of(&self.sysfs()?)
    }

    /// Writes an attribute below /sys/block/NAME.
    pub(crate) fn set(&self, name: &str, value: &str) -> Result<()> {
        write(self.sysfs()?.join(name), value)
    }

    /// Descriptors of the first ring, as reported by QEMU.
    pub(crate) fn ring_size(&self) -> Result<u64> {
        let path = format!("/machine/peripheral/{}/virtio-backend", self.id);
        let arguments = json!({ "path": path, "queue": 0 });
        let status = self.machine.qemu("x-query-virtio-queue-status", arguments)?;
        status["vring-num"].as_u64().with_context(|| format!("no size of a ring: {status}"))
    }

    /// Size in bytes as the kernel sees it.
    pub(crate) fn bytes(&self) -> Result<u64> {
        Ok(self.number("size")? * 512)
    }

    /// The serial number that QEMU gives the disk.
    pub(crate) fn expected_serial(&self) -> String {
        serial_of(&self.id)
    }

    /// Changes the size.
    pub(crate) fn resize(&self, bytes: u64) -> Result<()> {
        let Some(node) = self.ready.innermost() else {
            return self.control(&["resize", &bytes.to_string()]);
        };
        self.machine.qemu("block_resize", json!({ "node-name": node, "size": bytes }))?;
        Ok(())
    }

    /// Sends a command to the daemon that serves the disk.
    pub(crate) fn control(&self, words: &[&str]) -> Result<()> {
        let name = self.served()?.to_owned();
        let words = words.iter().map(|&word| word.to_owned()).collect();
        self.machine.ask(&Ask::Control { name, words })?;
        Ok(())
    }

    /// Sends a signal to the daemon that serves the disk.
    pub(crate) fn signal(&self, signal: &str) -> Result<()> {
        let name = self.served()?.to_owned();
        self.machine.ask(&Ask::Signal { name, signal: signal.to_owned() })?;
        Ok(())
    }

    /// The disk's name in the helper, if the helper serves it.
    pub(crate) fn served(&self) -> Result<&str> {
        self.ready.served().context("the helper does not serve this disk")
    }

    /// Unbinds the driver.
    pub(crate) fn unbind(&self) -> Result<()> {
        let (directory, name) = self.virtio()?;
        write(directory.join("driver/unbind"), &name)
    }

    /// Binds the driver.
    pub(crate) fn bind(&self) -> Result<()> {
        let (_, name) = self.virtio()?;
        write("/sys/bus/virtio/drivers/virtio_blk/bind", &name)
    }

    /// Unplugs the disk and waits until the kernel has removed it.
    pub(crate) fn unplug(mut self, way: Way) -> Result<()> {
        self.go(way)
    }

    /// Asks for the removal without waiting for it: the kernel takes the time of an attention
    /// button.
    pub(crate) fn ask_to_go(&mut self) -> Result<()> {
        self.slot.wait_until_settled()?;
        self.machine.qemu("device_del", json!({ "id": self.id }))?;
        Ok(())
    }

    fn go(&mut self, way: Way) -> Result<()> {
        if self.plugged {
            match way {
                Way::Orderly => {
                    self.slot.wait_until_settled()?;
                    // QEMU presses the slot's button when it plugs a card. If the kernel sees the
                    // press after it has switched the slot on, it removes the card again.
                    if !self.slot.is_empty() {
                        self.ask_to_go()?;
                        self.slot.power_off()?;
                    }
                }
                Way::Surprise => self.slot.cut_power()?,
            }
            self.plugged = false;
        }
        self.ready.remove(self.machine)
    }
}

impl Drop for Disk<'_> {
    fn drop(&mut self) {
        if let Err(why) = self.go(Way::Orderly) {
            eprintln!("clean-up of {}: {why:#}", self.id);
        }
    }
}

/// Shortens a name to at most 20 characters.
fn serial_of(id: &str) -> String {
    id.chars().take(20).collect()
}

/// The first entry of a directory whose name begins with `prefix`.
fn child(directory: &Path, prefix: &str) -> Option<String> {
    let names = fs::read_dir(directory).ok()?.flatten();
    let mut names = names.map(|entry| entry.file_name().to_string_lossy().into_owned());
    names.find(|name| name.starts_with(prefix))
}

/// The number of online CPUs.
pub(crate) fn cpus_online() -> Result<usize> {
    Ok(cpu_list(&read("/sys/devices/system/cpu/online")?)?.len())
}
