#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
#
# The first process of a machine with systemd, in its root image: mounts the payload and the
# kernel's modules, which are not in the image, and becomes systemd. lab.service does the rest.

mount -t proc proc /proc
mount -t sysfs sysfs /sys
mount -t devtmpfs devtmpfs /dev 2>/dev/null
for place in lab-payload:/lab lab-modules:/lib/modules; do
    tries=0
    until mount -L "${place%%:*}" "${place#*:}"; do
        tries=$((tries + 1))
        [ $tries -lt 20 ] || exec busybox reboot -f
        sleep 0.2
    done
done
release=$(uname -r)
ln -sfn "/usr/src/linux-headers-$release" "/lib/modules/$release/build"
exec /lib/systemd/systemd
