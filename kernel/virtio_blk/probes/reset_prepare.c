// SPDX-License-Identifier: GPL-2.0-only
/* The bus calls a driver before and after the transport resets its device. */
#include <linux/virtio.h>

void probe(struct virtio_driver *driver, int (*prepare)(struct virtio_device *vdev));

void probe(struct virtio_driver *driver, int (*prepare)(struct virtio_device *vdev))
{
	driver->reset_prepare = prepare;
	driver->reset_done = prepare;
}
