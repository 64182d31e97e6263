// SPDX-License-Identifier: GPL-2.0-only
/* Present in every kernel: if this does not compile, the other probes are meaningless. */
#include "vhost.h"

bool probe(struct vhost_virtqueue *vq);

bool probe(struct vhost_virtqueue *vq)
{
	return vhost_vq_is_setup(vq);
}
