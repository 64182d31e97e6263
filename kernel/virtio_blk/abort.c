// SPDX-License-Identifier: GPL-2.0-only
/*
 * A device is given up: it vanished, it broke its rings, or it does not answer although its driver
 * has to go. All requests end with an error, but not before the device can no longer write to
 * their memory.
 */
#include <linux/pci.h>

#include "virtio_blk.h"

/**
 * virtblk_pulled_out() - whether the device is gone from its bus
 * @vdev: perhaps gone
 */
bool virtblk_pulled_out(struct virtio_device *vdev)
{
	struct device *parent = vdev->dev.parent;

	return parent && dev_is_pci(parent) && !pci_device_is_present(to_pci_dev(parent));
}

/**
 * virtblk_reset() - after this the device touches no memory any more
 * @vdev: perhaps gone
 *
 * The virtio core waits until the device says that it is reset. A PCI function that was pulled out
 * reads as all ones and never does; nor does it write anywhere.
 */
void virtblk_reset(struct virtio_device *vdev)
{
	if (virtblk_pulled_out(vdev))
		virtio_break_device(vdev);
	else
		virtio_reset_device(vdev);
}

/**
 * virtblk_take_back() - takes a request back from a device that was reset
 * @q: its lock is held
 *
 * The core is not asked for more than there are: before it says that there is none, it makes sure
 * (BUG_ON) that all descriptors are free, and where chains ended it has read in descriptors that
 * the device may have changed.
 *
 * Return: the next one, or NULL.
 */
struct virtblk_request *virtblk_take_back(struct virtblk_queue *q)
{
	if (!q->vq || !q->in_flight)
		return NULL;
	q->in_flight--;
	return virtqueue_detach_unused_buf(q->vq);
}

static void fail_requests(struct virtblk_queue *q)
{
	struct request *rq, *requests = NULL;
	struct virtblk_request *request;

	spin_lock_irq(&q->lock);
	while ((request = virtblk_take_back(q))) {
		request->status = VIRTBLK_S_UNWRITTEN;
		rq = blk_mq_rq_from_pdu(request);
		rq->rq_next = requests;
		requests = rq;
	}
	q->full = false;
	spin_unlock_irq(&q->lock);
	while ((rq = requests)) {
		requests = rq->rq_next;
		rq->rq_next = NULL;
		blk_mq_complete_request(rq);
	}
}

/**
 * virtblk_await_start() - from here on, and until virtblk_started(), no device is given up
 * @blk: the probe, or the resume, is about to return
 *
 * After either the virtio core looks at the device's status, and starts a device that is not
 * started. That of one that was just reset because it was given up is not; and whoever waits for
 * that reset would then find the device started, and wait for ever. The same holds before the
 * driver itself starts a device, new or resumed.
 */
void virtblk_await_start(struct virtblk *blk)
{
	mutex_lock(&blk->vdev_mutex);
	blk->starting = true;
	mutex_unlock(&blk->vdev_mutex);
	/* The core keeps this back until it has looked: virtblk_config_work() comes after it. */
	virtio_config_changed(blk->vdev);
}

/**
 * virtblk_started() - nobody is going to start the device any more, and it may be given up
 * @blk: has its device; nobody deletes its virtqueues meanwhile
 *
 * Context: may sleep.
 */
void virtblk_started(struct virtblk *blk)
{
	bool was_starting;
	unsigned int i;

	mutex_lock(&blk->vdev_mutex);
	was_starting = blk->starting;
	blk->starting = false;
	/* It was given up while it was probed, and so the core has started it after its reset. */
	if (was_starting && blk->dead)
		virtblk_reset(blk->vdev);
	mutex_unlock(&blk->vdev_mutex);
	if (!was_starting)
		return;
	/* It may have been to be given up meanwhile. */
	for (i = 0; i < blk->queue_count; i++) {
		spin_lock_irq(&blk->queues[i].lock);
		virtblk_check_broken(&blk->queues[i]);
		spin_unlock_irq(&blk->queues[i].lock);
	}
}

/**
 * virtblk_give_up() - ends all requests with errors, now and from now on
 * @blk: its device is reset
 *
 * Context: may sleep.
 */
void virtblk_give_up(struct virtblk *blk)
{
	unsigned int i;

	mutex_lock(&blk->vdev_mutex);
	if (!blk->vdev || blk->dead || blk->starting)
		goto out;
	WRITE_ONCE(blk->dead, true);
	dev_err(&blk->vdev->dev, "[%s] the device is given up, all I/O fails\n",
		blk->disk->disk_name);
	/* From here on nothing gets into a ring. */
	virtio_break_device(blk->vdev);
	virtblk_reset(blk->vdev);
	for (i = 0; i < blk->queue_count; i++) {
		if (blk->use_bio)
			virtblk_bio_fail_all(&blk->queues[i]);
		else
			fail_requests(&blk->queues[i]);
	}
	/* Requests that wait for a place in the ring are dispatched, and fail. */
	if (!blk->use_bio)
		blk_mq_start_stopped_hw_queues(blk->disk->queue, true);
out:
	mutex_unlock(&blk->vdev_mutex);
}

void virtblk_abort_work(struct work_struct *work)
{
	virtblk_give_up(container_of(work, struct virtblk, abort_work));
}

/**
 * virtblk_check_broken() - gives the device up if it broke the rules of this ring
 * @q: its used ring was looked at; its lock is held
 *
 * The virtio core marks a ring whose used entries name requests that it never had, and
 * virtblk_get_used() one whose descriptors were changed. What is in flight there would never end.
 */
void virtblk_check_broken(struct virtblk_queue *q)
{
	if (unlikely(q->vq && virtqueue_is_broken(q->vq)) && !READ_ONCE(q->blk->dead))
		queue_work(virtblk_wq, &q->blk->abort_work);
}
