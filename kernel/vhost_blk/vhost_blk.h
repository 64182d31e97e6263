/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * vhost_blk: the in-kernel data plane of a virtio block device.
 *
 * vhost_blk_serve() in queue.c shows the life of a request, which goes down this list:
 *
 *   queue.c       the loop through all stages
 *   batch.c       the stages 1 to 3 for a few chains at once
 *   chain.c       1 take a chain from the avail ring
 *   request.c     2 copy and check its header and ranges
 *   submit.c      3 start the I/O
 *     data.c        its pages
 *     bdev.c        block devices: bios
 *     file.c        regular files: kiocbs
 *     workqueue.c   I/O that may sleep for long
 *     large.c       requests that are moved piece by piece
 *   completion.c  4 reap finished I/O, write the status byte; after 6, give everything back
 *   used.c        5 publish used entries, 6 call the driver
 *
 * vhost_blk_end_io() in completion.c is where all I/O ends. The stages are helped by poll.c (wait
 * for work without a sleep), limit.c and share.c (limits on the rate), inflight.c (marks of taken
 * chains), reserve.c (memory for emergencies), failure.c (reports a failing backend to the owner),
 * halt.c (keeps failed requests), timing.c (records slow requests for the owner) and arrivals.c
 * (their time in the ring). coalesce.c holds calls, batch_size.c has the size of batches; both are
 * chosen by trials, trial.c.
 *
 * The control plane, from the outside in: dev.c is the user interface, core.c the vhost core's part
 * of it, info.c describes the device, backend.c attaches storage, pinned.c pins the memory table,
 * drain.c starts, pauses and stops queues.
 *
 * The headers; each of these includes only those before it: vhost_blk.h the device, backend.h its
 * storage, request.h a request, queue.h a queue, stages.h the functions of the stages.
 * arg.h, arrivals.h, batch_size.h, coalesce.h, compat.h, limit.h, reserve.h, stats.h, timing.h,
 * trace.h and trial.h stand beside them.
 *
 * vhost_blk_set_state() changes the state of a queue, under vq.mutex, so that a run of the loop sees
 * one state from begin to end. Transitions, by row from and by column to:
 *
 *              STOPPED    RUNNING   PAUSED   FAULTED      STOPPING
 *   STOPPED    -          start     -        -            -
 *   RUNNING    no start   -         pause    ring fault   stop
 *   PAUSED     -          resume    -        ring fault   stop, after SIGKILL
 *   FAULTED    -          -         -        -            stop
 *   STOPPING   drained    -         -        -            stop again
 *
 * "No start" is a start that fails before it releases vq.mutex. All transitions but ring faults
 * also need dev.mutex, under which a queue neither enters nor leaves STOPPED and STOPPING.
 *
 * The vhost core sees two states: vq.private_data is NULL in STOPPED, the backend otherwise.
 *
 * Locks, outermost first: dev.mutex (control plane) -> vq.mutex (everything about a ring, and the
 * requests of its queue). State that must be readable meanwhile has its own locks, held for
 * moments: backend_mutex -> the backend's, serial_lock, failure_lock, timing.lock, and a
 * queue's reqs_lock. A submitted request belongs to the block layer or the file system until
 * vhost_blk_end_io(), and to its queue after that.
 */
#ifndef _VHOST_BLK_H
#define _VHOST_BLK_H

#include <linux/mutex.h>
#include <linux/spinlock.h>
#include <linux/uio.h>
#include <linux/vhost.h>

#include "vhost.h"	/* drivers/vhost/vhost.h of the kernel that is built for */
#include "compat.h"
#include "limit.h"
#include "timing.h"
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
/* Memory that the data of a request lies in: all of a chain but header or status byte. */
#define VHOST_BLK_DATA_SEGS_MAX	(UIO_MAXIOV - 1)
/*
 * Pages of a piece. A segment of L bytes at offset O of a page touches (O + L) / PAGE_SIZE pages,
 * rounded up: with O = PAGE_SIZE - 1 and L = n * PAGE_SIZE + 2 that is n + 2. So each segment has
 * less than two pages more than its bytes need.
 */
#define VHOST_BLK_PIECE_PAGES	(VHOST_BLK_PIECE_BYTES / PAGE_SIZE + 2 * VHOST_BLK_DATA_SEGS_MAX)
/* Segments that need no allocation. */
#define VHOST_BLK_INLINE_VECS	16
/* Ranges that need no allocation. */
#define VHOST_BLK_INLINE_RANGES	1
/* Discarded bytes that count as one byte for the limits. */
#define VHOST_BLK_DISCARDED_PER_WRITTEN	16
/* Pages pinned at once, with interrupts off. */
#define VHOST_BLK_PAGES_CHUNK	256u
/* Options that need VHOST_BLK_OPT_READS_APART. */
#define VHOST_BLK_OPT_READS_KEEP (VHOST_BLK_OPT_READS_KEEP_FAILED | \
				  VHOST_BLK_OPT_READS_KEEP_NO_SPACE)
/* Known options. */
#define VHOST_BLK_OPTIONS	(VHOST_BLK_OPT_WRITE_THROUGH | VHOST_BLK_OPT_READ_ONLY | \
				 VHOST_BLK_OPT_IOPOLL | VHOST_BLK_OPT_PIN_MEMORY | \
				 VHOST_BLK_OPT_NO_UNMAP | VHOST_BLK_OPT_COALESCE | \
				 VHOST_BLK_OPT_COALESCE_AUTO | VHOST_BLK_OPT_KEEP_FAILED | \
				 VHOST_BLK_OPT_KEEP_NO_SPACE | VHOST_BLK_OPT_HALT_AT_FLUSH | \
				 VHOST_BLK_OPT_HALT | VHOST_BLK_OPT_BATCH | \
				 VHOST_BLK_OPT_READS_APART | VHOST_BLK_OPT_READS_KEEP)

struct eventfd_ctx;
struct file;
struct page;
struct seq_file;
struct vhost_blk_backend;
struct vhost_blk_pinned;
struct vhost_blk_queue;

/**
 * struct vhost_blk - an open /dev/vhost-blk
 * @create_mutex: the device is created under it, once
 * @num_queues: number of queues; 0: only this structure exists yet
 * @dev: the vhost core's part
 * @vqs: its array of the queues
 * @queues: the queues
 * @backend: the storage; changed under dev.mutex and @backend_mutex; by vq.private_data under
 *	vq.mutex
 * @backend_mutex: keeps @backend, for moments only
 * @lock_waiters: tasks that may wait for a vq.mutex; see vhost_blk_stop_polling()
 * @inflight_bytes: data bytes in flight
 * @inflight_range_bytes: bytes that WRITE_ZEROES and SECURE_ERASE in flight name
 * @halted: no queue takes chains; changed under @failure_lock, set at any time, and cleared only
 *	while all queues are stopped. Read without a lock: a queue that misses it takes a batch more
 * @closing: the last file descriptor is gone; set once, so it is read without a lock
 * @any_starved: some queue waits for bytes in flight to go down; see vhost_blk_charge()
 * @opt: options; changed under dev.mutex. Requests read fields without a lock; each decision reads a
 *	field once. The flags that must be the same for all requests in flight (IOPOLL, PIN_MEMORY)
 *	are changed only while all queues are paused
 * @limit: limits on the rate
 * @timing: the trace of slow requests
 * @serial: GET_ID answer
 * @serial_lock: protects @serial
 * @pinned: the pinned memory table, or NULL; changed only while all queues are paused
 * @failure: failures since the owner last fetched them
 * @failure_event: signalled by the first failure, or NULL
 * @failure_lock: protects both, and changes of @halted
 * @end_file: its release ends the device, after the last close: see vhost_blk_close()
 * @close_work: the end of the device, if a kernel thread closes that file
 */
struct vhost_blk {
	struct mutex create_mutex;
	unsigned int num_queues;
	struct vhost_dev dev;
	struct vhost_virtqueue *vqs[VHOST_BLK_QUEUES_MAX];
	struct vhost_blk_queue *queues;
	struct vhost_blk_backend *backend;
	struct mutex backend_mutex;
	atomic_t lock_waiters;
	atomic64_t inflight_bytes;
	atomic64_t inflight_range_bytes;
	bool halted;
	bool closing;
	bool any_starved;
	struct vhost_blk_options opt;
	struct vhost_blk_limit limit;
	struct vhost_blk_timing timing;
	u8 serial[VHOST_BLK_SERIAL_BYTES];
	spinlock_t serial_lock;
	struct vhost_blk_pinned *pinned;
	struct vhost_blk_failure failure;
	struct eventfd_ctx *failure_event;
	spinlock_t failure_lock;
	struct file *end_file;
	struct work_struct close_work;
};

/* A polling queue holds its vq.mutex. It stops polling while lock_waiters is not 0. */
static inline void vhost_blk_stop_polling(struct vhost_blk *blk)
{
	atomic_inc(&blk->lock_waiters);
}

static inline void vhost_blk_allow_polling(struct vhost_blk *blk)
{
	atomic_dec(&blk->lock_waiters);
}

/* life.c */
int vhost_blk_ensure_device(struct vhost_blk *blk);
int vhost_blk_create_device(struct vhost_blk *blk, u32 num_queues);
int vhost_blk_open(struct inode *inode, struct file *file);
int vhost_blk_close(struct inode *inode, struct file *file);

/* queue.c */
void vhost_blk_iotlb_updated(struct vhost_blk *blk);

/* core.c */
extern const u64 vhost_blk_features;
void vhost_blk_cancel_orphans(struct vhost_blk *blk);
long vhost_blk_core_ioctl(struct vhost_blk *blk, unsigned int cmd, void __user *argp);

/* info.c */
int vhost_blk_get_info(struct vhost_blk *blk, void __user *argp);
int vhost_blk_get_oldest(struct vhost_blk *blk, void __user *argp);
void vhost_blk_show_fdinfo(struct seq_file *m, struct file *file);

/* pinned.c */
int vhost_blk_pin_memory(struct vhost_blk *blk);
void vhost_blk_unpin_memory(struct vhost_blk *blk);
struct page *vhost_blk_pinned_page(struct vhost_blk_pinned *pinned, unsigned long addr, bool write);

/* drain.c */
int vhost_blk_stop_all(struct vhost_blk *blk);
void vhost_blk_close_all(struct vhost_blk *blk);
int vhost_blk_drain_all(struct vhost_blk *blk);
int vhost_blk_pause_all(struct vhost_blk *blk);
void vhost_blk_resume_all(struct vhost_blk *blk);

/* inflight.c */
int vhost_blk_set_region(struct vhost_blk *blk, const struct vhost_blk_inflight *inflight);
void vhost_blk_forget_regions(struct vhost_blk *blk);

/* failure.c */
void vhost_blk_note_failure(struct vhost_blk *blk, u32 kind, int error,
			    const struct vhost_blk_req *req);
int vhost_blk_set_failure_event(struct vhost_blk *blk, int fd);
int vhost_blk_get_failure(struct vhost_blk *blk, void __user *argp);

/* halt.c */
void vhost_blk_halt(struct vhost_blk *blk);
void vhost_blk_end_halt(struct vhost_blk *blk);
int vhost_blk_get_kept(struct vhost_blk *blk, void __user *argp);
void vhost_blk_forget_halt(struct vhost_blk *blk);

extern unsigned long vhost_blk_inflight_max;
/* For works that wait for storage: many could fill a workqueue of the system. */
extern struct workqueue_struct *vhost_blk_wait_wq;

#endif /* _VHOST_BLK_H */
