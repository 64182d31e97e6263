/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * vhost_blk: the in-kernel data plane of a virtio block device.
 *
 * The life of a request, one word and one file each:
 *
 *   chain.c       take a chain from the avail ring
 *   request.c     copy and check its header and ranges
 *   submit.c      start the I/O (data.c: its pages; bdev.c: bios; file.c: kiocbs; slow.c: I/O that
 *                 may sleep for long)
 *   completion.c  reap finished I/O, status byte; used entries at once; one call
 *
 * queue.c holds the loop through them, drain.c starts and stops queues (state.h: their states),
 * reserve.c has memory for emergencies, failure.c reports a failing backend to the owner,
 * dev.c is the user interface (core.c: the vhost core's part of it).
 *
 * Locks, outermost first: dev.mutex (control plane) -> vq.mutex (everything about a ring, and the
 * requests of its queue). State that must be readable meanwhile has its own locks, held for
 * moments: backend_mutex -> the backend's, serial_lock, failure_lock. A submitted request belongs
 * to the block layer or the file system until vhost_blk_end_io(), and to its queue after that.
 */
#ifndef _VHOST_BLK_H
#define _VHOST_BLK_H

#include <linux/bio.h>
#include <linux/blkdev.h>
#include <linux/cgroup.h>
#include <linux/fs.h>
#include <linux/llist.h>
#include <linux/nospec.h>
#include <linux/uio.h>
#include <linux/vhost.h>
#include <linux/virtio_blk.h>
#include <linux/wait.h>
#include <linux/workqueue.h>

#include "vhost.h"	/* drivers/vhost/vhost.h of the kernel that is built for */
#include "compat.h"
#include "reserve.h"
#include "state.h"
#include "stats.h"
#include "../include/uapi/vhost_blk.h"

/* Chains served before the worker serves its other queues. */
#define VHOST_BLK_WEIGHT	256
/* Bytes moved before the worker serves its other queues. */
#define VHOST_BLK_BYTE_WEIGHT	(16 << 20)
/*
 * Chains started before completions are reaped: few at first, so that the driver works in parallel
 * with the device; then more, while the ring has more.
 */
#define VHOST_BLK_BATCH_FIRST	2u
#define VHOST_BLK_BATCH_MAX	16u
/* The same if the driver waits for the CPU of this loop. */
#define VHOST_BLK_BATCH_CROWDED	64u
/* Interval, in jiffies, of the poll for completions that have no interrupt. */
#define VHOST_BLK_POLL_INTERVAL	1
/* Data bytes of one request: what UEFI's driver (OVMF) reads at once. */
#define VHOST_BLK_REQUEST_BYTES_MAX	(1u << 30)
/* Data bytes that a large request has in flight. */
#define VHOST_BLK_PIECE_BYTES	(32u << 20)
/* Data segments of one request: the vhost core's limit, less header and status. */
#define VHOST_BLK_SEG_MAX	(UIO_MAXIOV - 2)
/* Pages of a piece: all its bytes, and a part of a page more at each border between segments. */
#define VHOST_BLK_PIECE_PAGES	(VHOST_BLK_PIECE_BYTES / PAGE_SIZE + VHOST_BLK_SEG_MAX + 1)
/* Segments that need no allocation. */
#define VHOST_BLK_INLINE_VECS	16
/* Ranges that need no allocation. */
#define VHOST_BLK_INLINE_RANGES	1
/* Pages looked up at once. */
#define VHOST_BLK_PAGES_CHUNK	32
/* Known options. */
#define VHOST_BLK_OPTIONS	(VHOST_BLK_OPT_WRITE_THROUGH | VHOST_BLK_OPT_READ_ONLY | \
				 VHOST_BLK_OPT_IOPOLL | VHOST_BLK_OPT_PIN_MEMORY | \
				 VHOST_BLK_OPT_NO_UNMAP)

struct vhost_blk;
struct vhost_blk_queue;
struct vhost_blk_pinned;

/**
 * struct vhost_blk_backend - the storage behind a device
 * @blk: the device
 * @file: file or device that the owner attached
 * @bdev_file: the module's own, exclusive open of a block device; NULL: regular file, or removed
 * @bdev: the block device, or NULL
 * @wq: runs operations that may sleep for long
 * @mem_mask: bits that must be zero in a buffer's address, else it is bounced
 * @lbs: logical block size in bytes
 * @read_only: refuses requests that write
 * @direct: a regular file opened with O_DIRECT
 * @nowait: a regular file that honours IOCB_NOWAIT
 * @polls: a block device with poll queues
 * @dead: the block device was removed; set once. vhost_blk_dead_work() takes each vq.mutex after
 *	that, so a run of the loop that begins later sees it
 * @iocb_flags: of @file when it was attached; the owner may change them later
 * @wb_err: write-back errors of @file that an earlier backend was told of
 * @sync_error: errno of the first failed sync of @file; every later FLUSH fails with it
 * @dead_work: releases a removed block device
 * @lock: serialises its release with its open and its readers
 * @cred: credentials of the owner that attached it; the workqueue uses them
 * @blkcg_css: cgroup charged for I/O that the workqueue does
 * @memcg_css: cgroup charged for page cache that the workqueue makes
 */
struct vhost_blk_backend {
	struct vhost_blk *blk;
	struct file *file;
	struct file *bdev_file;
	struct block_device *bdev;
	struct workqueue_struct *wq;
	unsigned int mem_mask;
	unsigned int lbs;
	bool read_only;
	bool direct;
	bool nowait;
	bool polls;
	bool dead;
	int iocb_flags;
	errseq_t wb_err;
	int sync_error;
	struct work_struct dead_work;
	struct mutex lock;
	const struct cred *cred;
	struct cgroup_subsys_state *blkcg_css;
	struct cgroup_subsys_state *memcg_css;
};

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
 * @slow: it is or was on the workqueue
 * @refused: it was answered without I/O
 * @bounced: the pages in @vecs are the module's own
 * @error: first errno of the I/O
 * @start_ns: when the chain was taken
 * @vecs: the data's pages
 * @nr_vecs: used elements of @vecs
 * @max_vecs: room in @vecs
 * @bounce_to: destination of a bounced read
 * @bounce_iov: memory of @bounce_to
 * @log: entries to mark in the dirty log, or NULL
 * @log_num: entries of @log
 * @log_iov: the same as host addresses, with an IOTLB
 * @log_iov_num: entries of @log_iov
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
	u32 charged;
	u32 written;
	u32 type;
	u16 head;
	u8 gen;
	bool durable;
	bool pinned;
	bool bounced;
	bool nowait;
	bool slow;
	bool refused;
	int error;
	u64 start_ns;
	struct bio_vec *vecs;
	unsigned int nr_vecs;
	unsigned int max_vecs;
	struct iov_iter bounce_to;
	const void *bounce_iov;
	struct vhost_log *log;
	unsigned int log_num;
	struct iovec *log_iov;
	unsigned int log_iov_num;
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

/**
 * struct vhost_blk_region - the in-flight region of a queue
 * @user: its address in the owner, or NULL
 * @desc_num: its entries
 * @counter: last submission number given
 */
struct vhost_blk_region {
	struct vhost_blk_region_split __user *user;
	unsigned int desc_num;
	u64 counter;
};

/**
 * struct vhost_blk_polling - adaptive polling of a queue; see queue.c
 * @score: 0: no polling; up for polls that found work, down for the others
 * @interval: sleeps between two trials
 * @until_trial: sleeps until the next one
 */
struct vhost_blk_polling {
	int score;
	int interval;
	int until_trial;
};

/**
 * struct vhost_blk_queue - a virtqueue and its requests
 * @vq: the vhost core's part
 * @blk: the device
 * @done: finished I/O, pushed from any context
 * @done_work: runs the loop for @done
 * @orphan_work: ends @done after the owner was killed
 * @state: see state.h; under vq.mutex
 * @looping: the loop will reap @done without a wake-up. Apart from @state, because completions
 *	read it in any context, without a lock: see vhost_blk_end_io()
 * @starved: waits for bytes in flight of other queues, which clear it without this queue's lock:
 *	see vhost_blk_charge()
 * @crowded: the last call made another task wait for this CPU; only the size of batches depends
 *	on it
 * @gen: generation of new requests; under vq.mutex, changed by drains only
 * @inflight: requests in flight by generation; changed under vq.mutex
 * @settled: used entries in vq.heads that wait until the rings can be reached; under vq.mutex; 0
 *	while chains are taken
 * @drained: woken when a generation is empty
 * @reqs: all requests
 * @free: the unused ones
 * @polled: I/O in flight that only this queue polls for
 * @poll: state of adaptive polling
 * @now_ns: the time at the start of the batch
 * @region: the in-flight region, which marks taken chains
 * @reserve: memory for one request if the allocator has none
 * @stats: counters
 */
struct vhost_blk_queue {
	struct vhost_virtqueue vq;
	struct vhost_blk *blk;
	struct llist_head done;
	struct vhost_work done_work;
	struct delayed_work orphan_work;
	enum vhost_blk_state state;
	bool looping;
	bool starved;
	bool crowded;
	u8 gen;
	unsigned int inflight[2];
	unsigned int settled;
	wait_queue_head_t drained;
	struct vhost_blk_req *reqs;
	struct vhost_blk_req *free;
	struct list_head polled;
	struct vhost_blk_polling poll;
	u64 now_ns;
	struct vhost_blk_region region;
	struct vhost_blk_reserve reserve;
	struct vhost_blk_stats stats;
};

/**
 * struct vhost_blk - an open /dev/vhost-blk
 * @make_mutex: the device is made under it, once
 * @num_queues: number of queues; 0: only this structure exists yet
 * @dev: the vhost core's part
 * @vqs: its array of the queues
 * @queues: the queues
 * @backend: the storage; changed under dev.mutex and @backend_mutex; by vq.private_data under
 *	vq.mutex
 * @backend_mutex: keeps @backend, for moments only
 * @ioctls: number of running and waiting ioctls; no queue polls meanwhile
 * @inflight_bytes: data bytes in flight
 * @closing: the last file descriptor is gone; set once, so it is read without a lock
 * @starving: some queue waits for @inflight_bytes to go down; see vhost_blk_charge()
 * @opt: options; changed under dev.mutex. A request reads each field once, without a lock, so that
 *	they need not change together; but the flags that must be the same for all requests in
 *	flight (IOPOLL, PIN_MEMORY) are changed only while all queues are paused
 * @serial: GET_ID answer
 * @serial_lock: protects @serial
 * @pinned: the pinned memory table, or NULL; changed only while all queues are paused
 * @failure: failures since the owner last fetched them
 * @failure_event: signalled by the first failure, or NULL
 * @failure_lock: protects both
 */
struct vhost_blk {
	struct mutex make_mutex;
	unsigned int num_queues;
	struct vhost_dev dev;
	struct vhost_virtqueue *vqs[VHOST_BLK_QUEUES_MAX];
	struct vhost_blk_queue *queues;
	struct vhost_blk_backend *backend;
	struct mutex backend_mutex;
	atomic_t ioctls;
	atomic64_t inflight_bytes;
	bool closing;
	bool starving;
	struct vhost_blk_options opt;
	u8 serial[VHOST_BLK_SERIAL_BYTES];
	spinlock_t serial_lock;
	struct vhost_blk_pinned *pinned;
	struct vhost_blk_failure failure;
	struct eventfd_ctx *failure_event;
	spinlock_t failure_lock;
};

static inline struct vhost_blk_queue *vhost_blk_queue_of(struct vhost_virtqueue *vq)
{
	return container_of(vq, struct vhost_blk_queue, vq);
}

static inline unsigned int vhost_blk_queue_index(const struct vhost_blk_queue *q)
{
	return q - q->blk->queues;
}

/* The queue of a number that userspace gave, or NULL. */
static inline struct vhost_blk_queue *vhost_blk_queue_at(struct vhost_blk *blk, unsigned int index)
{
	if (index >= blk->num_queues)
		return NULL;
	return blk->queues + array_index_nospec(index, blk->num_queues);
}

static inline void vhost_blk_set_state(struct vhost_blk_queue *q, enum vhost_blk_state state)
{
	lockdep_assert_held(&q->vq.mutex);
	WRITE_ONCE(q->state, state);
}

/* True if a queue is not stopped; dev.mutex protects that. */
static inline bool vhost_blk_runs(const struct vhost_blk_queue *q)
{
	return READ_ONCE(q->state) != VHOST_BLK_STOPPED;
}

/* True if no request of a generation is in flight. */
static inline bool vhost_blk_gen_empty(const struct vhost_blk_queue *q, u8 gen)
{
	/* Pairs with the release in vhost_blk_put_req(), their last use. */
	return !smp_load_acquire(&q->inflight[gen]);
}

/* Requests in flight; under vq.mutex. */
static inline unsigned int vhost_blk_inflight(const struct vhost_blk_queue *q)
{
	return q->inflight[0] + q->inflight[1];
}

/* queue.c */
void vhost_blk_queue_init(struct vhost_blk *blk, struct vhost_blk_queue *q);

/* chain.c */
void vhost_blk_fault(struct vhost_blk_queue *q);
int vhost_blk_take_chain(struct vhost_blk_queue *q, struct vhost_blk_chain *chain);
void vhost_blk_put_back_chain(struct vhost_blk_queue *q, struct vhost_blk_req *req);
struct vhost_blk_req *vhost_blk_get_req(struct vhost_blk_queue *q);
void vhost_blk_put_req(struct vhost_blk_req *req);

/* request.c */
bool vhost_blk_read_only(const struct vhost_blk_req *req);
int vhost_blk_parse(struct vhost_blk_req *req, const struct vhost_blk_chain *chain,
		    struct iov_iter *data);

/* data.c */
int vhost_blk_map_data(struct vhost_blk_req *req, struct iov_iter *data);
bool vhost_blk_copy_back(struct vhost_blk_req *req);
void vhost_blk_unmap_data(struct vhost_blk_req *req);

/* submit.c */
int vhost_blk_submit(struct vhost_blk_queue *q, const struct vhost_blk_chain *chain,
		     unsigned int *bytes);
void vhost_blk_release(struct vhost_blk_req *req);

/* bdev.c */
bool vhost_blk_polls(const struct vhost_blk_req *req);
void vhost_blk_submit_bdev(struct vhost_blk_req *req);
int vhost_blk_bdev_rw(struct vhost_blk_req *req);
void vhost_blk_submit_flush(struct vhost_blk_req *req);
void vhost_blk_poll_bdev(struct vhost_blk_queue *q);

/* file.c */
void vhost_blk_submit_file(struct vhost_blk_req *req);
int vhost_blk_file_rw(struct vhost_blk_req *req);
int vhost_blk_file_zero(struct vhost_blk_req *req, loff_t pos, loff_t len);

/* slow.c */
void vhost_blk_submit_slow(struct vhost_blk_req *req);
void vhost_blk_slow_work(struct work_struct *work);
bool vhost_blk_given_up(const struct vhost_blk_req *req);

/* completion.c */
void vhost_blk_end_io(struct vhost_blk_req *req, int error);
unsigned int vhost_blk_complete(struct vhost_blk_queue *q);
void vhost_blk_settle(struct vhost_blk_queue *q);
void vhost_blk_publish_settled(struct vhost_blk_queue *q);
void vhost_blk_drop_settled(struct vhost_blk_queue *q);
void vhost_blk_queue_done(struct vhost_blk_queue *q);
void vhost_blk_orphan_work(struct work_struct *work);

/* inflight.c */
void vhost_blk_region_take(struct vhost_blk_queue *q, unsigned int head);
void vhost_blk_region_untake(struct vhost_blk_queue *q, unsigned int head);
void vhost_blk_region_batch(struct vhost_blk_queue *q, unsigned int count);
void vhost_blk_region_used(struct vhost_blk_queue *q, unsigned int count);
int vhost_blk_set_region(struct vhost_blk *blk, const struct vhost_blk_inflight *inflight);
void vhost_blk_forget_regions(struct vhost_blk *blk);
int vhost_blk_region_ready(struct vhost_blk_queue *q);

/* drain.c */
int vhost_blk_start_queue(struct vhost_blk_queue *q, struct vhost_blk_backend *be);
int vhost_blk_stop_queue(struct vhost_blk_queue *q);
int vhost_blk_stop_all(struct vhost_blk *blk);
void vhost_blk_close_all(struct vhost_blk *blk);
int vhost_blk_drain_all(struct vhost_blk *blk);
int vhost_blk_pause_all(struct vhost_blk *blk);
void vhost_blk_resume_all(struct vhost_blk *blk);

/* backend.c */
long vhost_blk_set_backend(struct vhost_blk *blk, const struct vhost_vring_file *file);
void vhost_blk_put_backend(struct vhost_blk_backend *be);
u64 vhost_blk_backend_bytes(const struct vhost_blk_backend *be);

/* pinned.c */
int vhost_blk_pin_memory(struct vhost_blk *blk);
void vhost_blk_unpin_memory(struct vhost_blk *blk);
struct page *vhost_blk_pinned_page(struct vhost_blk_pinned *pinned, unsigned long addr, bool write);

/* failure.c */
void vhost_blk_request_failed(const struct vhost_blk_req *req);
void vhost_blk_note_failure(struct vhost_blk *blk, u32 kind, int error, u64 sector);
int vhost_blk_set_failure_event(struct vhost_blk *blk, int fd);
int vhost_blk_get_failure(struct vhost_blk *blk, void __user *argp);

/* core.c */
void vhost_blk_cancel_orphans(struct vhost_blk *blk);
long vhost_blk_core_ioctl(struct vhost_blk *blk, unsigned int cmd, void __user *argp);
extern const u64 vhost_blk_features;

/* info.c */
int vhost_blk_get_info(struct vhost_blk *blk, void __user *argp);
void vhost_blk_show_fdinfo(struct seq_file *m, struct file *file);

extern unsigned long vhost_blk_inflight_max;

#endif /* _VHOST_BLK_H */
