/* SPDX-License-Identifier: GPL-2.0-only */
#ifndef _VHOST_BLK_TRIAL_H
#define _VHOST_BLK_TRIAL_H

#include <linux/types.h>

/**
 * struct vhost_blk_tally - requests and calls of some time
 * @ns: the time
 * @requests: published requests
 * @calls: calls of the driver
 */
struct vhost_blk_tally {
	u64 ns;
	u64 requests;
	u64 calls;
};

/* Windows of a block, in the order ABBA. */
#define VHOST_BLK_TRIAL_BLOCK	4u
/* Gain that a change needs. A choice that is better for another reason may lose as much. */
#define VHOST_BLK_TRIAL_GAIN	300

/**
 * struct vhost_blk_trial - a comparison of the present choice with another one; see trial.c
 * @likely: the better mean of few blocks is enough for a change, because a wrong choice costs less
 *	    than a late one; otherwise the gain has to be more than chance
 * @windows: windows of the present trial that have ended, plus 1; 0: there is no trial
 * @rates: sums of the rates of the present block's windows, of the present choice and of the other
 *	   one, in requests a second
 * @blocks: blocks of the trial that have ended
 * @sum: sum of their gains
 * @squares: sum of the squares of these
 * @pause: windows between two trials
 * @until: windows until the next one
 *
 * A gain is the other choice's, in 1/10000 of the rate.
 */
struct vhost_blk_trial {
	bool likely;
	unsigned int windows;
	u64 rates[2];
	unsigned int blocks;
	s64 sum;
	s64 squares;
	unsigned int pause;
	unsigned int until;
};

/**
 * enum vhost_blk_trial_step - result of a window
 * @VHOST_BLK_TRIAL_NONE: there is no trial
 * @VHOST_BLK_TRIAL_BEGINS: it begins with the next window
 * @VHOST_BLK_TRIAL_GOES_ON: it needs more windows
 * @VHOST_BLK_TRIAL_KEEPS: it has ended, and the present choice stays
 * @VHOST_BLK_TRIAL_CHANGES: it has ended, and the other choice is the present one from now on
 */
enum vhost_blk_trial_step {
	VHOST_BLK_TRIAL_NONE,
	VHOST_BLK_TRIAL_BEGINS,
	VHOST_BLK_TRIAL_GOES_ON,
	VHOST_BLK_TRIAL_KEEPS,
	VHOST_BLK_TRIAL_CHANGES,
};

/**
 * vhost_blk_trial_differs - true if the present window uses the other choice
 * @trial: the trial
 *
 * The order is ABBA, so that a steady change of the load affects both alike.
 *
 * Return: true if it does.
 */
static inline bool vhost_blk_trial_differs(const struct vhost_blk_trial *trial)
{
	unsigned int window = (trial->windows - 1) % VHOST_BLK_TRIAL_BLOCK;

	return trial->windows && (window == 1 || window == 2);
}

void vhost_blk_trial_init(struct vhost_blk_trial *trial, bool likely);
void vhost_blk_trial_abandon(struct vhost_blk_trial *trial);
enum vhost_blk_trial_step vhost_blk_trial_window(struct vhost_blk_trial *trial,
						 const struct vhost_blk_tally *window, int wanted);

#endif /* _VHOST_BLK_TRIAL_H */
