#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
#
# Prints the directory of the vhost core's private header, vhost.h, for the kernel of a build directory.
# No headers package has it, and it changes inside stable series, so it is taken from the source
# of exactly that version: from the tree itself, or from Debian's linux-source package.
#
#   scripts/kernel/vhost-private.sh KDIR [DIR]   DIR: put vhost.h there, not into the cache
#
# VHOST_PRIVATE=DIR in the environment names a directory that has it already.

set -eu
# shellcheck source=scripts/kernel/lib.sh
. "$(dirname "$0")/lib.sh"

fill() {
    have=$cache/source-$version/drivers/vhost/vhost.h
    if [ -f "$have" ]; then
        cp "$have" "$1"
        return
    fi
    note "fetching vhost.h of Linux $version (in a package of about 150 MB)"
    unpack "linux-source-$series=$version" "$1/.package"
    tar -C "$1" --strip-components=3 -xf "$1/.package/usr/src/linux-source-$series.tar.xz" \
        "linux-source-$series/drivers/vhost/vhost.h"
    rm -r "$1/.package"
}

kdir=${1:?the kernel build directory (KDIR) is needed}
[ -f "$kdir/Makefile" ] || die "$kdir is no kernel build directory: it has no Makefile"
if [ -n "${VHOST_PRIVATE:-}" ]; then
    [ -f "$VHOST_PRIVATE/vhost.h" ] || die "VHOST_PRIVATE=$VHOST_PRIVATE holds no vhost.h"
    directory=$VHOST_PRIVATE
elif [ -f "$kdir/source/drivers/vhost/vhost.h" ]; then
    directory=$kdir/source/drivers/vhost
elif [ -f "$kdir/drivers/vhost/vhost.h" ]; then
    directory=$kdir/drivers/vhost
else
    version=$(debian_version "$kdir")
    [ -n "$version" ] || die "$kdir is not Debian's and has no drivers/vhost/vhost.h: give VHOST_PRIVATE=DIR, with the vhost.h of exactly this kernel"
    series=$(echo "$version" | cut -d. -f1-2)
    has_vhost_h "$version" ||
        die "apt has no linux-source-$series $version, which has the vhost.h of this kernel: run apt-get update (while a mirror is being updated, later), take the kernel that apt offers ($(candidate "linux-source-$series")), or give VHOST_PRIVATE=DIR"
    directory=$(entry "vhost-h-$version" fill)
fi
[ $# -lt 2 ] || {
    mkdir -p "$2"
    cp "$directory/vhost.h" "$2"
    directory=$2
}
echo "$directory"
