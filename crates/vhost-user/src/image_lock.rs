// SPDX-License-Identifier: Apache-2.0
//! The lock of the image follows the side of a migration that runs the guest.
//!
//! | The device | Lock | Changes |
//! |---|---|---|
//! | waits for a guest (`--incoming on`) | released | taken before the first queue starts |
//! | serves | held | given up when the last queue is stopped by GET_VRING_BASE while the dirty log is on |
//! | has handed over | released | taken again before a queue starts: the migration failed |
//!
//! Without a lock (`--lock off`) the states are the same: a backup notices that the guest was elsewhere.
//!
//! While the lock is released no queue runs, so that nothing is written. A queue whose lock another
//! program holds does not start. A front-end can make the lock change in a loop: the log has one line
//! of a kind in a second.

use crate::error::refusal;
use crate::session::Session;
use backend::ImageLock;
use std::io;
use std::time::Duration;
use virtio_spec::features::VHOST_F_LOG_ALL;

/// Maximum wait of the start of a queue for the lock. The other side of a migration gives it up
/// before the guest moves; a killed daemon holds it until the kernel has completed its I/O.
const LOCK_WAIT_MAX: Duration = Duration::from_secs(5);

/// The lock of a device's image.
#[derive(Debug)]
pub(crate) struct FollowedLock {
    pub(crate) lock: ImageLock,
    pub(crate) held: bool,
}

impl Session<'_> {
    /// Takes the lock of the image, unless the device holds it. A file may have grown while another
    /// program held the lock: the disk adopts its present size.
    pub(crate) fn acquire_image_lock(&mut self) -> io::Result<()> {
        let Some(followed) = self.device.image_lock.as_mut().filter(|followed| !followed.held)
        else {
            return Ok(());
        };
        followed.lock.take(LOCK_WAIT_MAX).map_err(refusal)?;
        followed.held = true;
        if !followed.lock.is_off() {
            data_plane::log_once_per_second!(info, "took the lock of the image");
        }
        if let Err(error) = self.resize(None) {
            data_plane::log_once_per_second!(warn, %error, "the present size of the image is not adopted");
        }
        Ok(())
    }

    /// Returns whether another program may change the image.
    pub(crate) fn is_image_released(&self) -> bool {
        self.device.image_lock.as_ref().is_some_and(|followed| !followed.held)
    }

    /// Gives the lock up if the guest is about to leave: its dirty pages are logged, and its last
    /// queue is stopped.
    pub(crate) fn release_image_lock(&mut self) {
        let leaves = self.acked(VHOST_F_LOG_ALL) && self.log.is_some();
        let runs = self.queues.iter().any(|queue| queue.running.is_some());
        let Some(followed) = self.device.image_lock.as_mut().filter(|followed| followed.held)
        else {
            return;
        };
        if !leaves || runs {
            return;
        }
        match followed.lock.give_up() {
            Ok(()) if followed.lock.is_off() => followed.held = false,
            Ok(()) => {
                followed.held = false;
                data_plane::log_once_per_second!(
                    info,
                    "gave the lock of the image up: the guest may go on elsewhere"
                );
            }
            Err(error) if followed.lock.is_off() => {
                followed.held = false;
                data_plane::log_once_per_second!(
                    error,
                    %error,
                    "a completed write may be lost, and without a lock the guest may go on \
                     elsewhere: check its data"
                );
            }
            Err(error) => {
                data_plane::log_once_per_second!(
                    error,
                    %error,
                    "keeps the lock of the image, so that the guest cannot go on elsewhere: a \
                     completed write may be lost; let the guest go on here and check its data"
                );
            }
        }
    }
}
