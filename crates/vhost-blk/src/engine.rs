// SPDX-License-Identifier: Apache-2.0
//! The glue to the layers below: a data plane and a vhost-user device for a disk.

use crate::failure::Failure;
use crate::options::ServeArgs;
use crate::values::{Cache, IoPoll};
use backend::Disk;
use data_plane::{DataPlane, PlaneOptions};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use vhost_user::{Device, DeviceOptions};

/// Serves front-ends, one at a time.
pub struct Server {
    device: Device,
}

impl Server {
    /// Starts the data plane's threads.
    ///
    /// # Errors
    /// When a thread's io_uring or a resource of the disk cannot be had.
    pub fn start(disk: Arc<dyn Disk>, args: &ServeArgs) -> Result<Server, Failure> {
        if args.iopoll == IoPoll::On && !disk.info().io_poll {
            return Err(Failure::run(
                "poll the storage device",
                format!("{} has no poll queues", disk.info().description),
                "use --iopoll auto",
            ));
        }
        let options = PlaneOptions {
            threads: args.thread_count(),
            cpus: args.cpus.clone().map(|list| list.0).unwrap_or_default(),
            poll_max: args.poll_max(),
            pin_memory: args.pin_memory.is_on(),
            iopoll: match args.iopoll {
                IoPoll::Auto => data_plane::IoPoll::Auto,
                IoPoll::On => data_plane::IoPoll::On,
                IoPoll::Off => data_plane::IoPoll::Off,
            },
        };
        let plane = DataPlane::new(Arc::clone(&disk), &options).map_err(|error| {
            Failure::run("start the data plane", error, "see what vhost-blk doctor says")
        })?;
        let options = DeviceOptions {
            num_queues: args.queues(),
            queue_size_max: args.queue_size,
            serial: args.serial.clone(),
            packed: args.packed.is_on(),
            writeback: args.cache == Cache::Writeback,
        };
        Ok(Server { device: Device::new(disk, plane, options) })
    }

    /// Serves one front-end until it is gone.
    ///
    /// # Errors
    /// Why the connection ended other than by the front-end leaving, in words.
    pub fn serve(&mut self, stream: UnixStream) -> Result<(), String> {
        self.device.serve(stream).map_err(|error| error.to_string())
    }
}
