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

/**
 * struct vhost_blk_trial - a comparison of the present choice with another one; see trial.c
 * @windows: windows of the present trial that have ended, plus 1; 0: there is no trial
 * @tally: tallies of the present choice and of the other one
 * @pause: windows between two trials
 * @until: windows until the next one
 */
struct vhost_blk_trial {
	unsigned int windows;
	struct vhost_blk_tally tally[2];
	unsigned int pause;
	unsigned int until;
};

/**
 * enum vhost_blk_trial_step - result of a window
 * @VHOST_BLK_TRIAL_NONE: there is no trial
 * @VHOST_BLK_TRIAL_BEGINS: it begins with the next window
 * @VHOST_BLK_TRIAL_GOES_ON: it has windows left
 * @VHOST_BLK_TRIAL_ENDS: it has all windows; vhost_blk_trial_end() must follow
 */
enum vhost_blk_trial_step {
	VHOST_BLK_TRIAL_NONE,
	VHOST_BLK_TRIAL_BEGINS,
	VHOST_BLK_TRIAL_GOES_ON,
	VHOST_BLK_TRIAL_ENDS,
};

/**
 * vhost_blk_trial_differs - whether the present window uses the other choice
 * @trial: the trial
 *
 * The order is ABBA, so that a steady change of the load affects both alike.
 *
 * Return: true if it does.
 */
static inline bool vhost_blk_trial_differs(const struct vhost_blk_trial *trial)
{
	unsigned int window = trial->windows - 1;

	return trial->windows && (window % 4 == 1 || window % 4 == 2);
}

void vhost_blk_trial_init(struct vhost_blk_trial *trial);
void vhost_blk_trial_abandon(struct vhost_blk_trial *trial);
enum vhost_blk_trial_step vhost_blk_trial_window(struct vhost_blk_trial *trial,
						 const struct vhost_blk_tally *window,
						 unsigned int windows);
void vhost_blk_trial_end(struct vhost_blk_trial *trial, bool changed);
bool vhost_blk_rate_is(const struct vhost_blk_tally *tally, const struct vhost_blk_tally *than,
		       unsigned int percent);

#endif /* _VHOST_BLK_TRIAL_H */
