// SPDX-License-Identifier: Apache-2.0
//! A PCI Express slot: what is in it, and taking it out.

use std::fs::{self, OpenOptions};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};

use crate::system::{read, wait_for, write};

const SLOTS: &str = "/sys/bus/pci/slots";
const DEVICES: &str = "/sys/bus/pci/devices";

/// Offsets and bits of PCI configuration space: PCI Express Base Specification, 7.5.1 and 7.5.3.
const CAPABILITIES_POINTER: u64 = 0x34;
const CAPABILITY_EXPRESS: u8 = 0x10;
const SLOT_CONTROL: u64 = 0x18;
const INTERRUPT_ENABLED: u16 = 0x0020;
const POWER_INDICATOR_OFF: u16 = 0x0300;
const POWER_CONTROLLER_OFF: u16 = 0x0400;

/// Most capabilities that are followed.
const CAPABILITIES_MAX: usize = 48;

/// A slot by its number.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Slot {
    number: u32,
    /// `domain:bus:device` of what is in it.
    address: String,
}

impl Slot {
    /// The slots that have nothing in them, in order.
    pub(crate) fn free() -> Result<Vec<Self>> {
        let mut slots = Vec::new();
        for entry in fs::read_dir(SLOTS).with_context(|| SLOTS.to_owned())? {
            let entry = entry?;
            // Slots of other kinds have names that are no numbers.
            let Ok(number) = entry.file_name().to_string_lossy().parse() else { continue };
            let slot = Self { number, address: read(entry.path().join("address"))? };
            if slot.is_hot_pluggable() && !slot.device().exists() {
                slots.push(slot);
            }
        }
        slots.sort_by_key(|slot| slot.number);
        Ok(slots)
    }

    /// QEMU's name of it.
    pub(crate) fn bus(&self) -> String {
        format!("slot{}", self.number)
    }

    /// The folder of the function in it.
    pub(crate) fn device(&self) -> PathBuf {
        Path::new(DEVICES).join(format!("{}.0", self.address))
    }

    fn power(&self) -> PathBuf {
        Path::new(SLOTS).join(self.number.to_string()).join("power")
    }

    fn is_hot_pluggable(&self) -> bool {
        self.power().exists()
    }

    /// Waits for the kernel to see what was plugged.
    pub(crate) fn wait_until_filled(&self) -> Result<()> {
        let device = self.device();
        wait_for(&format!("{} to appear", device.display()), || device.exists().then_some(()))
    }

    /// Waits for the kernel to be rid of what was in it.
    pub(crate) fn wait_until_empty(&self) -> Result<()> {
        let device = self.device();
        wait_for(&format!("{} to go", device.display()), || (!device.exists()).then_some(()))?;
        // Switching the power off takes along whatever is in the slot by then.
        let power = self.power();
        wait_for("the slot's power to go", || (read(&power).ok()? == "0").then_some(()))
    }

    /// Switches the power off in order: the driver lets the device go first.
    pub(crate) fn power_off(&self) -> Result<()> {
        write(self.power(), "0")
    }

    /// Takes the power away behind the driver's back: from now on the device does not answer.
    pub(crate) fn cut_power(&self) -> Result<()> {
        let port = self.port()?;
        let config = OpenOptions::new().read(true).write(true).open(port.join("config"))?;
        let at = express_capability(&config)? + SLOT_CONTROL;
        let mut control = [0; 2];
        config.read_exact_at(&mut control, at)?;
        let before = u16::from_le_bytes(control) | POWER_INDICATOR_OFF;
        let off = (before & !INTERRUPT_ENABLED) | POWER_CONTROLLER_OFF;
        config.write_all_at(&off.to_le_bytes(), at).context("slot control")?;
        // The kernel must find that the card is missing and not that somebody switched it off. The
        // indicator stays off: when the kernel switches that off itself, QEMU unplugs once more.
        config.write_all_at(&before.to_le_bytes(), at).context("slot control")
    }

    /// The root port that the slot belongs to: the folder that the device's lies in.
    fn port(&self) -> Result<PathBuf> {
        let device = fs::canonicalize(self.device()).context("the slot is empty")?;
        Ok(device.parent().context("a device is below its port")?.to_owned())
    }
}

fn express_capability(config: &fs::File) -> Result<u64> {
    let mut at = [0; 1];
    config.read_exact_at(&mut at, CAPABILITIES_POINTER)?;
    for _ in 0..CAPABILITIES_MAX {
        let mut head = [0; 2];
        config.read_exact_at(&mut head, at[0].into())?;
        if head[0] == CAPABILITY_EXPRESS {
            return Ok(at[0].into());
        }
        at[0] = head[1];
        if at[0] == 0 {
            break;
        }
    }
    bail!("the port is not of PCI Express")
}
