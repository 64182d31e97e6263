/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * vhost_blk: the in-kernel data plane of a virtio block device.
 *
 * The life of a request, one word and one file each:
 *
 *   chain.c       take a chain from the avail ring
 *   request.c     copy and check its header and ranges
 *   submit.c      start the I/O (data.c: its pages; bdev.c: bios; file.c: kiocbs; slow.c: what may
 *                 sleep for long)
 *   completion.c  collect finished I/O, status byte; used entries in one go; one call
 *
 * queue.c holds the loop through them, drain.c starts and stops queues, dev.c is the user
 * interface.
 *
 * Locks, outermost first: dev.mutex (control plane) -> vq.mutex (everything about a ring, and the
 * requests of its queue). A request that was submitted belongs to the block layer or the file
 * system until vhost_blk_end_io(), and to its queue again from then on.
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
#include "../include/uapi/vhost_blk.h"

/* Chains served before the worker looks after its other queues. */
#define VHOST_BLK_WEIGHT	256
/* Bytes moved before it does. */
#define VHOST_BLK_BYTE_WEIGHT	(16 << 20)
/*
 * Chains started before finished ones are looked at: few at first, so that the driver gets to work
 * while the device does; then more, as long as the ring has more.
 */
#define VHOST_BLK_BATCH_FIRST	2u
#define VHOST_BLK_BATCH_MAX	16u
/* Each where the driver waits for the CPU that this loop has. */
#define VHOST_BLK_BATCH_CROWDED	64u
/* How often, in jiffies, completions are looked for that no interrupt announces. */
#define VHOST_BLK_POLL_INTERVAL	1
/* Data bytes of one request. */
#define VHOST_BLK_REQUEST_BYTES_MAX	(32u << 20)
/* Data segments of one request: what the vhost core can hold, less header and status. */
#define VHOST_BLK_SEG_MAX	(UIO_MAXIOV - 2)
/* Segments that need no allocation. */
#define VHOST_BLK_INLINE_VECS	16
/* Ranges that need no allocation. */
#define VHOST_BLK_INLINE_RANGES	1
/* Pages looked up at once. */
#define VHOST_BLK_PAGES_CHUNK	32
/* Options that are known. */
#define VHOST_BLK_OPTIONS	(VHOST_BLK_OPT_WRITE_THROUGH | VHOST_BLK_OPT_READ_ONLY | \
				 VHOST_BLK_OPT_IOPOLL | VHOST_BLK_OPT_PIN_MEMORY)
/* Powers of two of microseconds in the latency histogram; the last one takes all above. */
#define VHOST_BLK_LATENCY_BUCKETS	24

struct vhost_blk;
struct vhost_blk_queue;
struct vhost_blk_pinned;

/**
 * struct vhost_blk_backend - the storage behind a device
 * @blk: the device
 * @file: what the owner attached
 * @bdev_file: the module's own, exclusive open of a block device; NULL: regular file, or removed
 * @bdev: the block device, or NULL
 * @wq: runs what may sleep for long
 * @mem_mask: bits that must be zero in a buffer's address, else it is bounced
 * @lbs: logical block size in bytes
 * @read_only: nothing that writes is let through
 * @direct: a regular file opened with O_DIRECT
 * @nowait: a regular file that can say that it would block
 * @polls: a block device with poll queues
 * @dead: the block device was removed; set once, read under vq.mutex
 * @iocb_flags: of @file when it was attached; the owner may change them later
 * @dead_work: lets go of a removed block device
 * @lock: serialises letting go of it with opening it and looking at it
 * @cred: who attached it; the workqueue has no more rights than that
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
 * @sectors: how many
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
 * @polled: in the queue's list of I/O to poll for
 * @q: its queue
 * @be: its backend, valid until the request is finished
 * @status_addr: where the status byte goes, or NULL
 * @sector: first 512-byte sector
 * @bytes: data bytes
 * @charged: bytes that count as in flight
 * @written: bytes written into the chain before the status byte
 * @type: VIRTIO_BLK_T_*
 * @head: number of the chain
 * @gen: generation that the drain counts it in
 * @durable: complete only when it is on stable storage
 * @pinned: the pages in @vecs are to be unpinned
 * @nowait: it was submitted so that it does not wait, and may have to be done again
 * @slow: it went through the workqueue, or is there
 * @refused: it was answered without I/O
 * @bounced: the pages in @vecs are the module's own
 * @error: first errno of the I/O
 * @start_ns: when the chain was taken
 * @vecs: the data's pages
 * @nr_vecs: used elements of @vecs
 * @max_vecs: room in @vecs
 * @bounce_to: where a bounced read goes at the end
 * @bounce_iov: memory of @bounce_to
 * @log: what to mark in the dirty log, or NULL
 * @log_num: entries of @log
 * @log_iov: the same as host addresses, where an IOTLB is in use
 * @log_iov_num: entries of @log_iov
 * @ranges: ranges of a range command
 * @nr_ranges: how many
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
 * struct vhost_blk_stats - counters of a queue; under vq.mutex
 * @chains: chains taken
 * @completed: chains put into the used ring
 * @refused: requests that were answered without I/O because they are wrong or not supported
 * @failed: requests whose I/O failed
 * @dropped: requests that ended after their owner was killed: no used entry
 * @kicks: times the handler ran because of a kick
 * @turns: times the loop went round
 * @calls: batches after which the call eventfd was tried
 * @bounced: requests copied because their buffers do not suit the device
 * @slow: requests that went through the workqueue
 * @polls: times the handler polled before sleeping
 * @polls_won: times that brought work
 * @read_bytes: data read by successful requests
 * @write_bytes: data written by successful requests
 * @latency: finished requests by log2 of microseconds from taken to published
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
	u64 bounced;
	u64 slow;
	u64 polls;
	u64 polls_won;
	u64 read_bytes;
	u64 write_bytes;
	u64 latency[VHOST_BLK_LATENCY_BUCKETS];
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
 * struct vhost_blk_polling - whether a queue polls before it sleeps; see queue.c
 * @score: 0: it does not; up for polls that found work, down for the others
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
 * @done_work: runs the loop for it
 * @orphan_work: ends it when the owner was killed
 * @looping: the loop will look at @done by itself; see vhost_blk_end_io()
 * @broken: a ring fault; nothing is taken until the queue is started again
 * @paused: nothing is taken for the moment
 * @stopping: nothing is taken any more; being stopped, or a stop has failed
 * @blind: the rings cannot be reached before an IOTLB update
 * @starved: waits for bytes in flight of other queues
 * @crowded: to tell the driver made somebody wait for this CPU
 * @gen: generation of new requests
 * @inflight: requests in flight by generation
 * @drained: woken when one of them gets 0
 * @reqs: all requests
 * @free: the unused ones
 * @polled: I/O in flight that nobody but us looks after
 * @poll: whether to poll before sleeping
 * @now_ns: the time at the start of the batch
 * @region: where taken chains are marked
 * @stats: counters
 */
struct vhost_blk_queue {
	struct vhost_virtqueue vq;
	struct vhost_blk *blk;
	struct llist_head done;
	struct vhost_work done_work;
	struct delayed_work orphan_work;
	bool looping;
	bool broken;
	bool paused;
	bool stopping;
	bool blind;
	bool starved;
	bool crowded;
	u8 gen;
	atomic_t inflight[2];
	wait_queue_head_t drained;
	struct vhost_blk_req *reqs;
	struct vhost_blk_req *free;
	struct list_head polled;
	struct vhost_blk_polling poll;
	u64 now_ns;
	struct vhost_blk_region region;
	struct vhost_blk_stats stats;
};

/**
 * struct vhost_blk - an open /dev/vhost-blk
 * @dev: the vhost core's part
 * @vqs: what it wants of the queues
 * @queues: the queues
 * @backend: the storage; under dev.mutex, and by vq.private_data under vq.mutex
 * @inflight_bytes: data bytes in flight
 * @closing: the last file descriptor is gone
 * @starving: some queue waits for @inflight_bytes to go down
 * @opt: options; fields are read one by one
 * @serial: GET_ID answer
 * @serial_lock: protects @serial
 * @pinned: the pinned memory table, or NULL; changed only while all queues are paused
 */
struct vhost_blk {
	struct vhost_dev dev;
	struct vhost_virtqueue *vqs[VHOST_BLK_QUEUES_MAX];
	struct vhost_blk_queue *queues;
	struct vhost_blk_backend *backend;
	atomic64_t inflight_bytes;
	bool closing;
	bool starving;
	struct vhost_blk_options opt;
	u8 serial[VHOST_BLK_SERIAL_BYTES];
	spinlock_t serial_lock;
	struct vhost_blk_pinned *pinned;
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
	if (index >= VHOST_BLK_QUEUES_MAX)
		return NULL;
	return blk->queues + array_index_nospec(index, VHOST_BLK_QUEUES_MAX);
}

/* Whether a queue has a backend; under dev.mutex, without which that does not change. */
static inline bool vhost_blk_runs(const struct vhost_blk_queue *q)
{
	return READ_ONCE(q->vq.private_data);
}

/* Requests in flight. */
static inline int vhost_blk_inflight(struct vhost_blk_queue *q)
{
	return atomic_read(&q->inflight[0]) + atomic_read(&q->inflight[1]);
}

/* queue.c */
void vhost_blk_queue_init(struct vhost_blk *blk, struct vhost_blk_queue *q);

/* chain.c */
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
void vhost_blk_queue_done(struct vhost_blk_queue *q);
void vhost_blk_orphan_work(struct work_struct *work);
void vhost_blk_drop_if_closing(struct vhost_blk_queue *q);

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
void vhost_blk_stop_all(struct vhost_blk *blk);
int vhost_blk_drain(struct vhost_blk_queue *q);
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

/* info.c */
int vhost_blk_get_info(struct vhost_blk *blk, void __user *argp);
void vhost_blk_show_fdinfo(struct seq_file *m, struct file *file);

extern unsigned long vhost_blk_inflight_max;

#endif /* _VHOST_BLK_H */
