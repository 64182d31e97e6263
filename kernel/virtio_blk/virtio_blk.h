/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * What the files of the guest driver share. The life of a request, in the project's six words,
 * seen from the driver: a chain is made of a request (request.c), submitted to the ring
 * (request_path.c or bio_path.c), its completion is taken from the used ring (completion.c,
 * bio_completion.c, poll.c); notify is the kick, once a batch, outside of the lock.
 */
#ifndef _VIRTBLK_H
#define _VIRTBLK_H

#include <linux/bio.h>
#include <linux/blkdev.h>
#include <linux/mutex.h>
#include <linux/scatterlist.h>
#include <linux/spinlock.h>
#include <linux/virtio.h>
#include <linux/virtio_blk.h>
#include <linux/virtio_config.h>
#include <linux/wait.h>
#include <linux/workqueue.h>

#include "compat.h"

/* Scatterlist entries inside of a request; more are allocated, and chained to these if possible. */
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
/* Requests that the bio path keeps for a queue. */
#define VIRTBLK_SLOTS_MAX	1024u
/* Minor numbers of a disk. */
#define VIRTBLK_MINOR_BITS	4
/* The status byte before the device writes it: no status of virtio 1.3, so an error. */
#define VIRTBLK_S_UNWRITTEN	0xff
/* A request that is not answered for this time is reported. */
#define VIRTBLK_TIMEOUT		(30 * HZ)
/* A device whose driver has to go, and that uses nothing for this time, is given up. */
#define VIRTBLK_GIVE_UP		(60 * HZ)

/**
 * struct virtblk_request - one request as the device sees it
 * @header: first readable buffer, section 5.2.6 of virtio 1.3
 * @status: last writable buffer, one byte
 * @writes: the data buffers are read by the device
 * @own_sg: @data was allocated and has to be freed
 * @withheld: fault injection kept its completion back, the timeout gives it
 * @range: the range of a discard, write zeroes or secure erase
 * @id: the serial number, where the device writes it (VIRTIO_BLK_T_GET_ID)
 * @ranges: more than one range, allocated; or NULL
 * @header_sg: describes @header; set once
 * @status_sg: describes @status; set once
 * @data: data buffers; none if nents is 0
 * @inline_sg: first entries of @data
 * @descriptors: of the ring, that it took; written when the device has @status, so far from it
 *
 * Its address is the token in the virtqueue. Owned by the device from virtblk_add() until the
 * virtqueue gives it back.
 */
struct virtblk_request {
	struct virtio_blk_outhdr header;
	u8 status;
	bool writes;
	bool own_sg;
	bool withheld;
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

/* What a slot of the bio path is busy with. */
enum virtblk_stage {
	VIRTBLK_FREE,		/* in the queue's free list */
	VIRTBLK_PREFLUSH,	/* T_FLUSH before the data, or all there is */
	VIRTBLK_DATA,
	VIRTBLK_POSTFLUSH,	/* T_FLUSH after the data: FUA */
	VIRTBLK_GET_ID,
};

/**
 * struct virtblk_slot - a request of the bio path
 * @request: what the device sees; first, because the virtqueue's token is its address
 * @node: in one of the queue's lists of slots, or in none
 * @stage: see above; changed under the queue's lock
 * @accounted: the bios were counted as in flight for iostat
 * @on_ring: the device has it; under the queue's lock
 * @uses_reserve: its data is described by the queue's reserve
 * @start: jiffies when it was first put into the ring
 * @bios: what it carries, linked by bi_next; NULL for VIRTBLK_GET_ID
 */
struct virtblk_slot {
	struct virtblk_request request;
	struct list_head node;
	u8 stage;
	bool accounted;
	bool on_ring;
	bool uses_reserve;
	unsigned long start;
	struct bio *bios;
};

/**
 * struct virtblk_queue - a virtqueue and what belongs to it
 * @lock: guards the virtqueue and all fields below that are not constant; taken in interrupts
 * @vq: NULL while the device is suspended, or after it could not be resumed
 * @blk: the disk
 * @index: of the virtqueue
 * @polled: has no interrupt
 * @stopped: bio path: nothing may be put into the ring, bios wait
 * @full: request path: the hardware queue was stopped because the ring was full
 * @in_flight: requests that the device has
 * @last_reap: jiffies when somebody last looked into the used ring
 * @last_used: jiffies when something was found there
 * @last_report: jiffies of the last report of a silent device
 * @name: for /proc/interrupts
 * @free: bio path: slots to be used
 * @resumed: slots that have another stage to go through; before @waiting
 * @asked: slots of VIRTBLK_GET_ID that the device has; they are not among @slots
 * @waiting: bios for which there was no slot or no place in the ring, in order
 * @waiting_count: their number
 * @throttled: submitters that wait until @waiting_count falls
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
	unsigned int in_flight;
	unsigned long last_reap;
	unsigned long last_used;
	unsigned long last_report;
	char name[16];

	struct list_head free;
	struct list_head resumed;
	struct list_head asked;
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
 * @cache_mutex: held by whoever makes the cache's mode the same here and there
 * @vdev_mutex: held by whatever may run while virtblk_remove() does, to look at @vdev
 * @vdev: NULL after removal
 * @disk: lives on while somebody has it open
 * @tag_set: request path only
 * @maps: which queue a CPU uses, for interrupts and for polling
 * @queues: polled ones come last
 * @queue_count: of all queues
 * @poll_count: of polled ones
 * @index: of the disk's name
 * @use_bio: the bio path, constant
 * @removing: the driver is being unbound
 * @removing_since: jiffies when that began
 * @dead: the device was given up, nothing may be sent to it; under @vdev_mutex
 * @suspended: virtblk_suspend() was called and virtblk_resume() was not
 * @starting: the device is yet to be started, see virtblk_await_start(); under @vdev_mutex
 * @watching: @watch is scheduled
 * @ring_size: descriptors of the smallest ring, as found at probe
 * @seg_max: scatterlist entries of one request
 * @seg_bytes_max: bytes of an entry
 * @config_work: looks at the capacity after a change; must not wait for requests
 * @cache_work: looks at the cache's mode after that
 * @abort_work: gives the device up
 * @watch: bio path: looks for requests that are not answered; both: for polled requests that
 *	nobody polls for
 */
struct virtblk {
	struct mutex cache_mutex;
	struct mutex vdev_mutex;
	struct virtio_device *vdev;
	struct gendisk *disk;
	struct blk_mq_tag_set tag_set;
	struct blk_mq_queue_map maps[2];
	struct virtblk_queue *queues;
	unsigned int queue_count;
	unsigned int poll_count;
	int index;
	bool use_bio;
	bool removing;
	bool dead;
	bool suspended;
	bool starting;
	bool watching;
	unsigned int ring_size;
	unsigned long removing_since;
	unsigned int seg_max;
	unsigned int seg_bytes_max;
	struct work_struct config_work;
	struct work_struct cache_work;
	struct work_struct abort_work;
	struct delayed_work watch;
};

enum { VIRTBLK_MAP_INTERRUPT, VIRTBLK_MAP_POLL };

extern struct workqueue_struct *virtblk_wq;
extern int virtblk_major;
extern const struct block_device_operations virtblk_rq_fops;
extern const struct block_device_operations virtblk_bio_fops;
extern const struct blk_mq_ops virtblk_mq_ops;
extern const struct attribute_group *virtblk_attr_groups[];

/* main.c: parameters */
unsigned int virtblk_param_queues(void);
unsigned int virtblk_param_poll_queues(void);
unsigned int virtblk_param_depth(void);
bool virtblk_param_use_bio(void);

/* probe.c */
int virtblk_probe(struct virtio_device *vdev);
void virtblk_remove(struct virtio_device *vdev);
void virtblk_free_disk(struct gendisk *disk);
void virtblk_index_exit(void);

/* power.c */
int virtblk_suspend(struct virtio_device *vdev);
int virtblk_resume(struct virtio_device *vdev);
void virtblk_fail_kept(struct virtblk *blk);

/* queues.c */
int virtblk_alloc_queues(struct virtblk *blk);
int virtblk_find_queues(struct virtblk *blk);
void virtblk_del_queues(struct virtblk *blk, struct virtio_device *vdev);
void virtblk_free_queues(struct virtblk *blk);
void virtblk_map_queues(struct virtblk *blk, struct blk_mq_queue_map *map, bool polled);
unsigned int virtblk_depth(struct virtblk *blk);

/* limits.c */
int virtblk_validate(struct virtio_device *vdev);
int virtblk_read_limits(struct virtblk *blk, struct queue_limits *lim);

/* config.c */
bool virtblk_has_cache(struct virtio_device *vdev);
int virtblk_set_cache(struct virtblk *blk, bool write_back);
void virtblk_restore_cache(struct virtblk *blk);
void virtblk_update_capacity(struct virtblk *blk, bool resize);
void virtblk_config_changed(struct virtio_device *vdev);
void virtblk_config_work(struct work_struct *work);
void virtblk_cache_work(struct work_struct *work);
void virtblk_cancel_config(struct virtblk *blk);

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
blk_status_t virtblk_status(const struct virtblk_request *request);
bool virtblk_kick_prepare(struct virtblk_queue *q);
void virtblk_kick(struct virtblk_queue *q, bool kick);

/* completion.c */
void virtblk_interrupt(struct virtqueue *vq);
unsigned int virtblk_rq_take(struct virtblk_queue *q, bool interrupt, struct request **first);
void virtblk_withhold(struct request *rq);
unsigned int virtblk_rq_reap(struct virtblk_queue *q, bool interrupt);
void virtblk_complete_rq(struct request *rq);
void virtblk_finish_rq(struct request *rq);

/* poll.c */
int virtblk_poll(struct blk_mq_hw_ctx *hctx, struct io_comp_batch *iob);
int virtblk_poll_bio(struct bio *bio, struct io_comp_batch *iob, unsigned int flags);

/* timeout.c */
enum blk_eh_timer_return virtblk_timeout(struct request *rq);
void virtblk_watch(struct work_struct *work);
void virtblk_start_watch(struct virtblk *blk);
void virtblk_retry_soon(struct virtblk *blk);

/* abort.c */
void virtblk_abort_work(struct work_struct *work);
void virtblk_await_start(struct virtblk *blk);
void virtblk_started(struct virtblk *blk);
void virtblk_give_up(struct virtblk *blk);
bool virtblk_pulled_out(struct virtio_device *vdev);
void virtblk_reset(struct virtio_device *vdev);
void virtblk_check_broken(struct virtblk_queue *q);
struct virtblk_request *virtblk_take_back(struct virtblk_queue *q);

/* get_id.c */
struct virtblk_id_wait;
int virtblk_get_id(struct virtblk *blk, char id[VIRTIO_BLK_ID_BYTES + 1]);
void virtblk_id_done(struct virtblk_slot *slot, blk_status_t status);

/* bio_path.c */
void virtblk_submit_bio(struct bio *bio);
void virtblk_bio_submit_list(struct virtblk_queue *q, struct bio_list *bios);
void virtblk_bio_stop(struct virtblk *blk);
void virtblk_bio_start(struct virtblk *blk);
struct virtblk_queue *virtblk_bio_queue(struct virtblk *blk, bool polled);

/* More bios wait than the ring takes. */
static inline bool virtblk_bio_is_crowded(const struct virtblk_queue *q)
{
	return READ_ONCE(q->waiting_count) > q->slot_count;
}

/* bio_dispatch.c */
bool virtblk_bio_dispatch(struct virtblk_queue *q, struct bio_list *bios, struct bio_list *done);
void virtblk_slot_back(struct virtblk_queue *q, struct virtblk_slot *slot);

/* bio_plug.c */
bool virtblk_bio_plug(struct virtblk_queue *q, struct bio *bio);

/* bio_merge.c */
bool virtblk_may_join(const struct bio *first, const struct bio *second);
unsigned int virtblk_bio_segments(const struct virtblk *blk, struct bio *bio);
unsigned int virtblk_gather(struct virtblk_queue *q, struct virtblk_slot *slot,
			    struct bio_list *bios, unsigned int *taken);
int virtblk_map_bios(struct virtblk_queue *q, struct virtblk_slot *slot, unsigned int segments);

/* bio_flush.c */
enum virtblk_stage virtblk_first_stage(const struct bio *bio);
enum virtblk_stage virtblk_next_stage(const struct virtblk_slot *slot);
int virtblk_prepare_stage(struct virtblk_queue *q, struct virtblk_slot *slot,
			  unsigned int segments);

/* bio_completion.c */
unsigned int virtblk_bio_reap(struct virtblk_queue *q, bool interrupt);
void virtblk_slot_end(struct virtblk_queue *q, struct virtblk_slot *slot, blk_status_t status,
		      struct bio_list *done);
void virtblk_end_bios(struct virtblk *blk, struct bio_list *done);
void virtblk_bio_fail_all(struct virtblk_queue *q);
void virtblk_wake_throttled(struct virtblk_queue *q);

/* bio_account.c */
void virtblk_account_start(struct virtblk_queue *q, struct virtblk_slot *slot);
void virtblk_account_end(const struct virtblk_slot *slot, struct bio *bio);

/* bio_pool.c */
int virtblk_alloc_slots(struct virtblk_queue *q);
void virtblk_free_slots(struct virtblk_queue *q);
struct virtblk_slot *virtblk_get_slot(struct virtblk_queue *q);
void virtblk_put_slot(struct virtblk_queue *q, struct virtblk_slot *slot);

#endif /* _VIRTBLK_H */
