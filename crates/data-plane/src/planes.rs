// SPDX-License-Identifier: Apache-2.0
//! Who runs the queues of a device: the daemon's own threads or the kernel. The control plane sees
//! one interface; all queues of a device are on one plane at a time.

use crate::kernel::{KernelError, KernelOptions, KernelPlane, counters};
use crate::region::QueueRegion;
use crate::{DataPlane, InflightRegion, QueueHandle, QueueStart, QueueStats, QueueStopped};
use backend::Disk;
use std::fmt;
use std::fs::File;
use std::io;
use std::sync::Arc;
use virtio_blk::DiskView;
use virtqueue::{GuestMemory, Layout, QueueError, QueueSetup, VirtQueue};

/// One of the two data planes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PlaneKind {
    /// The kernel module, by `/dev/vhost-blk`.
    Kernel,
    /// The daemon's own io_uring threads.
    Uring,
}

impl fmt::Display for PlaneKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            PlaneKind::Kernel => "kernel",
            PlaneKind::Uring => "uring",
        })
    }
}

/// Which plane is wanted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PlaneChoice {
    /// The kernel where it can, the daemon's own otherwise, also later.
    Auto,
    /// Always this one.
    Only(PlaneKind),
}

/// A complete queue, for whichever plane.
#[derive(Debug)]
pub struct QueueSpec {
    /// The device's number of the queue.
    pub index: u16,
    /// The ring, and where to go on in it.
    pub setup: QueueSetup,
    /// The features that the driver took.
    pub features: u64,
    /// What the driver may do with the disk.
    pub disk: DiskView,
    /// Kick eventfd; without one the ring is polled.
    pub kick: Option<File>,
    /// Call eventfd; without one the driver polls.
    pub call: Option<File>,
    /// Signalled at a ring fault.
    pub err: Option<File>,
    /// Where to keep track of chains in flight.
    pub region: Option<Arc<InflightRegion>>,
}

impl QueueSpec {
    /// The queue for the daemon's own plane.
    fn into_start(self, ring: VirtQueue) -> QueueStart {
        let QueueSpec { index, setup, disk, kick, call, err, region, .. } = self;
        QueueStart { index, ring, layout: setup.layout, disk, kick, call, err, region }
    }

    fn try_clone(&self) -> io::Result<Self> {
        let copy = |file: &Option<File>| file.as_ref().map(File::try_clone).transpose();
        Ok(QueueSpec {
            index: self.index,
            setup: self.setup.clone(),
            features: self.features,
            disk: self.disk.clone(),
            kick: copy(&self.kick)?,
            call: copy(&self.call)?,
            err: copy(&self.err)?,
            region: self.region.clone(),
        })
    }
}

/// A queue that was started.
#[derive(Debug)]
#[must_use = "a started queue must be stopped"]
pub enum StartedQueue {
    /// The daemon's own threads run it.
    Uring(QueueHandle),
    /// The kernel runs it; its number.
    Kernel(u16),
    /// A ring fault stopped it before it reached the kernel.
    Faulted(QueueStopped),
}

impl StartedQueue {
    /// The plane that it was started on.
    pub fn plane(&self) -> PlaneKind {
        match self {
            StartedQueue::Uring(_) => PlaneKind::Uring,
            StartedQueue::Kernel(_) | StartedQueue::Faulted(_) => PlaneKind::Kernel,
        }
    }
}

/// Why a queue did not start.
#[derive(Debug, thiserror::Error)]
pub enum QueueStartError {
    /// What the front-end set up is wrong, on either plane.
    #[error("{0}")]
    Ring(#[from] QueueError),
    /// No descriptor is left.
    #[error("no descriptor is left: {0}")]
    Descriptor(#[from] io::Error),
    /// The kernel does not take it; the other plane would.
    #[error("the kernel data plane cannot run it: {0}")]
    Kernel(#[from] KernelError),
}

/// See the module's head.
pub struct Planes {
    uring: DataPlane,
    kernel: Option<KernelPlane>,
    choice: PlaneChoice,
    packed: bool,
    /// Where the queues of the next front-end start.
    preferred: (PlaneKind, String),
    current: (PlaneKind, String),
    memory: Option<Arc<GuestMemory>>,
}

/// Without the kernel.
impl From<DataPlane> for Planes {
    fn from(uring: DataPlane) -> Self {
        let preferred = (PlaneKind::Uring, "there is no other".to_owned());
        Planes {
            uring,
            kernel: None,
            choice: PlaneChoice::Only(PlaneKind::Uring),
            packed: true,
            current: preferred.clone(),
            preferred,
            memory: None,
        }
    }
}

impl Planes {
    /// Both planes of a disk; `uring` was started for it.
    ///
    /// # Errors
    /// When the choice is the kernel alone, and it cannot run this disk.
    pub fn new(
        disk: Arc<dyn Disk>,
        uring: DataPlane,
        options: KernelOptions,
        choice: PlaneChoice,
    ) -> Result<Self, KernelError> {
        let node = options.path.display().to_string();
        let kernel = KernelPlane::new(disk, options);
        let preferred = match choice {
            PlaneChoice::Auto => match kernel.probe() {
                Ok(()) => (PlaneKind::Kernel, format!("{node} is there and suits the disk")),
                Err(why) => (PlaneKind::Uring, why.to_string()),
            },
            PlaneChoice::Only(kind) => {
                if kind == PlaneKind::Kernel {
                    kernel.probe()?;
                }
                (kind, "--data-plane says so".to_owned())
            }
        };
        Ok(Planes {
            uring,
            kernel: Some(kernel),
            choice,
            // What the guest sees must not depend on the plane it starts on.
            packed: preferred.0 == PlaneKind::Uring,
            current: preferred.clone(),
            preferred,
            memory: None,
        })
    }

    /// The plane that queues start on.
    pub fn current(&self) -> PlaneKind {
        self.current.0
    }

    /// Why it is this one.
    pub fn why(&self) -> &str {
        &self.current.1
    }

    /// Whether packed virtqueues may be offered: the kernel has none.
    pub fn packed(&self) -> bool {
        self.packed
    }

    /// Whether packed virtqueues can be served, if only after the kernel has refused them.
    pub fn can_serve_packed(&self) -> bool {
        self.current() == PlaneKind::Uring || self.may_fall_back()
    }

    /// Whether a queue that the kernel refuses may start on the other plane.
    pub fn may_fall_back(&self) -> bool {
        self.current() == PlaneKind::Kernel && self.choice != PlaneChoice::Only(PlaneKind::Kernel)
    }

    /// Whether queues could start on `kind` now.
    ///
    /// # Errors
    /// When it is the kernel, and it cannot run this disk.
    pub fn check(&self, kind: PlaneKind) -> Result<(), KernelError> {
        match (kind, &self.kernel) {
            (PlaneKind::Uring, _) => Ok(()),
            (PlaneKind::Kernel, Some(kernel)) => kernel.probe(),
            (PlaneKind::Kernel, None) => {
                Err(KernelError::Unsuited("this program was started without it".into()))
            }
        }
    }

    /// Lets queues start on `kind`, which was checked, from now on, `because`. No queue may be
    /// running.
    pub fn move_to(&mut self, kind: PlaneKind, because: &str) {
        if self.current.0 != kind {
            // The kernel pins memory for itself.
            let own = (kind == PlaneKind::Uring).then(|| self.memory.clone()).flatten();
            self.uring.set_memory(own);
        }
        self.current = (kind, because.to_owned());
    }

    /// Makes the current plane the one where the queues of the next front-end start.
    pub fn prefer_current(&mut self) {
        self.preferred.clone_from(&self.current);
    }

    /// A front-end is gone: back to the plane that is preferred. No queue may be running.
    pub fn start_over(&mut self) {
        let (kind, because) = self.preferred.clone();
        self.move_to(kind, &because);
    }

    /// Tells of new guest memory (`None`: none any more). No queue may be running.
    pub fn set_memory(&mut self, memory: Option<Arc<GuestMemory>>) {
        self.memory = memory;
        if self.current() == PlaneKind::Uring {
            self.uring.set_memory(self.memory.clone());
        }
    }

    /// Starts a queue on the current plane.
    ///
    /// # Errors
    /// [`QueueStartError`]; the queue is as it was then.
    pub fn start_queue(&mut self, mut spec: QueueSpec) -> Result<StartedQueue, QueueStartError> {
        let ring = VirtQueue::start(&spec.setup)?;
        if self.current() == PlaneKind::Uring {
            return Ok(StartedQueue::Uring(self.uring.start_queue(spec.into_start(ring))));
        }
        if spec.setup.layout == Layout::Packed {
            let why = "the guest uses packed virtqueues; set --packed off and restart its device";
            return Err(KernelError::Unsuited(why.into()).into());
        }
        if let Some(stopped) = self.take_up(&mut spec, ring)? {
            return Ok(StartedQueue::Faulted(stopped));
        }
        self.kernel.as_mut().expect("selected only where there is one").start_queue(&spec)?;
        Ok(StartedQueue::Kernel(spec.index))
    }

    /// Finishes what an earlier daemon left in flight, on the daemon's own plane, and moves
    /// `spec` behind it: the kernel only keeps the in-flight region, it does not read it. Returns
    /// the state of the queue if the guest broke its ring meanwhile.
    fn take_up(
        &self,
        spec: &mut QueueSpec,
        mut ring: VirtQueue,
    ) -> Result<Option<QueueStopped>, QueueStartError> {
        let Some(region) = &spec.region else { return Ok(None) };
        let opened = QueueRegion::open(region, Layout::Split, spec.index, &mut ring);
        let Some((_, left)) = opened else {
            tracing::warn!(
                queue = spec.index,
                "the in-flight region has no room for this queue: it is not kept"
            );
            spec.region = None;
            return Ok(None);
        };
        spec.setup.base = ring.base();
        if left.is_empty() {
            return Ok(None);
        }
        let ring = VirtQueue::start(&spec.setup)?;
        let handle = self.uring.start_queue(spec.try_clone()?.into_start(ring));
        let stopped = self.uring.stop_queue(handle);
        spec.setup.base = stopped.base;
        Ok(stopped.faulted.then_some(stopped))
    }

    /// Takes a queue back: nothing more is taken, what is in flight completes, and the state is
    /// returned.
    pub fn stop_queue(&mut self, queue: StartedQueue) -> QueueStopped {
        match (queue, &mut self.kernel) {
            (StartedQueue::Uring(handle), _) => self.uring.stop_queue(handle),
            (StartedQueue::Faulted(stopped), _) => stopped,
            (StartedQueue::Kernel(index), Some(kernel)) => kernel.stop_queue(index),
            (StartedQueue::Kernel(_), None) => unreachable!("started by the kernel"),
        }
    }

    /// Replaces the call eventfd of a running queue, without waiting for its I/O.
    ///
    /// # Errors
    /// When the kernel does not take it: the queue still calls the old one.
    pub fn set_call(
        &mut self,
        queue: &StartedQueue,
        call: Option<File>,
    ) -> Result<(), KernelError> {
        match (queue, &mut self.kernel) {
            (StartedQueue::Uring(handle), _) => self.uring.set_call(handle, call),
            (StartedQueue::Kernel(index), Some(kernel)) => kernel.set_call(*index, call)?,
            (StartedQueue::Kernel(_) | StartedQueue::Faulted(_), _) => {}
        }
        Ok(())
    }

    /// The cache mode, which [`DiskView`] shares, has changed: the kernel is told; the daemon's
    /// own plane looks at it with every request.
    ///
    /// # Errors
    /// When the kernel does not take it: its queues go on in the old mode.
    pub fn cache_mode_changed(&mut self) -> Result<(), KernelError> {
        self.kernel.as_mut().map_or(Ok(()), KernelPlane::cache_mode_changed)
    }

    /// What a queue did since it was started, by name; `kernel` is what
    /// [`Planes::kernel_counters`] said.
    pub fn queue_counts(
        &self,
        queue: &StartedQueue,
        kernel: &[(String, String)],
    ) -> Vec<(String, u64)> {
        match queue {
            StartedQueue::Uring(handle) => {
                let QueueStats { chains, refused, kicks, calls } = self.uring.queue_stats(handle);
                let counts =
                    [("chains", chains), ("refused", refused), ("kicks", kicks), ("calls", calls)];
                counts.map(|(name, count)| (name.to_owned(), count)).to_vec()
            }
            StartedQueue::Kernel(index) => counters::of_queue(kernel, *index),
            StartedQueue::Faulted(_) => Vec::new(),
        }
    }

    /// What the kernel tells of itself, line by line, while it runs queues.
    pub fn kernel_counters(&self) -> Vec<(String, String)> {
        self.kernel.as_ref().map(KernelPlane::counters).unwrap_or_default()
    }
}
