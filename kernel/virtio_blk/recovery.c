// SPDX-License-Identifier: GPL-2.0-only
/*
 * Abandons devices that cannot recover, and resets the devices of live disks.
 *
 *	virtblk_give_up()	resets a device that vanished, broke a ring, or is silent during a
 *				drain; only then its requests end with an error
 *	suspend, resume		also the reset of the PCI function
 *
 * A request is not ended before the device answers it or is reset: the device may still write to
 * its memory.
 */
#include <linux/pci.h>
#include <linux/sched/mm.h>
#include <linux/slab.h>

#include "virtio_blk.h"

/* Surprise removal: the device is gone from its bus. */
static bool virtblk_is_removed(struct virtio_device *vdev)
{
	struct device *parent = vdev->dev.parent;

	return parent && dev_is_pci(parent) && !pci_device_is_present(to_pci_dev(parent));
}

/**
 * virtblk_reset() - resets the device: it no longer uses any memory
 * @vdev: perhaps gone
 *
 * The virtio core waits until the device says that it is reset. A PCI function that was removed by
 * surprise reads as all ones and never says so; nor does it write anywhere.
 */
void virtblk_reset(struct virtio_device *vdev)
{
	if (virtblk_is_removed(vdev))
		virtio_break_device(vdev);
	else
		virtio_reset_device(vdev);
}

/* The operations of a transport for a device that is gone, and the transport's own. */
struct virtblk_hidden_status {
	struct list_head list;
	struct virtio_config_ops ops;
	const struct virtio_config_ops *real;
};

/*
 * One for each transport, until the module is unloaded: a reader of the device's status in sysfs
 * may still use it when the driver is unbound.
 */
static LIST_HEAD(virtblk_hidden);
static DEFINE_MUTEX(virtblk_hidden_mutex);

static u8 virtblk_no_status(struct virtio_device *vdev)
{
	return 0;
}

static struct virtblk_hidden_status *virtblk_hidden_of(const struct virtio_config_ops *real)
{
	struct virtblk_hidden_status *hidden;
	struct virtio_config_ops ops = *real;

	ops.get_status = virtblk_no_status;
	mutex_lock(&virtblk_hidden_mutex);
	/* A transport that was loaded again may have other operations at the same address. */
	list_for_each_entry(hidden, &virtblk_hidden, list)
		if (hidden->real == real && !memcmp(&hidden->ops, &ops, sizeof(ops)))
			goto out;
	hidden = kmalloc(sizeof(*hidden), GFP_KERNEL);
	if (!hidden)
		goto out;
	hidden->ops = ops;
	hidden->real = real;
	list_add(&hidden->list, &virtblk_hidden);
out:
	mutex_unlock(&virtblk_hidden_mutex);
	return hidden;
}

/* No device is bound any more. */
void virtblk_free_hidden(void)
{
	struct virtblk_hidden_status *hidden, *next;

	list_for_each_entry_safe(hidden, next, &virtblk_hidden, list)
		kfree(hidden);
}

static void virtblk_show_status(void *data)
{
	struct virtio_device *vdev = data;

	vdev->config = container_of(vdev->config, struct virtblk_hidden_status, ops)->real;
}

/**
 * virtblk_hide_status() - makes a device that is gone have status 0 until its driver is unbound
 * @vdev: its removal is about to return
 *
 * The virtio core warns, with a stack, of a device that was not reset, and the status of one that
 * is gone reads as all ones. The driver core puts the operations back after it has unbound the
 * driver.
 */
void virtblk_hide_status(struct virtio_device *vdev)
{
	struct virtblk_hidden_status *hidden;

	if (!virtblk_is_removed(vdev))
		return;
	hidden = virtblk_hidden_of(vdev->config);
	if (hidden && !devm_add_action(&vdev->dev, virtblk_show_status, vdev))
		vdev->config = &hidden->ops;
}

/*
 * Returns true if the device will not answer its requests: it broke a ring, it vanished, or it has
 * used nothing at all for long during a drain. One old request is not enough: a flush may take its
 * time.
 */
static bool virtblk_is_hopeless(struct virtblk *blk)
{
	unsigned long quiet = jiffies - blk->drain_start;
	bool broken = false, busy = false;
	unsigned int i;

	for (i = 0; i < blk->queue_count; i++) {
		struct virtblk_queue *q = &blk->queues[i];

		spin_lock_irq(&q->lock);
		broken |= q->vq && virtqueue_is_broken(q->vq);
		busy |= q->in_flight;
		quiet = min(quiet, jiffies - q->last_used);
		spin_unlock_irq(&q->lock);
	}
	if (blk->state == VIRTBLK_DRAINING && busy && quiet >= VIRTBLK_GIVE_UP)
		return true;
	return broken || virtblk_is_removed(blk->vdev);
}

static bool virtblk_may_give_up(const struct virtblk *blk)
{
	return blk->state == VIRTBLK_LIVE || blk->state == VIRTBLK_DRAINING;
}

/* Resets the device and ends all requests with an error, now and later. */
static void virtblk_kill(struct virtblk *blk)
{
	unsigned int i;

	virtblk_set_state(blk, VIRTBLK_DEAD);
	dev_err(&blk->vdev->dev, "[%s] the device is given up, all I/O fails\n",
		blk->disk->disk_name);
	/* From here on nothing can be added to a ring. */
	virtio_break_device(blk->vdev);
	virtblk_reset(blk->vdev);
	for (i = 0; i < blk->queue_count; i++) {
		if (blk->use_bio)
			virtblk_bio_fail_all(&blk->queues[i]);
		else
			virtblk_rq_fail_all(&blk->queues[i]);
	}
	/* Requests that wait for room in the ring are dispatched, and fail. */
	if (!blk->use_bio)
		blk_mq_start_stopped_hw_queues(blk->disk->queue, true);
}

/**
 * virtblk_give_up() - gives the device up if it is hopeless
 * @blk: any disk
 *
 * Context: may sleep.
 *
 * Return: true if the device is given up, now or before.
 */
bool virtblk_give_up(struct virtblk *blk)
{
	bool dead;

	mutex_lock(&blk->vdev_mutex);
	if (virtblk_may_give_up(blk) && virtblk_is_hopeless(blk))
		virtblk_kill(blk);
	dead = blk->state == VIRTBLK_DEAD;
	mutex_unlock(&blk->vdev_mutex);
	return dead;
}

/**
 * virtblk_abort_work() - gives the device up if it is hopeless
 * @work: &virtblk.abort_work
 */
void virtblk_abort_work(struct work_struct *work)
{
	virtblk_give_up(container_of(work, struct virtblk, abort_work));
}

/**
 * virtblk_begin_drain() - from here on a silent device is given up
 * @blk: has its device; removal or suspend waits for its requests next
 *
 * Also waits for &virtblk.config_work: a change of the capacity may submit requests.
 *
 * Context: may sleep.
 */
void virtblk_begin_drain(struct virtblk *blk)
{
	mutex_lock(&blk->vdev_mutex);
	blk->drain_start = jiffies;
	if (blk->state == VIRTBLK_LIVE || blk->state == VIRTBLK_RESUMED)
		virtblk_set_state(blk, VIRTBLK_DRAINING);
	mutex_unlock(&blk->vdev_mutex);
	virtblk_start_watchdog(blk);
	/* A ring may have broken while the device could not be given up. */
	queue_work(virtblk_wq, &blk->abort_work);
	cancel_work_sync(&blk->config_work);
}

/* Releases the I/O that virtblk_suspend() holds back. Without virtqueues it fails. */
static void virtblk_release_io(struct virtblk *blk)
{
	if (blk->use_bio) {
		virtblk_bio_start(blk);
		/* Stops by itself if nothing is in flight. */
		virtblk_start_watchdog(blk);
	} else {
		blk_mq_unquiesce_queue(blk->disk->queue);
	}
}

/**
 * virtblk_fail_held() - fails the I/O that is held back for a resume that did not come
 * @blk: if it is suspended, the virtio core could not restore it, and it has no virtqueues
 */
void virtblk_fail_held(struct virtblk *blk)
{
	bool suspended;

	mutex_lock(&blk->vdev_mutex);
	suspended = blk->state == VIRTBLK_SUSPENDED;
	if (suspended)
		virtblk_set_state(blk, VIRTBLK_DEAD);
	mutex_unlock(&blk->vdev_mutex);
	if (suspended)
		virtblk_release_io(blk);
}

/**
 * virtblk_suspend() - drains in-flight requests and resets the device; new I/O is held back
 * @vdev: still works, or is silent
 *
 * The queue is frozen until nothing is in flight, and then holds I/O back by other means: a frozen
 * queue would block the suspend, which waits for tasks that wait to enter it. Suspend also waits for
 * running dispatchers, because they use the virtqueues that are deleted (CVE-2024-57946 and its
 * successors).
 *
 * A device that answers nothing for VIRTBLK_GIVE_UP is given up, as in a removal: its requests
 * fail, and the reset that comes next may cure it.
 *
 * Return: 0.
 */
int virtblk_suspend(struct virtio_device *vdev)
{
	struct virtblk *blk = vdev->priv;
	struct request_queue *queue = blk->disk->queue;
	unsigned int memflags;

	virtblk_fail_held(blk);
	virtblk_begin_drain(blk);
	/* A change of the cache mode ends first, so that disk and device agree about it. */
	mutex_lock(&blk->cache_mutex);
	memflags = virtblk_freeze_queue(queue);
	if (blk->use_bio)
		virtblk_bio_stop(blk);
	else
		blk_mq_quiesce_queue(queue);
	virtblk_unfreeze_queue(queue, memflags);
	/* Waits for submitters of requests that have ended: they may still kick. */
	synchronize_rcu();

	mutex_lock(&blk->vdev_mutex);
	virtblk_reset(vdev);
	virtblk_set_state(blk, VIRTBLK_SUSPENDED);
	mutex_unlock(&blk->vdev_mutex);
	mutex_unlock(&blk->cache_mutex);
	cancel_delayed_work_sync(&blk->watchdog);
	cancel_work_sync(&blk->abort_work);
	virtblk_del_queues(blk, vdev);
	return 0;
}

/* Gives the device its virtqueues and its cache mode back. After an error it has no virtqueues. */
static int virtblk_restart_device(struct virtblk *blk)
{
	int err = virtblk_find_queues(blk);

	if (err)
		return err;
	virtio_device_ready(blk->vdev);
	/* The I/O that is held back was made for this mode. */
	err = virtblk_restore_cache(blk);
	if (err) {
		virtblk_reset(blk->vdev);
		virtblk_del_queues(blk, blk->vdev);
	}
	return err;
}

/**
 * virtblk_resume() - restarts the device, and sends the I/O that was held back
 * @vdev: was reset; its features are settled again
 *
 * A device that was given up has another chance. The virtio core looks at the device's status when
 * this returns, and starts a device that is not started. A reset at that moment would wait for the
 * status 0 for ever, so the device is not given up until virtblk_config_work() has run, which the
 * core keeps back until after its look.
 *
 * Return: 0, or a negative errno; then all I/O fails.
 */
int virtblk_resume(struct virtio_device *vdev)
{
	struct virtblk *blk = vdev->priv;
	unsigned int noio;
	int err;

	/* Reclaim must not wait for I/O that is held back until virtblk_release_io(). */
	noio = memalloc_noio_save();
	err = virtblk_restart_device(blk);
	if (err)
		dev_err(&vdev->dev, "[%s] the device cannot be resumed: error %d\n",
			blk->disk->disk_name, err);
	mutex_lock(&blk->vdev_mutex);
	virtblk_set_state(blk, err ? VIRTBLK_DEAD : VIRTBLK_RESUMED);
	mutex_unlock(&blk->vdev_mutex);
	if (!err)
		/* The capacity may have changed, too. */
		virtio_config_changed(vdev);
	virtblk_release_io(blk);
	memalloc_noio_restore(noio);
	return err;
}
