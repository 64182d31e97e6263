// SPDX-License-Identifier: Apache-2.0
//! State of a wrapper's lane for each I/O in flight.

use crate::Slot;

/// One value for each slot. The first use of a slot grows the list.
pub(super) struct BySlot<T>(Vec<Option<T>>);

impl<T> BySlot<T> {
    pub(super) fn new() -> Self {
        BySlot(Vec::new())
    }

    pub(super) fn put(&mut self, slot: Slot, value: T) {
        let at = slot.0 as usize;
        if at >= self.0.len() {
            self.0.resize_with(at + 1, || None);
        }
        self.0[at] = Some(value);
    }

    pub(super) fn take(&mut self, slot: Slot) -> Option<T> {
        self.0.get_mut(slot.0 as usize)?.take()
    }
}
