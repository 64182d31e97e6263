// SPDX-License-Identifier: Apache-2.0
//! A PCI Express slot: its content, plugging and unplugging.
//!
//! The kernel's hot-plug driver handles cards, except on a kernel with lockdep. That driver takes
//! two locks in both orders (Linux 6.12, `reset_lock` and `pci_rescan_remove_lock`). Lockdep
//! reports this at the first card and then stops checking. On such a kernel the cases unbind the
//! slots from the driver, and tell the kernel to scan for cards and to remove them.

use std::fs::{self, File, OpenOptions};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};

use crate::guest::system::{read, wait_for, write};

const DEVICES: &str = "/sys/bus/pci/devices";
const SLOTS: &str = "/sys/bus/pci/slots";
const HOT_PLUG_DRIVER: &str = "/sys/bus/pci_express/drivers/pciehp";

/// PCI class of a bridge.
const CLASS_BRIDGE: &str = "0x060400";

/// Offsets and bits of PCI configuration space: PCI Express Base Specification, 7.5.1 and 7.5.3.
const CAPABILITIES_POINTER: u64 = 0x34;
const CAPABILITY_EXPRESS: u8 = 0x10;
const FLAGS: u64 = 0x02;
const FLAG_SLOT: u16 = 0x0100;
const SLOT_CAPABILITIES: u64 = 0x14;
const SLOT_CONTROL: u64 = 0x18;
const INTERRUPT_ENABLED: u16 = 0x0020;
const POWER_INDICATOR_ON: u16 = 0x0100;
const POWER_INDICATOR_BLINKING: u16 = 0x0200;
const POWER_INDICATOR_OFF: u16 = 0x0300;
const POWER_INDICATOR: u16 = 0x0300;
const POWER_CONTROLLER_OFF: u16 = 0x0400;

/// Most capabilities to follow.
const CAPABILITIES_MAX: usize = 48;

/// A slot, identified by its port.
#[derive(Debug)]
pub(crate) struct Slot {
    number: u32,
    /// Directory of the root port.
    port: PathBuf,
    /// Configuration space of the port, and the offset of its capability.
    config: File,
    express: u64,
    by_hand: bool,
}

impl Slot {
    /// True if the kernel's hot-plug driver watches the slots of this machine.
    pub(crate) fn have_hot_plug_driver() -> bool {
        !Path::new("/proc/lockdep").exists()
    }

    /// The empty slots, in order.
    pub(crate) fn free() -> Result<Vec<Self>> {
        let by_hand = !Self::have_hot_plug_driver();
        if by_hand {
            take_all()?;
        }
        let mut slots = Vec::new();
        for entry in fs::read_dir(DEVICES).with_context(|| DEVICES.to_owned())? {
            let port = fs::canonicalize(entry?.path())?;
            if read(port.join("class"))? == CLASS_BRIDGE {
                slots.extend(Self::of_port(port, by_hand)?.filter(Self::is_empty));
            }
        }
        slots.sort_by_key(|slot| slot.number);
        Ok(slots)
    }

    /// The slot of a port, if it has one.
    fn of_port(port: PathBuf, by_hand: bool) -> Result<Option<Self>> {
        let config = OpenOptions::new().read(true).write(true).open(port.join("config"))?;
        let Some(express) = express_capability(&config)? else { return Ok(None) };
        if u16_at(&config, express + FLAGS)? & FLAG_SLOT == 0 {
            return Ok(None);
        }
        let mut capabilities = [0; 4];
        config.read_exact_at(&mut capabilities, express + SLOT_CAPABILITIES)?;
        let number = u32::from_le_bytes(capabilities) >> 19;
        Ok((number > 0).then_some(Self { number, port, config, express, by_hand }))
    }

    /// QEMU's name of the slot.
    pub(crate) fn bus(&self) -> String {
        format!("slot{}", self.number)
    }

    /// Directory of the function in the slot.
    pub(crate) fn device(&self) -> Option<PathBuf> {
        let entries = fs::read_dir(&self.port).ok()?.flatten();
        let is_function = |path: &PathBuf| path.join("vendor").exists();
        entries.map(|entry| entry.path()).find(is_function)
    }

    /// True if the kernel knows of no function in the slot.
    pub(crate) fn is_empty(&self) -> bool {
        self.device().is_none()
    }

    /// True if the kernel's hot-plug driver watches the slot.
    pub(crate) fn is_hot_plugged(&self) -> bool {
        !self.by_hand
    }

    /// Prepares the slot before QEMU plugs a card.
    pub(crate) fn prepare(&self) -> Result<()> {
        if self.by_hand {
            let on = self.control()? & !(POWER_CONTROLLER_OFF | POWER_INDICATOR_OFF);
            self.set_control(on | POWER_INDICATOR_ON)?;
        }
        Ok(())
    }

    /// Waits until the kernel sees the card that QEMU has plugged.
    pub(crate) fn wait_until_filled(&self) -> Result<PathBuf> {
        if self.by_hand {
            write(self.port.join("rescan"), "1")?;
        }
        wait_for(&format!("a device in slot {}", self.number), || self.device())
    }

    /// Waits until the kernel has finished a change of the slot: QEMU refuses to unplug a card
    /// while the power indicator blinks.
    pub(crate) fn wait_until_settled(&self) -> Result<()> {
        let settled = || {
            let control = self.control().ok()?;
            (control & POWER_INDICATOR != POWER_INDICATOR_BLINKING).then_some(())
        };
        wait_for(&format!("slot {} to be settled", self.number), settled)
    }

    /// Removes the driver, then the device, as QEMU has asked.
    pub(crate) fn power_off(&self) -> Result<()> {
        if self.by_hand {
            self.remove()?;
            return self.cut();
        }
        write(Path::new(SLOTS).join(self.number.to_string()).join("power"), "0")?;
        self.wait_until_empty()
    }

    /// Switches the power off without the driver's knowledge: from now on the device does not
    /// answer. Then the kernel detects the removal.
    pub(crate) fn cut_power(&self) -> Result<()> {
        let before = self.control()?;
        self.cut()?;
        if self.by_hand {
            return self.remove();
        }
        // The kernel must detect a missing card instead of a slot that was switched off. The
        // indicator stays off: if the kernel switched it off itself, QEMU would unplug once more.
        self.set_control(before | POWER_INDICATOR_OFF)?;
        self.wait_until_empty()?;
        // Switching the power off removes whatever is in the slot at that time.
        let power = Path::new(SLOTS).join(self.number.to_string()).join("power");
        wait_for("the slot's power to go", || (read(&power).ok()? == "0").then_some(()))
    }

    /// Waits until the kernel has removed the card.
    fn wait_until_empty(&self) -> Result<()> {
        wait_for(&format!("slot {} to be empty", self.number), || self.is_empty().then_some(()))
    }

    fn remove(&self) -> Result<()> {
        match self.device() {
            Some(device) => write(device.join("remove"), "1"),
            None => Ok(()),
        }
    }

    /// QEMU removes a card when power and indicator are off.
    fn cut(&self) -> Result<()> {
        let control = self.control()? & !INTERRUPT_ENABLED;
        self.set_control(control | POWER_INDICATOR_OFF | POWER_CONTROLLER_OFF)
    }

    fn control(&self) -> Result<u16> {
        u16_at(&self.config, self.express + SLOT_CONTROL)
    }

    fn set_control(&self, control: u16) -> Result<()> {
        let at = self.express + SLOT_CONTROL;
        self.config.write_all_at(&control.to_le_bytes(), at).context("slot control")
    }
}

/// Unbinds all slots from the kernel's hot-plug driver.
fn take_all() -> Result<()> {
    let entries = fs::read_dir(HOT_PLUG_DRIVER).with_context(|| HOT_PLUG_DRIVER.to_owned())?;
    for entry in entries.flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        if name.contains("pcie") {
            write(Path::new(HOT_PLUG_DRIVER).join("unbind"), &name)?;
        }
    }
    Ok(())
}

fn u16_at(config: &File, at: u64) -> Result<u16> {
    let mut bytes = [0; 2];
    config.read_exact_at(&mut bytes, at)?;
    Ok(u16::from_le_bytes(bytes))
}

fn express_capability(config: &File) -> Result<Option<u64>> {
    let mut at = u16_at(config, CAPABILITIES_POINTER)? & 0xff;
    for _ in 0..CAPABILITIES_MAX {
        if at == 0 {
            return Ok(None);
        }
        let [kind, next] = u16_at(config, at.into())?.to_le_bytes();
        if kind == CAPABILITY_EXPRESS {
            return Ok(Some(at.into()));
        }
        at = next.into();
    }
    bail!("capabilities without end")
}
