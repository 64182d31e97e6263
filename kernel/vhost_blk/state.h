/* SPDX-License-Identifier: GPL-2.0-only */
#ifndef _VHOST_BLK_STATE_H
#define _VHOST_BLK_STATE_H

/**
 * enum vhost_blk_state - state of a queue
 * @VHOST_BLK_STOPPED: has no backend and no request
 * @VHOST_BLK_RUNNING: takes chains
 * @VHOST_BLK_PAUSED: takes none while an ioctl changes what requests refer to
 * @VHOST_BLK_FAULTED: takes none, because its ring is faulty
 * @VHOST_BLK_STOPPING: takes none; a stop drains, or was interrupted
 *
 * vhost_blk_set_state() changes it, under vq.mutex, so that a run of the loop sees one state from
 * begin to end. Transitions, by row from and by column to:
 *
 *              STOPPED    RUNNING   PAUSED   FAULTED      STOPPING
 *   STOPPED    -          start     -        -            -
 *   RUNNING    no start   -         pause    ring fault   stop
 *   PAUSED     -          resume    -        ring fault   -
 *   FAULTED    -          -         -        -            stop
 *   STOPPING   drained    -         -        -            stop again
 *
 * "No start" is a start that fails before it releases vq.mutex. All transitions but ring faults
 * also need dev.mutex, under which a queue neither enters nor leaves STOPPED and STOPPING.
 *
 * The vhost core sees two of them: vq.private_data is NULL in STOPPED, the backend otherwise.
 */
enum vhost_blk_state {
	VHOST_BLK_STOPPED,
	VHOST_BLK_RUNNING,
	VHOST_BLK_PAUSED,
	VHOST_BLK_FAULTED,
	VHOST_BLK_STOPPING,
};

#endif /* _VHOST_BLK_STATE_H */
