// SPDX-License-Identifier: GPL-2.0-only
/*
 * Trials: windows of time with the present choice and with another one take turns, and the caller
 * compares their tallies. No lock and no kernel interface is used here: test/driver/tests/trial.rs
 * builds this file for userspace.
 */
#include <linux/minmax.h>
#include <linux/string.h>

#include "trial.h"

/* Windows between two trials; the pause doubles after each trial that changes nothing. */
#define VHOST_BLK_PAUSE_MIN	16u
#define VHOST_BLK_PAUSE_MAX	1024u

/**
 * vhost_blk_trial_init - begin anew, with the shortest pause
 * @trial: the trial
 */
void vhost_blk_trial_init(struct vhost_blk_trial *trial)
{
	trial->windows = 0;
	trial->pause = VHOST_BLK_PAUSE_MIN;
	trial->until = VHOST_BLK_PAUSE_MIN;
}

/**
 * vhost_blk_trial_abandon - end a trial without a result, if there is one
 * @trial: the trial; the next one begins after a window
 */
void vhost_blk_trial_abandon(struct vhost_blk_trial *trial)
{
	if (trial->windows)
		trial->until = 0;
	trial->windows = 0;
}

/**
 * vhost_blk_trial_window - count a window
 * @trial: the trial
 * @window: tally of the window
 * @windows: length of a trial
 *
 * Return: the step that the window makes.
 */
enum vhost_blk_trial_step vhost_blk_trial_window(struct vhost_blk_trial *trial,
						 const struct vhost_blk_tally *window,
						 unsigned int windows)
{
	struct vhost_blk_tally *tally = trial->tally + vhost_blk_trial_differs(trial);

	if (!trial->windows) {
		if (trial->until--)
			return VHOST_BLK_TRIAL_NONE;
		memset(trial->tally, 0, sizeof(trial->tally));
		trial->windows = 1;
		return VHOST_BLK_TRIAL_BEGINS;
	}
	tally->ns += window->ns;
	tally->requests += window->requests;
	tally->calls += window->calls;
	return trial->windows++ == windows ? VHOST_BLK_TRIAL_ENDS : VHOST_BLK_TRIAL_GOES_ON;
}

/**
 * vhost_blk_trial_end - end a trial
 * @trial: the trial
 * @changed: the other choice is the present one from now on
 */
void vhost_blk_trial_end(struct vhost_blk_trial *trial, bool changed)
{
	trial->pause = changed ? VHOST_BLK_PAUSE_MIN : min(trial->pause * 2, VHOST_BLK_PAUSE_MAX);
	trial->until = trial->pause;
	trial->windows = 0;
}

/**
 * vhost_blk_rate_is - compare two rates
 * @tally: one tally; not longer than 4 s and some millions of requests, so that the products fit
 * @than: the other one
 * @percent: share of its rate
 *
 * Return: true if the rate of @tally is at least that.
 */
bool vhost_blk_rate_is(const struct vhost_blk_tally *tally, const struct vhost_blk_tally *than,
		       unsigned int percent)
{
	return tally->requests * than->ns / percent >= than->requests * tally->ns / 100;
}
