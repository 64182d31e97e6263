// SPDX-License-Identifier: Apache-2.0
//! A PCI Express slot: what is in it, putting something in and taking it out.
//!
//! Cards come and go by the kernel's own hot-plug driver, except on a kernel with lockdep: that driver
//! takes two locks in both orders (Linux 6.12, `reset_lock` and `pci_rescan_remove_lock`), which
//! lockdep reports at the first card and then looks at nothing any more. There the slots are taken
//! from it, and the kernel is told to look for cards and to let them go.

use std::fs::{self, File, OpenOptions};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};

use crate::system::{read, wait_for, write};

const DEVICES: &str = "/sys/bus/pci/devices";
const SLOTS: &str = "/sys/bus/pci/slots";
const HOT_PLUG_DRIVER: &str = "/sys/bus/pci_express/drivers/pciehp";

/// The class of a bridge.
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
const POWER_INDICATOR_OFF: u16 = 0x0300;
const POWER_CONTROLLER_OFF: u16 = 0x0400;

/// Most capabilities that are followed.
const CAPABILITIES_MAX: usize = 48;

/// A slot by its port.
#[derive(Debug)]
pub(crate) struct Slot {
    number: u32,
    /// The folder of the root port.
    port: PathBuf,
    /// The port's configuration space, and where its capability is in it.
    config: File,
    express: u64,
    by_hand: bool,
}

impl Slot {
    /// Whether the kernel's hot-plug driver watches the slots of this machine.
    pub(crate) fn have_hot_plug_driver() -> bool {
        !Path::new("/proc/lockdep").exists()
    }

    /// The slots that have nothing in them, in order.
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

    /// The slot of a port that has one.
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

    /// QEMU's name of it.
    pub(crate) fn bus(&self) -> String {
        format!("slot{}", self.number)
    }

    /// The folder of the function in it.
    pub(crate) fn device(&self) -> Option<PathBuf> {
        let entries = fs::read_dir(&self.port).ok()?.flatten();
        let is_function = |path: &PathBuf| path.join("vendor").exists();
        entries.map(|entry| entry.path()).find(is_function)
    }

    /// Whether the kernel knows of nothing in it.
    pub(crate) fn is_empty(&self) -> bool {
        self.device().is_none()
    }

    /// Whether the kernel's hot-plug driver watches it.
    pub(crate) fn is_hot_plugged(&self) -> bool {
        !self.by_hand
    }

    /// Before QEMU plugs something.
    pub(crate) fn prepare(&self) -> Result<()> {
        if self.by_hand {
            let on = self.control()? & !(POWER_CONTROLLER_OFF | POWER_INDICATOR_OFF);
            self.set_control(on | POWER_INDICATOR_ON)?;
        }
        Ok(())
    }

    /// After QEMU has plugged something: waits for the kernel to see it.
    pub(crate) fn wait_until_filled(&self) -> Result<PathBuf> {
        if self.by_hand {
            write(self.port.join("rescan"), "1")?;
        }
        wait_for(&format!("a device in slot {}", self.number), || self.device())
    }

    /// Lets the driver go, then the device. QEMU has been asked for that.
    pub(crate) fn power_off(&self) -> Result<()> {
        if self.by_hand {
            self.remove()?;
            return self.cut();
        }
        write(Path::new(SLOTS).join(self.number.to_string()).join("power"), "0")?;
        self.wait_until_empty()
    }

    /// Takes the power away behind the driver's back: from now on the device does not answer. Then
    /// the kernel finds out.
    pub(crate) fn cut_power(&self) -> Result<()> {
        let before = self.control()?;
        self.cut()?;
        if self.by_hand {
            return self.remove();
        }
        // The kernel must find that the card is missing and not that somebody switched it off. The
        // indicator stays off: when the kernel switches that off itself, QEMU unplugs once more.
        self.set_control(before | POWER_INDICATOR_OFF)?;
        self.wait_until_empty()?;
        // Switching the power off takes along whatever is in the slot by then.
        let power = Path::new(SLOTS).join(self.number.to_string()).join("power");
        wait_for("the slot's power to go", || (read(&power).ok()? == "0").then_some(()))
    }

    /// Waits for the kernel to be rid of what was in it.
    fn wait_until_empty(&self) -> Result<()> {
        wait_for(&format!("slot {} to be empty", self.number), || self.is_empty().then_some(()))
    }

    fn remove(&self) -> Result<()> {
        match self.device() {
            Some(device) => write(device.join("remove"), "1"),
            None => Ok(()),
        }
    }

    /// QEMU takes a card away when power and indicator are off.
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

/// Takes all slots from the kernel's hot-plug driver.
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
