// SPDX-License-Identifier: Apache-2.0
//! What the cases ask of the helper on the real machine: a line of JSON each way.

use std::path::PathBuf;

use clap::ValueEnum;
use serde::{Deserialize, Serialize};

/// A request.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(tag = "do", rename_all = "kebab-case")]
pub(crate) enum Ask {
    /// Make an empty image; answered by its path.
    Image {
        /// Its name in the folder.
        name: String,
        /// Its size.
        bytes: u64,
    },
    /// Remove an image.
    RemoveImage {
        /// Its name in the folder.
        name: String,
    },
    /// Start the project's daemon; answered by the socket's path.
    Daemon {
        /// The socket's name.
        name: String,
        /// Arguments of `serve` but the socket's.
        args: Vec<String>,
    },
    /// Send a signal to a daemon, by the names of kill(1).
    Signal {
        /// The socket's name.
        name: String,
        /// The signal.
        signal: String,
    },
    /// Start a disk in memory that keeps all writes and flushes in their order; answered by the
    /// socket's path.
    Journal {
        /// The socket's name.
        name: String,
        /// The disk's size.
        bytes: u64,
    },
    /// Make the image that a power cut would have left; answered by its path.
    Cut {
        /// The journal.
        journal: String,
        /// The image's name.
        image: String,
        /// How many entries had come.
        at: u64,
        /// Chooses what of the volatile cache is lost.
        seed: u64,
    },
    /// How many writes and flushes a journal has.
    Count {
        /// The journal.
        journal: String,
    },
    /// Start a device that lies; answered by the socket's path.
    Liar {
        /// The socket's name.
        name: String,
        /// What it lies about.
        lie: Lie,
        /// How many requests it answers as it should before it begins.
        after: u32,
        /// What its random numbers come from.
        seed: u64,
    },
    /// End whatever serves a socket.
    Stop {
        /// The socket's name.
        name: String,
    },
}

/// The answer.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Answer {
    /// It is done.
    Done,
    /// A path on the real machine.
    Path(PathBuf),
    /// A number.
    Count(u64),
    /// Not done, and why.
    Error(String),
}

/// What a lying device does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Lie {
    /// None: to know that the device is one.
    Nothing,
    /// Used ids beyond the ring.
    IdsOutOfRange,
    /// Each used id twice.
    IdsTwice,
    /// Random used ids of the ring's range.
    IdsRandom,
    /// Used lengths beyond the chain's.
    LengthsHuge,
    /// Used lengths of zero.
    LengthsZero,
    /// The status byte stays as it was.
    StatusNotWritten,
    /// A status byte that means nothing.
    StatusUnknown,
    /// The used index goes far ahead.
    IndexJumps,
    /// Nothing is ever answered.
    NeverAnswers,
    /// Answers every other request, and the rest never.
    AnswersHalf,
    /// Interrupts without reason.
    CallsAlways,
    /// No interrupts.
    CallsNever,
    /// Overwrites the descriptor table and the avail ring.
    ScribblesRing,
    /// What it has used goes on, says the descriptor table now, at another request's place.
    ChainsJoined,
    /// Limits in the configuration that are zero.
    ConfigZero,
    /// Limits in the configuration that are as large as can be.
    ConfigHuge,
    /// A random configuration, another one at each read.
    ConfigRandom,
    /// The capacity changes all the time.
    CapacityJumps,
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
