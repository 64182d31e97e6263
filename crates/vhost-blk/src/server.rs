// SPDX-License-Identifier: Apache-2.0
//! Starts the data planes and a vhost-user device for a disk.

use crate::failure::Failure;
use crate::options::{DiskArgs, ProcessArgs};
use crate::values::{Cache, Coalesce, IoPoll, Plane};
use backend::{Disk, ImageLock};
use data_plane::{
    GroupStart, Health, HealthEvent, KernelOptions, Limits, PlaneChoice, PlaneKind, PlaneSelector,
    StartError, UringOptions, UringPool,
};
use std::os::fd::{BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use vhost_user::{Control, Device, DeviceOptions, DeviceState, Next, Notice, Waiting};

/// Serves front-ends, one at a time.
pub struct Server {
    device: Device,
    health: Arc<Health>,
}

impl Server {
    /// Adds the disk to the threads of the io_uring data plane and selects the data plane. `lock` is
    /// the lock of the image, and whether it is held. A disk of a group changes no limits yet: another step of its
    /// start may fail ([`Server::start_in_group`]).
    ///
    /// # Errors
    /// [`Failure`] if a thread gets no io_uring or no resource of the disk, or the kernel data
    /// plane is required and unavailable.
    pub fn start(
        disk: Arc<dyn Disk>,
        lock: Option<(ImageLock, bool)>,
        args: &DiskArgs,
        process: &ProcessArgs,
        pool: &UringPool,
    ) -> Result<Server, Failure> {
        if process.iopoll == IoPoll::On && !disk.info().io_poll {
            return Err(Failure::run(
                "poll the storage device",
                format!("{} has no poll queues", disk.info().description),
                "use --iopoll auto",
            ));
        }
        let uring = uring_options(process, args.queues());
        let kernel = kernel_options(&uring, args, process);
        let mut plane = pool.add_disk(Arc::clone(&disk)).map_err(start_failed)?;
        match &args.limit_group {
            Some(group) => plane.join_limit_group(group),
            None => plane.set_limits(&args.limits()),
        }
        let planes = PlaneSelector::new(Arc::clone(&disk), plane, kernel, choice(args.data_plane))
            .map_err(|error| Failure::told("use the kernel data plane", error))?;
        let mut device = Device::new(disk, planes, device_options(args))
            .map_err(|error| Failure::told("open an eventfd", error))?;
        let health = Arc::new(health(args));
        device.set_health(Arc::clone(&health));
        if let Some((lock, held)) = lock {
            device.follow_lock(lock, held);
        }
        Ok(Server { device, health })
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

    /// Gives the group of the disk the limits of its options.
    ///
    /// # Errors
    /// [`Failure`] if they are refused.
    pub fn start_in_group(&mut self, start: &GroupStart) -> Result<(), Failure> {
        self.device
            .start_in_group(start)
            .map_err(|error| Failure::told("set the limits of the group", error))
    }

    /// Calls `observer` after each change of the disk.
    pub fn observe(&mut self, observer: impl Fn(Notice) + Send + 'static) {
        self.device.observe(observer);
    }

    /// Calls `observer` after each change of the health of the disk, from any thread. It must not
    /// wait.
    pub fn observe_health(&self, observer: impl Fn(&HealthEvent) + Send + Sync + 'static) {
        self.health.set_hook(Box::new(observer));
    }

    /// The health of the disk.
    pub fn health(&self) -> Arc<Health> {
        Arc::clone(&self.health)
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

    /// Forgets a front-end of the earlier program that cannot be served on.
    pub fn forget_inherited(&mut self) {
        self.device.forget_inherited();
    }

    /// The front-ends that wait, for another thread that ends the disk.
    pub fn waiting(&self) -> Waiting {
        self.device.waiting()
    }

    /// The first of the front-ends that have connected meanwhile.
    pub fn take_waiting(&mut self) -> Option<UnixStream> {
        self.device.take_waiting()
    }
}

/// Starts the threads of the io_uring data plane, for disks with so many queues.
///
/// # Errors
/// [`Failure`] if a thread gets no io_uring.
pub fn start_pool(process: &ProcessArgs, queues: u16) -> Result<UringPool, Failure> {
    UringPool::new(&uring_options(process, queues)).map_err(start_failed)
}

fn start_failed(error: StartError) -> Failure {
    Failure::run("start the data plane", error, "see the output of vhost-blk doctor")
}

fn health(args: &DiskArgs) -> Health {
    let rules = args.error_rules();
    Health::new(rules.policies, rules.io_timeout)
}

fn uring_options(process: &ProcessArgs, queues: u16) -> UringOptions {
    UringOptions {
        threads: process.thread_count(queues),
        cpus: process.cpus.clone().map(|list| list.0).unwrap_or_default(),
        poll_max: process.poll_max(),
        batch_size: process.batch_size.0,
        coalesce: match process.coalesce {
            Coalesce::Auto => data_plane::Coalesce::Auto,
            Coalesce::On => data_plane::Coalesce::On,
            Coalesce::Off => data_plane::Coalesce::Off,
        },
        pin_memory: process.pin_memory.is_on(),
        iopoll: match process.iopoll {
            IoPoll::Auto => data_plane::IoPoll::Auto,
            IoPoll::On => data_plane::IoPoll::On,
            IoPoll::Off => data_plane::IoPoll::Off,
        },
    }
}

fn kernel_options(uring: &UringOptions, args: &DiskArgs, process: &ProcessArgs) -> KernelOptions {
    KernelOptions {
        path: data_plane::DEVICE_PATH.into(),
        workers: process.worker_count(args.queues()),
        cpus: uring.cpus.clone(),
        poll_max: uring.poll_max,
        batch_size: uring.batch_size,
        coalesce: uring.coalesce,
        pin_memory: uring.pin_memory,
        iopoll: uring.iopoll,
        seg_max: vhost_user::seg_max(args.queue_size),
        num_queues: args.queues(),
        queue_size_max: args.queue_size,
        limits: if args.limit_group.is_some() { Limits::NONE } else { args.limits() },
        watches_time: args.io_timeout.is_some(),
        errors: args.error_rules().policies,
    }
}

/// The options of the device.
pub fn device_options(args: &DiskArgs) -> DeviceOptions {
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
