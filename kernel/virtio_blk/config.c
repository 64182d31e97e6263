// SPDX-License-Identifier: GPL-2.0-only
/*
 * What of the configuration changes while the disk is used: its capacity, by the device; the mode
 * of its write cache, by the administrator.
 */
#define pr_fmt(fmt) KBUILD_MODNAME ": " fmt

#include <linux/sched/mm.h>
#include <linux/string_helpers.h>

#include "virtio_blk.h"

/* Bytes have to fit into a loff_t. */
#define CAPACITY_MAX	((u64)LLONG_MAX >> SECTOR_SHIFT)

/**
 * virtblk_has_cache() - whether written data may be lost before it is flushed
 * @vdev: with settled features
 *
 * A mode that the specification does not have is taken as a cache: a flush too many does no harm.
 */
bool virtblk_has_cache(struct virtio_device *vdev)
{
	u8 write_back;

	if (virtio_cread_feature(vdev, VIRTIO_BLK_F_CONFIG_WCE, struct virtio_blk_config, wce,
				 &write_back))
		return virtio_has_feature(vdev, VIRTIO_BLK_F_FLUSH);
	return write_back;
}

static int commit_cache(struct virtblk *blk, bool write_back)
{
	struct request_queue *queue = blk->disk->queue;
	struct queue_limits lim = queue_limits_start_update(queue);
	unsigned int memflags;
	int err;

	if (write_back)
		lim.features |= BLK_FEAT_WRITE_CACHE;
	else
		lim.features &= ~BLK_FEAT_WRITE_CACHE;
	memflags = virtblk_freeze_queue(queue);
	err = queue_limits_commit_update(queue, &lim);
	virtblk_unfreeze_queue(queue, memflags);
	return err;
}

static void write_wce(struct virtblk *blk, bool write_back)
{
	virtio_cwrite8(blk->vdev, offsetof(struct virtio_blk_config, wce), write_back);
}

static int set_cache(struct virtblk *blk, bool write_back)
{
	int err;

	if (write_back) {
		err = commit_cache(blk, true);
		if (err)
			return err;
		write_wce(blk, true);
	} else {
		write_wce(blk, false);
		err = blkdev_issue_flush(blk->disk->part0);
		if (err)
			return err;
	}
	/* The device may have refused. */
	return commit_cache(blk, virtblk_has_cache(blk->vdev));
}

/**
 * virtblk_set_cache() - changes the mode of the device's cache, as VIRTIO_BLK_F_CONFIG_WCE allows
 * @blk: has that feature
 * @write_back: the new mode
 *
 * On the way to write back, flushes come first: the block layer drops them for a disk without a
 * cache, and what it dropped them from has ended before the device changes. Only a bio that the
 * block layer holds back between the two, waiting for the queue, is not covered: to write that
 * needed FUA and to change the mode at the same time is left to the administrator's care. On the
 * way to write through, flushes end last, after one more for what the cache still holds.
 *
 * Return: a negative errno.
 */
int virtblk_set_cache(struct virtblk *blk, bool write_back)
{
	int err;

	/* Two at a time, or one and virtblk_cache_work(), could leave a cache without flushes. */
	if (mutex_lock_killable(&blk->cache_mutex))
		return -EINTR;
	err = set_cache(blk, write_back);
	mutex_unlock(&blk->cache_mutex);
	/* virtblk_cache_work() may have come meanwhile, and left the mode alone. */
	virtio_config_changed(blk->vdev);
	return err;
}

static bool expects_cache(struct virtblk *blk)
{
	return blk->disk->queue->limits.features & BLK_FEAT_WRITE_CACHE;
}

/**
 * virtblk_restore_cache() - gives the device the mode back that it had before it was reset
 * @blk: ready, but nothing was sent yet
 *
 * virtblk_cache_work() follows a device that refuses.
 */
void virtblk_restore_cache(struct virtblk *blk)
{
	bool expected = expects_cache(blk);

	if (!virtio_has_feature(blk->vdev, VIRTIO_BLK_F_CONFIG_WCE) ||
	    virtblk_has_cache(blk->vdev) == expected)
		return;
	write_wce(blk, expected);
	if (virtblk_has_cache(blk->vdev) != expected)
		dev_warn(&blk->vdev->dev, "[%s] the device does not take its cache's mode back\n",
			 blk->disk->disk_name);
}

/* Takes over the mode of a device that changed it. */
static void follow_cache(struct virtblk *blk, bool write_back)
{
	int err = commit_cache(blk, write_back);

	/* What was written meanwhile was not followed by flushes. */
	if (!err && write_back)
		err = blkdev_issue_flush(blk->disk->part0);
	if (err)
		pr_warn("%s: the cache's mode has changed and was not taken over: error %d\n",
			blk->disk->disk_name, err);
}

/**
 * virtblk_update_capacity() - takes over the device's capacity
 * @blk: its device is there
 * @resize: the disk is known already, and others are told
 */
void virtblk_update_capacity(struct virtblk *blk, bool resize)
{
	unsigned int block = queue_logical_block_size(blk->disk->queue);
	struct virtio_device *vdev = blk->vdev;
	char binary[10], decimal[10];
	u64 capacity, blocks;

	virtio_cread(vdev, struct virtio_blk_config, capacity, &capacity);
	if (capacity > CAPACITY_MAX) {
		dev_warn(&vdev->dev, "[%s] a capacity of %llu sectors is too large; taken as %llu\n",
			 blk->disk->disk_name, capacity, CAPACITY_MAX);
		capacity = CAPACITY_MAX;
	}
	if (resize && capacity == get_capacity(blk->disk))
		return;
	blocks = DIV_ROUND_UP_ULL(capacity, block >> SECTOR_SHIFT);
	string_get_size(blocks, block, STRING_UNITS_2, binary, sizeof(binary));
	string_get_size(blocks, block, STRING_UNITS_10, decimal, sizeof(decimal));
	dev_notice(&vdev->dev, "[%s] %s%llu %u-byte logical blocks (%s/%s)\n", blk->disk->disk_name,
		   resize ? "new size: " : "", blocks, block, decimal, binary);
	set_capacity_and_notify(blk->disk, capacity);
}

/* Under the mutex of the device. */
static bool is_usable(const struct virtblk *blk)
{
	return blk->vdev && !blk->dead && !blk->suspended && !READ_ONCE(blk->removing);
}

/* The device has changed its configuration, or was started. */
void virtblk_config_work(struct work_struct *work)
{
	struct virtblk *blk = container_of(work, struct virtblk, config_work);
	unsigned int noio;

	virtblk_started(blk);
	/* Memory must not wait for a request that has to be given up, which takes that mutex. */
	noio = memalloc_noio_save();
	mutex_lock(&blk->vdev_mutex);
	if (is_usable(blk))
		virtblk_update_capacity(blk, true);
	mutex_unlock(&blk->vdev_mutex);
	memalloc_noio_restore(noio);
	/* Not on the workqueue of those that end requests: it waits for requests. */
	queue_work(virtblk_system_wq, &blk->cache_work);
}

/* The device's cache may have another mode. */
void virtblk_cache_work(struct work_struct *work)
{
	struct virtblk *blk = container_of(work, struct virtblk, cache_work);
	bool cache, changed = false;

	/* Not waited for: whoever holds it waits for requests, and the removal for this work. */
	if (!mutex_trylock(&blk->cache_mutex))
		return;
	mutex_lock(&blk->vdev_mutex);
	if (is_usable(blk)) {
		cache = virtblk_has_cache(blk->vdev);
		changed = cache != expects_cache(blk);
	}
	mutex_unlock(&blk->vdev_mutex);
	/* Without that mutex: it waits for requests, which may have to be given up. */
	if (unlikely(changed))
		follow_cache(blk, cache);
	mutex_unlock(&blk->cache_mutex);
}

/**
 * virtblk_cancel_config() - waits until nobody looks at the configuration any more
 * @blk: no longer looked at: suspended, or being removed
 */
void virtblk_cancel_config(struct virtblk *blk)
{
	cancel_work_sync(&blk->config_work);
	/* Queued by the other. */
	cancel_work_sync(&blk->cache_work);
}

/**
 * virtblk_config_changed() - the device's configuration has changed, or may have
 * @vdev: from probe to removal
 *
 * Context: any; interrupts among them.
 */
void virtblk_config_changed(struct virtio_device *vdev)
{
	struct virtblk *blk = vdev->priv;

	if (!READ_ONCE(blk->removing))
		queue_work(virtblk_wq, &blk->config_work);
}
