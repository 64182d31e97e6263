// SPDX-License-Identifier: GPL-2.0-only
/*
 * Requests without an answer, devices without hope, and resets below a living disk.
 *
 *	time-out, watchdog	look at the used ring again, in case that only an interrupt was
 *				lost; report requests that are overdue
 *	virtblk_give_up()	resets a device that vanished, broke a ring, or is silent during a
 *				drain; only then its requests end with an error
 *	suspend, resume		also the reset of the PCI function
 *
 * A request is not ended before the device answers it or is reset: the device may still write to
 * its memory.
 */
#include <linux/pci.h>
#include <linux/slab.h>

#include "virtio_blk.h"

/* A completion that is later than this without an interrupt counts as a lost interrupt. */
#define VIRTBLK_LOST_AFTER	(2 * HZ)

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

/* The virtio core's operations for a device that is gone, and those that it had. */
struct virtblk_hidden_status {
	struct virtio_config_ops ops;
	const struct virtio_config_ops *real;
	struct virtio_device *vdev;
};

static u8 virtblk_no_status(struct virtio_device *vdev)
{
	return 0;
}

static void virtblk_show_status(void *data)
{
	struct virtblk_hidden_status *hidden = data;

	hidden->vdev->config = hidden->real;
	kfree(hidden);
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
	hidden = kmalloc(sizeof(*hidden), GFP_KERNEL);
	if (!hidden)
		return;
	hidden->ops = *vdev->config;
	hidden->ops.get_status = virtblk_no_status;
	hidden->real = vdev->config;
	hidden->vdev = vdev;
	if (devm_add_action(&vdev->dev, virtblk_show_status, hidden))
		kfree(hidden);
	else
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

static void virtblk_report_lost_interrupt(struct virtblk_queue *q)
{
	dev_warn_ratelimited(&q->blk->vdev->dev,
			     "[%s] queue %u: requests were used, their interrupt is late or lost\n",
			     q->blk->disk->disk_name, q->index);
}

/* Reports an overdue request, once per VIRTBLK_TIMEOUT for a queue. */
static void virtblk_report_overdue(struct virtblk_queue *q, int tag, unsigned int age_s)
{
	struct virtblk *blk = q->blk;

	if (q->last_report && time_before(jiffies, q->last_report + VIRTBLK_TIMEOUT))
		return;
	q->last_report = jiffies ?: 1;
	dev_warn_ratelimited(&blk->vdev->dev,
			     "[%s] queue %u: no answer to request %d for %u s, %u in flight\n",
			     blk->disk->disk_name, q->index, tag, age_s, READ_ONCE(q->in_flight));
}

/* A request is overdue: reports it, and has the device given up if it is hopeless. */
static void virtblk_handle_overdue(struct virtblk_queue *q, int tag, unsigned int age_s)
{
	virtblk_report_overdue(q, tag, age_s);
	queue_work(virtblk_wq, &q->blk->abort_work);
}

static unsigned int virtblk_age_s(const struct request *rq)
{
	u64 start_ns = rq->io_start_time_ns;

	if (!start_ns)
		return rq->timeout / HZ;
	return div_u64(ktime_get_ns() - start_ns, NSEC_PER_SEC);
}

/**
 * virtblk_timeout() - a request of the request path was not answered in time
 * @rq: in flight; not freed before this returns
 *
 * Return: BLK_EH_DONE if only its interrupt was lost, else BLK_EH_RESET_TIMER.
 */
enum blk_eh_timer_return virtblk_timeout(struct request *rq)
{
	struct virtblk *blk = rq->q->queuedata;
	struct virtblk_queue *q = &blk->queues[rq->mq_hctx->queue_num];
	struct virtblk_request *request = blk_mq_rq_to_pdu(rq);
	unsigned int age = virtblk_age_s(rq);

	if (unlikely(READ_ONCE(request->fake_timeout))) {
		WRITE_ONCE(request->fake_timeout, false);
		blk_mq_complete_request(rq);
		return BLK_EH_DONE;
	}
	virtblk_rq_reap(q, !q->polled);
	/* Completed, or about to be: on this CPU it is idle again by now. */
	if (blk_mq_rq_state(rq) != MQ_RQ_IN_FLIGHT) {
		if (!q->polled)
			virtblk_report_lost_interrupt(q);
		return BLK_EH_DONE;
	}
	virtblk_handle_overdue(q, rq->tag, age);
	return BLK_EH_RESET_TIMER;
}

/**
 * struct virtblk_oldest - the slot that the device has had for longest
 * @exists: the device has one
 * @slot: its index
 * @sent: jiffies when it was sent
 */
struct virtblk_oldest {
	bool exists;
	int slot;
	unsigned long sent;
};

static struct virtblk_oldest virtblk_find_oldest(struct virtblk_queue *q)
{
	struct virtblk_oldest oldest = { };
	struct virtblk_slot *slot;

	spin_lock_irq(&q->lock);
	slot = list_first_entry_or_null(&q->ring, struct virtblk_slot, node);
	if (slot)
		oldest = (struct virtblk_oldest){ true, slot->index, slot->sent };
	spin_unlock_irq(&q->lock);
	return oldest;
}

/* No online CPU uses the queue: where the kernel spreads interrupts, its interrupt is off. */
static bool virtblk_is_orphan(const struct virtblk_queue *q)
{
	const struct blk_mq_queue_map *map = &q->blk->maps[VIRTBLK_MAP_INTERRUPT];
	unsigned int cpu;

	for_each_online_cpu(cpu)
		if (map->mq_map[cpu] == q->index)
			return false;
	return !q->polled;
}

/*
 * Returns true if an old request was in the used ring, for which no interrupt had come. A younger
 * one may have been used at this very moment.
 */
static bool virtblk_has_lost_interrupt(const struct virtblk_queue *q,
				       const struct virtblk_oldest *before,
				       const struct virtblk_oldest *after)
{
	bool gone = !after->exists || after->slot != before->slot || after->sent != before->sent;

	return before->exists && gone && !q->polled &&
	       time_after(jiffies, before->sent + VIRTBLK_LOST_AFTER);
}

/* Returns whether interrupts are missing, so that the next look should be soon. */
static bool virtblk_watch_bio_queue(struct virtblk_queue *q)
{
	struct virtblk_oldest before = virtblk_find_oldest(q), after;

	/* Completes polled requests that nobody polls for, and sends bios that wait for memory. */
	virtblk_bio_reap(q, !q->polled);
	after = virtblk_find_oldest(q);
	if (after.exists && time_after(jiffies, after.sent + VIRTBLK_TIMEOUT))
		virtblk_handle_overdue(q, after.slot, (jiffies - after.sent) / HZ);
	if (virtblk_is_orphan(q))
		return after.exists;
	if (!virtblk_has_lost_interrupt(q, &before, &after))
		return false;
	virtblk_report_lost_interrupt(q);
	return true;
}

/* Completes polled requests that nobody polls for. */
static void virtblk_watch_polled_queue(struct virtblk_queue *q)
{
	if (q->polled && time_after_eq(jiffies, q->last_reap + VIRTBLK_WATCH_POLLED))
		virtblk_rq_reap(q, false);
}

static bool virtblk_is_watched(const struct virtblk_queue *q)
{
	return q->blk->use_bio || q->polled;
}

static bool virtblk_is_busy(struct virtblk_queue *q)
{
	bool busy;

	spin_lock_irq(&q->lock);
	busy = q->in_flight || !bio_list_empty(&q->waiting) || !list_empty(&q->requeued);
	spin_unlock_irq(&q->lock);
	return busy;
}

/**
 * virtblk_watchdog() - looks for requests that neither an interrupt nor a poller completes
 * @work: &virtblk.watchdog
 *
 * Runs while requests are in flight: an idle disk costs nothing.
 */
void virtblk_watchdog(struct work_struct *work)
{
	struct virtblk *blk = container_of(to_delayed_work(work), struct virtblk, watchdog);
	bool busy = false, lost = false;
	unsigned int i;

	for (i = 0; i < blk->queue_count; i++) {
		if (blk->use_bio)
			lost |= virtblk_watch_bio_queue(&blk->queues[i]);
		else
			virtblk_watch_polled_queue(&blk->queues[i]);
	}
	/* A request that is added after the next look at its queue starts the watchdog again. */
	for (i = 0; i < blk->queue_count; i++)
		busy |= virtblk_is_watched(&blk->queues[i]) && virtblk_is_busy(&blk->queues[i]);
	if (busy && lost)
		virtblk_retry_soon(blk);
	else if (busy)
		virtblk_start_watchdog(blk);
}

/**
 * virtblk_cpu_dead() - a CPU is offline, and with it perhaps the interrupt of its queue
 * @cpu: the CPU
 * @node: of a disk of the bio path
 *
 * The interrupt is off only if no other CPU uses the queue; the watchdog finds that out.
 *
 * Return: 0.
 */
int virtblk_cpu_dead(unsigned int cpu, struct hlist_node *node)
{
	virtblk_retry_soon(hlist_entry(node, struct virtblk, cpu_node));
	return 0;
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
 * @vdev: works still, or is silent
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
	int err = virtblk_restart_device(blk);

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
	return err;
}
