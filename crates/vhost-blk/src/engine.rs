// SPDX-License-Identifier: Apache-2.0
//! The glue to the layers below: the data planes and a vhost-user device for a disk.

use crate::failure::Failure;
use crate::options::ServeArgs;
use crate::values::{Cache, IoPoll, Plane};
use backend::Disk;
use data_plane::{DataPlane, KernelOptions, PlaneChoice, PlaneKind, PlaneOptions, Planes};
use std::os::fd::BorrowedFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use vhost_user::{Control, Device, DeviceOptions};

/// Serves front-ends, one at a time.
pub struct Server {
    device: Device,
}

impl Server {
    /// Starts the data plane's threads, and chooses the plane.
    ///
    /// # Errors
    /// When a thread's io_uring or a resource of the disk cannot be had, or the kernel's plane is
    /// wanted and cannot be had.
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
        let kernel = KernelOptions {
            path: data_plane::DEVICE_PATH.into(),
            workers: args.worker_count(),
            cpus: options.cpus,
            poll_max: options.poll_max,
            pin_memory: options.pin_memory,
            iopoll: options.iopoll,
            seg_max: vhost_user::seg_max(args.queue_size),
            queue_size_max: args.queue_size,
        };
        let planes = Planes::new(Arc::clone(&disk), plane, kernel, choice(args.data_plane))
            .map_err(|error| Failure::told("use the kernel data plane", error))?;
        let options = DeviceOptions {
            num_queues: args.queues(),
            queue_size_max: args.queue_size,
            serial: args.serial.clone(),
            packed: args.packed.is_on(),
            writeback: args.cache == Cache::Writeback,
        };
        Ok(Server { device: Device::new(disk, planes, options) })
    }

    /// The plane that queues start on, and why.
    pub fn plane(&self) -> (PlaneKind, &str) {
        (self.device.planes().current(), self.device.planes().why())
    }

    /// Something to ask the device things with.
    ///
    /// # Errors
    /// When no descriptor is left.
    pub fn control(&mut self) -> std::io::Result<Control> {
        self.device.control()
    }

    /// Readable when [`Server::answer`] has something to do, if it ever has.
    pub fn control_fd(&self) -> Option<BorrowedFd<'_>> {
        self.device.control_fd()
    }

    /// Answers what was asked while no front-end is connected.
    pub fn answer(&mut self) {
        self.device.answer();
    }

    /// Serves one front-end until it is gone.
    ///
    /// # Errors
    /// Why the connection ended other than by the front-end leaving, in words.
    pub fn serve(&mut self, stream: UnixStream) -> Result<(), String> {
        self.device.serve(stream).map_err(|error| error.to_string())
    }
}

fn choice(plane: Plane) -> PlaneChoice {
    match plane {
        Plane::Auto => PlaneChoice::Auto,
        Plane::Kernel => PlaneChoice::Only(PlaneKind::Kernel),
        Plane::Uring => PlaneChoice::Only(PlaneKind::Uring),
    }
}
