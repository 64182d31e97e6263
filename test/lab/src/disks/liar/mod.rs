// SPDX-License-Identifier: Apache-2.0
//! A vhost-user block device that lies, as a test of the driver.
//!
//! It has only those parts of a device that a driver needs to come up: reads return random bytes,
//! and writes are dropped. All other behaviour is the [`Lie`].
//!
//! * [`wire`]: messages of the front-end.
//! * [`memory`]: guest memory.
//! * [`ring`]: queues, each on a thread.
//! * [`split`], [`packed`]: the two kinds of rings.
//! * [`config`]: the configuration space.

mod config;
mod memory;
mod packed;
mod ring;
mod split;
mod wire;

use std::fs::File;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result};
use virtio_spec::blk::{
    F_BLK_SIZE, F_CONFIG_WCE, F_DISCARD, F_FLUSH, F_MQ, F_SECURE_ERASE, F_SEG_MAX, F_SIZE_MAX,
    F_TOPOLOGY, F_WRITE_ZEROES,
};
use virtio_spec::features::{
    F_EVENT_IDX, F_INDIRECT_DESC, F_RING_PACKED, F_VERSION_1, VHOST_USER_F_PROTOCOL_FEATURES, bit,
};

use config::random_config;
use kit::disks::Lie;
use kit::rng::Rng;
use memory::Memory;
use ring::{Manner, Queue, Shared};
use wire::{Channel, Code, Message};

/// Number of queues.
const QUEUES: u64 = 8;

/// Protocol features: several queues, acknowledgements, a channel of its own, configuration space.
const PROTOCOL_FEATURES: u64 = 1 << 0 | 1 << 3 | 1 << 5 | 1 << 9;

/// Interval between two changes of a jumping capacity.
const JUMP_EVERY: Duration = Duration::from_millis(100);

/// Serves one front-end until it disconnects.
pub(super) fn serve(stream: &UnixStream, lie: Lie, after: u32, seed: u64) -> Result<()> {
    let channel = Channel::new(stream);
    let mut device = Liar {
        lie,
        after,
        shared: Arc::new(Shared::new(after)),
        rng: Rng::new(seed),
        packed: false,
        memory: None,
        queues: (0..QUEUES).map(|_| Queue::default()).collect(),
        backend: None,
    };
    loop {
        if lie == Lie::CapacityJumps && !channel.wait(JUMP_EVERY)? {
            device.tell_config_changed()?;
            continue;
        }
        let Some(message) = channel.receive()? else { return Ok(()) };
        device.handle(&channel, message)?;
    }
}

struct Liar {
    lie: Lie,
    /// Number of requests that are answered correctly before the lie begins.
    after: u32,
    shared: Arc<Shared>,
    rng: Rng,
    /// True for packed rings.
    packed: bool,
    memory: Option<Arc<Memory>>,
    queues: Vec<Queue>,
    /// The channel for the device's own messages.
    backend: Option<UnixStream>,
}

impl Liar {
    fn handle(&mut self, channel: &Channel<'_>, mut message: Message) -> Result<()> {
        let reply = match message.code {
            Code::GetFeatures => Some(features().to_le_bytes().to_vec()),
            Code::GetProtocolFeatures => Some(PROTOCOL_FEATURES.to_le_bytes().to_vec()),
            Code::GetQueueNum => Some(QUEUES.to_le_bytes().to_vec()),
            Code::GetConfig => Some(self.config(&message.payload)),
            Code::GetVringBase => Some(self.stop_queue(&message)?),
            _ => None,
        };
        if let Some(payload) = reply {
            return channel.reply(&message, &payload);
        }
        let done = self.set(&mut message);
        if let Err(why) = &done {
            eprintln!("helper: liar: {:?}: {why:#}", message.code);
        }
        if message.wants_ack {
            channel.reply(&message, &u64::from(done.is_err()).to_le_bytes())?;
        }
        Ok(())
    }

    fn set(&mut self, message: &mut Message) -> Result<()> {
        match message.code {
            Code::SetFeatures => self.packed = message.quad(0)? & bit(F_RING_PACKED) != 0,
            Code::SetMemTable => {
                self.memory = Some(Arc::new(Memory::map(&message.payload, &mut message.fds)?));
            }
            Code::SetVringNum => {
                let (index, size) = message.state()?;
                self.queue(index)?.size = u16::try_from(size)?;
            }
            Code::SetVringBase => {
                let (index, base) = message.state()?;
                self.queue(index)?.base = base;
            }
            Code::SetVringAddr => {
                let index = message.word(0)?;
                let addresses = [message.quad(8)?, message.quad(16)?, message.quad(24)?];
                self.queue(index)?.set_addresses(addresses);
            }
            Code::SetVringKick => {
                let (index, file) = message.vring_file()?;
                self.start_queue(index, file)?;
            }
            Code::SetVringCall => {
                let (index, file) = message.vring_file()?;
                self.queue(index)?.set_call(file);
            }
            Code::SetBackendReqFd => {
                self.backend = message.fds.pop().map(UnixStream::from);
            }
            _ => {}
        }
        Ok(())
    }

    fn queue(&mut self, index: u32) -> Result<&mut Queue> {
        self.queues.get_mut(index as usize).with_context(|| format!("no queue {index}"))
    }

    fn start_queue(&mut self, index: u32, kick: Option<File>) -> Result<()> {
        let memory = self.memory.clone();
        if self.lie == Lie::SilentUntilReset {
            self.shared.start_over(self.after);
        }
        let shared = Arc::clone(&self.shared);
        let manner = Manner { lie: self.lie, shared, rng: Rng::new(self.rng.number()) };
        let packed = self.packed;
        let queue = self.queue(index)?;
        queue.stop();
        match (memory, kick) {
            (Some(memory), Some(kick)) => queue.start(memory, kick, packed, manner),
            _ => Ok(()),
        }
    }

    fn stop_queue(&mut self, message: &Message) -> Result<Vec<u8>> {
        let index = message.word(0)?;
        let queue = self.queue(index)?;
        queue.stop();
        Ok([index.to_le_bytes(), queue.base.to_le_bytes()].concat())
    }

    /// The payload of an answer to GET_CONFIG: the request's fields and the bytes.
    fn config(&mut self, asked: &[u8]) -> Vec<u8> {
        let config = random_config(self.lie, &mut self.rng);
        let word = |at: usize| {
            asked.get(at..at + 4).map_or(0, |bytes| {
                u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]) as usize
            })
        };
        let (offset, length) = (word(0), word(4).min(4096));
        let mut payload = asked.get(..12).unwrap_or_default().to_vec();
        let mut bytes = config.get(offset.min(config.len())..).unwrap_or_default().to_vec();
        bytes.resize(length, 0);
        payload.extend(bytes);
        payload
    }

    fn tell_config_changed(&mut self) -> Result<()> {
        if let Some(backend) = &self.backend {
            Channel::new(backend).tell_config_changed()?;
        }
        Ok(())
    }
}

fn features() -> u64 {
    [
        F_SIZE_MAX,
        F_SEG_MAX,
        F_BLK_SIZE,
        F_FLUSH,
        F_TOPOLOGY,
        F_CONFIG_WCE,
        F_MQ,
        F_DISCARD,
        F_WRITE_ZEROES,
        F_SECURE_ERASE,
        F_INDIRECT_DESC,
        F_EVENT_IDX,
        F_RING_PACKED,
        VHOST_USER_F_PROTOCOL_FEATURES,
        F_VERSION_1,
    ]
    .into_iter()
    .map(bit)
    .fold(0, |all, one| all | one)
}
