// SPDX-License-Identifier: Apache-2.0
//! The mail of the control plane, as the thread handles it between two turns.

use super::disks::DiskOnThread;
use super::{Worker, arm_kick};
use crate::error::StartError;
use crate::event::{Event, QueueId};
use crate::mail::{AddDisk, Mail};
use crate::plane::{AtStop, QueueSetup, QueueState};
use crate::running::RunningQueue;
use crate::submit::Storage;
use crate::throttle::Throttle;
use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::sync::mpsc::Sender;
use virtqueue::VirtQueue;

/// Maximum mails that the thread carries out between two turns.
pub(super) const MAILS_MAX: usize = 64;

impl Worker {
    #[cold]
    pub(super) fn handle_mails(&mut self, armed: bool) {
        if !armed {
            let event = Event::Mail { armed: true };
            self.uring.poll_eventfd(self.mail_fd.as_raw_fd(), event);
        }
        for _ in 0..MAILS_MAX {
            let Ok(mail) = self.mail.try_recv() else { return };
            self.handle_mail(mail);
        }
        self.mail_fd.write(1).expect("the mail counter never fills up"); // more may be there
    }

    /// Carries out one mail. The control plane waits for each answer, so that no `send` of one fails.
    pub(super) fn handle_mail(&mut self, mail: Mail) {
        match mail {
            Mail::AddDisk(disk, reply) => {
                let _ = reply.send(self.add_disk(disk));
            }
            Mail::RemoveDisk(number, reply) => {
                let disk = self.disks.remove(number).expect("it was added");
                assert!(disk.is_idle(), "no queue of the disk runs");
                let _ = reply.send(disk.storage.close(&mut self.uring));
            }
            Mail::ReplaceLane(number, lane, reply) => {
                let disk = self.disks.disk(number);
                assert!(disk.is_idle(), "no queue of the disk runs");
                let _ = reply.send(disk.storage.replace_lane(&mut self.uring, lane));
            }
            Mail::Memory(disk, memory, reply) => {
                let result = match memory {
                    Some(memory) => self.uring.register_memory(disk, &memory),
                    None => {
                        self.uring.unregister_memory(disk);
                        Ok(())
                    }
                };
                let _ = reply.send(result);
            }
            Mail::LimitsChanged(limiter) => {
                self.disks.queues().for_each(|queue| queue.throttle.limits_changed(&limiter));
            }
            Mail::Share(number, share) => {
                let disk = self.disks.disk(number);
                disk.queues().for_each(|queue| queue.throttle = Throttle::new(Arc::clone(&share)));
                disk.share = share;
            }
            Mail::Start(disk, start, reply) => {
                let (setup, virtqueue) = *start;
                let _ = reply.send(self.start_queue(disk, setup, virtqueue));
            }
            Mail::Wake(disk) => {
                let Worker { disks, active, clock, .. } = self;
                disks.disk(disk).queues().for_each(|queue| {
                    queue.look_at_disk(clock); // a stop may follow in the same mail
                    active.wake(queue);
                });
            }
            Mail::Stop(id, at_stop, reply) => self.stop_queue(id, at_stop, reply),
            Mail::SetCall(id, new_call) => self.disks.queue(id).0.take_call(&new_call),
            Mail::State(id, reply) => {
                let mut state = self.disks.queue(id).0.state();
                state.choices.batch_size = self.batch_size.chosen() as u64;
                let _ = reply.send(state);
            }
            Mail::Ping(reply) => {
                let _ = reply.send(());
            }
            Mail::Exit => self.exit = true,
        }
    }

    fn add_disk(&mut self, disk: AddDisk) -> Result<u16, StartError> {
        let AddDisk { lane, share, iopoll, force_async } = disk;
        let number = self.disks.free_disk().ok_or(StartError::Full)?;
        self.uring.open_port(number, &lane.files(), iopoll).map_err(StartError::Register)?;
        self.uring.ports[usize::from(number)].force_async = force_async;
        self.disks.insert(number, DiskOnThread::new(Storage::new(number, lane), share));
        Ok(number)
    }

    /// Takes ownership of a queue. The next turn finds waiting chains without a kick.
    fn start_queue(&mut self, number: u16, setup: QueueSetup, virtqueue: VirtQueue) -> QueueId {
        let disk = self.disks.disk(number);
        let copies = disk.storage.moves_data_itself();
        let id = QueueId { disk: number, queue: disk.free_queue() };
        let mut queue =
            RunningQueue::new(id, setup, virtqueue, copies, self.coalesce, Arc::clone(&disk.share));
        if queue.is_blocked() {
            queue.block();
        } else if queue.virtqueue.may_wait_for_call() {
            queue.call();
        }
        arm_kick(&mut self.uring, &mut queue);
        self.running += 1;
        self.active.reserve(self.running);
        self.active.wake(&mut queue);
        queue.forget_arrivals(); // chains may be older than the start
        disk.insert(id.queue, queue);
        id
    }

    fn stop_queue(&mut self, id: QueueId, at_stop: AtStop, reply: Sender<QueueState>) {
        let (queue, _) = self.disks.queue(id);
        queue.stopping = Some(reply);
        queue.kept_at_stop = at_stop;
        self.stopping.push(id);
        self.active.wake(queue); // chains to resubmit are taken before the queue stops
        if queue.kick_armed {
            self.uring.cancel(Event::Kick { queue: id, armed: true });
        }
    }

    /// Returns drained queues to the control plane.
    #[inline]
    pub(super) fn finish_stops(&mut self) {
        if !self.stopping.is_empty() {
            self.finish_drained();
        }
    }

    #[cold]
    fn finish_drained(&mut self) {
        let Worker { disks, active, stopping, running, clock, .. } = self;
        stopping.retain(|&id| {
            let (queue, _) = disks.queue(id);
            queue.end_kept(clock);
            if !queue.is_drained() {
                return true;
            }
            let mut stopped = disks.disk(id.disk).remove(id.queue).expect("it runs");
            active.remove(id);
            *running -= 1;
            let (state, reply) = (stopped.final_state(), stopped.stopping.take());
            // Releases guest memory before the control plane continues, which has its own descriptors of the eventfds.
            drop(stopped);
            if let Some(reply) = reply {
                let _ = reply.send(state);
            }
            false
        });
    }
}
