// SPDX-License-Identifier: GPL-2.0-only
/*
 * The device as seen from outside: VHOST_BLK_GET_INFO, VHOST_BLK_GET_OLDEST, and the counters in
 * fdinfo.
 */
#include <linux/minmax.h>
#include <linux/sched/clock.h>
#include <linux/seq_file.h>

#include "arg.h"
#include "backend.h"
#include "stages.h"

static void vhost_blk_bdev_info(struct vhost_blk_info *info, struct vhost_blk_backend *be)
{
	struct block_device *bdev = be->bdev;

	info->flags |= VHOST_BLK_INFO_BLOCK_DEVICE;
	if (bdev_write_cache(bdev))
		info->flags |= VHOST_BLK_INFO_WRITE_CACHE;
	if (bdev_max_discard_sectors(bdev))
		info->flags |= VHOST_BLK_INFO_DISCARD;
	if (bdev_max_secure_erase_sectors(bdev))
		info->flags |= VHOST_BLK_INFO_SECURE_ERASE;
	if (be->polls)
		info->flags |= VHOST_BLK_INFO_POLL_QUEUES;
	info->physical_block_bytes = bdev_physical_block_size(bdev);
	info->io_min_bytes = bdev_io_min(bdev);
	info->io_opt_bytes = bdev_io_opt(bdev);
	info->discard_align_sectors =
		max_t(u32, bdev_discard_granularity(bdev), SECTOR_SIZE) >> SECTOR_SHIFT;
}

static void vhost_blk_file_info(struct vhost_blk_info *info, struct vhost_blk_backend *be)
{
	struct inode *inode = file_inode(be->file);

	info->flags |= VHOST_BLK_INFO_WRITE_CACHE;
	if (be->file->f_op->fallocate)
		info->flags |= VHOST_BLK_INFO_DISCARD;
	info->physical_block_bytes = max(be->lbs, i_blocksize(inode));
	info->discard_align_sectors = i_blocksize(inode) >> SECTOR_SHIFT;
}

static void vhost_blk_backend_info(struct vhost_blk_info *info, struct vhost_blk_backend *be)
{
	info->flags |= VHOST_BLK_INFO_ATTACHED;
	if (be->read_only)
		info->flags |= VHOST_BLK_INFO_READ_ONLY;
	info->logical_block_bytes = be->lbs;
	info->memory_align_bytes = be->mem_mask + 1;

	mutex_lock(&be->lock);
	if (READ_ONCE(be->dead)) {
		info->flags |= VHOST_BLK_INFO_DEAD;
	} else {
		info->capacity_sectors = vhost_blk_backend_bytes(be) >> SECTOR_SHIFT;
		if (be->bdev)
			vhost_blk_bdev_info(info, be);
		else
			vhost_blk_file_info(info, be);
	}
	mutex_unlock(&be->lock);

	/* Lower layers split longer ranges. */
	info->max_discard_sectors = U32_MAX;
	info->max_write_zeroes_sectors = U32_MAX;
	info->max_secure_erase_sectors = U32_MAX;
	info->flags |= VHOST_BLK_INFO_WRITE_ZEROES;
	if (be->read_only)
		info->flags &= ~(VHOST_BLK_INFO_DISCARD | VHOST_BLK_INFO_WRITE_ZEROES |
				 VHOST_BLK_INFO_SECURE_ERASE);
}

/**
 * vhost_blk_get_info - VHOST_BLK_GET_INFO
 * @blk: the device
 * @argp: the argument
 *
 * Return: 0, or a negative errno.
 */
int vhost_blk_get_info(struct vhost_blk *blk, void __user *argp)
{
	struct vhost_blk_info info = {
		.size = sizeof(info),
		.option_flags = VHOST_BLK_OPTIONS,
		.queues_max = VHOST_BLK_QUEUES_MAX,
		/* Pairs with vhost_blk_init_device(). */
		.num_queues = smp_load_acquire(&blk->num_queues) ?: VHOST_BLK_QUEUES_MAX,
		.queue_size_max = VHOST_BLK_QUEUE_SIZE_MAX,
		.seg_max = VHOST_BLK_SEG_MAX,
		.request_bytes_max = VHOST_BLK_REQUEST_BYTES_MAX,
		.inflight_bytes_max = READ_ONCE(vhost_blk_inflight_max),
	};
	int room = vhost_blk_room(argp, sizeof(info), offsetofend(struct vhost_blk_info, flags));

	if (room < 0)
		return room;
	mutex_lock(&blk->backend_mutex);
	if (blk->backend)
		vhost_blk_backend_info(&info, blk->backend);
	mutex_unlock(&blk->backend_mutex);
	return copy_to_user(argp, &info, room) ? -EFAULT : 0;
}

/*
 * When the oldest request in flight was taken; 0: none is in flight. Without vq.mutex, because a
 * worker that waits for a tag of storage that hangs holds it.
 */
static u64 vhost_blk_oldest_start(struct vhost_blk_queue *q)
{
	unsigned int i;
	u64 oldest = 0;

	spin_lock(&q->reqs_lock);
	for (i = 0; i < q->nr_reqs; i++)
		oldest = min_not_zero(oldest, READ_ONCE(q->reqs[i].start_ns));
	spin_unlock(&q->reqs_lock);
	return oldest;
}

/**
 * vhost_blk_get_oldest - VHOST_BLK_GET_OLDEST
 * @blk: the device
 * @argp: the argument
 *
 * Return: 0, or a negative errno.
 */
int vhost_blk_get_oldest(struct vhost_blk *blk, void __user *argp)
{
	struct vhost_blk_oldest oldest = { .size = sizeof(oldest), .age_ns = U64_MAX };
	struct vhost_blk_oldest __user *arg = argp;
	int room = vhost_blk_room(argp, sizeof(oldest),
				  offsetofend(struct vhost_blk_oldest, age_ns));
	struct vhost_blk_queue *q;
	u64 start;

	if (room < 0)
		return room;
	if (get_user(oldest.index, &arg->index))
		return -EFAULT;
	/* Pairs with vhost_blk_init_device(). */
	if (!smp_load_acquire(&blk->num_queues))
		return -ENOBUFS;
	q = vhost_blk_queue_at(blk, oldest.index);
	if (!q)
		return -ENOBUFS;
	start = vhost_blk_oldest_start(q);
	/* The clocks of two CPUs may differ slightly. */
	if (start)
		oldest.age_ns = max_t(s64, local_clock() - start, 0);
	return copy_to_user(argp, &oldest, room) ? -EFAULT : 0;
}

static const char *const vhost_blk_state_names[] = {
	[VHOST_BLK_STOPPED] = "stopped",
	[VHOST_BLK_RUNNING] = "running",
	[VHOST_BLK_PAUSED] = "paused",
	[VHOST_BLK_FAULTED] = "faulted",
	[VHOST_BLK_STOPPING] = "stopping",
};

static const char *const vhost_blk_op_names[VHOST_BLK_OPS] = {
	[VHOST_BLK_OP_READ] = "read",
	[VHOST_BLK_OP_WRITE] = "write",
	[VHOST_BLK_OP_FLUSH] = "flush",
	[VHOST_BLK_OP_DISCARD] = "discard",
};

static const char *const vhost_blk_failure_names[VHOST_BLK_FAILURE_KINDS] = {
	"io", "removed", "no_space", "timeout", "read_only",
};

static void vhost_blk_show_queue(struct seq_file *m, struct vhost_blk_queue *q)
{
	const struct vhost_blk_stats *s = &q->stats;
	unsigned int n = vhost_blk_queue_index(q), op, i;

	seq_printf(m, "queue%u:\t%s size=%u inflight=%u kept=%u chains=%llu completed=%llu refused=%llu failed=%llu dropped=%llu read_bytes=%llu write_bytes=%llu",
		   n, vhost_blk_state_names[q->state], q->vq.num, vhost_blk_inflight(q), q->nr_kept,
		   s->chains, s->completed, s->refused, s->failed, s->dropped, s->read_bytes,
		   s->write_bytes);
	seq_printf(m, " discards=%llu discarded_bytes=%llu", s->discards, s->discarded_bytes);
	seq_printf(m, " kicks=%llu turns=%llu calls=%llu coalesced=%llu suppressed=%llu throttled=%llu bounced=%llu slow=%llu",
		   s->kicks, s->turns, s->calls, s->coalesced, s->suppressed, s->throttled,
		   s->bounced, s->slow);
	seq_printf(m, " polls=%llu polls_won=%llu poll_ns=%llu polling=%d", s->polls, s->polls_won,
		   s->poll_ns, q->poll[0].score || q->poll[1].score);
	for (i = 0; i < VHOST_BLK_FAILURE_KINDS; i++)
		seq_printf(m, " failed_%s=%llu", vhost_blk_failure_names[i], s->failures[i]);
	/* The present choices. */
	seq_printf(m, " batch_trials=%llu batch=%u coalescing=%d\n", s->batch_trials,
		   vhost_blk_batch_chosen(q), vhost_blk_coalesce_chosen(q));
	/* "N=count": requests that took at least N / 2 and less than N microseconds. */
	for (op = 0; op < VHOST_BLK_OPS; op++) {
		seq_printf(m, "latency%u_%s_us:\tsum=%llu", n, vhost_blk_op_names[op],
			   s->latency[op].sum_us);
		for (i = 0; i < VHOST_BLK_LATENCY_BUCKETS; i++)
			if (s->latency[op].count[i])
				seq_printf(m, " %u=%llu", 1u << i, s->latency[op].count[i]);
		seq_putc(m, '\n');
	}
}

/**
 * vhost_blk_show_fdinfo - the device's lines in /proc/PID/fdinfo/FD
 * @m: destination
 * @file: the open device
 */
void vhost_blk_show_fdinfo(struct seq_file *m, struct file *file)
{
	struct vhost_blk *blk = file->private_data;
	/* Pairs with vhost_blk_init_device(). */
	unsigned int i, num_queues = smp_load_acquire(&blk->num_queues);
	struct vhost_blk_backend *be;

	/* Not dev.mutex, which a drain may hold for as long as the storage takes. */
	mutex_lock(&blk->backend_mutex);
	be = blk->backend;
	seq_printf(m, "backend:\t%s%s%s\n",
		   !be ? "none" : be->bdev ? "block-device" : "file",
		   be && be->read_only ? " read-only" : "",
		   be && READ_ONCE(be->dead) ? " removed" : "");
	mutex_unlock(&blk->backend_mutex);
	seq_printf(m, "inflight_bytes:\t%lld\n", (long long)atomic64_read(&blk->inflight_bytes));
	seq_printf(m, "inflight_range_bytes:\t%lld\n",
		   (long long)atomic64_read(&blk->inflight_range_bytes));
	seq_printf(m, "memory_pinned:\t%d\n", !!READ_ONCE(blk->pinned));
	seq_printf(m, "halted:\t%d\n", READ_ONCE(blk->halted));
	seq_printf(m, "limit_debt_ms:\t%llu\n", vhost_blk_limit_debt(blk));
	vhost_blk_stop_polling(blk);
	for (i = 0; i < num_queues; i++) {
		struct vhost_blk_queue *q = blk->queues + i;

		if (mutex_lock_killable(&q->vq.mutex))
			break;
		if (q->stats.turns || q->state != VHOST_BLK_STOPPED)
			vhost_blk_show_queue(m, q);
		mutex_unlock(&q->vq.mutex);
	}
	vhost_blk_allow_polling(blk);
}
