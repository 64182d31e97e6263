// SPDX-License-Identifier: GPL-2.0-only
/*
 * /dev/vhost-blk: the ioctls of include/uapi/vhost_blk.h. All others are the vhost core's: see core.c.
 * life.c has its open and close.
 */
#include <linux/compat.h>
#include <linux/miscdevice.h>
#include <linux/module.h>

#include "arg.h"
#include "backend.h"
#include "queue.h"

#define CREATE_TRACE_POINTS
#include "trace.h"

/* The lowest number of our own ioctls; the vhost core's are all below. New ones go downwards. */
#define VHOST_BLK_OWN_NR_MIN	0xf0
/* The lowest one that this module knows. */
#define VHOST_BLK_KNOWN_NR_MIN	_IOC_NR(VHOST_BLK_SHARE_LIMITS)

static const u64 vhost_blk_backend_features = BIT_ULL(VHOST_BACKEND_F_IOTLB_MSG_V2);

unsigned long vhost_blk_inflight_max = 256UL << 20;
module_param_named(inflight_bytes_max, vhost_blk_inflight_max, ulong, 0644);
MODULE_PARM_DESC(inflight_bytes_max,
		 "most data bytes of a device in flight, whose pages are pinned, and most bytes that it zeroes at once; more wait in the ring");

struct workqueue_struct *vhost_blk_wait_wq;

static int vhost_blk_set_num_queues(struct vhost_blk *blk, void __user *argp, size_t given)
{
	u32 num_queues;
	int err;

	err = vhost_blk_copy_arg(&num_queues, sizeof(num_queues), sizeof(num_queues), argp, given);
	return err ?: vhost_blk_create_device(blk, num_queues);
}

/* The queues read them one by one; they need not change together. */
static void vhost_blk_take_options(struct vhost_blk *blk, const struct vhost_blk_options *opt)
{
	WRITE_ONCE(blk->opt.max_discard_sectors, opt->max_discard_sectors);
	WRITE_ONCE(blk->opt.max_write_zeroes_sectors, opt->max_write_zeroes_sectors);
	WRITE_ONCE(blk->opt.max_secure_erase_sectors, opt->max_secure_erase_sectors);
	WRITE_ONCE(blk->opt.batch, opt->batch);
	WRITE_ONCE(blk->opt.flags, opt->flags);
	if (opt->flags & VHOST_BLK_OPT_HALT)
		vhost_blk_halt(blk);
	vhost_blk_limit_set(blk, opt);
	blk->opt.limit_iops = opt->limit_iops;
	blk->opt.limit_bytes = opt->limit_bytes;
	blk->opt.limit_burst_ms = opt->limit_burst_ms;
}

/* True if the flags are known, and agree with each other and with the other options. */
static bool vhost_blk_options_agree(const struct vhost_blk_options *opt)
{
	if (opt->flags & ~VHOST_BLK_OPTIONS)
		return false;
	if (opt->flags & VHOST_BLK_OPT_READS_KEEP && !(opt->flags & VHOST_BLK_OPT_READS_APART))
		return false;
	return !(opt->flags & VHOST_BLK_OPT_BATCH) == !opt->batch;
}

static int vhost_blk_set_options(struct vhost_blk *blk, void __user *argp)
{
	struct vhost_blk_options opt;
	bool pin, pinned = blk->pinned, must_pause;
	int err = vhost_blk_copy_sized(&opt, sizeof(opt),
				       offsetofend(struct vhost_blk_options, flags), argp);

	if (err)
		return err;
	if (!vhost_blk_options_agree(&opt) || opt.batch > VHOST_BLK_BATCH_SIZE_MAX ||
	    opt.limit_burst_ms > VHOST_BLK_LIMIT_BURST_MS_MAX)
		return -EINVAL;

	pin = opt.flags & VHOST_BLK_OPT_PIN_MEMORY;
	/* Unpolled requests may wait for the tags of polled ones: never mix them. */
	must_pause = pin != pinned || (opt.flags ^ blk->opt.flags) & VHOST_BLK_OPT_IOPOLL;
	err = must_pause ? vhost_blk_pause_all(blk) : 0;
	if (err)
		return err;
	if (pin && !pinned)
		err = vhost_blk_pin_memory(blk);
	else if (!pin)
		vhost_blk_unpin_memory(blk);
	if (!err)
		vhost_blk_take_options(blk, &opt);
	if (must_pause)
		vhost_blk_resume_all(blk);
	return err;
}

static long vhost_blk_set_queue(struct vhost_blk *blk, const struct vhost_vring_state *state)
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

static int vhost_blk_set_serial(struct vhost_blk *blk, void __user *argp, size_t given)
{
	u8 serial[VHOST_BLK_SERIAL_BYTES];
	int err = vhost_blk_copy_arg(serial, sizeof(serial), sizeof(serial), argp, given);

	if (err)
		return err;
	spin_lock(&blk->serial_lock);
	memcpy(blk->serial, serial, sizeof(serial));
	spin_unlock(&blk->serial_lock);
	return 0;
}

static int vhost_blk_take_trace(struct vhost_blk *blk, void __user *argp)
{
	struct vhost_blk_trace trace;
	int err = vhost_blk_copy_sized(&trace, sizeof(trace),
				       offsetofend(struct vhost_blk_trace, slower_than_ns), argp);

	return err ?: vhost_blk_set_trace(blk, &trace);
}

/*
 * Our own ioctls, for the owner only. By number: the size of a structure is part of its ioctl's code,
 * and may grow. An unknown number gets -ENOTTY from any task, so each case looks at the owner check.
 */
static long vhost_blk_own_ioctl(struct vhost_blk *blk, unsigned int cmd, void __user *argp)
{
	union {
		struct vhost_vring_file file;
		struct vhost_vring_state state;
		struct vhost_blk_inflight inflight;
		__s32 fd;
		struct vhost_blk_share share;
	} arg;
	size_t given = _IOC_SIZE(cmd);
	long err = vhost_dev_check_owner(&blk->dev);

	switch (_IOC_NR(cmd)) {
	case _IOC_NR(VHOST_BLK_SET_BACKEND):
		err = err ?: vhost_blk_copy_arg(&arg, sizeof(arg.file), sizeof(arg.file), argp,
						given);
		return err ?: vhost_blk_set_backend(blk, &arg.file);
	case _IOC_NR(VHOST_BLK_SET_QUEUE):
		err = err ?: vhost_blk_copy_arg(&arg, sizeof(arg.state), sizeof(arg.state), argp,
						given);
		return err ?: vhost_blk_set_queue(blk, &arg.state);
	case _IOC_NR(VHOST_BLK_SET_INFLIGHT):
		err = err ?: vhost_blk_copy_arg(&arg, sizeof(arg.inflight), sizeof(arg.inflight),
						argp, given);
		return err ?: vhost_blk_set_region(blk, &arg.inflight);
	case _IOC_NR(VHOST_BLK_SET_FAILURE_EVENT):
		err = err ?: vhost_blk_copy_arg(&arg, sizeof(arg.fd), sizeof(arg.fd), argp, given);
		return err ?: vhost_blk_set_failure_event(blk, arg.fd);
	case _IOC_NR(VHOST_BLK_SET_OPTIONS):
		return err ?: vhost_blk_set_options(blk, argp);
	case _IOC_NR(VHOST_BLK_GET_KEPT):
		return err ?: vhost_blk_get_kept(blk, argp);
	case _IOC_NR(VHOST_BLK_SHARE_LIMITS):
		err = err ?: vhost_blk_copy_arg(&arg, sizeof(arg.share), sizeof(arg.share), argp,
						given);
		return err ?: vhost_blk_share_limits(blk, &arg.share);
	}
	return -ENOTTY;
}

static bool vhost_blk_is_own(unsigned int cmd)
{
	return _IOC_TYPE(cmd) == VHOST_VIRTIO && _IOC_NR(cmd) >= VHOST_BLK_OWN_NR_MIN;
}

/*
 * Ioctls that need neither the device nor dev.mutex, and so never wait for storage. Nor do unknown ones: a caller
 * that asks for a new one may still choose the number of queues.
 */
static long vhost_blk_unlocked_ioctl(struct vhost_blk *blk, unsigned int cmd, void __user *argp)
{
	u64 features;

	switch (cmd) {
	case VHOST_GET_FEATURES:
		features = vhost_blk_features;
		return copy_to_user(argp, &features, sizeof(features)) ? -EFAULT : 0;
	case VHOST_GET_BACKEND_FEATURES:
		features = vhost_blk_backend_features;
		return copy_to_user(argp, &features, sizeof(features)) ? -EFAULT : 0;
	}
	if (_IOC_TYPE(cmd) != VHOST_VIRTIO)
		return -ENOTTY;
	if (!vhost_blk_is_own(cmd))
		return -ENOIOCTLCMD;
	if (_IOC_NR(cmd) < VHOST_BLK_KNOWN_NR_MIN)
		return -ENOTTY;
	switch (_IOC_NR(cmd)) {
	case _IOC_NR(VHOST_BLK_SET_NUM_QUEUES):
		return vhost_blk_set_num_queues(blk, argp, _IOC_SIZE(cmd));
	case _IOC_NR(VHOST_BLK_SET_SERIAL):
		return vhost_blk_set_serial(blk, argp, _IOC_SIZE(cmd));
	case _IOC_NR(VHOST_BLK_GET_INFO):
		return vhost_blk_get_info(blk, argp);
	case _IOC_NR(VHOST_BLK_GET_FAILURE):
		return vhost_blk_get_failure(blk, argp);
	case _IOC_NR(VHOST_BLK_SET_TRACE):
		return vhost_blk_take_trace(blk, argp);
	case _IOC_NR(VHOST_BLK_GET_TRACED):
		return vhost_blk_get_traced(blk, argp);
	case _IOC_NR(VHOST_BLK_GET_OLDEST):
		return vhost_blk_get_oldest(blk, argp);
	}
	return -ENOIOCTLCMD;
}

/* Not under dev.mutex, which the core takes itself. */
static long vhost_blk_set_backend_features(struct vhost_blk *blk, void __user *argp)
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
	void __user *argp = (void __user *)arg;
	long err;

	err = vhost_blk_unlocked_ioctl(blk, cmd, argp);
	if (err != -ENOIOCTLCMD)
		return err;
	err = vhost_blk_ensure_device(blk);
	if (err)
		return err;
	vhost_blk_stop_polling(blk);
	if (cmd == VHOST_SET_BACKEND_FEATURES) {
		err = vhost_blk_set_backend_features(blk, argp);
	} else if (mutex_lock_killable(&blk->dev.mutex)) {
		/* Another thread may hold it and wait for the storage. */
		err = -EINTR;
	} else {
		err = vhost_blk_is_own(cmd) ? vhost_blk_own_ioctl(blk, cmd, argp) :
					      vhost_blk_core_ioctl(blk, cmd, argp);
		mutex_unlock(&blk->dev.mutex);
	}
	vhost_blk_allow_polling(blk);
	return err == -ENOIOCTLCMD ? -ENOTTY : err;
}

static ssize_t vhost_blk_read_iter(struct kiocb *iocb, struct iov_iter *to)
{
	struct vhost_blk *blk = iocb->ki_filp->private_data;
	int err = vhost_blk_ensure_device(blk);

	if (err)
		return err;
	return vhost_chr_read_iter(&blk->dev, to, iocb->ki_filp->f_flags & O_NONBLOCK);
}

/* Drains the requests with addresses that were translated before this. */
static int vhost_blk_await_invalidation(struct vhost_blk *blk)
{
	int err;

	if (mutex_lock_killable(&blk->dev.mutex))
		return -EINTR;
	err = vhost_blk_drain_all(blk);
	mutex_unlock(&blk->dev.mutex);
	return err;
}

static int vhost_blk_go_on_updated(struct vhost_blk *blk)
{
	if (mutex_lock_killable(&blk->dev.mutex))
		return -EINTR;
	vhost_blk_iotlb_updated(blk);
	mutex_unlock(&blk->dev.mutex);
	return 0;
}

/*
 * An IOTLB message of either version; they differ in the second word. The core removes entries, but
 * does not know our requests in flight. The message is copied once, so that the core and this
 * function see the same bytes.
 */
static ssize_t vhost_blk_write_iter(struct kiocb *iocb, struct iov_iter *from)
{
	struct vhost_blk *blk = iocb->ki_filp->private_data;
	struct vhost_msg_v2 msg = {};
	struct kvec vec = { .iov_base = &msg };
	int err = vhost_blk_ensure_device(blk);
	struct iov_iter copy;
	ssize_t done;

	static_assert(sizeof(msg) == sizeof(struct vhost_msg) &&
		      offsetof(struct vhost_msg_v2, iotlb) == offsetof(struct vhost_msg, iotlb));
	if (err)
		return err;
	vec.iov_len = copy_from_iter(&msg, sizeof(msg), from);
	iov_iter_kvec(&copy, ITER_SOURCE, &vec, 1, vec.iov_len);
	/* The core takes the mutexes of all queues. */
	vhost_blk_stop_polling(blk);
	done = vhost_chr_write_iter(&blk->dev, &copy);
	if (done > 0 && msg.iotlb.type == VHOST_IOTLB_UPDATE)
		err = vhost_blk_go_on_updated(blk);
	if (done > 0 && msg.iotlb.type == VHOST_IOTLB_INVALIDATE)
		err = vhost_blk_await_invalidation(blk);
	vhost_blk_allow_polling(blk);
	return err ? -EINTR : done;
}

static __poll_t vhost_blk_poll(struct file *file, poll_table *wait)
{
	struct vhost_blk *blk = file->private_data;

	if (vhost_blk_ensure_device(blk))
		return EPOLLERR;
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

static int __init vhost_blk_init(void)
{
	int err;

	vhost_blk_wait_wq = alloc_workqueue("vhost_blk_wait", WQ_UNBOUND, 0);
	if (!vhost_blk_wait_wq)
		return -ENOMEM;
	err = misc_register(&vhost_blk_misc);
	if (err)
		destroy_workqueue(vhost_blk_wait_wq);
	return err;
}
module_init(vhost_blk_init);

static void __exit vhost_blk_exit(void)
{
	misc_deregister(&vhost_blk_misc);
	destroy_workqueue(vhost_blk_wait_wq);
}
module_exit(vhost_blk_exit);

MODULE_LICENSE("GPL");
MODULE_VERSION("0.1.0");
MODULE_DESCRIPTION("In-kernel data plane of virtio block devices");
