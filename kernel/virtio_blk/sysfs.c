// SPDX-License-Identifier: GPL-2.0-only
/*
 * The attributes in /sys/block/vdX.
 */
#include "virtio_blk.h"

static const char *const virtblk_cache_types[] = { "write through", "write back" };

static struct virtblk *virtblk_of(struct device *dev)
{
	return dev_to_disk(dev)->private_data;
}

static ssize_t serial_show(struct device *dev, struct device_attribute *attr, char *buf)
{
	char id[VIRTIO_BLK_ID_BYTES + 1];
	struct virtblk *blk = virtblk_of(dev);
	int err;

	id[VIRTIO_BLK_ID_BYTES] = '\0';
	err = blk->use_bio ? virtblk_bio_get_id(blk, id) : virtblk_rq_get_id(blk, id);
	/* A device may have none. */
	if (err == -EIO || err == -EOPNOTSUPP)
		return 0;
	return err ?: sysfs_emit(buf, "%s", id);
}
static DEVICE_ATTR_RO(serial);

static ssize_t cache_type_show(struct device *dev, struct device_attribute *attr, char *buf)
{
	struct virtblk *blk = virtblk_of(dev);

	return sysfs_emit(buf, "%s\n", virtblk_cache_types[virtblk_has_cache(blk->vdev)]);
}

static ssize_t cache_type_store(struct device *dev, struct device_attribute *attr, const char *buf,
				size_t count)
{
	struct virtblk *blk = virtblk_of(dev);
	int type = sysfs_match_string(virtblk_cache_types, buf);
	int err;

	if (type < 0)
		return type;
	/* The mode of the file does not stop root. */
	if (!virtio_has_feature(blk->vdev, VIRTIO_BLK_F_CONFIG_WCE))
		return -EOPNOTSUPP;
	err = virtblk_set_cache(blk, type);
	return err ?: count;
}
static DEVICE_ATTR_RW(cache_type);

static ssize_t io_path_show(struct device *dev, struct device_attribute *attr, char *buf)
{
	return sysfs_emit(buf, "%s\n", virtblk_of(dev)->use_bio ? "bio" : "request");
}
static DEVICE_ATTR_RO(io_path);

static ssize_t io_queues_show(struct device *dev, struct device_attribute *attr, char *buf)
{
	return sysfs_emit(buf, "%u\n", virtblk_of(dev)->queue_count);
}
static DEVICE_ATTR_RO(io_queues);

static ssize_t io_poll_queues_show(struct device *dev, struct device_attribute *attr, char *buf)
{
	return sysfs_emit(buf, "%u\n", virtblk_of(dev)->poll_count);
}
static DEVICE_ATTR_RO(io_poll_queues);

static struct attribute *virtblk_attrs[] = {
	&dev_attr_serial.attr,
	&dev_attr_cache_type.attr,
	&dev_attr_io_path.attr,
	&dev_attr_io_queues.attr,
	&dev_attr_io_poll_queues.attr,
	NULL,
};

static umode_t virtblk_attr_mode(struct kobject *kobj, struct attribute *attr, int index)
{
	struct virtblk *blk = virtblk_of(kobj_to_dev(kobj));

	if (attr == &dev_attr_cache_type.attr &&
	    !virtio_has_feature(blk->vdev, VIRTIO_BLK_F_CONFIG_WCE))
		return 0444;
	return attr->mode;
}

static const struct attribute_group virtblk_attr_group = {
	.attrs = virtblk_attrs,
	.is_visible = virtblk_attr_mode,
};

const struct attribute_group *virtblk_attr_groups[] = {
	&virtblk_attr_group,
	NULL,
};
