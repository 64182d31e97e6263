#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
#
# Prints the directory of an unpacked Debian kernel source.
#
#   scripts/kernel/source.sh SERIES [VERSION]     for example: 6.12, 6.12.1-1

set -eu
# shellcheck source=scripts/kernel/lib.sh
. "$(dirname "$0")/lib.sh"

fill() {
    note "fetching linux-source-$series $version (about 150 MB)"
    package=$1/.package
    unpack "linux-source-$series=$version" "$package"
    tar -C "$1" --strip-components=1 -xf "$package/usr/src/linux-source-$series.tar.xz"
    rm -r "$package"
}

series=${1:?a kernel series is needed, such as 6.12}
version=${2:-$(candidate "linux-source-$series")}
[ -n "$version" ] || die "apt offers no linux-source-$series: add Debian's main and security repositories to its sources"
entry "source-$version" fill
