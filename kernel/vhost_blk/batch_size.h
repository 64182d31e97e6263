/* SPDX-License-Identifier: GPL-2.0-only */
#ifndef _VHOST_BLK_BATCH_SIZE_H
#define _VHOST_BLK_BATCH_SIZE_H

#include "trial.h"

/* Positions of sizes, and that of a new queue, whose batches grow. */
#define VHOST_BLK_BATCH_SIZES	5
#define VHOST_BLK_BATCH_SIZE_FIRST	3

/**
 * struct vhost_blk_batch_size - size of a queue's batches; see batch_size.c. Under vq.mutex
 * @chosen: position of the present size
 * @candidate: position of the size that the present trial compares with it
 * @smaller_next: the next trial is of a smaller size
 * @trial: the trial
 */
struct vhost_blk_batch_size {
	unsigned int chosen;
	unsigned int candidate;
	bool smaller_next;
	struct vhost_blk_trial trial;
};

extern const unsigned int vhost_blk_batch_sizes[VHOST_BLK_BATCH_SIZES];

/**
 * vhost_blk_batch_size_now - the size of the present window
 * @size: the size of a queue's batches
 *
 * Return: the size in requests; 0: batches grow, see vhost_blk_batch_limit().
 */
static inline unsigned int vhost_blk_batch_size_now(const struct vhost_blk_batch_size *size)
{
	unsigned int at = vhost_blk_trial_differs(&size->trial) ? size->candidate : size->chosen;

	return vhost_blk_batch_sizes[at];
}

void vhost_blk_batch_size_init(struct vhost_blk_batch_size *size);
bool vhost_blk_batch_size_window(struct vhost_blk_batch_size *size,
				 const struct vhost_blk_tally *window);

#endif /* _VHOST_BLK_BATCH_SIZE_H */
