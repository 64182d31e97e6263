// SPDX-License-Identifier: GPL-2.0-only
/* Stable kernels have it from some 6.12 on. Later ones warn of system_unbound_wq, its old name. */
#include <linux/workqueue.h>

bool probe(struct work_struct *work);

bool probe(struct work_struct *work)
{
	return queue_work(system_dfl_wq, work);
}
