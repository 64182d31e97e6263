/* SPDX-License-Identifier: GPL-2.0-only */
#ifndef _VHOST_BLK_PORTION_H
#define _VHOST_BLK_PORTION_H

#include "trial.h"

/* Positions of sizes, and that of a new queue, whose batches grow. */
#define VHOST_BLK_PORTION_SIZES	5
#define VHOST_BLK_PORTION_FIRST	3

/**
 * struct vhost_blk_portion - size of a queue's batches; see portion.c. Under vq.mutex
 * @chosen: position of the present size
 * @candidate: position of the size that the present trial compares with it
 * @smaller_next: the next trial is of a smaller size
 * @trial: the trial
 */
struct vhost_blk_portion {
	unsigned int chosen;
	unsigned int candidate;
	bool smaller_next;
	struct vhost_blk_trial trial;
};

extern const unsigned int vhost_blk_portion_sizes[VHOST_BLK_PORTION_SIZES];

/**
 * vhost_blk_portion_size - the size of the present window
 * @portion: the portion
 *
 * Return: the size in requests; 0: batches grow, see vhost_blk_batch_limit().
 */
static inline unsigned int vhost_blk_portion_size(const struct vhost_blk_portion *portion)
{
	unsigned int at = vhost_blk_trial_differs(&portion->trial) ? portion->candidate :
								     portion->chosen;

	return vhost_blk_portion_sizes[at];
}

void vhost_blk_portion_init(struct vhost_blk_portion *portion);
bool vhost_blk_portion_window(struct vhost_blk_portion *portion,
			      const struct vhost_blk_tally *window);

#endif /* _VHOST_BLK_PORTION_H */
