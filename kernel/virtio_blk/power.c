// SPDX-License-Identifier: GPL-2.0-only
/*
 * The device is reset under a living disk: suspend and resume, and the reset of the PCI function.
 */
#include "virtio_blk.h"

/* Lets go on what virtblk_suspend() stopped. A disk without virtqueues is dead: all I/O fails. */
static void let_go(struct virtblk *blk)
{
	WRITE_ONCE(blk->suspended, false);
	if (blk->use_bio) {
		virtblk_bio_start(blk);
		/* What was kept is in flight now; the watch stops by itself if nothing is. */
		virtblk_start_watch(blk);
	} else {
		blk_mq_unquiesce_queue(blk->disk->queue);
	}
}

/**
 * virtblk_fail_kept() - fails what was kept for a resume that did not come
 * @blk: if it is suspended, the virtio core could not restore it, and it has no virtqueues
 */
void virtblk_fail_kept(struct virtblk *blk)
{
	if (!blk->suspended)
		return;
	WRITE_ONCE(blk->dead, true);
	let_go(blk);
}

/**
 * virtblk_suspend() - takes everything off the device before it is reset
 * @vdev: works still
 *
 * The queue is frozen until nothing is in flight, and then made to keep what comes. It must not
 * stay frozen: who waits to enter a frozen queue would block the suspend. Dispatchers that run are
 * waited for, because they use the virtqueues that go (CVE-2024-57946 and what came after it).
 *
 * Return: 0.
 */
int virtblk_suspend(struct virtio_device *vdev)
{
	struct virtblk *blk = vdev->priv;
	struct request_queue *queue = blk->disk->queue;
	unsigned int memflags;

	virtblk_fail_kept(blk);
	mutex_lock(&blk->vdev_mutex);
	WRITE_ONCE(blk->suspended, true);
	mutex_unlock(&blk->vdev_mutex);
	/* It may wait for requests: it has to be through before they are kept. */
	virtblk_cancel_config(blk);
	virtblk_started(blk);

	memflags = virtblk_freeze_queue(queue);
	if (blk->use_bio)
		virtblk_bio_stop(blk);
	else
		blk_mq_quiesce_queue(queue);
	virtblk_unfreeze_queue(queue, memflags);
	/* Their requests may be done, and they be about to kick. */
	synchronize_rcu();

	mutex_lock(&blk->vdev_mutex);
	virtblk_reset(vdev);
	blk->starting = true;
	mutex_unlock(&blk->vdev_mutex);
	virtblk_cancel_config(blk);
	cancel_delayed_work_sync(&blk->watch);
	WRITE_ONCE(blk->watching, false);
	cancel_work_sync(&blk->abort_work);
	virtblk_del_queues(blk, vdev);
	return 0;
}

/**
 * virtblk_resume() - gives the device its queues back, and what was kept meanwhile
 * @vdev: was reset; its features are settled again
 *
 * Return: a negative errno; all I/O fails then, instead of waiting.
 */
int virtblk_resume(struct virtio_device *vdev)
{
	struct virtblk *blk = vdev->priv;
	int err;

	err = virtblk_find_queues(blk);
	/* Also a device that was given up has another chance after a reset. */
	WRITE_ONCE(blk->dead, err);
	if (err) {
		dev_err(&vdev->dev, "[%s] the device cannot be resumed: error %d\n",
			blk->disk->disk_name, err);
	} else {
		virtio_device_ready(vdev);
		/* What is let go was made for the mode that the cache had. */
		virtblk_restore_cache(blk);
		/* It may also have another size by now, or have refused that mode. */
		virtblk_await_start(blk);
	}
	let_go(blk);
	return err;
}
