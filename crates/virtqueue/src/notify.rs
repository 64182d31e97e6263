// SPDX-License-Identifier: Apache-2.0
//! Stage *notify*: the event-index comparison (sections 2.7.7 and 2.8.10).

/// Returns whether an index that moved from `old` to `new` passed `event`, the entry at which the
/// other side asked for a notification.
#[inline]
pub(crate) fn passed(event: u16, new: u16, old: u16) -> bool {
    new.wrapping_sub(event).wrapping_sub(1) < new.wrapping_sub(old)
}

#[cfg(test)]
mod tests {
    use super::passed;

    #[test]
    fn moving_past_the_event_is_told_once() {
        assert!(passed(5, 6, 5));
        assert!(!passed(5, 7, 6));
        assert!(!passed(5, 5, 4));
    }

    #[test]
    fn the_comparison_survives_the_wrap_of_the_index() {
        assert!(passed(65535, 0, 65535));
        assert!(passed(0, 3, 65534));
        assert!(!passed(3, 3, 65534));
    }
}
