// SPDX-License-Identifier: GPL-2.0-only
/*
 * A request as the device sees it, for both paths: header, data, status byte (section 5.2.6 of
 * virtio 1.3), its way into the ring and out of it, and the work items that look after it.
 */
#include <uapi/linux/virtio_ring.h>

#include "virtio_blk.h"

/**
 * virtblk_init_request() - sets up the fields that all uses of a request share
 * @request: its memory keeps its address until the disk is removed
 */
void virtblk_init_request(struct virtblk_request *request)
{
	sg_init_one(&request->header_sg, &request->header, sizeof(request->header));
	sg_init_one(&request->status_sg, &request->status, sizeof(request->status));
	request->data.nents = 0;
	request->ranges = NULL;
	request->own_sg = false;
}

static void virtblk_set_header(struct virtio_device *vdev, struct virtblk_request *request,
			       u32 type, u64 sector, unsigned short ioprio)
{
	request->header.type = cpu_to_virtio32(vdev, type);
	request->header.ioprio = cpu_to_virtio32(vdev, ioprio);
	request->header.sector = cpu_to_virtio64(vdev, sector);
	request->status = VIRTBLK_S_UNWRITTEN;
	request->data.nents = 0;
}

/**
 * virtblk_set_command() - sets header and direction of a block layer operation
 * @vdev: gives the byte order
 * @request: to be filled in
 * @opf: operation and flags
 * @sector: in units of 512 bytes; ignored where the specification has none
 * @ioprio: of the submitter
 *
 * Return: BLK_STS_NOTSUPP for operations that virtio-blk does not have, else BLK_STS_OK.
 */
blk_status_t virtblk_set_command(struct virtio_device *vdev, struct virtblk_request *request,
				 blk_opf_t opf, sector_t sector, unsigned short ioprio)
{
	u32 type;

	request->writes = true;
	switch (opf & REQ_OP_MASK) {
	case REQ_OP_READ:
		request->writes = false;
		type = VIRTIO_BLK_T_IN;
		break;
	case REQ_OP_WRITE:
		type = VIRTIO_BLK_T_OUT;
		break;
	case REQ_OP_FLUSH:
		type = VIRTIO_BLK_T_FLUSH;
		sector = 0;
		break;
	case REQ_OP_DISCARD:
		type = VIRTIO_BLK_T_DISCARD;
		sector = 0;
		break;
	case REQ_OP_WRITE_ZEROES:
		type = VIRTIO_BLK_T_WRITE_ZEROES;
		sector = 0;
		break;
	case REQ_OP_SECURE_ERASE:
		type = VIRTIO_BLK_T_SECURE_ERASE;
		sector = 0;
		break;
	default:
		return BLK_STS_NOTSUPP;
	}
	virtblk_set_header(vdev, request, type, sector, ioprio);
	return BLK_STS_OK;
}

static void virtblk_fill_range(struct virtio_blk_discard_write_zeroes *range, blk_opf_t opf,
			       sector_t sector, sector_t sectors)
{
	u32 flags = 0;

	/* Only write zeroes has the flag: a device refuses a discard with it. */
	if ((opf & REQ_OP_MASK) == REQ_OP_WRITE_ZEROES && !(opf & REQ_NOUNMAP))
		flags = VIRTIO_BLK_WRITE_ZEROES_FLAG_UNMAP;
	range->sector = cpu_to_le64(sector);
	range->num_sectors = cpu_to_le32(sectors);
	range->flags = cpu_to_le32(flags);
}

static void virtblk_set_one_buffer(struct virtblk_request *request, void *buffer,
				   unsigned int bytes)
{
	request->data.sgl = request->inline_sg;
	request->data.nents = 1;
	sg_init_one(request->data.sgl, buffer, bytes);
}

/**
 * virtblk_set_range() - sets the only range of a discard, write zeroes or secure erase
 * @request: after virtblk_set_command()
 * @opf: operation and flags
 * @sector: first sector
 * @sectors: their number; bios and requests are shorter than 2^32 sectors
 */
void virtblk_set_range(struct virtblk_request *request, blk_opf_t opf, sector_t sector,
		       sector_t sectors)
{
	virtblk_fill_range(&request->range, opf, sector, sectors);
	virtblk_set_one_buffer(request, &request->range, sizeof(request->range));
}

/**
 * virtblk_set_ranges() - sets one range for each bio of a discard request
 * @request: after virtblk_set_command()
 * @rq: the discard
 * @count: its number of ranges
 *
 * Return: 0, or -ENOMEM: the caller tries again later.
 */
int virtblk_set_ranges(struct virtblk_request *request, struct request *rq, unsigned int count)
{
	struct virtio_blk_discard_write_zeroes *ranges;
	unsigned int filled = 0;
	struct bio *bio;

	ranges = kmalloc_array(count, sizeof(*ranges), GFP_ATOMIC);
	if (!ranges)
		return -ENOMEM;
	__rq_for_each_bio(bio, rq) {
		if (WARN_ON_ONCE(filled == count))
			break;
		virtblk_fill_range(&ranges[filled++], rq->cmd_flags, bio->bi_iter.bi_sector,
				   bio_sectors(bio));
	}
	request->ranges = ranges;
	virtblk_set_one_buffer(request, ranges, filled * sizeof(*ranges));
	return 0;
}

/**
 * virtblk_set_get_id() - makes a query of the serial number, 20 bytes into @request->id
 * @vdev: gives the byte order
 * @request: to be filled in
 */
void virtblk_set_get_id(struct virtio_device *vdev, struct virtblk_request *request)
{
	memset(request->id, 0, sizeof(request->id));
	request->writes = false;
	virtblk_set_header(vdev, request, VIRTIO_BLK_T_GET_ID, 0, 0);
	virtblk_set_one_buffer(request, request->id, sizeof(request->id));
}

/**
 * virtblk_alloc_sg() - allocates a scatterlist for data
 * @request: its data.sgl gets @segments entries
 * @segments: at least 1
 *
 * Return: 0, or -ENOMEM: the caller tries again later.
 */
int virtblk_alloc_sg(struct virtblk_request *request, unsigned int segments)
{
	request->data.sgl = request->inline_sg;
	if (segments <= VIRTBLK_INLINE_SG) {
		sg_init_table(request->data.sgl, segments);
		return 0;
	}
	if (sg_alloc_table_chained(&request->data, segments, request->inline_sg,
				   VIRTBLK_CHAINED_SG)) {
		request->data.nents = 0;
		return -ENOMEM;
	}
	request->own_sg = true;
	return 0;
}

/**
 * virtblk_free_data() - frees the memory that describes the data
 * @request: no longer owned by the device
 */
void virtblk_free_data(struct virtblk_request *request)
{
	if (request->own_sg) {
		sg_free_table_chained(&request->data, VIRTBLK_CHAINED_SG);
		request->own_sg = false;
	}
	if (unlikely(request->ranges)) {
		kfree(request->ranges);
		request->ranges = NULL;
	}
	request->data.nents = 0;
}

/**
 * virtblk_add() - adds a request to the ring
 * @q: its lock is held
 * @request: complete
 *
 * Return: 0; -ENOSPC if the ring has too little room, -ENOMEM if the data could not be mapped, -EIO
 * if the device is broken or gone. After an error the caller still owns the request.
 */
int virtblk_add(struct virtblk_queue *q, struct virtblk_request *request)
{
	unsigned int out = 0, in = 0, needed, free;
	struct scatterlist *sgs[3];
	int err;

	lockdep_assert_held(&q->lock);
	if (unlikely(!q->vq))
		return -EIO;
	needed = virtio_has_feature(q->vq->vdev, VIRTIO_RING_F_INDIRECT_DESC) ?
		 1 : request->data.nents + VIRTBLK_OVERHEAD;
	free = q->vq->num_free;
	/* The core would return the same, but kick the device first, under our lock. */
	if (unlikely(free < needed))
		return virtqueue_is_broken(q->vq) ? -EIO : -ENOSPC;
	sgs[out++] = &request->header_sg;
	if (request->data.nents) {
		if (request->writes)
			sgs[out++] = request->data.sgl;
		else
			sgs[out + in++] = request->data.sgl;
	}
	sgs[out + in++] = &request->status_sg;
	err = virtqueue_add_sgs(q->vq, sgs, out, in, request, GFP_ATOMIC);
	if (likely(!err)) {
		request->descriptors = free - q->vq->num_free;
		q->in_flight++;
	} else if (err == -EIO && !virtqueue_is_broken(q->vq)) {
		/* A packed ring says so when a buffer cannot be mapped for the moment. */
		err = -ENOMEM;
	}
	return err;
}

/**
 * virtblk_get_used() - takes a request from the used ring
 * @q: its lock is held, it has a virtqueue
 *
 * For a split ring the core reads the number of descriptors that become free in the descriptor
 * table, where the device may have changed it. Too many of them would give one descriptor to two
 * requests, and the first would never end. So the ring is broken when the number has changed.
 *
 * Return: the next one, or NULL.
 */
struct virtblk_request *virtblk_get_used(struct virtblk_queue *q)
{
	unsigned int free = q->vq->num_free, len;
	struct virtblk_request *request = virtqueue_get_buf(q->vq, &len);

	if (!request)
		return NULL;
	q->in_flight--;
	if (unlikely(q->vq->num_free - free != request->descriptors)) {
		dev_err_ratelimited(&q->vq->vdev->dev, "the device changed the descriptors of %s\n",
				    q->name);
		__virtqueue_break(q->vq);
	}
	return request;
}

/**
 * virtblk_detach() - takes a request back from a device that was reset
 * @q: its lock is held
 *
 * The core must not be asked for more requests than there are. Before it answers that there is
 * none, it checks (BUG_ON) that all descriptors are free, and it has read the ends of chains in
 * descriptors that the device may have changed.
 *
 * Return: the next one, or NULL.
 */
struct virtblk_request *virtblk_detach(struct virtblk_queue *q)
{
	lockdep_assert_held(&q->lock);
	if (!q->vq || !q->in_flight)
		return NULL;
	q->in_flight--;
	return virtqueue_detach_unused_buf(q->vq);
}

/**
 * virtblk_check_broken() - has the device given up if this ring is broken
 * @q: its used ring was looked at; its lock is held
 *
 * The virtio core breaks a ring whose used entries name requests that it never had, and
 * virtblk_get_used() one whose descriptors were changed. Requests in flight there would never end.
 */
void virtblk_check_broken(struct virtblk_queue *q)
{
	lockdep_assert_held(&q->lock);
	if (likely(!q->vq || !virtqueue_is_broken(q->vq)) || q->broken)
		return;
	q->broken = true;
	queue_work(virtblk_wq, &q->blk->abort_work);
}

static unsigned long virtblk_watchdog_interval(const struct virtblk *blk)
{
	return blk->poll_count ? VIRTBLK_WATCH_POLLED : VIRTBLK_WATCH_OTHERS;
}

/**
 * virtblk_start_watchdog() - lets the watchdog run as long as requests are in flight
 * @blk: a request was added to one of its rings
 *
 * Context: without the queue's lock.
 */
void virtblk_start_watchdog(struct virtblk *blk)
{
	/* Not pending: it does not run, or may have looked at the request's queue already. */
	if (unlikely(!delayed_work_pending(&blk->watchdog)))
		queue_delayed_work(virtblk_wq, &blk->watchdog, virtblk_watchdog_interval(blk));
}

/**
 * virtblk_retry_soon() - has the watchdog look at all queues in a moment
 * @blk: one of its queues will get no completion that would do the same
 */
void virtblk_retry_soon(struct virtblk *blk)
{
	mod_delayed_work(virtblk_wq, &blk->watchdog, max(1, HZ / 100));
}

/**
 * virtblk_dispatch_soon() - has the watchdog dispatch at once
 * @blk: has more waiting bios than may be sent with interrupts off, or a query
 */
void virtblk_dispatch_soon(struct virtblk *blk)
{
	mod_delayed_work(virtblk_wq, &blk->watchdog, 0);
}
