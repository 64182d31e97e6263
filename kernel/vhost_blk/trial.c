// SPDX-License-Identifier: GPL-2.0-only
/*
 * Trials: windows of time with the present choice and with another one take turns, and the other
 * choice has to win by more than chance.
 *
 * The rate of a device varies by 10 % and more from one window to the next. Four windows in the order
 * ABBA make a block, in which a steady change of the load affects both choices alike. The relative
 * gains of the blocks have a mean and a standard error: a trial goes on until the error is small
 * enough for the mean, or until it has its last block. The daemon's own data plane does the same
 * (crates/data-plane/src/gain.rs).
 *
 * No lock and no kernel interface is used here: test/driver/tests/trial.rs builds this file for
 * userspace.
 */
#include <linux/minmax.h>

#include "trial.h"

/* Blocks of a trial at most, and of one with a likely gain. */
#define VHOST_BLK_BLOCKS	64u
#define VHOST_BLK_LIKELY_BLOCKS	6u
/* A whole rate, as a gain. */
#define VHOST_BLK_GAIN_UNIT	10000
/* Square of the standard deviation of a gain at least (5 %): a few blocks may agree by chance. */
#define VHOST_BLK_VARIANCE_MIN	(500 * 500)
/*
 * Blocks for a win before the last one, and standard errors between the mean and the wanted gain: more
 * than at the end, because each block is another chance. Numbers of errors are squares, times 4.
 */
#define VHOST_BLK_EARLY_BLOCKS	4u
#define VHOST_BLK_EARLY_ERRORS	49	/* 3.5 */
/* Standard errors of a gain for a win with the last block. */
#define VHOST_BLK_WIN_ERRORS	25	/* 2.5 */
/* Standard errors below the wanted gain for a loss: a trial costs the guest a part of its rate. */
#define VHOST_BLK_LOSS_ERRORS	16	/* 2 */

/* Windows between two trials; the pause doubles after each trial that changes nothing. */
#define VHOST_BLK_PAUSE_MIN	16u
#define VHOST_BLK_PAUSE_MAX	1024u

/**
 * vhost_blk_trial_init - begin anew, with the shortest pause
 * @trial: the trial
 * @likely: a likely gain is enough
 */
void vhost_blk_trial_init(struct vhost_blk_trial *trial, bool likely)
{
	trial->likely = likely;
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

static enum vhost_blk_trial_step vhost_blk_trial_end(struct vhost_blk_trial *trial, bool changes)
{
	trial->pause = changes ? VHOST_BLK_PAUSE_MIN : min(trial->pause * 2, VHOST_BLK_PAUSE_MAX);
	trial->until = trial->pause;
	trial->windows = 0;
	return changes ? VHOST_BLK_TRIAL_CHANGES : VHOST_BLK_TRIAL_KEEPS;
}

static enum vhost_blk_trial_step vhost_blk_trial_begin(struct vhost_blk_trial *trial)
{
	if (trial->until--)
		return VHOST_BLK_TRIAL_NONE;
	*trial = (struct vhost_blk_trial) {
		.likely = trial->likely, .windows = 1, .pause = trial->pause
	};
	return VHOST_BLK_TRIAL_BEGINS;
}

/* Counts the gain of the block that has ended. */
static void vhost_blk_count_block(struct vhost_blk_trial *trial)
{
	s64 present = trial->rates[0], other = trial->rates[1];
	/* Over the mean of both: the quotient of equal rates that vary is more than 1 on average. */
	s64 gain = (other - present) * 2 * VHOST_BLK_GAIN_UNIT / max_t(s64, other + present, 1);

	trial->blocks++;
	trial->sum += gain;
	trial->squares += gain * gain;
	trial->rates[0] = 0;
	trial->rates[1] = 0;
}

/*
 * True if a mean of @sum over the blocks is more than so many standard errors above 0. Its square
 * is compared, times the square of the number of blocks.
 */
static bool vhost_blk_above_errors(const struct vhost_blk_trial *trial, s64 sum, int errors)
{
	s64 n = trial->blocks;
	s64 variance = (n * trial->squares - trial->sum * trial->sum) / (n * (n - 1));

	return sum > 0 && 4 * sum * sum > errors * max_t(s64, variance, VHOST_BLK_VARIANCE_MIN) * n;
}

/* The verdict about a trial with a whole number of blocks. */
static enum vhost_blk_trial_step vhost_blk_trial_verdict(struct vhost_blk_trial *trial, int wanted)
{
	s64 above = trial->sum - (s64)trial->blocks * wanted;
	bool wins;

	if (trial->blocks < 2)
		return VHOST_BLK_TRIAL_GOES_ON;
	if (trial->blocks >= VHOST_BLK_EARLY_BLOCKS &&
	    vhost_blk_above_errors(trial, above, VHOST_BLK_EARLY_ERRORS))
		return vhost_blk_trial_end(trial, true);
	if (vhost_blk_above_errors(trial, -above, VHOST_BLK_LOSS_ERRORS))
		return vhost_blk_trial_end(trial, false);
	if (trial->blocks < (trial->likely ? VHOST_BLK_LIKELY_BLOCKS : VHOST_BLK_BLOCKS))
		return VHOST_BLK_TRIAL_GOES_ON;
	wins = above > 0 && (trial->likely || wanted < 0 ||
			     vhost_blk_above_errors(trial, trial->sum, VHOST_BLK_WIN_ERRORS));
	return vhost_blk_trial_end(trial, wins);
}

/**
 * vhost_blk_trial_window - count a window
 * @trial: the trial
 * @window: tally of the window, which took some time; at most 10^9 requests
 * @wanted: gain that the other choice needs, in 1/10000 of the rate; negative: loss that it may have
 *
 * Return: the step that the window makes.
 */
enum vhost_blk_trial_step vhost_blk_trial_window(struct vhost_blk_trial *trial,
						 const struct vhost_blk_tally *window, int wanted)
{
	if (!trial->windows)
		return vhost_blk_trial_begin(trial);
	trial->rates[vhost_blk_trial_differs(trial)] += window->requests * 1000000000 / window->ns;
	if (trial->windows++ % VHOST_BLK_TRIAL_BLOCK)
		return VHOST_BLK_TRIAL_GOES_ON;
	vhost_blk_count_block(trial);
	return vhost_blk_trial_verdict(trial, wanted);
}
