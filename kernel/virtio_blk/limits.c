// SPDX-License-Identifier: GPL-2.0-only
/*
 * From the device's configuration (section 5.2.4 of virtio 1.3) to the block layer's limits. The
 * device is not trusted: what makes no sense is replaced, and said.
 */
#include "virtio_blk.h"

/* Larger than any real disk's; also keeps the arithmetic below 32 bits. */
#define BLOCK_EXP_MAX	11

#define read_config(vdev, field, value)	\
	virtio_cread(vdev, struct virtio_blk_config, field, value)

/**
 * virtblk_validate() - looks at what the device offers before features are settled
 * @vdev: not yet driven
 *
 * Host-aware and not zoned devices are plain disks if the feature is not negotiated; host-managed
 * ones cannot be written to without knowing zones, and are refused.
 *
 * Return: -EINVAL if there is no configuration, -EOPNOTSUPP for host-managed zones.
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
	read_config(vdev, zoned.model, &model);
	if (model != VIRTIO_BLK_Z_NONE && model != VIRTIO_BLK_Z_HA) {
		dev_err(&vdev->dev, "zoned disks (model %u) are not supported by this driver\n",
			model);
		return -EOPNOTSUPP;
	}
	__virtio_clear_bit(vdev, VIRTIO_BLK_F_ZONED);
	return 0;
}

static int read_segments(struct virtblk *blk, struct queue_limits *lim)
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
	/* The block layer does not split pages. */
	if (blk->seg_bytes_max < PAGE_SIZE) {
		dev_err(&vdev->dev, "segments of at most %u bytes are too small; %lu are needed\n",
			blk->seg_bytes_max, PAGE_SIZE);
		return -EINVAL;
	}
	lim->max_segments = blk->seg_max;
	lim->max_segment_size = blk->seg_bytes_max;
	lim->max_hw_sectors = UINT_MAX;
	return 0;
}

static int read_block_size(struct virtio_device *vdev, struct queue_limits *lim)
{
	u32 size;

	if (virtio_cread_feature(vdev, VIRTIO_BLK_F_BLK_SIZE, struct virtio_blk_config, blk_size,
				 &size))
		return 0;
	if (!blk_validate_block_size(size)) {
		lim->logical_block_size = size;
		return 0;
	}
	/* A hint, says the specification; but devices that take it for more refuse parts of it. */
	if (size > PAGE_SIZE && is_power_of_2(size)) {
		dev_err(&vdev->dev, "blocks of %u bytes are too large for this kernel: %lu at most\n",
			size, PAGE_SIZE);
		return -EINVAL;
	}
	dev_warn(&vdev->dev, "blocks of %u bytes make no sense; taken as %u\n", size,
		 lim->logical_block_size);
	return 0;
}

static void read_topology(struct virtio_device *vdev, struct queue_limits *lim)
{
	u32 block = lim->logical_block_size;
	u8 exponent, alignment;
	u16 io_min;
	u32 io_opt;

	if (!virtio_has_feature(vdev, VIRTIO_BLK_F_TOPOLOGY))
		return;
	read_config(vdev, physical_block_exp, &exponent);
	read_config(vdev, alignment_offset, &alignment);
	read_config(vdev, min_io_size, &io_min);
	read_config(vdev, opt_io_size, &io_opt);
	if (exponent > BLOCK_EXP_MAX) {
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

/* A number of sectors to bytes, or 0. */
static u32 sectors_to_bytes(struct virtio_device *vdev, u32 sectors)
{
	if (sectors <= UINT_MAX >> SECTOR_SHIFT)
		return sectors << SECTOR_SHIFT;
	dev_warn(&vdev->dev, "a granularity of %u sectors makes no sense; ignored\n", sectors);
	return 0;
}

static void read_discard(struct virtblk *blk, struct queue_limits *lim)
{
	struct virtio_device *vdev = blk->vdev;
	u32 sectors, segments, alignment;

	if (!virtio_has_feature(vdev, VIRTIO_BLK_F_DISCARD))
		return;
	read_config(vdev, max_discard_sectors, &sectors);
	read_config(vdev, max_discard_seg, &segments);
	read_config(vdev, discard_sector_alignment, &alignment);
	/* 0 is used for no limit. */
	lim->max_hw_discard_sectors = sectors ?: UINT_MAX;
	lim->max_discard_segments = min(segments ?: blk->seg_max, VIRTBLK_RANGES_MAX);
	lim->discard_granularity = sectors_to_bytes(vdev, alignment) ?: lim->logical_block_size;
}

static void read_secure_erase(struct virtblk *blk, struct queue_limits *lim)
{
	struct virtio_device *vdev = blk->vdev;
	u32 sectors, segments, alignment;

	if (!virtio_has_feature(vdev, VIRTIO_BLK_F_SECURE_ERASE))
		return;
	read_config(vdev, max_secure_erase_sectors, &sectors);
	read_config(vdev, max_secure_erase_seg, &segments);
	read_config(vdev, secure_erase_sector_alignment, &alignment);
	if (!sectors || !segments || !sectors_to_bytes(vdev, alignment)) {
		dev_warn(&vdev->dev, "limits of secure erase of 0 make no sense; it is not used\n");
		return;
	}
	lim->max_secure_erase_sectors = sectors;
	/* The block layer has one granularity for both. */
	alignment = sectors_to_bytes(vdev, alignment);
	if (!lim->discard_granularity || alignment < lim->discard_granularity)
		lim->discard_granularity = alignment;
}

/**
 * virtblk_read_limits() - what the device can do
 * @blk: has its virtqueues; seg_max is what these can take
 * @lim: filled in for the disk
 *
 * Return: -EINVAL if no limits of the block layer describe the device.
 */
int virtblk_read_limits(struct virtblk *blk, struct queue_limits *lim)
{
	struct virtio_device *vdev = blk->vdev;
	u32 sectors;
	int err;

	lim->features = BLK_FEAT_ROTATIONAL;
	lim->logical_block_size = SECTOR_SIZE;
	err = read_segments(blk, lim);
	if (err)
		return err;
	err = read_block_size(vdev, lim);
	if (err)
		return err;
	read_topology(vdev, lim);
	read_discard(blk, lim);
	read_secure_erase(blk, lim);
	if (virtio_has_feature(vdev, VIRTIO_BLK_F_WRITE_ZEROES)) {
		read_config(vdev, max_write_zeroes_sectors, &sectors);
		lim->max_write_zeroes_sectors = sectors ?: UINT_MAX;
	}
	if (virtblk_has_cache(vdev))
		lim->features |= BLK_FEAT_WRITE_CACHE;
	if (!blk->use_bio)
		return 0;
	/* What blk-mq sets for its disks. */
	lim->features |= BLK_FEAT_IO_STAT | BLK_FEAT_NOWAIT;
	if (blk->poll_count)
		lim->features |= BLK_FEAT_POLL;
	/* One range a bio: those of several bios are not merged there. */
	lim->max_discard_segments = min_t(u16, lim->max_discard_segments, 1);
	return 0;
}
