// SPDX-License-Identifier: GPL-2.0-only
/* What every kernel has: if this does not compile, the other probes say nothing. */
#include "vhost.h"

bool probe(struct vhost_virtqueue *vq);

bool probe(struct vhost_virtqueue *vq)
{
	return vhost_vq_is_setup(vq);
}
