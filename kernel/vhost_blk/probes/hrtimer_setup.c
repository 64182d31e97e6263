// SPDX-License-Identifier: GPL-2.0-only
/* Linux 6.13 has it; hrtimer_init() is gone in 6.15. An address: a call would be declared by itself. */
#include <linux/hrtimer.h>

void *probe(void);

void *probe(void)
{
	return hrtimer_setup;
}
