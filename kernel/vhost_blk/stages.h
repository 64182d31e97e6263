/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * The functions of the stages, in the order of a request's life.
 */
#ifndef _VHOST_BLK_STAGES_H
#define _VHOST_BLK_STAGES_H

#include <linux/sched/clock.h>

#include "queue.h"

/* State of one run of the loop. */
struct vhost_blk_run {
	unsigned int chains;
	unsigned int bytes;
	unsigned int batch_size;	/* of this turn: see vhost_blk_batch_limit() */
	unsigned int growing_batch;	/* most chains of this turn if @batch_size is 0 */
	struct llist_node *ended;	/* finished requests that later turns publish */
	bool yield;	/* other work of this worker is due; the queue is queued again */
	bool stuck;	/* a completion, an IOTLB entry or a timer comes before the next chain */
	bool rings_unmapped;	/* the rings cannot be reached until an IOTLB entry comes */
};

/* queue.c */
unsigned int vhost_blk_batch_chosen(const struct vhost_blk_queue *q);
bool vhost_blk_rings_mapped(struct vhost_blk_queue *q);

/* batch.c */
void vhost_blk_submit_batch(struct vhost_blk_queue *q, struct vhost_blk_run *run);

/* chain.c */
int vhost_blk_take_chain(struct vhost_blk_queue *q, struct vhost_blk_chain *chain);
void vhost_blk_put_back_chain(struct vhost_blk_queue *q, struct vhost_blk_req *req);

/* request.c */
int vhost_blk_check_writable(const struct vhost_blk_req *req);
u64 vhost_blk_range_sectors(const struct vhost_blk_req *req);
u64 vhost_blk_first_sector(const struct vhost_blk_req *req);
bool vhost_blk_storage_failed(const struct vhost_blk_req *req, int err);
int vhost_blk_parse(struct vhost_blk_req *req, const struct vhost_blk_chain *chain,
		    struct iov_iter *data);

/* submit.c */
int vhost_blk_submit(struct vhost_blk_queue *q, const struct vhost_blk_chain *chain,
		     unsigned int *bytes);
void vhost_blk_release(struct vhost_blk_req *req);

/* large.c */
int vhost_blk_submit_large(struct vhost_blk_req *req, const struct iov_iter *data);
int vhost_blk_do_large(struct vhost_blk_req *req);

/* data.c */
void vhost_blk_save_iter(struct iov_iter *to, struct iovec *iov, const struct iov_iter *data);
bool vhost_blk_fits_device(const struct vhost_blk_req *req, const struct iov_iter *data,
			   unsigned int *pages);
int vhost_blk_map_data(struct vhost_blk_req *req, struct iov_iter *data, bool fits,
		       unsigned int pages);
bool vhost_blk_copy_back(struct vhost_blk_req *req);
void vhost_blk_unmap_data(struct vhost_blk_req *req);

/* bdev.c */
bool vhost_blk_polls(const struct vhost_blk_req *req);
void vhost_blk_submit_bdev(struct vhost_blk_req *req);
int vhost_blk_bdev_rw(struct vhost_blk_req *req);
void vhost_blk_submit_flush(struct vhost_blk_req *req);
void vhost_blk_poll_bdev(struct vhost_blk_queue *q);

/* file.c */
bool vhost_blk_copy_file(struct vhost_blk_req *req, const struct iov_iter *data);
void vhost_blk_submit_file(struct vhost_blk_req *req);
int vhost_blk_file_rw(struct vhost_blk_req *req);
int vhost_blk_flush_file(struct vhost_blk_backend *be);
int vhost_blk_file_zero(struct vhost_blk_req *req, loff_t pos, loff_t len);

/* workqueue.c */
void vhost_blk_defer(struct vhost_blk_req *req);
void vhost_blk_deferred_work(struct work_struct *work);
bool vhost_blk_should_abort(const struct vhost_blk_req *req);
int vhost_blk_abort_error(const struct vhost_blk_req *req);
bool vhost_blk_wait_to_retry(const struct vhost_blk_req *req);

/* completion.c */
void vhost_blk_end_io(struct vhost_blk_req *req, int error);
void vhost_blk_queue_done(struct vhost_blk_queue *q);
unsigned int vhost_blk_complete(struct vhost_blk_queue *q, struct vhost_blk_run *run);
void vhost_blk_complete_unpublished(struct vhost_blk_queue *q);
void vhost_blk_orphan_work(struct work_struct *work);

/* limit.c; see there. Without a limit the answer costs no call. */
static inline bool vhost_blk_limit_admits(struct vhost_blk_queue *q)
{
	return likely(!READ_ONCE(q->blk->limit.set)) || vhost_blk_limit_look(q);
}

/* timing.c; see there. While the trace is off, no clock is read. */
void vhost_blk_note_submit(struct vhost_blk_req *req);
void vhost_blk_note_used(struct vhost_blk_queue *q, struct llist_node *list, u64 slower_than_ns);

static inline bool vhost_blk_times_stages(const struct vhost_blk *blk)
{
	return unlikely(READ_ONCE(blk->timing.slower_than_ns));
}

/* The storage gets the request now, under vq.mutex. */
static inline void vhost_blk_time_submit(struct vhost_blk_req *req)
{
	if (vhost_blk_times_stages(req->q->blk))
		vhost_blk_note_submit(req);
}

/* The I/O of the request is finished. Any context. */
static inline void vhost_blk_time_end(struct vhost_blk_req *req)
{
	if (unlikely(req->submit_ns))
		req->end_ns = local_clock();
}

/* The driver sees the requests now. */
static inline void vhost_blk_time_used(struct vhost_blk_queue *q, struct llist_node *list)
{
	u64 slower_than_ns = READ_ONCE(q->blk->timing.slower_than_ns);

	if (unlikely(slower_than_ns))
		vhost_blk_note_used(q, list, slower_than_ns);
}

/* arrivals.c; see there. While the trace is off, nothing is noted. */
void vhost_blk_note_batch(struct vhost_blk_queue *q);
void vhost_blk_note_chain(struct vhost_blk_queue *q, int taken);
void vhost_blk_note_look(struct vhost_blk_queue *q);
bool vhost_blk_wait_for_kick(struct vhost_blk_queue *q);
u64 vhost_blk_ring_wait(const struct vhost_blk_queue *q, u64 limit_ns);

static inline void vhost_blk_arrivals_batch(struct vhost_blk_queue *q)
{
	if (vhost_blk_times_stages(q->blk))
		vhost_blk_note_batch(q);
	else if (unlikely(q->arrivals.look_ns))
		vhost_blk_arrivals_forget(q);
}

static inline void vhost_blk_arrivals_chain(struct vhost_blk_queue *q, int taken)
{
	/* Without a batch that was noted, the trace is younger than the batch. */
	if (unlikely(q->arrivals.look_ns) && taken >= 0)
		vhost_blk_note_chain(q, taken);
}

static inline void vhost_blk_arrivals_look(struct vhost_blk_queue *q)
{
	if (vhost_blk_times_stages(q->blk))
		vhost_blk_note_look(q);
}

/* halt.c */
bool vhost_blk_handle_failure(struct vhost_blk_req *req);

/* failure.c */
void vhost_blk_request_failed(const struct vhost_blk_req *req);

/* used.c */
void vhost_blk_notify(struct vhost_blk_queue *q, unsigned int n);
void vhost_blk_publish(struct vhost_blk_queue *q, unsigned int n);
void vhost_blk_publish_pending(struct vhost_blk_queue *q);
void vhost_blk_drop_pending(struct vhost_blk_queue *q);

/* coalesce.c */
bool vhost_blk_coalesce_chosen(const struct vhost_blk_queue *q);
void vhost_blk_coalesce_init(struct vhost_blk_queue *q);
void vhost_blk_call_or_hold(struct vhost_blk_queue *q, unsigned int n);
void vhost_blk_send_held_call(struct vhost_blk_queue *q);
void vhost_blk_send_due_call(struct vhost_blk_queue *q);
bool vhost_blk_wait_before_call(struct vhost_blk_queue *q);

/* inflight.c */
void vhost_blk_region_take(struct vhost_blk_queue *q, unsigned int head);
void vhost_blk_region_untake(struct vhost_blk_queue *q, unsigned int head);
void vhost_blk_region_batch(struct vhost_blk_queue *q, unsigned int count);
void vhost_blk_region_used(struct vhost_blk_queue *q, unsigned int count);

/* poll.c; see there. A poll replaces the next sleep if true; otherwise the next trial comes closer. */
static inline bool vhost_blk_poll_begin(struct vhost_blk_queue *q)
{
	struct vhost_blk_polling *poll = vhost_blk_polling(q);

	if (!q->vq.busyloop_timeout)
		return false;
	if (poll->score)
		return true;
	return !poll->until_trial--;
}

bool vhost_blk_spin(struct vhost_blk_queue *q, unsigned int us, u64 *ns);
bool vhost_blk_poll_ring(struct vhost_blk_queue *q);
bool vhost_blk_poll_device(struct vhost_blk_queue *q);

#endif /* _VHOST_BLK_STAGES_H */
