// SPDX-License-Identifier: Apache-2.0
//! The meaning of a ring completion, packed into its 64 bits of user data.

use backend::{Slot, Token};

const TAG_LANE: u64 = 0;
const TAG_KICK: u64 = 1;
const TAG_MAIL: u64 = 2;
const TAG_IGNORED: u64 = 3;
const TAG_TIMER: u64 = 4;
const TAG_REMOTE: u64 = 5;

/// The meaning of a completion.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Event {
    /// A lane's operation ended.
    Lane(Token),
    /// A lane's timer expired.
    Timer(Token),
    /// The kick eventfd of a queue was signalled.
    Kick {
        /// The worker's number of the queue.
        queue: u16,
        /// The poll stays armed; `false`: it has ended.
        armed: bool,
    },
    /// The control plane sent mail to the worker.
    Mail {
        /// The poll stays armed.
        armed: bool,
    },
    /// Another thread delivered events ([`crate::remote`]).
    Remote {
        /// The poll stays armed.
        armed: bool,
    },
    /// A completion without effect.
    Ignored,
}

impl Event {
    pub(crate) fn to_user_data(self) -> u64 {
        match self {
            Event::Lane(token) => TAG_LANE << 56 | token_bits(token),
            Event::Timer(token) => TAG_TIMER << 56 | token_bits(token),
            Event::Kick { queue, .. } => TAG_KICK << 56 | u64::from(queue),
            Event::Mail { .. } => TAG_MAIL << 56,
            Event::Remote { .. } => TAG_REMOTE << 56,
            Event::Ignored => TAG_IGNORED << 56,
        }
    }

    #[inline]
    pub(crate) fn from_user_data(data: u64, armed: bool) -> Self {
        match data >> 56 {
            TAG_LANE => Event::Lane(token_of(data)),
            TAG_TIMER => Event::Timer(token_of(data)),
            TAG_KICK => Event::Kick { queue: data as u16, armed },
            TAG_MAIL => Event::Mail { armed },
            TAG_REMOTE => Event::Remote { armed },
            _ => Event::Ignored,
        }
    }
}

#[inline]
fn token_bits(token: Token) -> u64 {
    u64::from(token.layer) << 32 | u64::from(token.slot.0)
}

#[inline]
fn token_of(data: u64) -> Token {
    Token { slot: Slot(data as u32), layer: (data >> 32) as u8 }
}

/// Packs the worker's number of a queue and the index of an entry of its in-flight table.
#[inline]
pub(crate) fn slot_of(queue: u16, entry: u16) -> Slot {
    Slot(u32::from(queue) << 16 | u32::from(entry))
}

/// The inverse of [`slot_of`].
#[inline]
pub(crate) fn queue_and_entry(slot: Slot) -> (usize, u16) {
    ((slot.0 >> 16) as usize, slot.0 as u16)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn user_data_gives_the_event_back() {
        let token = Token { slot: slot_of(63, 32767), layer: 7 };
        let events = [
            Event::Lane(token),
            Event::Timer(token),
            Event::Kick { queue: 9, armed: true },
            Event::Mail { armed: true },
            Event::Remote { armed: true },
            Event::Ignored,
        ];
        let back = events.map(|event| Event::from_user_data(event.to_user_data(), true));
        assert_eq!(back, events);
        assert_eq!(queue_and_entry(token.slot), (63, 32767));
    }
}
