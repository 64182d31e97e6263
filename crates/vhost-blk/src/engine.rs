// SPDX-License-Identifier: Apache-2.0
//! Starts the data planes and a vhost-user device for a disk.

use crate::failure::Failure;
use crate::options::ServeArgs;
use crate::values::{Cache, IoPoll, Plane};
use backend::Disk;
use data_plane::{KernelOptions, PlaneChoice, PlaneKind, PlaneSelector, UringOptions, UringPlane};
use std::os::fd::{BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use vhost_user::{Control, Device, DeviceOptions, DeviceState, Next};

/// Serves front-ends, one at a time.
pub struct Server {
    device: Device,
}

impl Server {
    /// Starts the threads of the io_uring data plane and selects the data plane.
    ///
    /// # Errors
    /// [`Failure`] if a thread gets no io_uring or no resource of the disk, or the kernel data
    /// plane is required and unavailable.
    pub fn start(disk: Arc<dyn Disk>, args: &ServeArgs) -> Result<Server, Failure> {
        if args.iopoll == IoPoll::On && !disk.info().io_poll {
            return Err(Failure::run(
                "poll the storage device",
                format!("{} has no poll queues", disk.info().description),
                "use --iopoll auto",
            ));
        }
        let options = UringOptions {
            threads: args.thread_count(),
            cpus: args.cpus.clone().map(|list| list.0).unwrap_or_default(),
            poll_max: args.poll_max(),
            portion: args.batch_size.0,
            pin_memory: args.pin_memory.is_on(),
            iopoll: match args.iopoll {
                IoPoll::Auto => data_plane::IoPoll::Auto,
                IoPoll::On => data_plane::IoPoll::On,
                IoPoll::Off => data_plane::IoPoll::Off,
            },
        };
        let plane = UringPlane::new(Arc::clone(&disk), &options).map_err(|error| {
            Failure::run("start the data plane", error, "see the output of vhost-blk doctor")
        })?;
        let kernel = KernelOptions {
            path: data_plane::DEVICE_PATH.into(),
            workers: args.worker_count(),
            cpus: options.cpus,
            poll_max: options.poll_max,
            pin_memory: options.pin_memory,
            iopoll: options.iopoll,
            seg_max: vhost_user::seg_max(args.queue_size),
            num_queues: args.queues(),
            queue_size_max: args.queue_size,
            limits: args.limits(),
        };
        let planes = PlaneSelector::new(Arc::clone(&disk), plane, kernel, choice(args.data_plane))
            .map_err(|error| Failure::told("use the kernel data plane", error))?;
        let mut device = Device::new(disk, planes, device_options(args));
        device
            .set_limits(args.limits())
            .map_err(|error| Failure::told("limit the rate of the disk", error))?;
        Ok(Server { device })
    }

    /// Continues the device of an earlier program, before anything else. Returns the connection of
    /// its front-end, for [`Server::serve`].
    ///
    /// # Errors
    /// [`Failure`] if the state cannot be taken over.
    pub fn take_over(
        &mut self,
        state: DeviceState,
        descriptors: Vec<OwnedFd>,
    ) -> Result<Option<UnixStream>, Failure> {
        self.device.take_over(state, descriptors).map_err(|error| {
            Failure::run("take over the disk of the old program", error, "start the daemon again")
        })
    }

    /// The data plane of new queues, and the reason for it.
    pub fn plane(&self) -> (PlaneKind, &str) {
        (self.device.planes().current(), self.device.planes().why())
    }

    /// A handle that sends commands to the device.
    ///
    /// # Errors
    /// The error of the system call, if no file descriptor is left.
    pub fn control(&mut self) -> std::io::Result<Control> {
        self.device.control()
    }

    /// A descriptor that is readable while [`Server::answer`] has commands to handle.
    pub fn control_fd(&self) -> Option<BorrowedFd<'_>> {
        self.device.control_fd()
    }

    /// Handles commands while no front-end is connected.
    pub fn answer(&mut self) {
        self.device.answer();
    }

    /// Serves one front-end until it disconnects or must make room for the `next` one.
    ///
    /// # Errors
    /// The reason as text, if the connection ended for another reason.
    pub fn serve(&mut self, stream: UnixStream, next: Option<Next<'_>>) -> Result<(), String> {
        self.device.serve(stream, next).map_err(|error| error.to_string())
    }

    /// The front-end that takes the place of a silent one.
    pub fn take_waiting(&mut self) -> Option<UnixStream> {
        self.device.take_waiting()
    }
}

/// The options of the device.
pub fn device_options(args: &ServeArgs) -> DeviceOptions {
    DeviceOptions {
        num_queues: args.queues(),
        queue_size_max: args.queue_size,
        serial: args.serial.clone(),
        packed: args.packed.is_on(),
        writeback: args.cache == Cache::Writeback,
    }
}

fn choice(plane: Plane) -> PlaneChoice {
    match plane {
        Plane::Auto => PlaneChoice::Auto,
        Plane::Kernel => PlaneChoice::Only(PlaneKind::Kernel),
        Plane::Uring => PlaneChoice::Only(PlaneKind::Uring),
    }
}
