// SPDX-License-Identifier: Apache-2.0
//! State of a lane for each I/O in flight.

use crate::Slot;

/// One value for each slot. The first use of a slot grows the list.
pub struct BySlot<T>(Vec<Option<T>>);

impl<T> Default for BySlot<T> {
    fn default() -> Self {
        Self::new()
    }
}

impl<T> BySlot<T> {
    /// No value for any slot.
    pub fn new() -> Self {
        BySlot(Vec::new())
    }

    /// Sets the value of `slot`.
    pub fn put(&mut self, slot: Slot, value: T) {
        let at = slot.0 as usize;
        if at >= self.0.len() {
            self.0.resize_with(at + 1, || None);
        }
        self.0[at] = Some(value);
    }

    /// Removes the value of `slot`.
    pub fn take(&mut self, slot: Slot) -> Option<T> {
        self.0.get_mut(slot.0 as usize)?.take()
    }
}
