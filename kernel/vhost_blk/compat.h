/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * Differences between kernels, found by compiling probes/ at build time (see Kbuild), not by
 * version numbers: the vhost core's interface changes inside stable series.
 */
#ifndef _VHOST_BLK_COMPAT_H
#define _VHOST_BLK_COMPAT_H

/* Without this test, a compiler option that breaks the probes would look like an old kernel. */
#ifndef VHOST_BLK_PROBES_WORK
#error "probes/baseline.c does not compile: the probes say nothing about this kernel"
#endif

/* Rates and times are divided as 64-bit numbers, and the daemon needs 64 bits anyway. */
#ifndef CONFIG_64BIT
#error "vhost-blk needs a 64-bit kernel"
#endif

#include <linux/hrtimer.h>
#include <linux/workqueue.h>

#include "vhost.h"

/* For work that may wait, on any CPU. */
#ifdef VHOST_BLK_HAS_DFL_WQ
#define vhost_blk_system_wq	system_dfl_wq
#else
#define vhost_blk_system_wq	system_unbound_wq
#endif

/* Prepare a timer of the monotonic clock that is started with relative times. */
static inline void vhost_blk_hrtimer_setup(struct hrtimer *timer,
					   enum hrtimer_restart (*function)(struct hrtimer *))
{
#ifdef VHOST_BLK_HAS_HRTIMER_SETUP
	hrtimer_setup(timer, function, CLOCK_MONOTONIC, HRTIMER_MODE_REL);
#else
	hrtimer_init(timer, CLOCK_MONOTONIC, HRTIMER_MODE_REL);
	timer->function = function;
#endif
}

/* Undo the last vhost_get_vq_desc(). */
static inline void vhost_blk_discard_desc(struct vhost_virtqueue *vq)
{
#ifdef VHOST_BLK_DISCARD_DESC_HAS_NDESC
	vhost_discard_vq_desc(vq, 1, 1);
#else
	vhost_discard_vq_desc(vq, 1);
#endif
}

/* Publish @count used entries. */
static inline int vhost_blk_add_used(struct vhost_virtqueue *vq, struct vring_used_elem *heads,
				     unsigned int count)
{
#ifdef VHOST_BLK_ADD_USED_HAS_NHEADS
	return vhost_add_used_n(vq, heads, NULL, count);
#else
	return vhost_add_used_n(vq, heads, count);
#endif
}

static inline void vhost_blk_set_acked_features(struct vhost_virtqueue *vq, u64 features)
{
#ifdef VHOST_BLK_ACKED_FEATURES_IS_ARRAY
	virtio_features_from_u64(vq->acked_features_array, features);
#else
	vq->acked_features = features;
#endif
}

#endif /* _VHOST_BLK_COMPAT_H */
