// SPDX-License-Identifier: Apache-2.0
//! Requests of the cases to the helper on the real machine: a line of JSON each way.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

/// A request.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(tag = "do", rename_all = "kebab-case")]
pub enum Ask {
    /// Make an empty image; answered by its path.
    Image {
        /// Its name in the directory.
        name: String,
        /// Its size.
        bytes: u64,
    },
    /// Remove an image.
    RemoveImage {
        /// Its name in the directory.
        name: String,
    },
    /// Start the project's daemon; answered by the socket's path.
    Daemon {
        /// The socket's name.
        name: String,
        /// Arguments of `serve`, without the socket's.
        args: Vec<String>,
    },
    /// Send a signal to a daemon, by the names of kill(1).
    Signal {
        /// The socket's name.
        name: String,
        /// The signal.
        signal: String,
    },
    /// Send a command to a daemon, as `vhost-blk ctl` does.
    Control {
        /// The socket's name.
        name: String,
        /// Command and arguments.
        words: Vec<String>,
    },
    /// Start a disk in memory that records all writes and flushes in order; answered by the
    /// socket's path.
    Journal {
        /// The socket's name.
        name: String,
        /// The disk's size.
        bytes: u64,
        /// Size of a physical block, which a power cut does not tear.
        physical_block_bytes: u32,
    },
    /// Make the image that a power cut would leave; answered by its path.
    Cut {
        /// The journal.
        journal: String,
        /// The image's name.
        image: String,
        /// Entries that had arrived before the cut.
        at: u64,
        /// Seed for the part of the volatile cache that is lost.
        seed: u64,
    },
    /// Count the writes and flushes of a journal.
    Count {
        /// The journal.
        journal: String,
    },
    /// Make a journal withhold its answers, or release them.
    Hold {
        /// The journal.
        journal: String,
        /// True: withhold from now on.
        held: bool,
    },
    /// Start a device that lies; answered by the socket's path.
    Liar {
        /// The socket's name.
        name: String,
        /// The lie.
        lie: Lie,
        /// Requests that it answers correctly before it begins.
        after: u32,
        /// Seed of its random numbers.
        seed: u64,
    },
    /// End the server of a socket.
    Stop {
        /// The socket's name.
        name: String,
    },
}

/// The answer.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Answer {
    /// The request is done.
    Done,
    /// A path on the real machine.
    Path(PathBuf),
    /// A number.
    Count(u64),
    /// The request failed for this reason.
    Error(String),
}

/// The misbehaviour of a lying device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Lie {
    /// No lie: a check that the device works.
    Nothing,
    /// Used ids beyond the ring.
    IdsOutOfRange,
    /// Reports each used id twice.
    IdsTwice,
    /// Random used ids inside of the ring's range.
    IdsRandom,
    /// Used lengths beyond the chain's.
    LengthsHuge,
    /// Used lengths of zero.
    LengthsZero,
    /// Leaves the status byte unwritten.
    StatusNotWritten,
    /// An unknown status byte.
    StatusUnknown,
    /// The used index jumps far ahead.
    IndexJumps,
    /// Answers no request.
    NeverAnswers,
    /// Answers every other request.
    AnswersHalf,
    /// Answers no request until the queues are set up again.
    SilentUntilReset,
    /// Interrupts without reason.
    CallsAlways,
    /// No interrupts.
    CallsNever,
    /// Overwrites the descriptor table and the avail ring.
    ScribblesRing,
    /// The descriptor table links a used chain to another request's chain.
    ChainsJoined,
    /// Limits of zero in the configuration.
    ConfigZero,
    /// Limits in the configuration at their largest values.
    ConfigHuge,
    /// A random configuration, different at each read.
    ConfigRandom,
    /// The capacity changes all the time.
    CapacityJumps,
    /// No lie: requests of at most one segment and blocks of 4 KiB. Fails each request with more segments.
    OneSegment,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_and_answers_survive_the_line() {
        let ask = Ask::Liar { name: "a".into(), lie: Lie::IdsTwice, after: 0, seed: 7 };
        let text = serde_json::to_string(&ask).unwrap();
        assert!(text.contains("\"do\":\"liar\"") && text.contains("ids-twice"), "{text}");
        assert!(matches!(serde_json::from_str(&text).unwrap(), Ask::Liar { seed: 7, .. }));
        let text = serde_json::to_string(&Answer::Error("no".into())).unwrap();
        assert!(matches!(serde_json::from_str(&text).unwrap(), Answer::Error(why) if why == "no"));
        assert!(matches!(serde_json::from_str("\"done\"").unwrap(), Answer::Done));
    }
}
