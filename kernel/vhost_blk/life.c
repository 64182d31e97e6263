// SPDX-License-Identifier: GPL-2.0-only
/*
 * The life of a device. Its open makes little; the parts of the vhost core follow when the number of
 * queues is known. Its end waits for the storage.
 */
#include <linux/anon_inodes.h>
#include <linux/file.h>
#include <linux/module.h>

#include "backend.h"
#include "queue.h"

/* The vhost core's part has a fixed number of queues: created when that number is known. */
static int vhost_blk_init_device(struct vhost_blk *blk, unsigned int num_queues)
{
	unsigned int i;

	lockdep_assert_held(&blk->create_mutex);
	blk->queues = kvcalloc(num_queues, sizeof(*blk->queues), GFP_KERNEL_ACCOUNT);
	if (!blk->queues)
		return -ENOMEM;
	for (i = 0; i < num_queues; i++) {
		vhost_blk_queue_init(blk, blk->queues + i);
		blk->vqs[i] = &blk->queues[i].vq;
	}
	vhost_dev_init(&blk->dev, blk->vqs, num_queues, UIO_MAXIOV, VHOST_BLK_WEIGHT,
		       VHOST_BLK_BYTE_WEIGHT, true, NULL);
	for (i = 0; i < num_queues; i++)
		vhost_blk_arrivals_init(blk->queues + i);
	/* A reader that sees the number sees the device; pairs with its smp_load_acquire(). */
	smp_store_release(&blk->num_queues, num_queues);
	return 0;
}

/**
 * vhost_blk_ensure_device - create the device with all queues, unless it exists
 * @blk: the device
 *
 * Return: 0; -ENOMEM.
 */
int vhost_blk_ensure_device(struct vhost_blk *blk)
{
	int err = 0;

	/* Pairs with vhost_blk_init_device(). */
	if (likely(smp_load_acquire(&blk->num_queues)))
		return 0;
	mutex_lock(&blk->create_mutex);
	if (!blk->num_queues)
		err = vhost_blk_init_device(blk, VHOST_BLK_QUEUES_MAX);
	mutex_unlock(&blk->create_mutex);
	return err;
}

/**
 * vhost_blk_create_device - create the device with a number of queues
 * @blk: the device
 * @num_queues: the number
 *
 * Return: 0; -EINVAL; -EBUSY if it exists; -ENOMEM.
 */
int vhost_blk_create_device(struct vhost_blk *blk, u32 num_queues)
{
	int err;

	if (!num_queues || num_queues > VHOST_BLK_QUEUES_MAX)
		return -EINVAL;
	mutex_lock(&blk->create_mutex);
	err = blk->num_queues ? -EBUSY : vhost_blk_init_device(blk, num_queues);
	mutex_unlock(&blk->create_mutex);
	return err;
}

static const struct file_operations vhost_blk_end_fops;

/**
 * vhost_blk_open - the open of /dev/vhost-blk
 * @inode: its node
 * @file: the file
 *
 * Return: 0; -ENOMEM; -ENFILE.
 */
int vhost_blk_open(struct inode *inode, struct file *file)
{
	struct vhost_blk *blk;

	blk = kvzalloc(sizeof(*blk), GFP_KERNEL_ACCOUNT);
	if (!blk)
		return -ENOMEM;
	blk->end_file = anon_inode_getfile("[vhost-blk]", &vhost_blk_end_fops, blk, O_RDWR);
	if (IS_ERR(blk->end_file)) {
		int err = PTR_ERR(blk->end_file);

		kvfree(blk);
		return err;
	}
	mutex_init(&blk->create_mutex);
	mutex_init(&blk->backend_mutex);
	spin_lock_init(&blk->serial_lock);
	spin_lock_init(&blk->failure_lock);
	vhost_blk_timing_init(blk);
	file->private_data = blk;
	return 0;
}

static void vhost_blk_destroy_device(struct vhost_blk *blk)
{
	WRITE_ONCE(blk->closing, true);
	vhost_blk_stop_polling(blk);
	mutex_lock(&blk->dev.mutex);
	vhost_blk_close_all(blk);
	vhost_blk_unshare_limits(blk);
	mutex_unlock(&blk->dev.mutex);
	vhost_dev_stop(&blk->dev);
	/* Waits for vhost_blk_end_io() of the last requests, which may have queued work. */
	synchronize_rcu();
	vhost_blk_cancel_orphans(blk);
	vhost_dev_flush(&blk->dev);
	vhost_dev_cleanup(&blk->dev);
	vhost_blk_unpin_memory(blk);
	vhost_blk_put_backend(blk->backend);
	kvfree(blk->queues);
}

static void vhost_blk_destroy(struct vhost_blk *blk)
{
	if (blk->num_queues)
		vhost_blk_destroy_device(blk);
	vhost_blk_set_failure_event(blk, VHOST_FILE_UNBIND);
	vhost_blk_timing_free(blk);
	kvfree(blk);
}

static void vhost_blk_close_work(struct work_struct *work)
{
	vhost_blk_destroy(container_of(work, struct vhost_blk, close_work));
	/* The exit of the module waits for the end of this function. */
	module_put(THIS_MODULE);
}

/*
 * Waits for the storage. A kernel thread must not: one thread closes the last descriptors of the
 * whole host that were in messages between sockets, or in memory maps (delayed_fput_work).
 */
static int vhost_blk_end(struct inode *inode, struct file *file)
{
	struct vhost_blk *blk = file->private_data;

	if (current->flags & PF_KTHREAD) {
		__module_get(THIS_MODULE);
		INIT_WORK(&blk->close_work, vhost_blk_close_work);
		queue_work(vhost_blk_wait_wq, &blk->close_work);
	} else {
		vhost_blk_destroy(blk);
	}
	return 0;
}

static const struct file_operations vhost_blk_end_fops = {
	.owner		= THIS_MODULE,
	.release	= vhost_blk_end,
};

/**
 * vhost_blk_close - the release of /dev/vhost-blk
 * @inode: its node
 * @file: the file
 *
 * fput() queues the release of end_file behind the other files of an exiting task. These close
 * before this one waits for storage that may need their release (a FUSE server, a userfaultfd).
 *
 * Return: 0.
 */
int vhost_blk_close(struct inode *inode, struct file *file)
{
	struct vhost_blk *blk = file->private_data;

	fput(blk->end_file);
	return 0;
}
