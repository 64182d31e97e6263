// SPDX-License-Identifier: GPL-2.0-only
/*
 * The module, and the life of a disk from probe to removal. A drop-in for the kernel's own
 * virtio_blk: same names, same parameters, and two more ways to do I/O.
 */
#include <linux/hdreg.h>
#include <linux/idr.h>
#include <linux/module.h>
#include <linux/slab.h>

#include "virtio_blk.h"

#define VIRTBLK_DISK_PREFIX	"vd"

static bool use_bio;
module_param(use_bio, bool, 0444);
MODULE_PARM_DESC(use_bio,
		 "Give bios to the device without requests, tags and scheduler. Default: 0.");

struct workqueue_struct *virtblk_wq;
static int virtblk_major;
static enum cpuhp_state virtblk_cpu_state;
static DEFINE_IDA(virtblk_disk_indexes);

/* Names the disk vda to vdz, vdaa and so on: numbers of base 26 without a zero. */
static int virtblk_set_disk_name(struct gendisk *disk, unsigned int index)
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
	snprintf(disk->disk_name, sizeof(disk->disk_name), VIRTBLK_DISK_PREFIX "%s", first);
	return 0;
}

#ifdef VIRTBLK_GETGEO_TAKES_DISK
static int virtblk_getgeo(struct gendisk *disk, struct hd_geometry *geo)
{
	return virtblk_read_geometry(disk->private_data, geo);
}
#else
static int virtblk_getgeo(struct block_device *bdev, struct hd_geometry *geo)
{
	return virtblk_read_geometry(bdev->bd_disk->private_data, geo);
}
#endif

static void virtblk_free(struct virtblk *blk)
{
	ida_free(&virtblk_disk_indexes, blk->index);
	mutex_destroy(&blk->cache_mutex);
	mutex_destroy(&blk->vdev_mutex);
	kfree(blk);
}

/* The last user has closed the disk, perhaps long after its device was removed. */
static void virtblk_free_disk(struct gendisk *disk)
{
	virtblk_free(disk->private_data);
}

static const struct block_device_operations virtblk_rq_fops = {
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

static const struct blk_mq_ops virtblk_mq_ops = {
	.queue_rq = virtblk_queue_rq,
#ifdef VIRTBLK_HAS_RQ_LIST
	.queue_rqs = virtblk_queue_rqs,
#endif
	.commit_rqs = virtblk_commit_rqs,
	.init_request = virtblk_init_rq,
	.complete = virtblk_complete_rq,
	.timeout = virtblk_timeout,
	.map_queues = virtblk_rq_map_queues,
	.poll = virtblk_poll,
};

static struct virtblk *virtblk_alloc(struct virtio_device *vdev)
{
	struct virtblk *blk = kzalloc(sizeof(*blk), GFP_KERNEL);
	int index;

	if (!blk)
		return ERR_PTR(-ENOMEM);
	index = ida_alloc_max(&virtblk_disk_indexes, (1 << (MINORBITS - VIRTBLK_MINOR_BITS)) - 1,
			      GFP_KERNEL);
	if (index < 0) {
		kfree(blk);
		return ERR_PTR(index);
	}
	blk->index = index;
	blk->vdev = vdev;
	blk->state = VIRTBLK_NEW;
	blk->use_bio = use_bio;
	mutex_init(&blk->cache_mutex);
	mutex_init(&blk->vdev_mutex);
	INIT_WORK(&blk->config_work, virtblk_config_work);
	INIT_WORK(&blk->abort_work, virtblk_abort_work);
	INIT_DELAYED_WORK(&blk->watchdog, virtblk_watchdog);
	vdev->priv = blk;
	return blk;
}

static struct gendisk *virtblk_alloc_rq_disk(struct virtblk *blk, struct queue_limits *lim)
{
	struct blk_mq_tag_set *set = &blk->tag_set;
	struct gendisk *disk;
	int err;

	set->ops = &virtblk_mq_ops;
	set->queue_depth = blk->depth;
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

static struct gendisk *virtblk_alloc_bio_disk(struct virtblk *blk, struct queue_limits *lim)
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

static int virtblk_alloc_disk(struct virtblk *blk)
{
	struct queue_limits lim = { };
	struct gendisk *disk;
	int err;

	err = virtblk_read_limits(blk, &lim);
	if (err)
		return err;
	disk = blk->use_bio ? virtblk_alloc_bio_disk(blk, &lim) : virtblk_alloc_rq_disk(blk, &lim);
	if (IS_ERR(disk))
		return PTR_ERR(disk);
	disk->major = virtblk_major;
	disk->first_minor = blk->index << VIRTBLK_MINOR_BITS;
	disk->minors = 1 << VIRTBLK_MINOR_BITS;
	disk->private_data = blk;
	disk->fops = blk->use_bio ? &virtblk_bio_fops : &virtblk_rq_fops;
	/* Pairs with virtblk_interrupt(), which needs all of it. */
	smp_store_release(&blk->disk, disk);
	return 0;
}

/* Frees a disk that was not added: the block layer does not call virtblk_free_disk() for it. */
static void virtblk_put_new_disk(struct virtblk *blk)
{
	put_disk(blk->disk);
	if (!blk->use_bio)
		blk_mq_free_tag_set(&blk->tag_set);
}

/* The bio path looks after its queues when CPUs go offline; blk-mq does so for the request path. */
static void virtblk_follow_cpus(struct virtblk *blk)
{
	if (blk->use_bio)
		cpuhp_state_add_instance_nocalls(virtblk_cpu_state, &blk->cpu_node);
}

static void virtblk_unfollow_cpus(struct virtblk *blk)
{
	if (blk->use_bio)
		cpuhp_state_remove_instance_nocalls(virtblk_cpu_state, &blk->cpu_node);
}

/**
 * virtblk_probe() - makes a disk of a device, without I/O
 * @vdev: with settled features
 *
 * virtblk_scan() adds the disk.
 *
 * Return: 0, or a negative errno.
 */
static int virtblk_probe(struct virtio_device *vdev)
{
	struct virtblk *blk = virtblk_alloc(vdev);
	int err;

	if (IS_ERR(blk))
		return PTR_ERR(blk);
	err = virtblk_alloc_queues(blk);
	if (err)
		goto no_queues;
	err = virtblk_alloc_disk(blk);
	if (err)
		goto no_disk;
	err = virtblk_set_disk_name(blk->disk, blk->index);
	if (err)
		goto no_disk;
	if (virtio_has_feature(vdev, VIRTIO_BLK_F_RO))
		set_disk_ro(blk->disk, true);
	dev_info(&vdev->dev, "[%s] %s path, %u/%u interrupt/polled queues\n", blk->disk->disk_name,
		 blk->use_bio ? "bio" : "request", blk->queue_count - blk->poll_count,
		 blk->poll_count);
	return 0;

no_disk:
	virtblk_reset(vdev);
	virtblk_del_queues(blk, vdev);
	/* No interrupt queues it any more, or uses the disk. */
	cancel_work_sync(&blk->abort_work);
	if (blk->disk)
		virtblk_put_new_disk(blk);
	virtblk_free_queues(blk);
no_queues:
	vdev->priv = NULL;
	virtblk_free(blk);
	return err;
}

/**
 * virtblk_scan() - adds the disk, which reads its partition table
 * @vdev: probed, and started by the virtio core
 *
 * The core does not touch the device's status after this call starts. So the device may be given up
 * from here on: it may break its ring, vanish, or be silent, from the first request on.
 */
static void virtblk_scan(struct virtio_device *vdev)
{
	struct virtblk *blk = vdev->priv;
	int err;

	mutex_lock(&blk->vdev_mutex);
	virtblk_set_state(blk, VIRTBLK_LIVE);
	mutex_unlock(&blk->vdev_mutex);
	/* A ring may have broken before, without any request. */
	queue_work(virtblk_wq, &blk->abort_work);
	/* Not before: a device that was not started reports no changes. */
	virtblk_update_capacity(blk, false);
	err = device_add_disk(&vdev->dev, blk->disk, virtblk_attr_groups);
	if (err) {
		/* The probe has succeeded already: the driver keeps a device without a disk. */
		dev_err(&vdev->dev, "[%s] the disk cannot be added: error %d\n",
			blk->disk->disk_name, err);
		return;
	}
	blk->added = true;
	virtblk_follow_cpus(blk);
}

static void virtblk_remove_disk(struct virtblk *blk)
{
	/* The bus breaks the rings of a device that is gone: it will not answer. */
	if (virtblk_give_up(blk))
		/* Afterwards: this waits for the file system's I/O. */
		blk_mark_disk_dead(blk->disk);
	del_gendisk(blk->disk);
	virtblk_unfollow_cpus(blk);
}

/**
 * virtblk_remove() - removes the disk: the device goes, or another driver takes it
 * @vdev: may be gone already, with requests in flight
 *
 * All requests end, by the device or with an error; virtblk_give_up() is for devices without
 * answers.
 */
static void virtblk_remove(struct virtio_device *vdev)
{
	struct virtblk *blk = vdev->priv;

	virtblk_fail_held(blk);
	virtblk_begin_drain(blk);
	if (blk->added)
		virtblk_remove_disk(blk);
	/* Waits for submitters of requests that have ended: they may still kick, and start the watchdog. */
	synchronize_rcu();
	cancel_delayed_work_sync(&blk->watchdog);
	cancel_work_sync(&blk->abort_work);
	if (blk->added && !blk->use_bio)
		blk_mq_free_tag_set(&blk->tag_set);

	mutex_lock(&blk->vdev_mutex);
	virtblk_reset(vdev);
	virtblk_hide_status(vdev);
	blk->vdev = NULL;
	virtblk_set_state(blk, VIRTBLK_GONE);
	mutex_unlock(&blk->vdev_mutex);
	virtblk_del_queues(blk, vdev);
	/* Again: until the virtqueues were deleted an interrupt could queue it. */
	cancel_work_sync(&blk->abort_work);
	virtblk_free_queues(blk);
	if (blk->added) {
		put_disk(blk->disk);
	} else {
		virtblk_put_new_disk(blk);
		virtblk_free(blk);
	}
}

static const struct virtio_device_id virtblk_id_table[] = {
	{ VIRTIO_ID_BLOCK, VIRTIO_DEV_ANY_ID },
	{ 0 },
};

/* virtblk_validate() looks at VIRTIO_BLK_F_ZONED, and then clears it. */
static const unsigned int virtblk_features[] = {
	VIRTIO_BLK_F_SEG_MAX, VIRTIO_BLK_F_SIZE_MAX, VIRTIO_BLK_F_GEOMETRY, VIRTIO_BLK_F_RO,
	VIRTIO_BLK_F_BLK_SIZE, VIRTIO_BLK_F_FLUSH, VIRTIO_BLK_F_TOPOLOGY, VIRTIO_BLK_F_CONFIG_WCE,
	VIRTIO_BLK_F_MQ, VIRTIO_BLK_F_DISCARD, VIRTIO_BLK_F_WRITE_ZEROES,
	VIRTIO_BLK_F_SECURE_ERASE, VIRTIO_BLK_F_ZONED,
};

static const unsigned int virtblk_features_legacy[] = {
	VIRTIO_BLK_F_SEG_MAX, VIRTIO_BLK_F_SIZE_MAX, VIRTIO_BLK_F_GEOMETRY, VIRTIO_BLK_F_RO,
	VIRTIO_BLK_F_BLK_SIZE, VIRTIO_BLK_F_FLUSH, VIRTIO_BLK_F_TOPOLOGY, VIRTIO_BLK_F_CONFIG_WCE,
	VIRTIO_BLK_F_MQ, VIRTIO_BLK_F_DISCARD, VIRTIO_BLK_F_WRITE_ZEROES,
	VIRTIO_BLK_F_SECURE_ERASE,
};

static struct virtio_driver virtblk_driver = {
	.feature_table = virtblk_features,
	.feature_table_size = ARRAY_SIZE(virtblk_features),
	.feature_table_legacy = virtblk_features_legacy,
	.feature_table_size_legacy = ARRAY_SIZE(virtblk_features_legacy),
	.driver.name = KBUILD_MODNAME,
	.id_table = virtblk_id_table,
	.validate = virtblk_validate,
	.probe = virtblk_probe,
	.scan = virtblk_scan,
	.remove = virtblk_remove,
	.config_changed = virtblk_config_changed,
#ifdef CONFIG_PM_SLEEP
	.freeze = virtblk_suspend,
	.restore = virtblk_resume,
#endif
#ifdef VIRTBLK_HAS_RESET_PREPARE
	.reset_prepare = virtblk_suspend,
	.reset_done = virtblk_resume,
#endif
};

static int __init virtblk_init(void)
{
	int err;

	virtblk_wq = alloc_workqueue("virtio-blk", WQ_UNBOUND | WQ_MEM_RECLAIM, 0);
	if (!virtblk_wq)
		return -ENOMEM;
	virtblk_major = register_blkdev(0, "virtblk");
	if (virtblk_major < 0) {
		err = virtblk_major;
		goto no_major;
	}
	err = cpuhp_setup_state_multi(CPUHP_BP_PREPARE_DYN, "block/virtio_blk:dead", NULL,
				      virtblk_cpu_dead);
	if (err < 0)
		goto no_cpus;
	virtblk_cpu_state = err;
	err = register_virtio_driver(&virtblk_driver);
	if (err)
		goto no_driver;
	return 0;

no_driver:
	cpuhp_remove_multi_state(virtblk_cpu_state);
no_cpus:
	unregister_blkdev(virtblk_major, "virtblk");
no_major:
	destroy_workqueue(virtblk_wq);
	return err;
}

static void __exit virtblk_exit(void)
{
	unregister_virtio_driver(&virtblk_driver);
	cpuhp_remove_multi_state(virtblk_cpu_state);
	unregister_blkdev(virtblk_major, "virtblk");
	destroy_workqueue(virtblk_wq);
	ida_destroy(&virtblk_disk_indexes);
	virtblk_free_hidden();
}

module_init(virtblk_init);
module_exit(virtblk_exit);

MODULE_DEVICE_TABLE(virtio, virtblk_id_table);
MODULE_DESCRIPTION("Virtio block driver with a request path, a bio path and polled queues");
MODULE_LICENSE("GPL");
/* Newer than the kernel's own driver, which has no version: DKMS replaces only older modules. */
MODULE_VERSION("0.1.0");
