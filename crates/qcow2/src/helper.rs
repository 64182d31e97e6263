// SPDX-License-Identifier: Apache-2.0
//! The thread of a disk that works on its tables. It takes all waiting questions, makes their
//! changes durable with one commit, and then answers.

use crate::image::{Answer, Image, Piece, Question};
use backend::{Remote, Slot, Token};
use std::io;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread;

/// Maximum questions of one commit.
const BATCH_MAX: usize = 64;

/// Work for the thread.
pub(crate) enum Work {
    /// A question, and the way of its answer.
    Ask(Question, Reply),
    /// Enlarge the disk to this many bytes.
    Grow(u64, Sender<io::Result<()>>),
    /// Tell when the tables are durable.
    Settle(Sender<io::Result<()>>),
    /// Tell the next piece at a position, of at most so many bytes.
    Tell(Of, u64, u64, Sender<io::Result<Piece>>),
}

/// The content of a piece.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Of {
    /// As far as the image has it itself.
    Image,
    /// As the guest sees it.
    Disk,
}

/// The way back to a lane.
pub(crate) struct Reply {
    pub(crate) token: Token,
    pub(crate) remote: Remote,
    pub(crate) answers: Sender<(Slot, Answer)>,
}

impl Reply {
    fn send(self, answer: Answer) {
        // Fails only if the lane is gone, which then waits for nothing.
        let _ = self.answers.send((self.token.slot, answer));
        self.remote.complete(self.token, 0);
    }
}

/// Starts the thread. It ends with the last sender. `failed` learns of a failed commit.
///
/// # Errors
/// The error of the system call.
pub(crate) fn start(
    image: Image,
    failed: impl Fn(i32) + Send + 'static,
) -> io::Result<Sender<Work>> {
    let (sender, work) = channel();
    thread::Builder::new().name("qcow2".into()).spawn(move || run(image, &work, &failed))?;
    Ok(sender)
}

fn run(mut image: Image, work: &Receiver<Work>, failed: &dyn Fn(i32)) {
    let mut answered = Vec::with_capacity(BATCH_MAX);
    let (mut told, mut settled) = (Vec::new(), Vec::new());
    while let Ok(first) = work.recv() {
        for work in std::iter::once(first).chain(work.try_iter()).take(BATCH_MAX) {
            match work {
                Work::Ask(question, reply) => {
                    let changes = !matches!(question, Question::Read(..));
                    answered.push((reply, image.answer(question), changes));
                }
                Work::Tell(Of::Image, at, len, reply) => {
                    told.push((reply, image.own(at, len)));
                }
                Work::Tell(Of::Disk, at, len, reply) => {
                    told.push((reply, image.visible(at, len)));
                }
                Work::Settle(reply) => settled.push(reply),
                Work::Grow(bytes, reply) => {
                    let _ = reply.send(image.grow(bytes)); // the control plane waits
                }
            }
        }
        let committed = image.commit().inspect_err(|errno| failed(*errno));
        for reply in settled.drain(..) {
            let _ = reply.send(committed.map_err(io::Error::from_raw_os_error)); // an upgrade waits
        }
        for (reply, piece) in told.drain(..) {
            // Before the commit, a part of a new cluster may not be in the file.
            let committed = committed.map_err(io::Error::from_raw_os_error);
            let _ = reply.send(committed.and(piece)); // a copier waits
        }
        for (reply, answer, changes) in answered.drain(..) {
            reply.send(match committed {
                Err(errno) if changes => Answer::Failed(errno),
                _ => answer,
            });
        }
    }
}
