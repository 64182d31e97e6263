// SPDX-License-Identifier: GPL-2.0-only
/*
 * Stage 2, request: copies the header (and the ranges of a range command) once, checks the copy,
 * and locates the data and the status byte. Virtio 1.3, section 5.2.6.
 */
#include "backend.h"
#include "stages.h"
#include "trace.h"

/*
 * 0 if the disk has the range, as of now: it may grow. Otherwise the driver is wrong, or the storage
 * has become smaller, and so has failed: @req notes that.
 */
static int vhost_blk_check_end(struct vhost_blk_req *req, u64 sector, u64 sectors)
{
	u64 end;

	if (unlikely(check_add_overflow(sector, sectors, &end)))
		return -EIO;
	if (likely(end <= vhost_blk_backend_bytes(req->be) >> SECTOR_SHIFT))
		return 0;
	req->cut_off = end <= req->be->sectors;
	/* The errors that a write and a read of a file there would have. */
	return req->cut_off && req->type != VIRTIO_BLK_T_IN ? -ENOSPC : -EIO;
}

/* True if the range is a whole number of logical blocks. */
static bool vhost_blk_whole_blocks(const struct vhost_blk_req *req, u64 sector, u64 sectors)
{
	return !((sector | sectors) & ((req->be->lbs >> SECTOR_SHIFT) - 1));
}

/**
 * vhost_blk_check_writable - check that the disk may be written now
 * @req: a request to it
 *
 * No lower layer checks: a bio or a discard to a device that became read-only is carried out. The
 * option is read once: if its reason vanished between two reads, the storage would get the blame.
 *
 * Return: 0; -EIO for a read-only file, or if the owner set the option; -EROFS if the device has
 * become read-only: the storage fails.
 */
int vhost_blk_check_writable(const struct vhost_blk_req *req)
{
	const struct vhost_blk_backend *be = req->be;

	if (be->read_only || READ_ONCE(req->q->blk->opt.flags) & VHOST_BLK_OPT_READ_ONLY)
		return -EIO;
	return vhost_blk_became_read_only(be) ? -EROFS : 0;
}

/* Without FLUSH, or with the cache in write-through mode, a write is durable when it completes. */
static bool vhost_blk_write_through(const struct vhost_blk_req *req)
{
	return !vhost_has_feature(&req->q->vq, VIRTIO_BLK_F_FLUSH) ||
	       READ_ONCE(req->q->blk->opt.flags) & VHOST_BLK_OPT_WRITE_THROUGH;
}

/* Finds the status byte, the last device-writable one; sets @bytes to the writable ones before it. */
static bool vhost_blk_find_status(struct vhost_blk_req *req, const struct vhost_blk_chain *chain,
				  size_t *bytes)
{
	const struct iovec *iov = req->q->vq.iov + chain->out;
	unsigned int last = chain->in;

	*bytes = iov_length(iov, chain->in);
	if (unlikely(!*bytes))
		return false;
	while (!iov[--last].iov_len)
		;
	req->status_addr = (u8 __user *)iov[last].iov_base + iov[last].iov_len - 1;
	--*bytes;
	return true;
}

/* The usual layout: a header in its own buffer. */
static bool vhost_blk_header_is_alone(const struct vhost_blk_req *req,
				      const struct vhost_blk_chain *chain)
{
	return likely(chain->out && req->q->vq.iov->iov_len == sizeof(struct virtio_blk_outhdr));
}

static bool vhost_blk_copy_header(struct vhost_blk_req *req, const struct vhost_blk_chain *chain,
				  struct virtio_blk_outhdr *hdr)
{
	const struct iovec *iov = req->q->vq.iov;
	const struct virtio_blk_outhdr __user *from = iov->iov_base;
	struct iov_iter out;

	if (!vhost_blk_header_is_alone(req, chain) || !IS_ALIGNED((unsigned long)from, 8)) {
		iov_iter_init(&out, ITER_SOURCE, iov, chain->out, iov_length(iov, chain->out));
		return copy_from_iter_full(hdr, sizeof(*hdr), &out);
	}
	if (!user_read_access_begin(from, sizeof(*from)))
		return false;
	unsafe_get_user(hdr->type, &from->type, fault);
	unsafe_get_user(hdr->sector, &from->sector, fault);
	user_read_access_end();
	return true;
fault:
	user_read_access_end();
	return false;
}

/* Sets @out up for the readable bytes after the header. */
static void vhost_blk_init_out(const struct vhost_blk_req *req, const struct vhost_blk_chain *chain,
			       struct iov_iter *out)
{
	const struct iovec *iov = req->q->vq.iov;
	size_t bytes = iov_length(iov, chain->out), skip = sizeof(struct virtio_blk_outhdr);

	if (vhost_blk_header_is_alone(req, chain)) {
		iov_iter_init(out, ITER_SOURCE, iov + 1, chain->out - 1, bytes - skip);
	} else {
		iov_iter_init(out, ITER_SOURCE, iov, chain->out, bytes);
		iov_iter_advance(out, skip);
	}
}

static int vhost_blk_parse_rw(struct vhost_blk_req *req, const struct iov_iter *data)
{
	size_t bytes = iov_iter_count(data);
	u64 sectors = bytes >> SECTOR_SHIFT;
	int err;

	if (bytes > VHOST_BLK_REQUEST_BYTES_MAX || bytes & (SECTOR_SIZE - 1) ||
	    !vhost_blk_whole_blocks(req, req->sector, sectors))
		return -EIO;
	err = vhost_blk_check_end(req, req->sector, sectors);
	/* The reason of a halt has the bytes of a request that the storage lacks, too. */
	if (likely(!err || req->cut_off))
		req->bytes = bytes;
	return err;
}

static int vhost_blk_parse_range(struct vhost_blk_req *req, struct vhost_blk_range *range,
				 const struct virtio_blk_discard_write_zeroes *wire, u32 limit)
{
	u32 flags = le32_to_cpu(wire->flags);
	u32 known = req->type == VIRTIO_BLK_T_WRITE_ZEROES ? VIRTIO_BLK_WRITE_ZEROES_FLAG_UNMAP : 0;

	if (flags & ~known)
		return -EOPNOTSUPP;
	range->sector = le64_to_cpu(wire->sector);
	range->sectors = le32_to_cpu(wire->num_sectors);
	range->unmap = flags & VIRTIO_BLK_WRITE_ZEROES_FLAG_UNMAP &&
		       !(READ_ONCE(req->q->blk->opt.flags) & VHOST_BLK_OPT_NO_UNMAP);
	if ((limit && range->sectors > limit) ||
	    !vhost_blk_whole_blocks(req, range->sector, range->sectors))
		return -EIO;
	return vhost_blk_check_end(req, range->sector, range->sectors);
}

/**
 * vhost_blk_range_sectors - the length of a range command
 * @req: the request
 *
 * Return: the sum of its ranges.
 */
u64 vhost_blk_range_sectors(const struct vhost_blk_req *req)
{
	u64 sectors = 0;
	unsigned int i;

	for (i = 0; i < req->nr_ranges; i++)
		sectors += req->ranges[i].sectors;
	return sectors;
}

/**
 * vhost_blk_first_sector - the begin of a request on the disk
 * @req: the request, whose header is checked
 *
 * Return: its first sector; U64_MAX: it is about none.
 */
u64 vhost_blk_first_sector(const struct vhost_blk_req *req)
{
	if (req->type == VIRTIO_BLK_T_IN || req->type == VIRTIO_BLK_T_OUT)
		return req->sector;
	return req->nr_ranges ? req->ranges[0].sector : U64_MAX;
}

/*
 * All ranges are checked before the first one starts. @limit holds for each of them and, unless a
 * stop skips them, for their sum.
 */
static int vhost_blk_parse_ranges(struct vhost_blk_req *req, struct iov_iter *data, u32 limit)
{
	size_t bytes = iov_iter_count(data);
	struct virtio_blk_discard_write_zeroes wire;
	size_t i, n = bytes / sizeof(wire);
	int err;

	if (!n || bytes % sizeof(wire) || n > VHOST_BLK_RANGES_MAX)
		return -EIO;
	err = vhost_blk_check_writable(req);
	if (unlikely(err))
		return err;

	req->ranges = &req->inline_range;
	if (n > VHOST_BLK_INLINE_RANGES) {
		req->ranges = vhost_blk_alloc(req, n, sizeof(*req->ranges));
		if (!req->ranges)
			return -ENOMEM;
	}
	for (i = 0; i < n; i++) {
		if (!copy_from_iter_full(&wire, sizeof(wire), data))
			return -EIO;
		err = vhost_blk_parse_range(req, &req->ranges[i], &wire, limit);
		/* The reason of a halt has the bytes of a request that the storage lacks, too. */
		if (req->cut_off)
			req->nr_ranges = i + 1;
		if (err)
			return err;
	}
	req->nr_ranges = n;
	if (limit && req->type != VIRTIO_BLK_T_DISCARD && vhost_blk_range_sectors(req) > limit)
		return -EIO;
	req->durable = vhost_blk_write_through(req);
	return 0;
}

/* Only negotiated features are honoured. */
static int vhost_blk_parse_range_command(struct vhost_blk_req *req, struct iov_iter *data)
{
	struct vhost_virtqueue *vq = &req->q->vq;
	struct vhost_blk_options *opt = &req->q->blk->opt;

	switch (req->type) {
	case VIRTIO_BLK_T_DISCARD:
		if (!vhost_has_feature(vq, VIRTIO_BLK_F_DISCARD))
			return -EOPNOTSUPP;
		return vhost_blk_parse_ranges(req, data, READ_ONCE(opt->max_discard_sectors));
	case VIRTIO_BLK_T_WRITE_ZEROES:
		if (!vhost_has_feature(vq, VIRTIO_BLK_F_WRITE_ZEROES))
			return -EOPNOTSUPP;
		return vhost_blk_parse_ranges(req, data, READ_ONCE(opt->max_write_zeroes_sectors));
	default:
		if (!vhost_has_feature(vq, VIRTIO_BLK_F_SECURE_ERASE))
			return -EOPNOTSUPP;
		return vhost_blk_parse_ranges(req, data, READ_ONCE(opt->max_secure_erase_sectors));
	}
}

/* @bytes: writable ones before the status byte. */
static int vhost_blk_parse_type(struct vhost_blk_req *req, const struct vhost_blk_chain *chain,
				size_t bytes, struct iov_iter *data)
{
	const struct iovec *in = req->q->vq.iov + chain->out;
	int err;

	switch (req->type) {
	case VIRTIO_BLK_T_IN:
		iov_iter_init(data, ITER_DEST, in, chain->in, bytes);
		return vhost_blk_parse_rw(req, data);
	case VIRTIO_BLK_T_OUT:
		vhost_blk_init_out(req, chain, data);
		err = vhost_blk_check_writable(req);
		if (unlikely(err))
			return err;
		req->durable = vhost_blk_write_through(req);
		return vhost_blk_parse_rw(req, data);
	case VIRTIO_BLK_T_FLUSH:
		return vhost_has_feature(&req->q->vq, VIRTIO_BLK_F_FLUSH) ? 0 : -EOPNOTSUPP;
	case VIRTIO_BLK_T_GET_ID:
		iov_iter_init(data, ITER_DEST, in, chain->in, bytes);
		return 0;
	case VIRTIO_BLK_T_DISCARD:
	case VIRTIO_BLK_T_WRITE_ZEROES:
	case VIRTIO_BLK_T_SECURE_ERASE:
		vhost_blk_init_out(req, chain, data);
		return vhost_blk_parse_range_command(req, data);
	default:
		return -EOPNOTSUPP;
	}
}

static int vhost_blk_parse_chain(struct vhost_blk_req *req, const struct vhost_blk_chain *chain,
				 struct iov_iter *data)
{
	struct virtio_blk_outhdr hdr;
	size_t bytes;

	if (!vhost_blk_find_status(req, chain, &bytes))
		return -EIO;
	if (!vhost_blk_copy_header(req, chain, &hdr))
		return -EIO;
	req->type = vhost32_to_cpu(&req->q->vq, hdr.type);
	req->sector = vhost64_to_cpu(&req->q->vq, hdr.sector);
	/* Its size is available from here on. */
	if (unlikely(READ_ONCE(req->be->dead)))
		return -EIO;
	return vhost_blk_parse_type(req, chain, bytes, data);
}

static bool vhost_blk_is_io(const struct vhost_blk_req *req)
{
	switch (req->type) {
	case VIRTIO_BLK_T_IN:
	case VIRTIO_BLK_T_OUT:
	case VIRTIO_BLK_T_FLUSH:
	case VIRTIO_BLK_T_DISCARD:
	case VIRTIO_BLK_T_WRITE_ZEROES:
	case VIRTIO_BLK_T_SECURE_ERASE:
		return true;
	default:
		return false;
	}
}

/* The block layer takes the size away before it tells the removal. */
static bool vhost_blk_is_removed(const struct vhost_blk_backend *be)
{
	return READ_ONCE(be->dead) || (be->bdev && !bdev_nr_sectors(be->bdev));
}

/**
 * vhost_blk_storage_failed - true if a request fails because of the storage, and not of the driver
 * @req: the request, whose I/O was not started
 * @err: its error
 *
 * Return: true if another try may succeed after a repair of the storage.
 */
bool vhost_blk_storage_failed(const struct vhost_blk_req *req, int err)
{
	return err == -ENODEV || err == -EROFS || req->cut_off;
}

/**
 * vhost_blk_parse - read a request from its chain
 * @req: filled in
 * @chain: the chain, whose elements are in vq.iov
 * @data: set to the data buffers of IN, OUT and GET_ID
 *
 * Reads only the header and the ranges, and writes nothing.
 *
 * Return: 0; -EOPNOTSUPP for S_UNSUPP, -ENOMEM to try again, -ENODEV if the storage was removed,
 * -EROFS if it has become read-only, any other errno for S_IOERR. vhost_blk_storage_failed() tells
 * failures of the storage from mistakes of the driver.
 */
int vhost_blk_parse(struct vhost_blk_req *req, const struct vhost_blk_chain *chain,
		    struct iov_iter *data)
{
	int err = vhost_blk_parse_chain(req, chain, data);

	if (unlikely(err == -EIO || req->cut_off) && vhost_blk_is_io(req) &&
	    vhost_blk_is_removed(req->be))
		err = -ENODEV;
	trace_vhost_blk_request(req, err);
	return err;
}
