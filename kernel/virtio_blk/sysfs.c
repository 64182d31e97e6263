// SPDX-License-Identifier: GPL-2.0-only
/*
 * /sys/block/vdX: serial and cache_type as the kernel's own driver has them; io_path, io_queues and
 * io_poll_queues tell how the disk is driven.
 */
#include "virtio_blk.h"

static const char *const cache_types[] = { "write through", "write back" };

static struct virtblk *blk_of(struct device *dev)
{
	return dev_to_disk(dev)->private_data;
}

static ssize_t serial_show(struct device *dev, struct device_attribute *attr, char *buf)
{
	char id[VIRTIO_BLK_ID_BYTES + 1];
	int err = virtblk_get_id(blk_of(dev), id);

	/* A device that has none is no error. */
	if (err == -EIO || err == -EOPNOTSUPP)
		return 0;
	return err ?: sysfs_emit(buf, "%s", id);
}
static DEVICE_ATTR_RO(serial);

static ssize_t cache_type_show(struct device *dev, struct device_attribute *attr, char *buf)
{
	return sysfs_emit(buf, "%s\n", cache_types[virtblk_has_cache(blk_of(dev)->vdev)]);
}

static ssize_t cache_type_store(struct device *dev, struct device_attribute *attr, const char *buf,
				size_t count)
{
	struct virtblk *blk = blk_of(dev);
	int type = sysfs_match_string(cache_types, buf);
	int err;

	if (type < 0)
		return type;
	/* root can write to files that say that they are read-only. */
	if (!virtio_has_feature(blk->vdev, VIRTIO_BLK_F_CONFIG_WCE))
		return -EOPNOTSUPP;
	err = virtblk_set_cache(blk, type);
	return err ?: count;
}
static DEVICE_ATTR_RW(cache_type);

static ssize_t io_path_show(struct device *dev, struct device_attribute *attr, char *buf)
{
	return sysfs_emit(buf, "%s\n", blk_of(dev)->use_bio ? "bio" : "request");
}
static DEVICE_ATTR_RO(io_path);

static ssize_t io_queues_show(struct device *dev, struct device_attribute *attr, char *buf)
{
	return sysfs_emit(buf, "%u\n", blk_of(dev)->queue_count);
}
static DEVICE_ATTR_RO(io_queues);

static ssize_t io_poll_queues_show(struct device *dev, struct device_attribute *attr, char *buf)
{
	return sysfs_emit(buf, "%u\n", blk_of(dev)->poll_count);
}
static DEVICE_ATTR_RO(io_poll_queues);

static struct attribute *attrs[] = {
	&dev_attr_serial.attr,
	&dev_attr_cache_type.attr,
	&dev_attr_io_path.attr,
	&dev_attr_io_queues.attr,
	&dev_attr_io_poll_queues.attr,
	NULL,
};

static umode_t is_visible(struct kobject *kobj, struct attribute *attr, int index)
{
	struct virtblk *blk = blk_of(kobj_to_dev(kobj));

	if (attr == &dev_attr_cache_type.attr &&
	    !virtio_has_feature(blk->vdev, VIRTIO_BLK_F_CONFIG_WCE))
		return 0444;
	return attr->mode;
}

static const struct attribute_group attr_group = {
	.attrs = attrs,
	.is_visible = is_visible,
};

const struct attribute_group *virtblk_attr_groups[] = {
	&attr_group,
	NULL,
};
