// SPDX-License-Identifier: GPL-2.0-only
/*
 * /dev/vhost-blk: open, close, ioctls. All but the ones of include/uapi/vhost_blk.h are the vhost
 * core's; this file says what must stand still while the core makes a change.
 */
#include <linux/compat.h>
#include <linux/miscdevice.h>
#include <linux/module.h>

#include "vhost_blk.h"

#define CREATE_TRACE_POINTS
#include "trace.h"

#define BIT_OF(feature)	(1ULL << (feature))

static const u64 vhost_blk_features =
	BIT_OF(VIRTIO_F_VERSION_1) | BIT_OF(VIRTIO_F_ANY_LAYOUT) |
	BIT_OF(VIRTIO_RING_F_INDIRECT_DESC) | BIT_OF(VIRTIO_RING_F_EVENT_IDX) |
	BIT_OF(VIRTIO_F_ACCESS_PLATFORM) | BIT_OF(VHOST_F_LOG_ALL) |
	BIT_OF(VIRTIO_BLK_F_SEG_MAX) | BIT_OF(VIRTIO_BLK_F_RO) | BIT_OF(VIRTIO_BLK_F_BLK_SIZE) |
	BIT_OF(VIRTIO_BLK_F_FLUSH) | BIT_OF(VIRTIO_BLK_F_TOPOLOGY) |
	BIT_OF(VIRTIO_BLK_F_CONFIG_WCE) | BIT_OF(VIRTIO_BLK_F_MQ) |
	BIT_OF(VIRTIO_BLK_F_DISCARD) | BIT_OF(VIRTIO_BLK_F_WRITE_ZEROES) |
	BIT_OF(VIRTIO_BLK_F_SECURE_ERASE);

static const u64 vhost_blk_backend_features = BIT_OF(VHOST_BACKEND_F_IOTLB_MSG_V2);

unsigned long vhost_blk_inflight_max = 256UL << 20;
module_param_named(inflight_bytes_max, vhost_blk_inflight_max, ulong, 0644);
MODULE_PARM_DESC(inflight_bytes_max,
		 "most data bytes of a device in flight, whose pages are pinned; more wait in the ring");

static int vhost_blk_open(struct inode *inode, struct file *file)
{
	struct vhost_blk *blk;
	unsigned int i;

	blk = kvzalloc(sizeof(*blk), GFP_KERNEL_ACCOUNT);
	if (!blk)
		return -ENOMEM;
	blk->queues = kvcalloc(VHOST_BLK_QUEUES_MAX, sizeof(*blk->queues), GFP_KERNEL_ACCOUNT);
	if (!blk->queues) {
		kvfree(blk);
		return -ENOMEM;
	}
	spin_lock_init(&blk->serial_lock);
	for (i = 0; i < VHOST_BLK_QUEUES_MAX; i++) {
		vhost_blk_queue_init(blk, blk->queues + i);
		blk->vqs[i] = &blk->queues[i].vq;
	}
	vhost_dev_init(&blk->dev, blk->vqs, VHOST_BLK_QUEUES_MAX, UIO_MAXIOV, VHOST_BLK_WEIGHT,
		       VHOST_BLK_BYTE_WEIGHT, true, NULL);
	file->private_data = blk;
	return 0;
}

/* Nothing is in flight any more, so nothing is left for them to do. */
static void cancel_orphans(struct vhost_blk *blk)
{
	unsigned int i;

	for (i = 0; i < VHOST_BLK_QUEUES_MAX; i++)
		cancel_delayed_work_sync(&blk->queues[i].orphan_work);
}

static int vhost_blk_close(struct inode *inode, struct file *file)
{
	struct vhost_blk *blk = file->private_data;

	WRITE_ONCE(blk->closing, true);
	mutex_lock(&blk->dev.mutex);
	vhost_blk_stop_all(blk);
	mutex_unlock(&blk->dev.mutex);
	vhost_dev_stop(&blk->dev);
	/* Ends vhost_blk_end_io() of the last requests, which may have queued work. */
	synchronize_rcu();
	cancel_orphans(blk);
	vhost_dev_flush(&blk->dev);
	vhost_dev_cleanup(&blk->dev);
	vhost_blk_unpin_memory(blk);
	vhost_blk_put_backend(blk->backend);
	kvfree(blk->queues);
	kvfree(blk);
	return 0;
}

static bool any_queue_runs(struct vhost_blk *blk)
{
	unsigned int i;

	for (i = 0; i < VHOST_BLK_QUEUES_MAX; i++)
		if (vhost_blk_runs(blk->queues + i))
			return true;
	return false;
}

/* Requests that were taken before the change end before it is reported. */
static int set_features(struct vhost_blk *blk, u64 features)
{
	bool iotlb = features & BIT_OF(VIRTIO_F_ACCESS_PLATFORM);
	unsigned int i;
	int err;

	if (features & ~vhost_blk_features)
		return -EOPNOTSUPP;
	if (features & BIT_OF(VHOST_F_LOG_ALL) && !vhost_log_access_ok(&blk->dev))
		return -EFAULT;
	if (iotlb != !!blk->dev.iotlb) {
		/* The addresses of the rings would mean something else, and nobody checked them. */
		if (any_queue_runs(blk))
			return -EBUSY;
		err = iotlb ? vhost_init_device_iotlb(&blk->dev) : 0;
		if (err)
			return err;
		if (!iotlb)
			vhost_clear_device_iotlb(&blk->dev);
	}
	for (i = 0; i < VHOST_BLK_QUEUES_MAX; i++) {
		if (mutex_lock_killable(&blk->queues[i].vq.mutex))
			return -EINTR;
		vhost_blk_set_acked_features(&blk->queues[i].vq, features);
		mutex_unlock(&blk->queues[i].vq.mutex);
	}
	return vhost_blk_drain_all(blk);
}

/* Read one by one by the queues, which need not see them change together. */
static void take_options(struct vhost_blk *blk, const struct vhost_blk_options *opt)
{
	WRITE_ONCE(blk->opt.max_discard_sectors, opt->max_discard_sectors);
	WRITE_ONCE(blk->opt.max_write_zeroes_sectors, opt->max_write_zeroes_sectors);
	WRITE_ONCE(blk->opt.max_secure_erase_sectors, opt->max_secure_erase_sectors);
	WRITE_ONCE(blk->opt.flags, opt->flags);
}

static int set_options(struct vhost_blk *blk, void __user *argp)
{
	struct vhost_blk_options opt;
	bool pin, pinned = blk->pinned, quiet;
	u32 size;
	int err;

	if (get_user(size, (u32 __user *)argp))
		return -EFAULT;
	if (size < offsetofend(struct vhost_blk_options, flags) || size > PAGE_SIZE)
		return -EINVAL;
	err = copy_struct_from_user(&opt, sizeof(opt), argp, size);
	if (err)
		return err;
	if (opt.flags & ~VHOST_BLK_OPTIONS || opt.reserved)
		return -EINVAL;

	pin = opt.flags & VHOST_BLK_OPT_PIN_MEMORY;
	/* One that is not polled may wait for a tag that polled ones have: they must not meet. */
	quiet = pin != pinned || (opt.flags ^ blk->opt.flags) & VHOST_BLK_OPT_IOPOLL;
	err = quiet ? vhost_blk_pause_all(blk) : 0;
	if (err)
		return err;
	if (pin && !pinned)
		err = vhost_blk_pin_memory(blk);
	else if (!pin)
		vhost_blk_unpin_memory(blk);
	if (!err)
		take_options(blk, &opt);
	if (quiet)
		vhost_blk_resume_all(blk);
	return err;
}

/* Where data and status bytes go was found by the old table: nothing may be in flight. */
static long set_mem_table(struct vhost_blk *blk, void __user *argp)
{
	bool pin = blk->opt.flags & VHOST_BLK_OPT_PIN_MEMORY;
	long err;
	int pin_err = 0;

	err = vhost_blk_pause_all(blk);
	if (err)
		return err;
	vhost_blk_unpin_memory(blk);
	err = vhost_dev_ioctl(&blk->dev, VHOST_SET_MEM_TABLE, argp);
	if (pin)
		pin_err = vhost_blk_pin_memory(blk);
	vhost_blk_resume_all(blk);
	return err ?: pin_err;
}

static long reset_owner(struct vhost_blk *blk)
{
	const struct vhost_vring_file detach = { .index = 0, .fd = VHOST_FILE_UNBIND };
	struct vhost_iotlb *umem;
	long err;

	umem = vhost_dev_reset_owner_prepare();
	if (!umem)
		return -ENOMEM;
	err = vhost_blk_set_backend(blk, &detach);
	if (err) {
		vhost_iotlb_free(umem);
		return err;
	}
	vhost_blk_unpin_memory(blk);
	blk->opt = (struct vhost_blk_options) {};
	vhost_blk_forget_regions(blk);
	vhost_dev_stop(&blk->dev);
	cancel_orphans(blk);
	vhost_dev_flush(&blk->dev);
	vhost_dev_reset_owner(&blk->dev, umem);
	return 0;
}

static long set_queue(struct vhost_blk *blk, const struct vhost_vring_state *state)
{
	struct vhost_blk_queue *q = vhost_blk_queue_at(blk, state->index);

	if (!q)
		return -ENOBUFS;
	if (state->num > 1)
		return -EINVAL;
	if (!state->num)
		return vhost_blk_stop_queue(q);
	if (!blk->backend)
		return -ENODEV;
	return vhost_blk_start_queue(q, blk->backend);
}

static int set_serial(struct vhost_blk *blk, void __user *argp)
{
	u8 serial[VHOST_BLK_SERIAL_BYTES];

	if (copy_from_user(serial, argp, sizeof(serial)))
		return -EFAULT;
	spin_lock(&blk->serial_lock);
	memcpy(blk->serial, serial, sizeof(serial));
	spin_unlock(&blk->serial_lock);
	return 0;
}

/*
 * The core expects no work of a queue without backend and kick. There is some when the queue was
 * started and stopped before its worker came to look.
 */
static long attach_worker(struct vhost_blk *blk, void __user *argp)
{
	struct vhost_vring_worker ring;
	struct vhost_blk_queue *q;

	if (copy_from_user(&ring, argp, sizeof(ring)))
		return -EFAULT;
	q = vhost_blk_queue_at(blk, ring.index);
	if (!q)
		return -ENOBUFS;
	if (!vhost_blk_runs(q) && !q->vq.kick && vhost_vq_has_work(&q->vq))
		vhost_dev_flush(&blk->dev);
	return vhost_worker_ioctl(&blk->dev, VHOST_ATTACH_VRING_WORKER, argp);
}

static long core_ioctl(struct vhost_blk *blk, unsigned int cmd, void __user *argp)
{
	long err;

	switch (cmd) {
	case VHOST_SET_MEM_TABLE:
		err = vhost_dev_check_owner(&blk->dev);
		return err ?: set_mem_table(blk, argp);
	case VHOST_ATTACH_VRING_WORKER:
		return attach_worker(blk, argp);
	case VHOST_NEW_WORKER:
	case VHOST_FREE_WORKER:
	case VHOST_GET_VRING_WORKER:
		return vhost_worker_ioctl(&blk->dev, cmd, argp);
	}
	err = vhost_dev_ioctl(&blk->dev, cmd, argp);
	if (err == -ENOIOCTLCMD)
		err = vhost_vring_ioctl(&blk->dev, cmd, argp);
	return err;
}

/* What only the owner may do. */
static long owner_ioctl(struct vhost_blk *blk, unsigned int cmd, void __user *argp)
{
	struct vhost_blk_inflight inflight;
	struct vhost_vring_state state;
	struct vhost_vring_file file;
	long err = vhost_dev_check_owner(&blk->dev);

	if (err)
		return err;
	switch (cmd) {
	case VHOST_BLK_SET_BACKEND:
		if (copy_from_user(&file, argp, sizeof(file)))
			return -EFAULT;
		return vhost_blk_set_backend(blk, &file);
	case VHOST_BLK_SET_QUEUE:
		if (copy_from_user(&state, argp, sizeof(state)))
			return -EFAULT;
		return set_queue(blk, &state);
	case VHOST_BLK_SET_OPTIONS:
		return set_options(blk, argp);
	case VHOST_BLK_SET_INFLIGHT:
		if (copy_from_user(&inflight, argp, sizeof(inflight)))
			return -EFAULT;
		return vhost_blk_set_region(blk, &inflight);
	default:
		return reset_owner(blk);
	}
}

static long locked_ioctl(struct vhost_blk *blk, unsigned int cmd, void __user *argp)
{
	u64 features;

	switch (cmd) {
	case VHOST_BLK_SET_BACKEND:
	case VHOST_BLK_SET_QUEUE:
	case VHOST_BLK_SET_OPTIONS:
	case VHOST_BLK_SET_INFLIGHT:
	case VHOST_RESET_OWNER:
		return owner_ioctl(blk, cmd, argp);
	case VHOST_BLK_SET_SERIAL:
		return set_serial(blk, argp);
	case VHOST_BLK_GET_INFO:
		return vhost_blk_get_info(blk, argp);
	case VHOST_GET_FEATURES:
		features = vhost_blk_features;
		return copy_to_user(argp, &features, sizeof(features)) ? -EFAULT : 0;
	case VHOST_SET_FEATURES:
		if (copy_from_user(&features, argp, sizeof(features)))
			return -EFAULT;
		return set_features(blk, features);
	case VHOST_GET_BACKEND_FEATURES:
		features = vhost_blk_backend_features;
		return copy_to_user(argp, &features, sizeof(features)) ? -EFAULT : 0;
	default:
		return core_ioctl(blk, cmd, argp);
	}
}

/* Not under dev.mutex, which the core takes by itself. */
static long set_backend_features(struct vhost_blk *blk, void __user *argp)
{
	u64 features;

	if (copy_from_user(&features, argp, sizeof(features)))
		return -EFAULT;
	if (features & ~vhost_blk_backend_features)
		return -EOPNOTSUPP;
	vhost_set_backend_features(&blk->dev, features);
	return 0;
}

static long vhost_blk_ioctl(struct file *file, unsigned int cmd, unsigned long arg)
{
	struct vhost_blk *blk = file->private_data;
	long err;

	if (cmd == VHOST_SET_BACKEND_FEATURES)
		return set_backend_features(blk, (void __user *)arg);
	/* Another thread may be waiting for the storage. */
	if (mutex_lock_killable(&blk->dev.mutex))
		return -EINTR;
	err = locked_ioctl(blk, cmd, (void __user *)arg);
	mutex_unlock(&blk->dev.mutex);
	return err == -ENOIOCTLCMD ? -ENOTTY : err;
}

static ssize_t vhost_blk_read_iter(struct kiocb *iocb, struct iov_iter *to)
{
	struct vhost_blk *blk = iocb->ki_filp->private_data;

	return vhost_chr_read_iter(&blk->dev, to, iocb->ki_filp->f_flags & O_NONBLOCK);
}

static ssize_t vhost_blk_write_iter(struct kiocb *iocb, struct iov_iter *from)
{
	struct vhost_blk *blk = iocb->ki_filp->private_data;

	return vhost_chr_write_iter(&blk->dev, from);
}

static __poll_t vhost_blk_poll(struct file *file, poll_table *wait)
{
	struct vhost_blk *blk = file->private_data;

	return vhost_chr_poll(file, &blk->dev, wait);
}

static const struct file_operations vhost_blk_fops = {
	.owner		= THIS_MODULE,
	.open		= vhost_blk_open,
	.release	= vhost_blk_close,
	.read_iter	= vhost_blk_read_iter,
	.write_iter	= vhost_blk_write_iter,
	.poll		= vhost_blk_poll,
	.unlocked_ioctl	= vhost_blk_ioctl,
	.compat_ioctl	= compat_ptr_ioctl,
	.show_fdinfo	= vhost_blk_show_fdinfo,
	.llseek		= noop_llseek,
};

static struct miscdevice vhost_blk_misc = {
	.minor	= MISC_DYNAMIC_MINOR,
	.name	= "vhost-blk",
	.fops	= &vhost_blk_fops,
	.mode	= 0600,
};
module_misc_device(vhost_blk_misc);

MODULE_LICENSE("GPL");
MODULE_DESCRIPTION("In-kernel data plane of virtio block devices");
