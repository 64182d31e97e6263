/* SPDX-License-Identifier: GPL-2.0-only */
#ifndef _VHOST_BLK_LIMIT_H
#define _VHOST_BLK_LIMIT_H

#include <linux/hrtimer.h>
#include <linux/spinlock.h>
#include <linux/types.h>

struct vhost_blk;
struct vhost_blk_options;
struct vhost_blk_queue;

/**
 * struct vhost_blk_bucket - a token bucket, kept as a clock
 * @rate: units per second; 0: no limit
 * @clock: time of the monotonic clock, in nanoseconds, at which the next request may be taken
 */
struct vhost_blk_bucket {
	u64 rate;
	u64 clock;
};

/**
 * struct vhost_blk_limit - limits of a device; see limit.c
 * @lock: protects all of it; @set is also read without it
 * @set: there is a limit
 * @version: number of changes of the limits
 * @burst_ns: unused time that later requests may catch up on
 * @iops: requests
 * @bytes: bytes
 */
struct vhost_blk_limit {
	spinlock_t lock;
	bool set;
	unsigned int version;
	u64 burst_ns;
	struct vhost_blk_bucket iops;
	struct vhost_blk_bucket bytes;
};

/**
 * struct vhost_blk_turn - a queue's view of the limits; under vq.mutex, but for @timer
 * @version: that of the limits when it last looked
 * @closed_until: the queue takes no chain before; 0: it may take one
 * @closed_at: when the present wait began; 0: there is none
 * @waited_ns: length of the wait that ended last
 * @waited_turn: the turn of the loop, by its time, in which it ended
 * @timer: runs the loop at that time
 */
struct vhost_blk_turn {
	unsigned int version;
	u64 closed_until;
	u64 closed_at;
	u64 waited_ns;
	u64 waited_turn;
	struct hrtimer timer;
};

void vhost_blk_limit_init(struct vhost_blk *blk);
void vhost_blk_limit_init_queue(struct vhost_blk_queue *q);
void vhost_blk_limit_set(struct vhost_blk *blk, const struct vhost_blk_options *opt);
u64 vhost_blk_limit_debt(struct vhost_blk *blk);
u64 vhost_blk_limit_waited(const struct vhost_blk_queue *q);
bool vhost_blk_limit_look(struct vhost_blk_queue *q);
void vhost_blk_limit_took(struct vhost_blk_queue *q, u64 bytes);

#endif /* _VHOST_BLK_LIMIT_H */
