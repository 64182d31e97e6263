// SPDX-License-Identifier: Apache-2.0
//! A pause that doubles each time it begins, up to a maximum.

/// A pause, counted in events of its owner.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Backoff {
    left: u32,
    next: u32,
    min: u32,
    max: u32,
}

impl Backoff {
    /// No pause yet; the first one takes `min` events.
    pub(crate) fn new(min: u32, max: u32) -> Self {
        Backoff { left: 0, next: min, min, max }
    }

    /// Begins a pause. The one after it takes twice as long.
    pub(crate) fn begin(&mut self) {
        self.left = self.next;
        self.next = (self.next * 2).min(self.max);
    }

    /// Makes the next pause the shortest one.
    pub(crate) fn reset(&mut self) {
        self.next = self.min;
    }

    /// Counts an event of the pause. Returns `false` if there is no pause.
    pub(crate) fn pass(&mut self) -> bool {
        let pauses = self.left > 0;
        self.left -= u32::from(pauses);
        pauses
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Begins a pause and returns its events.
    fn pause(backoff: &mut Backoff) -> u32 {
        backoff.begin();
        let mut events = 0;
        while backoff.pass() {
            events += 1;
        }
        events
    }

    #[test]
    fn pauses_double_up_to_the_maximum_until_a_reset() {
        let mut backoff = Backoff::new(3, 10);
        assert!(!backoff.pass());
        assert_eq!([(); 4].map(|()| pause(&mut backoff)), [3, 6, 10, 10]);
        backoff.reset();
        assert_eq!([(); 2].map(|()| pause(&mut backoff)), [3, 6]);
    }
}
