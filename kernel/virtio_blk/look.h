/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * Scans of the used ring; a scan arms the interrupt before the next.
 */
#ifndef _VIRTBLK_LOOK_H
#define _VIRTBLK_LOOK_H

#include "virtio_blk.h"

/* Looks at the used ring before the last one of an interrupt. */
#define VIRTBLK_LOOKS_MAX	8

/**
 * enum virtblk_look - a look at the used ring
 * @VIRTBLK_LOOK_ONCE: leaves the interrupt alone
 * @VIRTBLK_LOOK_MORE: arms the interrupt if no other look is due
 * @VIRTBLK_LOOK_LAST: arms it in any case. The lock is held until the ring is empty, so that other
 *	CPUs, which could send requests for ever, do not keep an interrupt from its end.
 */
enum virtblk_look {
	VIRTBLK_LOOK_ONCE,
	VIRTBLK_LOOK_MORE,
	VIRTBLK_LOOK_LAST,
};

/**
 * virtblk_arm() - arms the interrupt, unless the look leaves it alone or another one is due anyway
 * @q: its used ring was emptied, but for VIRTBLK_LOOK_ONCE with the interrupt off; its lock is held
 * @taken: requests found in that look
 * @look: the look
 *
 * The requests found are completed before the interrupt is armed, so that requests which the device
 * uses meanwhile need no interrupt. If the device has no other request, there is none to expect.
 *
 * Return: false if the caller has to look again: at once after VIRTBLK_LOOK_LAST, else after it has
 * completed its requests.
 */
static inline bool virtblk_arm(struct virtblk_queue *q, unsigned int taken, enum virtblk_look look)
{
	lockdep_assert_held(&q->lock);
	if (look == VIRTBLK_LOOK_ONCE)
		return true;
	if (look == VIRTBLK_LOOK_MORE && taken && q->in_flight)
		return false;
	return virtqueue_enable_cb(q->vq);
}

/**
 * virtblk_next_look() - the kind of a look at the used ring
 * @interrupt: the interrupt is to be armed in the end
 * @looks: looks before this one
 *
 * Return: the kind.
 */
static inline enum virtblk_look virtblk_next_look(bool interrupt, unsigned int looks)
{
	if (!interrupt)
		return VIRTBLK_LOOK_ONCE;
	return looks < VIRTBLK_LOOKS_MAX ? VIRTBLK_LOOK_MORE : VIRTBLK_LOOK_LAST;
}

/**
 * virtblk_recheck_look() - the only look of a task that no interrupt has called
 * @q: the queue
 *
 * Return: the kind.
 */
static inline enum virtblk_look virtblk_recheck_look(const struct virtblk_queue *q)
{
	return q->polled ? VIRTBLK_LOOK_ONCE : VIRTBLK_LOOK_LAST;
}

#endif /* _VIRTBLK_LOOK_H */
