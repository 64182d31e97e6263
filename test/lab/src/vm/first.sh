#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
#
# The host VM's first process, in its root image: finds the payload, which has the rest.

mount -t proc proc /proc
mount -t sysfs sysfs /sys
mount -t devtmpfs devtmpfs /dev 2>/dev/null
tries=0
until mount -L lab-payload /lab; do
    tries=$((tries + 1))
    [ $tries -lt 20 ] || exec busybox reboot -f
    sleep 0.2
done
exec /lab/init
