/* SPDX-License-Identifier: GPL-2.0-only */
#ifndef _VHOST_BLK_LIMIT_H
#define _VHOST_BLK_LIMIT_H

#include <linux/hrtimer.h>
#include <linux/types.h>

#include "../include/uapi/vhost_blk.h"

struct vhost_blk;
struct vhost_blk_member;
struct vhost_blk_queue;

/**
 * struct vhost_blk_limit - the limits of a device; see limit.c
 * @set: there may be a limit
 * @joins: number of changes of @member
 * @own: the limits of the device alone; their clocks and @version change without a lock
 * @member: its part in limits that several devices share, in place of @own; NULL: it shares none.
 *	Changed under dev.mutex
 */
struct vhost_blk_limit {
	bool set;
	u32 joins;
	struct vhost_blk_limits own;
	struct vhost_blk_member __rcu *member;
};

/**
 * struct vhost_blk_throttle - a queue's view of the limits; under vq.mutex, but for @timer
 * @version: that of the limits when it last looked; see vhost_blk_limit_version()
 * @closed_until: the queue takes no chain before; 0: it may take one
 * @closed_at: when the present wait began; 0: there is none
 * @waited_ns: length of the wait that ended last
 * @waited_turn: the turn of the loop, by its time, in which it ended
 * @took_at: when the queue took its last chain; others read it, and @closed_at, without the lock
 * @yields: times that it let others take since its last chain
 * @timer: runs the loop at that time
 */
struct vhost_blk_throttle {
	u64 version;
	u64 closed_until;
	u64 closed_at;
	u64 waited_ns;
	u64 waited_turn;
	u64 took_at;
	unsigned int yields;
	struct hrtimer timer;
};

u64 vhost_blk_limit_advance(u64 *clock, u64 cost, u64 earliest, u64 latest);
void vhost_blk_limit_init_queue(struct vhost_blk_queue *q);
void vhost_blk_limit_set(struct vhost_blk *blk, const struct vhost_blk_options *opt);
void vhost_blk_limit_changed(struct vhost_blk *blk);
u64 vhost_blk_limit_debt(struct vhost_blk *blk);
u64 vhost_blk_limit_waited(const struct vhost_blk_queue *q);
bool vhost_blk_limit_look(struct vhost_blk_queue *q);
void vhost_blk_limit_took(struct vhost_blk_queue *q, u64 bytes);

/* share.c */
int vhost_blk_share_limits(struct vhost_blk *blk, const struct vhost_blk_share *share);
void vhost_blk_unshare_limits(struct vhost_blk *blk);
struct vhost_blk_limits *vhost_blk_member_limits(struct vhost_blk_member *member);
void vhost_blk_member_owe(struct vhost_blk_member *member, u64 version,
			  const struct vhost_blk_debt *rest);
u64 vhost_blk_member_debt(const struct vhost_blk_member *member);
u64 vhost_blk_member_pay(struct vhost_blk_member *member, u64 earliest, u64 now);
void vhost_blk_member_charge(struct vhost_blk_member *member, u64 cost, u64 at, u64 now);
u64 vhost_blk_member_turn(struct vhost_blk_member *member, u64 at, u64 now);

#endif /* _VHOST_BLK_LIMIT_H */
