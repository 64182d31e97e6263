// SPDX-License-Identifier: GPL-2.0-only
/*
 * The configuration space (section 5.2.4 of virtio 1.3), the block layer's limits that follow from
 * it, and its changes while the disk is used. The device is not trusted: values that make no sense
 * are replaced, with a message.
 */
#include <linux/hdreg.h>
#include <linux/sched/mm.h>
#include <linux/string_helpers.h>

#include "virtio_blk.h"

/* Bytes have to fit into a loff_t. */
#define VIRTBLK_CAPACITY_MAX	((u64)LLONG_MAX >> SECTOR_SHIFT)
/* Larger than any real disk's; also keeps the arithmetic below 32 bits. */
#define VIRTBLK_BLOCK_EXP_MAX	11

#define virtblk_read_config(vdev, field, value)	\
	virtio_cread(vdev, struct virtio_blk_config, field, value)

/**
 * virtblk_validate() - checks the device before features are settled
 * @vdev: about to be probed
 *
 * Without the feature, host-aware devices are plain disks, and so are those without zones.
 * Host-managed ones are refused: a driver has to know their zones to write to them.
 *
 * Return: 0, -EINVAL if there is no configuration, -EOPNOTSUPP for host-managed zones.
 */
int virtblk_validate(struct virtio_device *vdev)
{
	u8 model;

	if (!vdev->config->get) {
		dev_err(&vdev->dev, "the device has no configuration to be read\n");
		return -EINVAL;
	}
	if (!virtio_has_feature(vdev, VIRTIO_BLK_F_ZONED))
		return 0;
	virtblk_read_config(vdev, zoned.model, &model);
	if (model != VIRTIO_BLK_Z_NONE && model != VIRTIO_BLK_Z_HA) {
		dev_err(&vdev->dev, "zoned disks (model %u) are not supported by this driver\n",
			model);
		return -EOPNOTSUPP;
	}
	__virtio_clear_bit(vdev, VIRTIO_BLK_F_ZONED);
	return 0;
}

static int virtblk_read_segments(struct virtblk *blk, struct queue_limits *lim)
{
	struct virtio_device *vdev = blk->vdev;
	size_t dma_max = virtio_max_dma_size(vdev);
	u32 seg_max = 1, size_max = 0;

	virtio_cread_feature(vdev, VIRTIO_BLK_F_SEG_MAX, struct virtio_blk_config, seg_max,
			     &seg_max);
	if (!seg_max) {
		dev_warn(&vdev->dev, "the device wants requests of 0 segments; taken as 1\n");
		seg_max = 1;
	}
	blk->seg_max = min(seg_max, blk->seg_max);
	blk->seg_bytes_max = min_t(size_t, dma_max, U32_MAX);
	if (!virtio_cread_feature(vdev, VIRTIO_BLK_F_SIZE_MAX, struct virtio_blk_config, size_max,
				  &size_max) && !size_max)
		dev_warn(&vdev->dev, "the device wants segments of 0 bytes; taken as no limit\n");
	if (size_max)
		blk->seg_bytes_max = min(size_max, blk->seg_bytes_max);
	if (blk->seg_bytes_max < VIRTBLK_SEG_BYTES_MIN) {
		dev_err(&vdev->dev, "segments of at most %u bytes are too small; %lu are needed\n",
			blk->seg_bytes_max, VIRTBLK_SEG_BYTES_MIN);
		return -EINVAL;
	}
	lim->max_segments = blk->seg_max;
	lim->max_segment_size = blk->seg_bytes_max;
	lim->max_hw_sectors = UINT_MAX;
	return 0;
}

static int virtblk_read_block_size(struct virtio_device *vdev, struct queue_limits *lim)
{
	u32 size;

	if (virtio_cread_feature(vdev, VIRTIO_BLK_F_BLK_SIZE, struct virtio_blk_config, blk_size,
				 &size))
		return 0;
	if (!blk_validate_block_size(size)) {
		lim->logical_block_size = size;
		return 0;
	}
	/* The specification has it as a hint, but some devices refuse parts of such a block. */
	if (size > PAGE_SIZE && is_power_of_2(size)) {
		dev_err(&vdev->dev, "blocks of %u bytes are too large for this kernel: %lu at most\n",
			size, PAGE_SIZE);
		return -EINVAL;
	}
	dev_warn(&vdev->dev, "blocks of %u bytes make no sense; taken as %u\n", size,
		 lim->logical_block_size);
	return 0;
}

/*
 * A block has to fit into a request, however its memory is cut: the block layer cannot split it, and
 * some kernels submit more segments than the limit then.
 */
static int virtblk_fit_block(struct virtblk *blk, struct queue_limits *lim)
{
	u32 segments = DIV_ROUND_UP(lim->logical_block_size,
				    min_t(u32, blk->seg_bytes_max, PAGE_SIZE));

	if (blk->seg_max < segments) {
		dev_err(&blk->vdev->dev, "requests of at most %u segments cannot hold a block of %u bytes\n",
			blk->seg_max, lim->logical_block_size);
		return -EINVAL;
	}
	/* Aligned memory has no segment more than that. */
	if (blk->seg_max == segments)
		lim->dma_alignment = min_t(u32, lim->logical_block_size, PAGE_SIZE) - 1;
	return 0;
}

static void virtblk_read_topology(struct virtio_device *vdev, struct queue_limits *lim)
{
	u32 block = lim->logical_block_size;
	u8 exponent, alignment;
	u16 io_min;
	u32 io_opt;

	if (!virtio_has_feature(vdev, VIRTIO_BLK_F_TOPOLOGY))
		return;
	virtblk_read_config(vdev, physical_block_exp, &exponent);
	virtblk_read_config(vdev, alignment_offset, &alignment);
	virtblk_read_config(vdev, min_io_size, &io_min);
	virtblk_read_config(vdev, opt_io_size, &io_opt);
	if (exponent > VIRTBLK_BLOCK_EXP_MAX) {
		dev_warn(&vdev->dev, "physical blocks of 2^%u blocks make no sense; ignored\n",
			 exponent);
		exponent = 0;
	}
	if (alignment >= 1u << exponent) {
		if (alignment)
			dev_warn(&vdev->dev, "an offset of %u blocks makes no sense; ignored\n",
				 alignment);
		alignment = 0;
	}
	lim->physical_block_size = block << exponent;
	lim->alignment_offset = block * alignment;
	lim->io_min = block * io_min;
	if (io_opt <= UINT_MAX / block)
		lim->io_opt = block * io_opt;
	else
		dev_warn(&vdev->dev, "I/O of %u blocks makes no sense; ignored\n", io_opt);
}

/* Returns 0 if the bytes do not fit. */
static u32 virtblk_sectors_to_bytes(struct virtio_device *vdev, u32 sectors)
{
	if (sectors <= UINT_MAX >> SECTOR_SHIFT)
		return sectors << SECTOR_SHIFT;
	dev_warn(&vdev->dev, "a granularity of %u sectors makes no sense; ignored\n", sectors);
	return 0;
}

static void virtblk_read_discard(struct virtblk *blk, struct queue_limits *lim)
{
	struct virtio_device *vdev = blk->vdev;
	u32 sectors, segments, alignment;

	if (!virtio_has_feature(vdev, VIRTIO_BLK_F_DISCARD))
		return;
	virtblk_read_config(vdev, max_discard_sectors, &sectors);
	virtblk_read_config(vdev, max_discard_seg, &segments);
	virtblk_read_config(vdev, discard_sector_alignment, &alignment);
	/* Devices use 0 for no limit. */
	lim->max_hw_discard_sectors = sectors ?: UINT_MAX;
	lim->max_discard_segments = min(segments ?: blk->seg_max, VIRTBLK_RANGES_MAX);
	lim->discard_granularity = virtblk_sectors_to_bytes(vdev, alignment) ?:
				   lim->logical_block_size;
}

static void virtblk_read_secure_erase(struct virtblk *blk, struct queue_limits *lim)
{
	struct virtio_device *vdev = blk->vdev;
	u32 sectors, segments, alignment;

	if (!virtio_has_feature(vdev, VIRTIO_BLK_F_SECURE_ERASE))
		return;
	virtblk_read_config(vdev, max_secure_erase_sectors, &sectors);
	virtblk_read_config(vdev, max_secure_erase_seg, &segments);
	virtblk_read_config(vdev, secure_erase_sector_alignment, &alignment);
	if (!sectors || !segments || !virtblk_sectors_to_bytes(vdev, alignment)) {
		dev_warn(&vdev->dev, "limits of secure erase of 0 make no sense; it is not used\n");
		return;
	}
	lim->max_secure_erase_sectors = sectors;
	/* The block layer has one granularity for both. */
	alignment = virtblk_sectors_to_bytes(vdev, alignment);
	if (!lim->discard_granularity || alignment < lim->discard_granularity)
		lim->discard_granularity = alignment;
}

/**
 * virtblk_has_cache() - tells if written data may be lost before it is flushed
 * @vdev: any device
 *
 * A mode that the specification does not have counts as a cache: a flush too many does no harm.
 *
 * Return: true if the device has a write cache.
 */
bool virtblk_has_cache(struct virtio_device *vdev)
{
	u8 write_back;

	if (virtio_cread_feature(vdev, VIRTIO_BLK_F_CONFIG_WCE, struct virtio_blk_config, wce,
				 &write_back))
		return virtio_has_feature(vdev, VIRTIO_BLK_F_FLUSH);
	return write_back;
}

/**
 * virtblk_read_limits() - reads the device's limits
 * @blk: has its virtqueues; its seg_max is the limit of these
 * @lim: gets the limits of the disk
 *
 * Return: 0, or -EINVAL if no limits of the block layer describe the device.
 */
int virtblk_read_limits(struct virtblk *blk, struct queue_limits *lim)
{
	struct virtio_device *vdev = blk->vdev;
	u32 sectors;
	int err;

	lim->features = BLK_FEAT_ROTATIONAL;
	lim->logical_block_size = SECTOR_SIZE;
	err = virtblk_read_segments(blk, lim);
	if (err)
		return err;
	err = virtblk_read_block_size(vdev, lim);
	if (err)
		return err;
	err = virtblk_fit_block(blk, lim);
	if (err)
		return err;
	virtblk_read_topology(vdev, lim);
	virtblk_read_discard(blk, lim);
	virtblk_read_secure_erase(blk, lim);
	if (virtio_has_feature(vdev, VIRTIO_BLK_F_WRITE_ZEROES)) {
		virtblk_read_config(vdev, max_write_zeroes_sectors, &sectors);
		lim->max_write_zeroes_sectors = sectors ?: UINT_MAX;
	}
	if (virtblk_has_cache(vdev))
		lim->features |= BLK_FEAT_WRITE_CACHE;
	if (!blk->use_bio)
		return 0;
	/* blk-mq sets these for its disks. */
	lim->features |= BLK_FEAT_IO_STAT | BLK_FEAT_NOWAIT;
	if (blk->poll_count)
		lim->features |= BLK_FEAT_POLL;
	/* The bio path sends one range per request. */
	lim->max_discard_segments = min_t(u16, lim->max_discard_segments, 1);
	return 0;
}

/**
 * virtblk_read_geometry() - reads the geometry that the device claims
 * @blk: perhaps removed
 * @geo: gets it
 *
 * Return: 0, or -ENXIO if the device is gone.
 */
int virtblk_read_geometry(struct virtblk *blk, struct hd_geometry *geo)
{
	int err = 0;

	mutex_lock(&blk->vdev_mutex);
	if (blk->state == VIRTBLK_GONE) {
		err = -ENXIO;
	} else if (virtio_has_feature(blk->vdev, VIRTIO_BLK_F_GEOMETRY)) {
		virtblk_read_config(blk->vdev, geometry.cylinders, &geo->cylinders);
		virtblk_read_config(blk->vdev, geometry.heads, &geo->heads);
		virtblk_read_config(blk->vdev, geometry.sectors, &geo->sectors);
	} else {
		/* The usual geometry of disks that have none. */
		geo->heads = 1 << 6;
		geo->sectors = 1 << 5;
		geo->cylinders = get_capacity(blk->disk) >> 11;
	}
	mutex_unlock(&blk->vdev_mutex);
	return err;
}

/**
 * virtblk_update_capacity() - sets the disk's capacity to the device's
 * @blk: has its device
 * @resize: the disk is in use; only a change is reported
 */
void virtblk_update_capacity(struct virtblk *blk, bool resize)
{
	unsigned int block = queue_logical_block_size(blk->disk->queue);
	struct virtio_device *vdev = blk->vdev;
	char binary[10], decimal[10];
	u64 capacity, blocks;

	virtio_cread(vdev, struct virtio_blk_config, capacity, &capacity);
	if (capacity > VIRTBLK_CAPACITY_MAX) {
		dev_warn(&vdev->dev, "[%s] a capacity of %llu sectors is too large; taken as %llu\n",
			 blk->disk->disk_name, capacity, VIRTBLK_CAPACITY_MAX);
		capacity = VIRTBLK_CAPACITY_MAX;
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

/**
 * virtblk_config_changed() - looks at the configuration after a change
 * @vdev: scanned, and neither suspended nor being removed: the virtio core sees to that
 *
 * Context: any, interrupts too.
 */
void virtblk_config_changed(struct virtio_device *vdev)
{
	struct virtblk *blk = vdev->priv;

	queue_work(virtblk_wq, &blk->config_work);
}

/**
 * virtblk_config_work() - the device has changed its configuration, or was resumed
 * @work: &virtblk.config_work
 *
 * The virtio core keeps this back until it has looked at the status of a resumed device.
 */
void virtblk_config_work(struct work_struct *work)
{
	struct virtblk *blk = container_of(work, struct virtblk, config_work);
	unsigned int noio;

	/* Reclaim must not wait for a request that virtblk_give_up() fails under the same mutex. */
	noio = memalloc_noio_save();
	mutex_lock(&blk->vdev_mutex);
	if (blk->state == VIRTBLK_RESUMED) {
		virtblk_set_state(blk, VIRTBLK_LIVE);
		/* A ring may have broken while the device could not be given up. */
		queue_work(virtblk_wq, &blk->abort_work);
	}
	if (blk->state == VIRTBLK_LIVE)
		virtblk_update_capacity(blk, true);
	mutex_unlock(&blk->vdev_mutex);
	memalloc_noio_restore(noio);
}

static int virtblk_commit_cache(struct virtblk *blk, bool write_back)
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

static void virtblk_write_wce(struct virtblk *blk, bool write_back)
{
	virtio_cwrite8(blk->vdev, offsetof(struct virtio_blk_config, wce), write_back);
}

/*
 * Changes the mode of the device's cache. To write back: enables flushes in the block layer, which
 * drops them for a disk without a cache; freezes the queue, which waits for writes without flushes;
 * then changes the device. To write through: changes the device, disables flushes last, and issues
 * one more for the data in the cache. Exception: a FUA write that the block layer holds while the
 * queue is frozen may lose its flush; the administrator does not change the mode during such writes.
 */
static int virtblk_change_cache(struct virtblk *blk, bool write_back)
{
	int err;

	if (write_back) {
		err = virtblk_commit_cache(blk, true);
		if (err)
			return err;
		virtblk_write_wce(blk, true);
	} else {
		virtblk_write_wce(blk, false);
		err = blkdev_issue_flush(blk->disk->part0);
		if (err)
			return err;
	}
	/* The device may have refused. */
	return virtblk_commit_cache(blk, virtblk_has_cache(blk->vdev));
}

static bool virtblk_is_suspended(struct virtblk *blk)
{
	bool suspended;

	mutex_lock(&blk->vdev_mutex);
	suspended = blk->state == VIRTBLK_SUSPENDED;
	mutex_unlock(&blk->vdev_mutex);
	return suspended;
}

/**
 * virtblk_set_cache() - changes the mode of the device's cache
 * @blk: a disk whose device has VIRTIO_BLK_F_CONFIG_WCE
 * @write_back: the new mode; write through otherwise
 *
 * Context: may sleep.
 *
 * Return: 0, -EBUSY for a disk that is suspended, -EINTR, or the error of the change or the flush.
 */
int virtblk_set_cache(struct virtblk *blk, bool write_back)
{
	int err = -EBUSY;

	/* Suspend takes it, too: until it is released the device is not reset. */
	if (mutex_lock_killable(&blk->cache_mutex))
		return -EINTR;
	if (!virtblk_is_suspended(blk))
		err = virtblk_change_cache(blk, write_back);
	mutex_unlock(&blk->cache_mutex);
	return err;
}

/**
 * virtblk_restore_cache() - gives a device that was reset the cache mode of its disk
 * @blk: ready, but suspended still: no request was sent, and virtblk_set_cache() refuses
 *
 * Return: 0, or -EIO if the device keeps a cache that the disk does not flush.
 */
int virtblk_restore_cache(struct virtblk *blk)
{
	bool expected = blk->disk->queue->limits.features & BLK_FEAT_WRITE_CACHE;

	if (!virtio_has_feature(blk->vdev, VIRTIO_BLK_F_CONFIG_WCE) ||
	    virtblk_has_cache(blk->vdev) == expected)
		return 0;
	virtblk_write_wce(blk, expected);
	if (virtblk_has_cache(blk->vdev) == expected)
		return 0;
	dev_warn(&blk->vdev->dev, "[%s] the device does not take its cache's mode back\n",
		 blk->disk->disk_name);
	/* Flushes without a cache do no harm. */
	return expected ? 0 : -EIO;
}
