/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * Declarations of the guest driver's files. A file calls only the files below it:
 *
 *	main.c		module, probe, scan, remove
 *	watchdog.c	time-outs, lost interrupts, requests without a poller
 *	recovery.c	giving a device up, suspend and resume
 *	sysfs.c		attributes in /sys/block/vdX
 *	config.c	configuration space, limits, capacity, cache mode
 *	queues.c	virtqueues, the CPUs that use them, interrupts
 *	rq_path.c	request path: blk-mq gives requests
 *	bio_path.c	bio path: bios from the block layer, throttled and plugged
 *	bio_reap.c	bio path: completion
 *	bio_dispatch.c	bio path: dispatch of new bios, waiting bios and next stages
 *	bio_stage.c	bio path: stages of a slot, flushes, accounting, the end of its bios
 *	bio_slot.c	bio path: pool of slots, merging of bios, their scatterlists
 *	bio_query.c	bio path: query of the serial number
 *	request.c	one request as the device sees it, into the ring and out of it
 *	look.h		scans of the used ring; a scan arms the interrupt before the next
 *	compat.h	differences between kernels
 *
 * Only work items go upwards: a broken ring queues &virtblk.abort_work, and a submission starts
 * &virtblk.watchdog, which recovery.c and watchdog.c run.
 *
 * The stages of a request have the project's six names, seen from the driver: a chain is made of a
 * request (request.c) and submitted to the ring (rq_path.c or bio_dispatch.c); its completion is
 * taken from the used ring (virtblk_rq_reap(), virtblk_bio_reap()); notify is the kick, once per
 * batch and outside of the queue's lock.
 */
#ifndef _VIRTBLK_H
#define _VIRTBLK_H

#include <linux/bio.h>
#include <linux/blkdev.h>
#include <linux/cpuhotplug.h>
#include <linux/mutex.h>
#include <linux/scatterlist.h>
#include <linux/spinlock.h>
#include <linux/virtio.h>
#include <linux/virtio_blk.h>
#include <linux/virtio_config.h>
#include <linux/wait.h>
#include <linux/workqueue.h>

#include "compat.h"

/* Scatterlist entries inside a request; others are allocated, and chained to these if possible. */
#define VIRTBLK_INLINE_SG	4
#ifdef CONFIG_ARCH_NO_SG_CHAIN
#define VIRTBLK_CHAINED_SG	0
#else
#define VIRTBLK_CHAINED_SG	VIRTBLK_INLINE_SG
#endif
/* Descriptors of a request that are not data: header and status byte. */
#define VIRTBLK_OVERHEAD	2
/* The largest ring that virtio allows. */
#define VIRTBLK_RING_MAX	32768
/* Ranges of one discard. */
#define VIRTBLK_RANGES_MAX	256u
/* Requests that the bio path allocates for a queue. */
#define VIRTBLK_SLOTS_MAX	1024u
/* Minor numbers of a disk. */
#define VIRTBLK_MINOR_BITS	4
/* The status byte before the device writes it. Virtio 1.3 has no such status: it is an error. */
#define VIRTBLK_S_UNWRITTEN	0xff
/* A request without an answer is reported after this time. */
#define VIRTBLK_TIMEOUT		(30 * HZ)
/* Interval of the watchdog if there are polled queues, and if there are none. */
#define VIRTBLK_WATCH_POLLED	(HZ / 2)
#define VIRTBLK_WATCH_OTHERS	(2 * HZ)
/* A device that uses nothing for this time during a drain is given up. */
#define VIRTBLK_GIVE_UP		(60 * HZ)

/**
 * enum virtblk_state - the state of a disk
 * @VIRTBLK_NEW: probed, without I/O; the virtio core starts the device next
 * @VIRTBLK_LIVE: does I/O; given up if it breaks a ring or vanishes
 * @VIRTBLK_DRAINING: removal or suspend waits for in-flight requests; also given up if it is silent
 * @VIRTBLK_SUSPENDED: reset, without virtqueues; new I/O is held back
 * @VIRTBLK_RESUMED: does I/O, but the virtio core may still start the device: not given up yet
 * @VIRTBLK_DEAD: reset and given up, or not resumed; all I/O fails
 * @VIRTBLK_GONE: removed; only the disk is left, for those that have it open
 *
 *	NEW -> LIVE			virtblk_scan(): the disk is added
 *	LIVE, RESUMED -> DRAINING	virtblk_begin_drain(), for removal and suspend
 *	LIVE, DRAINING -> DEAD		virtblk_give_up()
 *	DRAINING, DEAD -> SUSPENDED	virtblk_suspend()
 *	SUSPENDED -> RESUMED		virtblk_resume()
 *	SUSPENDED -> DEAD		virtblk_resume() without success, or virtblk_fail_held():
 *					removal, or another suspend, without a resume
 *	RESUMED -> LIVE			virtblk_config_work(), after the core's look at the device
 *	DRAINING, DEAD -> GONE		virtblk_remove()
 *
 * The state changes, and is decided on, under &virtblk.vdev_mutex.
 *
 * The state of a queue changes under its lock. Its @vq is NULL while there is no virtqueue.
 * @stopped keeps bios from the ring between virtblk_bio_stop() and virtblk_bio_start(), while
 * nothing is in flight. @full asks the next completion to restart the hardware queue. @broken says
 * that &virtblk.abort_work knows of a broken ring.
 */
enum virtblk_state {
	VIRTBLK_NEW,
	VIRTBLK_LIVE,
	VIRTBLK_DRAINING,
	VIRTBLK_SUSPENDED,
	VIRTBLK_RESUMED,
	VIRTBLK_DEAD,
	VIRTBLK_GONE,
};

/**
 * struct virtblk_request - one request as the device sees it
 * @header: first readable buffer, section 5.2.6 of virtio 1.3
 * @status: last writable buffer, one byte
 * @writes: the device reads the data buffers
 * @own_sg: @data was allocated and has to be freed
 * @fake_timeout: fault injection holds its completion back until the time-out
 * @range: the range of a discard, write zeroes or secure erase
 * @id: buffer for the serial number (VIRTIO_BLK_T_GET_ID)
 * @ranges: allocated if there is more than one range, else NULL
 * @header_sg: describes @header; set once
 * @status_sg: describes @status; set once
 * @data: data buffers; none if nents is 0
 * @inline_sg: first entries of @data
 * @descriptors: ring descriptors in use; far from @status, which the device writes at the same time
 *
 * Its address is the token in the virtqueue. The device owns it from virtblk_add() until
 * virtblk_get_used() or virtblk_detach() returns it.
 */
struct virtblk_request {
	struct virtio_blk_outhdr header;
	u8 status;
	bool writes;
	bool own_sg;
	bool fake_timeout;
	union {
		struct virtio_blk_discard_write_zeroes range;
		char id[VIRTIO_BLK_ID_BYTES];
	};
	struct virtio_blk_discard_write_zeroes *ranges;
	struct scatterlist header_sg;
	struct scatterlist status_sg;
	struct sg_table data;
	struct scatterlist inline_sg[VIRTBLK_INLINE_SG];
	u16 descriptors;
};

/**
 * enum virtblk_stage - the stage of a slot of the bio path
 * @VIRTBLK_FREE: in the queue's free list
 * @VIRTBLK_PREFLUSH: T_FLUSH before the data, or a flush without data
 * @VIRTBLK_DATA: the data
 * @VIRTBLK_POSTFLUSH: T_FLUSH after the data: FUA
 * @VIRTBLK_GET_ID: a query of the serial number
 */
enum virtblk_stage {
	VIRTBLK_FREE,
	VIRTBLK_PREFLUSH,
	VIRTBLK_DATA,
	VIRTBLK_POSTFLUSH,
	VIRTBLK_GET_ID,
};

/**
 * struct virtblk_slot - a request of the bio path
 * @request: what the device sees; first, because the virtqueue's token is its address
 * @node: in one of the queue's lists of slots, in its submitter's, or in none
 * @stage: changed under the queue's lock, or by the submitter before that
 * @accounted: the bios were counted as in flight for iostat
 * @uses_reserve: the queue's reserve describes its data
 * @index: its number in reports; VIRTBLK_GET_ID has the number after all others
 * @start: jiffies when its first stage began, for iostat
 * @sent: jiffies when it was last added to the ring
 * @bios: its bios, linked by bi_next; NULL for VIRTBLK_GET_ID
 */
struct virtblk_slot {
	struct virtblk_request request;
	struct list_head node;
	u8 stage;
	bool accounted;
	bool uses_reserve;
	u16 index;
	unsigned long start;
	unsigned long sent;
	struct bio *bios;
};

/**
 * struct virtblk_queue - a virtqueue and what belongs to it
 * @lock: guards the virtqueue and all fields below that are not constant; taken in interrupts
 * @vq: NULL while the device is suspended, and after a resume without success
 * @blk: the disk
 * @index: of the virtqueue
 * @polled: has no interrupt
 * @stopped: bio path: nothing may be added to the ring, bios wait
 * @full: request path: the hardware queue was stopped because the ring was full
 * @broken: the ring is broken, and &virtblk.abort_work was queued
 * @in_flight: requests that the device has
 * @last_reap: jiffies of the last look into the used ring
 * @last_used: jiffies of the last completion
 * @last_report: jiffies of the last report of a silent device
 * @name: for /proc/interrupts
 * @free: bio path: free slots
 * @ring: slots that the device has, in the order in which they were sent
 * @requeued: slots that have another stage to send; they go before @waiting
 * @flush: the one slot that carries a T_FLUSH, in @ring or @requeued; or NULL
 * @flush_joined: slots that the same T_FLUSH serves
 * @flush_waiting: slots that need a later T_FLUSH
 * @waiting: bios that found no slot or no room in the ring, in order
 * @waiting_count: their number
 * @throttled: submitters that sleep until @waiting_count falls
 * @slots: all slots
 * @slot_count: their number
 * @reserve_sg: one scatterlist of full length, so that memory pressure cannot stop the queue
 * @reserve_busy: a slot uses it
 */
struct virtblk_queue {
	spinlock_t lock;
	struct virtqueue *vq;
	struct virtblk *blk;
	unsigned int index;
	bool polled;
	bool stopped;
	bool full;
	bool broken;
	unsigned int in_flight;
	unsigned long last_reap;
	unsigned long last_used;
	unsigned long last_report;
	char name[16];

	struct list_head free;
	struct list_head ring;
	struct list_head requeued;
	struct virtblk_slot *flush;
	struct list_head flush_joined;
	struct list_head flush_waiting;
	struct bio_list waiting;
	unsigned int waiting_count;
	wait_queue_head_t throttled;
	struct virtblk_slot **slots;
	unsigned int slot_count;
	struct scatterlist *reserve_sg;
	bool reserve_busy;
} ____cacheline_aligned_in_smp;

/**
 * struct virtblk - a disk
 * @cache_mutex: guards the cache mode of disk and device; held by suspend, so that they agree then
 * @vdev_mutex: guards @vdev and @state
 * @vdev: NULL in VIRTBLK_GONE
 * @state: see enum virtblk_state
 * @drain_start: jiffies when VIRTBLK_DRAINING began
 * @disk: freed after its last user, perhaps long after the device
 * @added: the block layer knows @disk; constant after virtblk_scan()
 * @tag_set: request path only
 * @maps: bio path: the queue of each CPU, for interrupts and for polling
 * @queues: polled ones come last
 * @queue_count: of all queues
 * @poll_count: of polled queues
 * @index: of the disk's name
 * @use_bio: the bio path, constant
 * @depth: requests of a queue at once
 * @ring_size: descriptors of the smallest ring, as found at probe
 * @seg_max: scatterlist entries of one request
 * @seg_bytes_max: bytes of an entry
 * @config_work: reads the capacity after a change; must not wait for requests
 * @abort_work: gives a hopeless device up
 * @watchdog: looks for overdue requests: of all queues of the bio path, and of polled queues
 * @cpu_node: bio path: registration for CPU hotplug
 */
struct virtblk {
	struct mutex cache_mutex;
	struct mutex vdev_mutex;
	struct virtio_device *vdev;
	enum virtblk_state state;
	unsigned long drain_start;
	struct gendisk *disk;
	bool added;
	struct blk_mq_tag_set tag_set;
	struct blk_mq_queue_map maps[2];
	struct virtblk_queue *queues;
	unsigned int queue_count;
	unsigned int poll_count;
	int index;
	bool use_bio;
	unsigned int depth;
	unsigned int ring_size;
	unsigned int seg_max;
	unsigned int seg_bytes_max;
	struct work_struct config_work;
	struct work_struct abort_work;
	struct delayed_work watchdog;
	struct hlist_node cpu_node;
};

enum { VIRTBLK_MAP_INTERRUPT, VIRTBLK_MAP_POLL };

struct hd_geometry;
struct virtblk_batch;

/* Retries and aborts run here: I/O may wait for them when memory is short. */
extern struct workqueue_struct *virtblk_wq;
/* Tells our disks from others, by its address. */
extern const struct block_device_operations virtblk_bio_fops;

/* Changes the state of a disk; the caller holds its &virtblk.vdev_mutex. */
static inline void virtblk_set_state(struct virtblk *blk, enum virtblk_state state)
{
	lockdep_assert_held(&blk->vdev_mutex);
	blk->state = state;
}

/* watchdog.c */
enum blk_eh_timer_return virtblk_timeout(struct request *rq);
void virtblk_watchdog(struct work_struct *work);
int virtblk_cpu_dead(unsigned int cpu, struct hlist_node *node);

/* recovery.c */
void virtblk_abort_work(struct work_struct *work);
bool virtblk_give_up(struct virtblk *blk);
void virtblk_begin_drain(struct virtblk *blk);
void virtblk_fail_held(struct virtblk *blk);
void virtblk_reset(struct virtio_device *vdev);
void virtblk_hide_status(struct virtio_device *vdev);
void virtblk_free_hidden(void);
int virtblk_suspend(struct virtio_device *vdev);
int virtblk_resume(struct virtio_device *vdev);

/* sysfs.c */
extern const struct attribute_group *virtblk_attr_groups[];

/* config.c */
int virtblk_validate(struct virtio_device *vdev);
int virtblk_read_limits(struct virtblk *blk, struct queue_limits *lim);
int virtblk_read_geometry(struct virtblk *blk, struct hd_geometry *geo);
void virtblk_update_capacity(struct virtblk *blk, bool resize);
void virtblk_config_changed(struct virtio_device *vdev);
void virtblk_config_work(struct work_struct *work);
bool virtblk_has_cache(struct virtio_device *vdev);
int virtblk_set_cache(struct virtblk *blk, bool write_back);
int virtblk_restore_cache(struct virtblk *blk);

/* queues.c */
int virtblk_alloc_queues(struct virtblk *blk);
int virtblk_find_queues(struct virtblk *blk);
void virtblk_del_queues(struct virtblk *blk, struct virtio_device *vdev);
void virtblk_free_queues(struct virtblk *blk);
void virtblk_rq_map_queues(struct blk_mq_tag_set *set);

/* rq_path.c */
blk_status_t virtblk_queue_rq(struct blk_mq_hw_ctx *hctx, const struct blk_mq_queue_data *bd);
#ifdef VIRTBLK_HAS_RQ_LIST
void virtblk_queue_rqs(struct rq_list *list);
#endif
void virtblk_commit_rqs(struct blk_mq_hw_ctx *hctx);
int virtblk_init_rq(struct blk_mq_tag_set *set, struct request *rq, unsigned int hctx,
		    virtblk_node_t node);
void virtblk_complete_rq(struct request *rq);
int virtblk_poll(struct blk_mq_hw_ctx *hctx, struct io_comp_batch *iob);
unsigned int virtblk_rq_reap(struct virtblk_queue *q, bool interrupt);
void virtblk_rq_recheck(struct virtblk_queue *q);
void virtblk_rq_fail_all(struct virtblk_queue *q);
int virtblk_rq_get_id(struct virtblk *blk, char *id);

/* bio_path.c */
void virtblk_submit_bio(struct bio *bio);
int virtblk_poll_bio(struct bio *bio, struct io_comp_batch *iob, unsigned int flags);
void virtblk_bio_stop(struct virtblk *blk);
void virtblk_bio_start(struct virtblk *blk);

/* bio_reap.c */
unsigned int virtblk_bio_reap(struct virtblk_queue *q, bool interrupt);
void virtblk_bio_recheck(struct virtblk_queue *q);
void virtblk_bio_fail_all(struct virtblk_queue *q);

/* bio_dispatch.c */
void virtblk_bio_submit(struct virtblk_queue *q, struct bio_list *bios);
struct virtqueue *virtblk_dispatch(struct virtblk_queue *q, struct virtblk_batch *batch,
				   struct bio_list *done);
void virtblk_wake_throttled(struct virtblk_queue *q);

/* More bios wait than the ring takes. */
static inline bool virtblk_bio_is_congested(const struct virtblk_queue *q)
{
	return READ_ONCE(q->waiting_count) > q->slot_count;
}

/* bio_stage.c */
void virtblk_account_start(struct virtblk_queue *q, struct virtblk_slot *slot);
void virtblk_queue_flush(struct virtblk_queue *q, struct virtblk_slot *slot);
void virtblk_start_flush(struct virtblk_queue *q);
void virtblk_end_stage(struct virtblk_queue *q, struct virtblk_slot *slot, blk_status_t status,
		       struct bio_list *done);
void virtblk_end_slot(struct virtblk_queue *q, struct virtblk_slot *slot, blk_status_t status,
		      struct bio_list *done);
void virtblk_end_bios(struct virtblk *blk, struct bio_list *done);

/* bio_slot.c */
int virtblk_alloc_slots(struct virtblk_queue *q);
void virtblk_free_slots(struct virtblk_queue *q);
struct virtblk_slot *virtblk_get_slot(struct virtblk_queue *q);
void virtblk_put_slot(struct virtblk_queue *q, struct virtblk_slot *slot);
bool virtblk_can_merge(const struct bio *first, const struct bio *second);
int virtblk_prepare_next(struct virtblk_queue *q, struct virtblk_slot *slot, struct bio_list *bios,
			 bool locked, unsigned int *taken);
int virtblk_prepare_requeued(struct virtblk_queue *q, struct virtblk_slot *slot);
void virtblk_unprepare(struct virtblk_queue *q, struct virtblk_slot *slot);
void virtblk_put_back(struct virtblk_slot *slot, struct bio_list *bios);

/* bio_query.c */
int virtblk_bio_get_id(struct virtblk *blk, char *id);
void virtblk_end_query(struct virtblk_slot *slot, blk_status_t status);

/* request.c */
void virtblk_init_request(struct virtblk_request *request);
blk_status_t virtblk_set_command(struct virtio_device *vdev, struct virtblk_request *request,
				 blk_opf_t opf, sector_t sector, unsigned short ioprio);
void virtblk_set_range(struct virtblk_request *request, blk_opf_t opf, sector_t sector,
		       sector_t sectors);
int virtblk_set_ranges(struct virtblk_request *request, struct request *rq, unsigned int count);
void virtblk_set_get_id(struct virtio_device *vdev, struct virtblk_request *request);
int virtblk_alloc_sg(struct virtblk_request *request, unsigned int segments);
void virtblk_free_data(struct virtblk_request *request);
int virtblk_add(struct virtblk_queue *q, struct virtblk_request *request);
struct virtblk_request *virtblk_get_used(struct virtblk_queue *q);
struct virtblk_request *virtblk_detach(struct virtblk_queue *q);
void virtblk_check_broken(struct virtblk_queue *q);
void virtblk_start_watchdog(struct virtblk *blk);
void virtblk_retry_soon(struct virtblk *blk);
void virtblk_dispatch_soon(struct virtblk *blk);

/**
 * virtblk_kick_prepare() - asks whether the device needs a kick
 * @q: its lock is held
 *
 * Return: the virtqueue to be kicked, or NULL.
 */
static inline struct virtqueue *virtblk_kick_prepare(struct virtblk_queue *q)
{
	return q->vq && virtqueue_kick_prepare(q->vq) ? q->vq : NULL;
}

/**
 * virtblk_kick() - tells the device of new requests, which costs an exit
 * @vq: from virtblk_kick_prepare(); its deletion waits for the caller
 *
 * Context: without the queue's lock.
 */
static inline void virtblk_kick(struct virtqueue *vq)
{
	if (vq)
		virtqueue_notify(vq);
}

/**
 * virtblk_status() - the device's status of a request
 * @request: used by the device
 *
 * Any value but the two known ones is an error, a missing one too.
 *
 * Return: the block layer's status.
 */
static inline blk_status_t virtblk_status(const struct virtblk_request *request)
{
	switch (READ_ONCE(request->status)) {
	case VIRTIO_BLK_S_OK:
		return BLK_STS_OK;
	case VIRTIO_BLK_S_UNSUPP:
		return BLK_STS_NOTSUPP;
	default:
		return BLK_STS_IOERR;
	}
}

#endif /* _VIRTBLK_H */
