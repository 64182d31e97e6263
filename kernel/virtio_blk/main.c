// SPDX-License-Identifier: GPL-2.0-only
/*
 * The module: parameters, the ids of devices it drives, registration. A drop-in for the kernel's
 * own virtio_blk: same names, same parameters, and two more ways to do I/O.
 */
#define pr_fmt(fmt) KBUILD_MODNAME ": " fmt

#include <linux/module.h>

#include "virtio_blk.h"

static bool use_bio;
module_param(use_bio, bool, 0444);
MODULE_PARM_DESC(use_bio,
		 "Give bios to the device without requests, tags and scheduler. Default: 0.");

static unsigned int num_request_queues;
module_param(num_request_queues, uint, 0644);
MODULE_PARM_DESC(num_request_queues,
		 "At most so many queues for a disk; never more than CPUs. 0: no limit. Default: 0.");

static unsigned int poll_queues;
module_param(poll_queues, uint, 0644);
MODULE_PARM_DESC(poll_queues,
		 "So many of a disk's queues are polled, without interrupts; not all. Default: 0.");

static unsigned int queue_depth;
module_param(queue_depth, uint, 0444);
MODULE_PARM_DESC(queue_depth,
		 "Requests of a queue at once; 0: as many as its ring holds. Default: 0.");

int virtblk_major;
struct workqueue_struct *virtblk_wq;

unsigned int virtblk_param_queues(void)
{
	unsigned int wanted = READ_ONCE(num_request_queues);

	return min_not_zero(wanted, nr_cpu_ids);
}

unsigned int virtblk_param_poll_queues(void)
{
	return READ_ONCE(poll_queues);
}

unsigned int virtblk_param_depth(void)
{
	return queue_depth;
}

bool virtblk_param_use_bio(void)
{
	return use_bio;
}

static int check_parameters(void)
{
	if (num_request_queues && poll_queues >= num_request_queues) {
		pr_err("poll_queues=%u leaves no queue with interrupts of num_request_queues=%u\n",
		       poll_queues, num_request_queues);
		return -EINVAL;
	}
	if (queue_depth > BLK_MQ_MAX_DEPTH) {
		pr_err("queue_depth=%u: at most %u requests are possible\n", queue_depth,
		       BLK_MQ_MAX_DEPTH);
		return -EINVAL;
	}
	if (use_bio && queue_depth > VIRTBLK_SLOTS_MAX) {
		pr_err("queue_depth=%u: with use_bio=1 at most %u requests are possible\n",
		       queue_depth, VIRTBLK_SLOTS_MAX);
		return -EINVAL;
	}
	return 0;
}

static const struct virtio_device_id id_table[] = {
	{ VIRTIO_ID_BLOCK, VIRTIO_DEV_ANY_ID },
	{ 0 },
};

/* VIRTIO_BLK_F_ZONED is looked at and then cleared, by virtblk_validate(). */
static const unsigned int features[] = {
	VIRTIO_BLK_F_SEG_MAX, VIRTIO_BLK_F_SIZE_MAX, VIRTIO_BLK_F_GEOMETRY, VIRTIO_BLK_F_RO,
	VIRTIO_BLK_F_BLK_SIZE, VIRTIO_BLK_F_FLUSH, VIRTIO_BLK_F_TOPOLOGY, VIRTIO_BLK_F_CONFIG_WCE,
	VIRTIO_BLK_F_MQ, VIRTIO_BLK_F_DISCARD, VIRTIO_BLK_F_WRITE_ZEROES,
	VIRTIO_BLK_F_SECURE_ERASE, VIRTIO_BLK_F_ZONED,
};

static const unsigned int features_legacy[] = {
	VIRTIO_BLK_F_SEG_MAX, VIRTIO_BLK_F_SIZE_MAX, VIRTIO_BLK_F_GEOMETRY, VIRTIO_BLK_F_RO,
	VIRTIO_BLK_F_BLK_SIZE, VIRTIO_BLK_F_FLUSH, VIRTIO_BLK_F_TOPOLOGY, VIRTIO_BLK_F_CONFIG_WCE,
	VIRTIO_BLK_F_MQ, VIRTIO_BLK_F_DISCARD, VIRTIO_BLK_F_WRITE_ZEROES,
	VIRTIO_BLK_F_SECURE_ERASE,
};

static struct virtio_driver virtblk_driver = {
	.feature_table = features,
	.feature_table_size = ARRAY_SIZE(features),
	.feature_table_legacy = features_legacy,
	.feature_table_size_legacy = ARRAY_SIZE(features_legacy),
	.driver.name = KBUILD_MODNAME,
	.id_table = id_table,
	.validate = virtblk_validate,
	.probe = virtblk_probe,
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

	err = check_parameters();
	if (err)
		return err;
	/* Retries and aborts are what I/O may wait for when memory is short. */
	virtblk_wq = alloc_workqueue("virtio-blk", WQ_UNBOUND | WQ_MEM_RECLAIM, 0);
	if (!virtblk_wq)
		return -ENOMEM;
	virtblk_major = register_blkdev(0, "virtblk");
	if (virtblk_major < 0) {
		err = virtblk_major;
		goto no_major;
	}
	err = register_virtio_driver(&virtblk_driver);
	if (err)
		goto no_driver;
	return 0;

no_driver:
	unregister_blkdev(virtblk_major, "virtblk");
no_major:
	destroy_workqueue(virtblk_wq);
	return err;
}

static void __exit virtblk_exit(void)
{
	unregister_virtio_driver(&virtblk_driver);
	unregister_blkdev(virtblk_major, "virtblk");
	destroy_workqueue(virtblk_wq);
	virtblk_index_exit();
}

module_init(virtblk_init);
module_exit(virtblk_exit);

MODULE_DEVICE_TABLE(virtio, id_table);
MODULE_DESCRIPTION("Virtio block driver with a request path, a bio path and polled queues");
MODULE_LICENSE("GPL");
