/* SPDX-License-Identifier: GPL-2.0-only */
#ifndef _VHOST_BLK_STATS_H
#define _VHOST_BLK_STATS_H

#include <linux/types.h>

/* Powers of two of microseconds in the latency histogram; the last one counts all above. */
#define VHOST_BLK_LATENCY_BUCKETS	24

/* Kinds of failures, by the bits of VHOST_BLK_FAILURE_IO to VHOST_BLK_FAILURE_READ_ONLY. */
#define VHOST_BLK_FAILURE_KINDS	5

/* Operations whose latencies are counted apart. */
enum vhost_blk_op {
	VHOST_BLK_OP_READ,
	VHOST_BLK_OP_WRITE,
	VHOST_BLK_OP_FLUSH,
	VHOST_BLK_OP_DISCARD,	/* and WRITE_ZEROES, SECURE_ERASE */
	VHOST_BLK_OPS
};

/**
 * struct vhost_blk_latency - latencies of an operation, from taken to published
 * @count: finished requests by log2 of microseconds
 * @sum_us: sum of the latencies
 */
struct vhost_blk_latency {
	u64 count[VHOST_BLK_LATENCY_BUCKETS];
	u64 sum_us;
};

/**
 * struct vhost_blk_stats - counters of a queue since its start; under vq.mutex
 * @chains: chains taken, without those that the queue keeps: the owner adds nr_kept
 * @completed: chains put into the used ring
 * @refused: requests that were answered without I/O because they are wrong or not supported
 * @failed: requests that the storage has failed
 * @dropped: requests that ended without a used entry: their owner was killed, or the ring could not
 *	be written
 * @kicks: times the handler ran because of a kick
 * @turns: turns of the loop
 * @calls: calls of the driver
 * @coalesced: batches whose call came with that of an earlier batch
 * @batch_trials: trials of the size of batches that have ended
 * @suppressed: calls that the driver did not want
 * @throttled: waits for a limit
 * @bounced: requests copied because their buffers are not aligned
 * @slow: requests that went through the workqueue
 * @polls: times the handler polled before sleeping
 * @polls_won: polls that found work
 * @poll_ns: their time, but for the last look of each
 * @failures: requests that the storage has failed, by kind; also those that the queue keeps
 * @read_bytes: data read by successful requests
 * @write_bytes: data written by successful requests
 * @discards: successful DISCARDs
 * @discarded_bytes: lengths of their ranges
 * @latency: by operation; without refused requests and GET_ID
 */
struct vhost_blk_stats {
	u64 chains;
	u64 completed;
	u64 refused;
	u64 failed;
	u64 dropped;
	u64 kicks;
	u64 turns;
	u64 calls;
	u64 coalesced;
	u64 batch_trials;
	u64 suppressed;
	u64 throttled;
	u64 bounced;
	u64 slow;
	u64 polls;
	u64 polls_won;
	u64 poll_ns;
	u64 failures[VHOST_BLK_FAILURE_KINDS];
	u64 read_bytes;
	u64 write_bytes;
	u64 discards;
	u64 discarded_bytes;
	struct vhost_blk_latency latency[VHOST_BLK_OPS];
};

#endif /* _VHOST_BLK_STATS_H */
