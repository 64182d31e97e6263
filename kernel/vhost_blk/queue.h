/* SPDX-License-Identifier: GPL-2.0-only */
#ifndef _VHOST_BLK_QUEUE_H
#define _VHOST_BLK_QUEUE_H

#include <linux/llist.h>
#include <linux/nospec.h>
#include <linux/wait.h>
#include <linux/workqueue.h>

#include "arrivals.h"
#include "batch_size.h"
#include "coalesce.h"
#include "request.h"
#include "reserve.h"
#include "stats.h"

struct vhost_blk_region_split;

/**
 * enum vhost_blk_state - state of a queue
 * @VHOST_BLK_STOPPED: has no backend and no request
 * @VHOST_BLK_RUNNING: takes chains
 * @VHOST_BLK_PAUSED: takes none while an ioctl changes what requests refer to
 * @VHOST_BLK_FAULTED: takes none, because its ring is faulty
 * @VHOST_BLK_STOPPING: takes none; a stop drains, or was interrupted
 *
 * The head of vhost_blk.h has the table of transitions.
 */
enum vhost_blk_state {
	VHOST_BLK_STOPPED,
	VHOST_BLK_RUNNING,
	VHOST_BLK_PAUSED,
	VHOST_BLK_FAULTED,
	VHOST_BLK_STOPPING,
};

/**
 * struct vhost_blk_region - the in-flight region of a queue
 * @user: its address in the owner, or NULL
 * @desc_num: its entries
 * @counter: last submission number given
 */
struct vhost_blk_region {
	struct vhost_blk_region_split __user *user;
	unsigned int desc_num;
	u64 counter;
};

/**
 * struct vhost_blk_polling - adaptive polling during one of a queue's waits; see poll.c
 * @score: 0: no polling; up for polls that found work, down for the others
 * @interval: sleeps between two trials
 * @until_trial: sleeps until the next one
 */
struct vhost_blk_polling {
	int score;
	int interval;
	int until_trial;
};

/**
 * struct vhost_blk_queue - a virtqueue and its requests
 * @vq: the vhost core's part
 * @blk: the device
 * @done: finished I/O, pushed from any context
 * @done_work: runs the loop for @done
 * @orphan_work: ends @done after the owner was killed
 * @state: see the head of vhost_blk.h; under vq.mutex
 * @looping: the loop will reap @done without a wake-up. Apart from @state, because completions
 *	read it in any context, without a lock: see vhost_blk_end_io()
 * @starved: waits for bytes in flight of other queues, which clear it without this queue's lock:
 *	see vhost_blk_charge()
 * @used_broken: a publication has failed: none follows until the next start
 * @crowded: the last call made another task wait for this CPU; only the size of batches depends
 *	on it
 * @gen: generation of new requests; under vq.mutex, changed by drains only
 * @inflight: requests in flight by generation; changed under vq.mutex
 * @unpublished: used entries in vq.heads that wait until the rings can be reached; under vq.mutex; 0
 *	while chains are taken
 * @rings_miss_sent: an IOTLB miss for the rings was sent since the last update; under vq.mutex
 * @chain_miss_sent: the same for the next chain
 * @nr_kept: chains whose requests failed and halted the device; under vq.mutex
 * @kept: their heads
 * @drained: woken when a generation is empty
 * @reqs: all requests
 * @nr_reqs: their number
 * @reqs_lock: keeps @reqs and @nr_reqs for readers without vq.mutex, for moments only
 * @free: the unused ones
 * @polled: I/O in flight that only this queue polls for
 * @poll: adaptive polling while no request is in flight, and while some are
 * @coalesce: held calls
 * @batch_size: size of the batches
 * @throttle: the queue's view of the limits
 * @arrivals: times of chains in the ring, for the trace
 * @now_ns: the time at the start of the batch
 * @region: the in-flight region, which marks taken chains
 * @reserve: memory for one request if the allocator has none
 * @stats: counters
 */
struct vhost_blk_queue {
	struct vhost_virtqueue vq;
	struct vhost_blk *blk;
	struct llist_head done;
	struct vhost_work done_work;
	struct delayed_work orphan_work;
	enum vhost_blk_state state;
	bool looping;
	bool starved;
	bool used_broken;
	bool crowded;
	u8 gen;
	unsigned int inflight[2];
	unsigned int unpublished;
	bool rings_miss_sent;
	bool chain_miss_sent;
	unsigned int nr_kept;
	u16 kept[VHOST_BLK_QUEUE_SIZE_MAX];
	wait_queue_head_t drained;
	struct vhost_blk_req *reqs;
	unsigned int nr_reqs;
	spinlock_t reqs_lock;
	struct vhost_blk_req *free;
	struct list_head polled;
	struct vhost_blk_polling poll[2];
	struct vhost_blk_coalesce coalesce;
	struct vhost_blk_batch_size batch_size;
	struct vhost_blk_throttle throttle;
	struct vhost_blk_arrivals arrivals;
	u64 now_ns;
	struct vhost_blk_region region;
	struct vhost_blk_reserve reserve;
	struct vhost_blk_stats stats;
};

static inline struct vhost_blk_queue *vhost_blk_queue_of(struct vhost_virtqueue *vq)
{
	return container_of(vq, struct vhost_blk_queue, vq);
}

static inline unsigned int vhost_blk_queue_index(const struct vhost_blk_queue *q)
{
	return q - q->blk->queues;
}

/* The queue of a number that userspace gave, or NULL. */
static inline struct vhost_blk_queue *vhost_blk_queue_at(struct vhost_blk *blk, unsigned int index)
{
	if (index >= blk->num_queues)
		return NULL;
	return blk->queues + array_index_nospec(index, blk->num_queues);
}

static inline void vhost_blk_set_state(struct vhost_blk_queue *q, enum vhost_blk_state state)
{
	lockdep_assert_held(&q->vq.mutex);
	WRITE_ONCE(q->state, state);
}

/**
 * vhost_blk_fault - stop taking from a faulty ring; requests in flight still complete
 * @q: the queue; its vq.mutex is held
 */
static inline void vhost_blk_fault(struct vhost_blk_queue *q)
{
	if (q->state == VHOST_BLK_RUNNING || q->state == VHOST_BLK_PAUSED)
		vhost_blk_set_state(q, VHOST_BLK_FAULTED);
}

/* True if a queue is not stopped; dev.mutex protects that. */
static inline bool vhost_blk_runs(const struct vhost_blk_queue *q)
{
	return READ_ONCE(q->state) != VHOST_BLK_STOPPED;
}

/* True if any queue is not stopped; under dev.mutex. */
static inline bool vhost_blk_any_runs(const struct vhost_blk *blk)
{
	unsigned int i;

	for (i = 0; i < blk->num_queues; i++)
		if (vhost_blk_runs(blk->queues + i))
			return true;
	return false;
}

/* True if no request of a generation is in flight. */
static inline bool vhost_blk_gen_empty(const struct vhost_blk_queue *q, u8 gen)
{
	/* Pairs with the release in vhost_blk_put_req(), their last use. */
	return !smp_load_acquire(&q->inflight[gen]);
}

/* Requests in flight; under vq.mutex. */
static inline unsigned int vhost_blk_inflight(const struct vhost_blk_queue *q)
{
	return q->inflight[0] + q->inflight[1];
}

/* The polling of the present wait: for the driver alone, or for I/O as well. */
static inline struct vhost_blk_polling *vhost_blk_polling(struct vhost_blk_queue *q)
{
	return &q->poll[!!vhost_blk_inflight(q)];
}

/**
 * vhost_blk_get_req - take a request from the free list, which is not empty
 * @q: the queue; its vq.mutex is held
 *
 * Return: the request, counted as in flight.
 */
static inline struct vhost_blk_req *vhost_blk_get_req(struct vhost_blk_queue *q)
{
	struct vhost_blk_req *req = q->free;

	q->free = req->next_free;
	req->gen = q->gen;
	WRITE_ONCE(q->inflight[req->gen], q->inflight[req->gen] + 1);
	return req;
}

/**
 * vhost_blk_put_req - return a request to the free list; the last one wakes the drain
 * @req: the request, which holds no resources; its queue's vq.mutex is held
 */
static inline void vhost_blk_put_req(struct vhost_blk_req *req)
{
	struct vhost_blk_queue *q = req->q;
	unsigned int left = q->inflight[req->gen] - 1;

	req->next_free = q->free;
	q->free = req;
	WRITE_ONCE(req->start_ns, 0);
	/* Last use of the request. Pairs with vhost_blk_gen_empty(). */
	smp_store_release(&q->inflight[req->gen], left);
	/* Its barrier pairs with the one in wait_event(): the drain sees 0, or is seen waiting. */
	if (!left && wq_has_sleeper(&q->drained))
		wake_up_all(&q->drained);
}

/* True if the queue takes chains; under vq.mutex. */
static inline bool vhost_blk_takes(const struct vhost_blk_queue *q)
{
	return q->state == VHOST_BLK_RUNNING && !READ_ONCE(q->blk->halted);
}

/**
 * vhost_blk_batch_limit - the fixed size of batches: that of the owner, or that of the trials
 * @q: the queue; its vq.mutex is held
 *
 * A driver that waits for this CPU cannot work in parallel with the device: its batches grow.
 *
 * Return: maximum chains taken, and requests published, per turn; 0: batches grow, and requests
 * have no limit.
 */
static inline unsigned int vhost_blk_batch_limit(const struct vhost_blk_queue *q)
{
	u32 fixed = READ_ONCE(q->blk->opt.batch);

	if (fixed)
		return fixed;
	return q->crowded ? 0 : vhost_blk_batch_size_now(&q->batch_size);
}

/* queue.c */
void vhost_blk_queue_init(struct vhost_blk *blk, struct vhost_blk_queue *q);

/* drain.c */
int vhost_blk_start_queue(struct vhost_blk_queue *q, struct vhost_blk_backend *be);
int vhost_blk_stop_queue(struct vhost_blk_queue *q);

/* inflight.c */
int vhost_blk_region_ready(struct vhost_blk_queue *q);

#endif /* _VHOST_BLK_QUEUE_H */
