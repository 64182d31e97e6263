// SPDX-License-Identifier: Apache-2.0
//! A plugged disk.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};
use lab_case::stat::Stat;
use serde_json::{Map, Value, json};

use super::Machine;
use super::backing::{Backing, Ready};
use super::slot::Slot;
use crate::protocol::Ask;
use crate::system::{read, read_number, wait_for, write};

/// How a disk is plugged.
#[derive(Clone, Debug)]
pub(crate) struct Plug {
    /// What stores it.
    pub(crate) backing: Backing,
    /// Request queues.
    pub(crate) queues: u16,
    /// Descriptors of a queue.
    pub(crate) queue_size: u16,
    /// Further properties of QEMU's device.
    pub(crate) more: Map<String, Value>,
}

impl Plug {
    /// A disk with four queues of 128.
    pub(crate) fn of(backing: Backing) -> Self {
        Self { backing, queues: 4, queue_size: 128, more: Map::new() }
    }

    /// A disk in a file in memory.
    pub(crate) fn file(mib: u64) -> Self {
        Self::of(Backing::File { bytes: mib << 20 })
    }

    /// With another number of queues.
    pub(crate) fn queues(mut self, queues: u16) -> Self {
        self.queues = queues;
        self
    }

    /// With queues of another size.
    pub(crate) fn queue_size(mut self, queue_size: u16) -> Self {
        self.queue_size = queue_size;
        self
    }

    /// With one more property.
    pub(crate) fn with(mut self, name: &str, value: impl Into<Value>) -> Self {
        self.more.insert(name.to_owned(), value.into());
        self
    }
}

/// How a disk goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Way {
    /// QEMU asks, the kernel lets it go.
    Orderly,
    /// It is gone before the kernel knows.
    Surprise,
}

/// A disk in a slot; dropping it unplugs it.
#[derive(Debug)]
pub(crate) struct Disk<'a> {
    machine: &'a Machine,
    slot: Slot,
    /// The folder of its PCI function, once it is there.
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

    /// Plugs a disk on an image that is there.
    pub(crate) fn plug_image(machine: &'a Machine, path: &Path) -> Result<Self> {
        let plug = Plug::file(0);
        let disk = Self::plug_ready(machine, Ready::of_image(machine, path)?, &plug)?;
        disk.wait_for_block()?;
        Ok(disk)
    }

    fn plug_ready(machine: &'a Machine, ready: Ready, plug: &Plug) -> Result<Self> {
        let free = Slot::free()?;
        // Another one each time: the kernel is busy with a slot for a second after it was emptied.
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

    /// The folder of its PCI function.
    pub(crate) fn pci(&self) -> &Path {
        &self.pci
    }

    /// Whether the kernel's hot-plug driver has to do with it.
    pub(crate) fn is_hot_plugged(&self) -> bool {
        self.slot.is_hot_plugged()
    }

    /// The folder of its virtio device, and the device's name.
    pub(crate) fn virtio(&self) -> Result<(PathBuf, String)> {
        let pci = self.pci();
        wait_for("a virtio device", || child(pci, "virtio")).map(|name| (pci.join(&name), name))
    }

    /// Whether the driver has taken a feature, by its bit's number.
    pub(crate) fn has_feature(&self, bit: u32) -> Result<bool> {
        let (virtio, _) = self.virtio()?;
        Ok(read(virtio.join("features"))?.chars().nth(bit as usize) == Some('1'))
    }

    /// Its name as a block device, as long as it has one.
    pub(crate) fn block(&self) -> Option<String> {
        let (virtio, _) = self.virtio().ok()?;
        child(&virtio.join("block"), "vd")
    }

    /// Waits for the block device, until the driver has done with it what it does first.
    pub(crate) fn wait_for_block(&self) -> Result<String> {
        let name = wait_for("the disk's block device", || {
            let name = self.block()?;
            Path::new("/dev").join(&name).exists().then_some(name)
        })?;
        // The node is there before the partitions were looked for, and before /sys/block has the
        // disk. Binding a device that is bound is refused, once its probe is over.
        ensure!(self.bind().is_err(), "{name} was not bound");
        Ok(name)
    }

    /// Its node.
    pub(crate) fn path(&self) -> Result<String> {
        let name = self.block().context("the disk has no block device")?;
        Ok(format!("/dev/{name}"))
    }

    /// Its folder below /sys/block.
    pub(crate) fn sysfs(&self) -> Result<PathBuf> {
        let name = self.block().context("the disk has no block device")?;
        Ok(Path::new("/sys/block").join(name))
    }

    /// An attribute below /sys/block/NAME.
    pub(crate) fn attribute(&self, name: &str) -> Result<String> {
        read(self.sysfs()?.join(name))
    }

    /// The same as a number.
    pub(crate) fn number(&self, name: &str) -> Result<u64> {
        read_number(self.sysfs()?.join(name))
    }

    /// What the kernel counts of it.
    pub(crate) fn stat(&self) -> Result<Stat> {
        Stat::of(&self.sysfs()?)
    }

    /// Writes an attribute below /sys/block/NAME.
    pub(crate) fn set(&self, name: &str, value: &str) -> Result<()> {
        write(self.sysfs()?.join(name), value)
    }

    /// Its size as the kernel sees it.
    pub(crate) fn bytes(&self) -> Result<u64> {
        Ok(self.number("size")? * 512)
    }

    /// The serial number that QEMU was told to give.
    pub(crate) fn expected_serial(&self) -> String {
        serial_of(&self.id)
    }

    /// Gives it another size.
    pub(crate) fn resize(&self, bytes: u64) -> Result<()> {
        let node = self.ready.innermost().context("only disks in files can be resized")?;
        self.machine.qemu("block_resize", json!({ "node-name": node, "size": bytes }))?;
        Ok(())
    }

    /// Sends a signal to the daemon behind it.
    pub(crate) fn signal(&self, signal: &str) -> Result<()> {
        let name = self.served()?.to_owned();
        self.machine.ask(&Ask::Signal { name, signal: signal.to_owned() })?;
        Ok(())
    }

    /// The helper's name of what serves it.
    pub(crate) fn served(&self) -> Result<&str> {
        self.ready.served().context("the helper does not serve this disk")
    }

    /// Takes the driver off.
    pub(crate) fn unbind(&self) -> Result<()> {
        let (folder, name) = self.virtio()?;
        write(folder.join("driver/unbind"), &name)
    }

    /// Puts the driver on.
    pub(crate) fn bind(&self) -> Result<()> {
        let (_, name) = self.virtio()?;
        write("/sys/bus/virtio/drivers/virtio_blk/bind", &name)
    }

    /// Unplugs it and waits until the kernel is rid of it.
    pub(crate) fn unplug(mut self, way: Way) -> Result<()> {
        self.go(way)
    }

    /// Asks for it to go and lets the kernel take its time: that of an attention button.
    pub(crate) fn ask_to_go(&mut self) -> Result<()> {
        self.machine.qemu("device_del", json!({ "id": self.id }))?;
        Ok(())
    }

    fn go(&mut self, way: Way) -> Result<()> {
        if self.plugged {
            match way {
                Way::Orderly => {
                    self.ask_to_go()?;
                    self.slot.power_off()?;
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

/// At most 20 characters.
fn serial_of(id: &str) -> String {
    id.chars().take(20).collect()
}

/// The first entry of a folder whose name begins so.
fn child(folder: &Path, prefix: &str) -> Option<String> {
    let names = fs::read_dir(folder).ok()?.flatten();
    let mut names = names.map(|entry| entry.file_name().to_string_lossy().into_owned());
    names.find(|name| name.starts_with(prefix))
}

/// The number of CPUs that are on.
pub(crate) fn cpus_online() -> Result<u32> {
    let list = read("/sys/devices/system/cpu/online")?;
    let mut count = 0;
    for part in list.split(',') {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let (first, last): (u32, u32) = (first.parse()?, last.parse()?);
        if last < first {
            bail!("strange list of CPUs: {list}");
        }
        count += last - first + 1;
    }
    Ok(count)
}
