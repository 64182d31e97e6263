#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
#
# Prints a directory with the newest kernel of Debian sid: a chroot with the kernel, its headers, its
# compiler and its vhost.h. It is made once; remove the directory to get a newer kernel.
#
#   scripts/kernel/sid.sh
#
# The exit code is 69 (EX_UNAVAILABLE) if its packages are not to be had now.

set -eu
unavailable=69
# shellcheck source=scripts/kernel/lib.sh
. "$(dirname "$0")/lib.sh"

packages=gcc,make,kmod,xz-utils,libelf1t64,linux-headers-cloud-amd64,linux-image-cloud-amd64

# The index of a mirror may be past its date; its signature is still checked.
no_date='Acquire::Check-Valid-Until "false"'

# Runs in the chroot while its apt still has its index, the only source of the exact version.
# shellcheck disable=SC2016
fetch_source='
    version=$(sed -n "s/^#define LINUX_PACKAGE_ID \" Debian \(.*\)\"$/\1/p" \
        /usr/src/linux-headers-*/include/generated/package.h)
    mkdir /source /vhost-private
    cd /source
    apt-get -q -o APT::Sandbox::User=root download "linux-source-$(echo "$version" | cut -d. -f1-2)=$version"'

# Runs in the finished chroot.
take_vhost_h='
    cd /source
    dpkg-deb -x linux-source-*.deb .
    archive=$(echo usr/src/linux-source-*.tar.xz)
    tar -C /vhost-private --strip-components=3 -xf "$archive" \
        "$(basename "$archive" .tar.xz)/drivers/vhost/vhost.h"
    rm -r /source'

# Needs the mirror, and the packages of sid in a state that fits together.
fetch() {
    # shellcheck disable=SC2016
    FETCH_SOURCE=$fetch_source mmdebstrap --quiet --variant=minbase --aptopt="$no_date" \
        --include="$packages" --customize-hook='chroot "$1" sh -ec "$FETCH_SOURCE"' sid "$1"
}

fill() {
    command -v mmdebstrap >/dev/null || die "mmdebstrap is not installed (scripts/setup.sh lab)"
    note "fetching sid's kernel, headers and compiler (a few minutes)"
    fetch "$1" || exit "$unavailable"
    chroot "$1" sh -ec "$take_vhost_h"
}

entry sid fill
