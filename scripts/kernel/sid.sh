#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
#
# Prints a directory with the newest kernel of Debian sid: a chroot with the kernel, its headers, its
# compiler and its vhost.h. It is made once; remove the directory to get a newer kernel.
#
#   scripts/kernel/sid.sh

set -eu
# shellcheck source=scripts/kernel/lib.sh
. "$(dirname "$0")/lib.sh"

packages=gcc,make,kmod,xz-utils,libelf1t64,linux-headers-cloud-amd64,linux-image-cloud-amd64

# The index of a mirror may be past its date; its signature is still checked.
no_date='Acquire::Check-Valid-Until "false"'

# Runs in the chroot while its apt still has its index, the only source of the exact version.
# shellcheck disable=SC2016
take_vhost_h='
    version=$(sed -n "s/^#define LINUX_PACKAGE_ID \" Debian \(.*\)\"$/\1/p" \
        /usr/src/linux-headers-*/include/generated/package.h)
    series=$(echo "$version" | cut -d. -f1-2)
    mkdir /tmp/source /vhost-private
    cd /tmp/source
    apt-get -q -o APT::Sandbox::User=root download "linux-source-$series=$version"
    dpkg-deb -x linux-source-*.deb .
    tar -C /vhost-private --strip-components=3 -xf "usr/src/linux-source-$series.tar.xz" \
        "linux-source-$series/drivers/vhost/vhost.h"
    rm -r /tmp/source'

fill() {
    note "fetching sid's kernel, headers and compiler (a few minutes)"
    # shellcheck disable=SC2016
    TAKE_VHOST_H=$take_vhost_h mmdebstrap --quiet --variant=minbase --aptopt="$no_date" \
        --include="$packages" --customize-hook='chroot "$1" sh -ec "$TAKE_VHOST_H"' sid "$1"
}

entry sid fill
