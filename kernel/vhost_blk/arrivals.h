/* SPDX-License-Identifier: GPL-2.0-only */
#ifndef _VHOST_BLK_ARRIVALS_H
#define _VHOST_BLK_ARRIVALS_H

#include <linux/types.h>
#include <linux/wait.h>

struct vhost_blk_queue;

/* Values of vhost_blk_arrivals.kicked_ns that are no times. */
#define VHOST_BLK_NO_KICK	0ULL		/* waits for a kick */
#define VHOST_BLK_NOT_WAITING	U64_MAX		/* does not wait for a kick */

/**
 * struct vhost_blk_arrivals - bounds on the time at which chains came into the ring; see arrivals.c
 * @after_ns: the chain that was taken last came after this; 0: unknown
 * @horizon_ns: the chains from @horizon on came after this; 0: unknown
 * @horizon: index in the avail ring
 * @look_ns: a time before the last reading of the driver's index; 0: there was none in this trace
 * @kicked_ns: the first kick since the queue waits for one, or one of the values above. Written under
 *	vq.mutex, but the time of the kick by the driver's kick itself, in any context, which replaces
 *	VHOST_BLK_NO_KICK only
 * @core_wake: the vhost core's handler of a kick
 *
 * All but @kicked_ns and @core_wake are under vq.mutex.
 */
struct vhost_blk_arrivals {
	u64 after_ns;
	u64 horizon_ns;
	u16 horizon;
	u64 look_ns;
	u64 kicked_ns;
	wait_queue_func_t core_wake;
};

void vhost_blk_arrivals_init(struct vhost_blk_queue *q);
void vhost_blk_arrivals_forget(struct vhost_blk_queue *q);

#endif /* _VHOST_BLK_ARRIVALS_H */
