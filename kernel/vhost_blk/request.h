/* SPDX-License-Identifier: GPL-2.0-only */
#ifndef _VHOST_BLK_REQUEST_H
#define _VHOST_BLK_REQUEST_H

#include <linux/bio.h>
#include <linux/fs.h>
#include <linux/llist.h>
#include <linux/virtio_blk.h>
#include <linux/workqueue.h>

#include "vhost_blk.h"

struct vhost_blk_large;

/**
 * struct vhost_blk_chain - a chain that was taken
 * @head: its number in the ring
 * @out: number of device-readable elements of vq.iov
 * @in: number of device-writable ones, which follow
 * @log_num: entries in vq.log
 */
struct vhost_blk_chain {
	unsigned int head;
	unsigned int out;
	unsigned int in;
	unsigned int log_num;
};

/**
 * struct vhost_blk_range - one range of a DISCARD, WRITE_ZEROES or SECURE_ERASE
 * @sector: its first 512-byte sector
 * @sectors: number of 512-byte sectors
 * @unmap: WRITE_ZEROES may free the space
 */
struct vhost_blk_range {
	u64 sector;
	u32 sectors;
	bool unmap;
};

/**
 * struct vhost_blk_req - a request in flight
 * @next_free: in the queue's free list
 * @done: in the queue's list of finished ones
 * @polled: entry in the queue's list of polled I/O
 * @q: its queue
 * @be: its backend, valid until the request is finished
 * @status_addr: address of the status byte, or NULL
 * @sector: first 512-byte sector
 * @bytes: data bytes
 * @charged: bytes that count as in flight
 * @written: bytes written into the chain before the status byte
 * @type: VIRTIO_BLK_T_*
 * @head: number of the chain
 * @gen: generation that the drain counts it in
 * @durable: completes only on stable storage
 * @pinned: the pages in @vecs must be unpinned
 * @nowait: submitted with NOWAIT; it may have to be repeated
 * @deferred: it is or was on the workqueue
 * @refused: it is wrong or not supported, and is answered without I/O
 * @kept: it failed, and its queue keeps its chain
 * @cut_off: the storage has become smaller, and lacks its range
 * @bounced: the pages in @vecs are the module's own
 * @error: first errno of the I/O
 * @start_ns: when the chain was taken; 0: the request is free. Also read without vq.mutex
 * @submit_ns: when the storage got it; 0: it was submitted while no trace was on
 * @end_ns: if @submit_ns is set: when its I/O had finished
 * @limit_ns: likewise: the wait of the queue for a limit right before the chain was taken
 * @ring_ns: likewise: its other time in the ring, at most; U64_MAX: unknown
 * @vecs: the data's pages
 * @nr_vecs: used elements of @vecs
 * @max_vecs: room in @vecs
 * @bounce_to: destination of a bounced read
 * @bounce_iov: memory of @bounce_to
 * @log: entries to mark in the dirty log, or NULL
 * @log_num: entries of @log
 * @log_iov: the same as host addresses, with an IOTLB
 * @log_iov_num: entries of @log_iov
 * @large: the buffers of a request that is larger than a piece
 * @ranges: ranges of a range command
 * @nr_ranges: their number
 * @work: for the workqueue
 * @bio: the block I/O
 * @iocb: the file I/O
 * @inline_range: @ranges when there is one
 * @inline_vecs: @vecs when they are few
 */
struct vhost_blk_req {
	struct vhost_blk_req *next_free;
	struct llist_node done;
	struct list_head polled;
	struct vhost_blk_queue *q;
	struct vhost_blk_backend *be;
	u8 __user *status_addr;
	u64 sector;
	u32 bytes;
	u64 charged;
	u32 written;
	u32 type;
	u16 head;
	u8 gen;
	bool durable;
	bool pinned;
	bool bounced;
	bool nowait;
	bool deferred;
	bool refused;
	bool kept;
	bool cut_off;
	int error;
	u64 start_ns;
	u64 submit_ns;
	u64 end_ns;
	u64 limit_ns;
	u64 ring_ns;
	struct bio_vec *vecs;
	unsigned int nr_vecs;
	unsigned int max_vecs;
	struct iov_iter bounce_to;
	const void *bounce_iov;
	struct vhost_log *log;
	unsigned int log_num;
	struct iovec *log_iov;
	unsigned int log_iov_num;
	struct vhost_blk_large *large;
	struct vhost_blk_range *ranges;
	unsigned int nr_ranges;
	struct work_struct work;
	union {
		struct bio bio;
		struct kiocb iocb;
	};
	struct vhost_blk_range inline_range;
	struct bio_vec inline_vecs[VHOST_BLK_INLINE_VECS];
};

#endif /* _VHOST_BLK_REQUEST_H */
