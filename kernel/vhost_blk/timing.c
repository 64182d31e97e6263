// SPDX-License-Identifier: GPL-2.0-only
/*
 * Records slow requests and the times of their stages, while the owner asks for them: a bounded ring
 * for each device, which outlives its queues, and an eventfd.
 *
 * A request has its times in struct vhost_blk_req. Only requests that were submitted while the trace
 * was on read the clock; see vhost_blk_time_submit() and vhost_blk_time_end().
 */
#include <linux/eventfd.h>
#include <linux/sched/clock.h>

#include "arg.h"
#include "stages.h"

/**
 * vhost_blk_timing_init - prepare the trace of a device: it is off
 * @blk: the device, zeroed
 */
void vhost_blk_timing_init(struct vhost_blk *blk)
{
	spin_lock_init(&blk->timing.lock);
}

/**
 * vhost_blk_timing_forget - end the trace, and forget its records
 * @blk: the device, whose queues are stopped
 */
void vhost_blk_timing_forget(struct vhost_blk *blk)
{
	struct vhost_blk_timing *timing = &blk->timing;
	struct eventfd_ctx *event = NULL;

	spin_lock(&timing->lock);
	WRITE_ONCE(timing->slower_than_ns, 0);
	timing->count = 0;
	timing->lost = 0;
	swap(event, timing->event);
	spin_unlock(&timing->lock);
	vhost_blk_put_event(event);
}

/**
 * vhost_blk_timing_free - free the records at the close
 * @blk: the device, whose queues have ended
 */
void vhost_blk_timing_free(struct vhost_blk *blk)
{
	vhost_blk_timing_forget(blk);
	kvfree(blk->timing.records);
}

/**
 * vhost_blk_set_trace - VHOST_BLK_SET_TRACE
 * @blk: the device
 * @trace: the argument
 *
 * Return: 0, or a negative errno.
 */
int vhost_blk_set_trace(struct vhost_blk *blk, const struct vhost_blk_trace *trace)
{
	struct vhost_blk_timing *timing = &blk->timing;
	struct vhost_blk_traced *records = NULL;
	struct eventfd_ctx *event = vhost_blk_get_event(trace->fd);

	if (IS_ERR(event))
		return PTR_ERR(event);
	/* They stay until the close. */
	if (trace->slower_than_ns && !READ_ONCE(timing->records)) {
		records = kvcalloc(VHOST_BLK_TRACED_MAX, sizeof(*records), GFP_KERNEL_ACCOUNT);
		if (!records) {
			vhost_blk_put_event(event);
			return -ENOMEM;
		}
	}
	spin_lock(&timing->lock);
	/* Another task may have been faster. */
	if (records && !timing->records) {
		WRITE_ONCE(timing->records, records);
		records = NULL;
	}
	swap(event, timing->event);
	WRITE_ONCE(timing->slower_than_ns, trace->slower_than_ns);
	if (timing->count && timing->event)
		eventfd_signal(timing->event);
	spin_unlock(&timing->lock);
	kvfree(records);
	vhost_blk_put_event(event);
	return 0;
}

/**
 * vhost_blk_get_traced - VHOST_BLK_GET_TRACED
 * @blk: the device
 * @argp: the argument
 *
 * Return: 0, or a negative errno.
 */
int vhost_blk_get_traced(struct vhost_blk *blk, void __user *argp)
{
	struct vhost_blk_timing *timing = &blk->timing;
	struct vhost_blk_traced record = {};
	int room = vhost_blk_room(argp, sizeof(record), offsetofend(struct vhost_blk_traced, lost));

	if (room < 0)
		return room;
	spin_lock(&timing->lock);
	if (timing->count) {
		record = timing->records[timing->first];
		timing->first = (timing->first + 1) % VHOST_BLK_TRACED_MAX;
		timing->count--;
	}
	record.lost = timing->lost;
	timing->lost = 0;
	spin_unlock(&timing->lock);
	record.size = sizeof(record);
	return copy_to_user(argp, &record, room) ? -EFAULT : 0;
}

/* Adds a record; the oldest one makes room for it. */
static void vhost_blk_record(struct vhost_blk_timing *timing, const struct vhost_blk_traced *record)
{
	spin_lock(&timing->lock);
	timing->records[(timing->first + timing->count) % VHOST_BLK_TRACED_MAX] = *record;
	if (timing->count == VHOST_BLK_TRACED_MAX) {
		timing->first = (timing->first + 1) % VHOST_BLK_TRACED_MAX;
		timing->lost++;
	} else if (!timing->count++ && timing->event) {
		eventfd_signal(timing->event);
	}
	spin_unlock(&timing->lock);
}

/**
 * vhost_blk_note_submit - note the time at which the storage gets a request
 * @req: the request; its queue's vq.mutex is held
 */
void vhost_blk_note_submit(struct vhost_blk_req *req)
{
	req->limit_ns = vhost_blk_limit_waited(req->q);
	req->ring_ns = vhost_blk_ring_wait(req->q, req->limit_ns);
	req->submit_ns = local_clock();
}

static void vhost_blk_note_slow(const struct vhost_blk_req *req, u64 slower_than_ns, u64 now)
{
	bool moves = req->type == VIRTIO_BLK_T_IN || req->type == VIRTIO_BLK_T_OUT;
	struct vhost_blk_traced record = {
		.flags = VHOST_BLK_TRACED_VALID | (req->error ? VHOST_BLK_TRACED_FAILED : 0),
		.queue = vhost_blk_queue_index(req->q),
		.type = req->type,
		.sector = moves ? req->sector : U64_MAX,
		.bytes = moves ? req->bytes : vhost_blk_range_sectors(req) << SECTOR_SHIFT,
		.limit_ns = req->submit_ns ? req->limit_ns : 0,
		.ring_ns = req->submit_ns ? req->ring_ns : U64_MAX,
	};
	u64 waited = record.limit_ns + (record.ring_ns == U64_MAX ? 0 : record.ring_ns);
	/* The clocks of two CPUs may differ slightly. */
	u64 submitted = max(req->submit_ns, req->start_ns);
	/* A request from before the trace was in the storage all the time. */
	u64 ended = max(req->submit_ns ? req->end_ns : now, submitted);

	now = max(now, ended);
	record.submit_ns = submitted - req->start_ns;
	record.storage_ns = ended - submitted;
	record.used_ns = now - ended;
	if (waited + (now - req->start_ns) >= slower_than_ns)
		vhost_blk_record(&req->q->blk->timing, &record);
}

/**
 * vhost_blk_note_used - record the slow ones among finished requests that the driver sees
 * @q: the queue; its vq.mutex is held
 * @list: the requests, which still have their resources
 * @slower_than_ns: the bound
 */
void vhost_blk_note_used(struct vhost_blk_queue *q, struct llist_node *list, u64 slower_than_ns)
{
	struct vhost_blk_req *req;
	u64 now = local_clock();

	llist_for_each_entry(req, list, done)
		if (!req->refused && !req->kept && req->type != VIRTIO_BLK_T_GET_ID)
			vhost_blk_note_slow(req, slower_than_ns, now);
}
