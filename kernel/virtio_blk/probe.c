// SPDX-License-Identifier: GPL-2.0-only
/*
 * A device comes and goes.
 */
#include <linux/hdreg.h>
#include <linux/idr.h>
#include <linux/module.h>
#include <linux/slab.h>

#include "virtio_blk.h"

#define DISK_PREFIX	"vd"

static DEFINE_IDA(disk_indexes);

void virtblk_index_exit(void)
{
	ida_destroy(&disk_indexes);
}

/* vda to vdz, vdaa and so on: the numbers of base 26 that have no zero. */
static int set_disk_name(struct gendisk *disk, unsigned int index)
{
	char letters[8];
	char *first = letters + sizeof(letters) - 1;

	*first = '\0';
	for (;;) {
		if (first == letters)
			return -EINVAL;
		*--first = 'a' + index % 26;
		if (index < 26)
			break;
		index = index / 26 - 1;
	}
	snprintf(disk->disk_name, sizeof(disk->disk_name), DISK_PREFIX "%s", first);
	return 0;
}

static int geometry(struct virtblk *blk, struct hd_geometry *geo)
{
	int err = 0;

	mutex_lock(&blk->vdev_mutex);
	if (!blk->vdev) {
		err = -ENXIO;
	} else if (virtio_has_feature(blk->vdev, VIRTIO_BLK_F_GEOMETRY)) {
		virtio_cread(blk->vdev, struct virtio_blk_config, geometry.cylinders,
			     &geo->cylinders);
		virtio_cread(blk->vdev, struct virtio_blk_config, geometry.heads, &geo->heads);
		virtio_cread(blk->vdev, struct virtio_blk_config, geometry.sectors, &geo->sectors);
	} else {
		/* What everybody says who has none. */
		geo->heads = 1 << 6;
		geo->sectors = 1 << 5;
		geo->cylinders = get_capacity(blk->disk) >> 11;
	}
	mutex_unlock(&blk->vdev_mutex);
	return err;
}

#ifdef VIRTBLK_GETGEO_TAKES_DISK
static int virtblk_getgeo(struct gendisk *disk, struct hd_geometry *geo)
{
	return geometry(disk->private_data, geo);
}
#else
static int virtblk_getgeo(struct block_device *bdev, struct hd_geometry *geo)
{
	return geometry(bdev->bd_disk->private_data, geo);
}
#endif

/* The last user of the disk is gone, which may be long after its device. */
void virtblk_free_disk(struct gendisk *disk)
{
	struct virtblk *blk = disk->private_data;

	ida_free(&disk_indexes, blk->index);
	mutex_destroy(&blk->vdev_mutex);
	kfree(blk);
}

const struct block_device_operations virtblk_rq_fops = {
	.owner = THIS_MODULE,
	.getgeo = virtblk_getgeo,
	.free_disk = virtblk_free_disk,
};

const struct block_device_operations virtblk_bio_fops = {
	.owner = THIS_MODULE,
	.submit_bio = virtblk_submit_bio,
	.poll_bio = virtblk_poll_bio,
	.getgeo = virtblk_getgeo,
	.free_disk = virtblk_free_disk,
};

static struct virtblk *alloc_virtblk(struct virtio_device *vdev)
{
	struct virtblk *blk = kzalloc(sizeof(*blk), GFP_KERNEL);
	int index;

	if (!blk)
		return ERR_PTR(-ENOMEM);
	index = ida_alloc_max(&disk_indexes, (1 << (MINORBITS - VIRTBLK_MINOR_BITS)) - 1,
			      GFP_KERNEL);
	if (index < 0) {
		kfree(blk);
		return ERR_PTR(index);
	}
	blk->index = index;
	blk->vdev = vdev;
	blk->use_bio = virtblk_param_use_bio();
	blk->starting = true;
	mutex_init(&blk->cache_mutex);
	mutex_init(&blk->vdev_mutex);
	INIT_WORK(&blk->config_work, virtblk_config_work);
	INIT_WORK(&blk->cache_work, virtblk_cache_work);
	INIT_WORK(&blk->abort_work, virtblk_abort_work);
	INIT_DELAYED_WORK(&blk->watch, virtblk_watch);
	vdev->priv = blk;
	return blk;
}

static struct gendisk *alloc_rq_disk(struct virtblk *blk, struct queue_limits *lim)
{
	struct blk_mq_tag_set *set = &blk->tag_set;
	struct gendisk *disk;
	int err;

	set->ops = &virtblk_mq_ops;
	set->queue_depth = virtblk_depth(blk);
	set->numa_node = NUMA_NO_NODE;
	set->flags = VIRTBLK_TAG_SET_FLAGS;
	set->cmd_size = sizeof(struct virtblk_request);
	set->driver_data = blk;
	set->timeout = VIRTBLK_TIMEOUT;
	set->nr_hw_queues = blk->queue_count;
	/* The map of polled queues is the third one. */
	set->nr_maps = blk->poll_count ? HCTX_MAX_TYPES : 1;
	err = blk_mq_alloc_tag_set(set);
	if (err)
		return ERR_PTR(err);
	disk = blk_mq_alloc_disk(set, lim, blk);
	if (IS_ERR(disk))
		blk_mq_free_tag_set(set);
	return disk;
}

static struct gendisk *alloc_bio_disk(struct virtblk *blk, struct queue_limits *lim)
{
	unsigned int i;
	int err;

	for (i = 0; i < blk->queue_count; i++) {
		err = virtblk_alloc_slots(&blk->queues[i]);
		if (err)
			return ERR_PTR(err);
	}
	return blk_alloc_disk(lim, NUMA_NO_NODE);
}

static void put_new_disk(struct virtblk *blk)
{
	put_disk(blk->disk);
	if (!blk->use_bio)
		blk_mq_free_tag_set(&blk->tag_set);
}

static int alloc_disk(struct virtblk *blk)
{
	struct queue_limits lim = { };
	struct gendisk *disk;
	int err;

	err = virtblk_read_limits(blk, &lim);
	if (err)
		return err;
	disk = blk->use_bio ? alloc_bio_disk(blk, &lim) : alloc_rq_disk(blk, &lim);
	if (IS_ERR(disk))
		return PTR_ERR(disk);
	WRITE_ONCE(blk->disk, disk);
	disk->major = virtblk_major;
	disk->first_minor = blk->index << VIRTBLK_MINOR_BITS;
	disk->minors = 1 << VIRTBLK_MINOR_BITS;
	disk->private_data = blk;
	disk->fops = blk->use_bio ? &virtblk_bio_fops : &virtblk_rq_fops;
	return 0;
}

/**
 * virtblk_probe() - makes a disk of a device
 * @vdev: with settled features
 *
 * Return: a negative errno.
 */
int virtblk_probe(struct virtio_device *vdev)
{
	struct virtblk *blk = alloc_virtblk(vdev);
	int err;

	if (IS_ERR(blk))
		return PTR_ERR(blk);
	err = virtblk_alloc_queues(blk);
	if (err)
		goto no_queues;
	err = alloc_disk(blk);
	if (err)
		goto no_disk;
	err = set_disk_name(blk->disk, blk->index);
	if (err)
		goto not_added;
	if (virtio_has_feature(vdev, VIRTIO_BLK_F_RO))
		set_disk_ro(blk->disk, true);
	virtblk_update_capacity(blk, false);
	dev_info(&vdev->dev, "[%s] %s path, %u/%u interrupt/polled queues\n", blk->disk->disk_name,
		 blk->use_bio ? "bio" : "request", blk->queue_count - blk->poll_count,
		 blk->poll_count);
	virtio_device_ready(vdev);
	virtblk_started(blk);
	err = device_add_disk(&vdev->dev, blk->disk, virtblk_attr_groups);
	if (err)
		goto not_added;
	virtblk_await_start(blk);
	return 0;

not_added:
	WRITE_ONCE(blk->removing, true);
	virtblk_reset(vdev);
	cancel_delayed_work_sync(&blk->watch);
	/* From here on no interrupt queues the work any more, nor looks at the disk. */
	virtblk_del_queues(blk, vdev);
	cancel_work_sync(&blk->abort_work);
	put_new_disk(blk);
	goto no_virtqueues;
no_disk:
	virtblk_del_queues(blk, vdev);
	cancel_work_sync(&blk->abort_work);
no_virtqueues:
	virtblk_free_queues(blk);
no_queues:
	vdev->priv = NULL;
	ida_free(&disk_indexes, blk->index);
	kfree(blk);
	return err;
}

/**
 * virtblk_remove() - the device goes, or another driver takes it
 * @vdev: may be gone already, with requests
 *
 * All requests end, by the device or with an error; see abort.c for devices that do not answer.
 */
void virtblk_remove(struct virtio_device *vdev)
{
	struct virtblk *blk = vdev->priv;

	blk->removing_since = jiffies;
	/* Pairs with report_silent(), which needs to know since when. */
	smp_store_release(&blk->removing, true);
	virtblk_cancel_config(blk);
	virtblk_started(blk);
	virtblk_fail_kept(blk);
	/* So the bus says that the device is gone: nobody will answer. */
	if (blk->queues[0].vq && virtqueue_is_broken(blk->queues[0].vq)) {
		virtblk_give_up(blk);
		/* After it: it waits for what the file system has under way. */
		blk_mark_disk_dead(blk->disk);
	}
	virtblk_start_watch(blk);
	del_gendisk(blk->disk);
	WRITE_ONCE(blk->watching, true);
	cancel_delayed_work_sync(&blk->watch);
	cancel_work_sync(&blk->abort_work);
	if (!blk->use_bio)
		blk_mq_free_tag_set(&blk->tag_set);

	/* Who has put the last requests into a ring may be about to kick. */
	synchronize_rcu();
	mutex_lock(&blk->vdev_mutex);
	virtblk_reset(vdev);
	blk->vdev = NULL;
	mutex_unlock(&blk->vdev_mutex);
	virtblk_cancel_config(blk);
	virtblk_del_queues(blk, vdev);
	/* Only now does no interrupt queue it any more. */
	cancel_work_sync(&blk->abort_work);
	virtblk_free_queues(blk);
	put_disk(blk->disk);
}
