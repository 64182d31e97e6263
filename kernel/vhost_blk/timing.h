/* SPDX-License-Identifier: GPL-2.0-only */
#ifndef _VHOST_BLK_TIMING_H
#define _VHOST_BLK_TIMING_H

#include <linux/spinlock.h>
#include <linux/types.h>

struct eventfd_ctx;
struct llist_node;
struct vhost_blk;
struct vhost_blk_queue;
struct vhost_blk_req;
struct vhost_blk_trace;
struct vhost_blk_traced;

/**
 * struct vhost_blk_timing - the trace of a device's slow requests; see timing.c
 * @slower_than_ns: requests that take as long are recorded; 0: none. Also read without @lock
 * @lock: protects all of it
 * @records: a ring of %VHOST_BLK_TRACED_MAX records, from the first trace to the close, or NULL
 * @first: the oldest record
 * @count: records that the owner has not fetched
 * @lost: records that newer ones have replaced since the owner last fetched one
 * @event: signalled if there is a record where there was none, or NULL
 *
 * Not the tracepoints of trace.h.
 */
struct vhost_blk_timing {
	u64 slower_than_ns;
	spinlock_t lock;
	struct vhost_blk_traced *records;
	unsigned int first;
	unsigned int count;
	u64 lost;
	struct eventfd_ctx *event;
};

void vhost_blk_timing_init(struct vhost_blk *blk);
void vhost_blk_timing_forget(struct vhost_blk *blk);
void vhost_blk_timing_free(struct vhost_blk *blk);
int vhost_blk_set_trace(struct vhost_blk *blk, const struct vhost_blk_trace *trace);
int vhost_blk_get_traced(struct vhost_blk *blk, void __user *argp);

#endif /* _VHOST_BLK_TIMING_H */
