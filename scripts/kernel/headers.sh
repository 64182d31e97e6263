#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
#
# Prints a folder to build modules in (KDIR) for one of Debian's kernels; nothing gets installed.
#
#   scripts/kernel/headers.sh [RELEASE]     as `uname -r` says it; default: the newest 6.12 for
#                                           virtual machines

set -eu
# shellcheck source=scripts/kernel/lib.sh
. "$(dirname "$0")/lib.sh"

meta=linux-headers-6.12-cloud-amd64

# The packages a headers package needs to be of use, with their versions.
parts() {
    echo "$package=$version"
    apt-cache show "$package=$version" | sed -n 's/^Depends: //p' | head -n 1 | tr ',' '\n' |
        awk '$1 ~ /^linux-(headers|kbuild)-/ { print $1 }' | while read -r part; do
        exact=$(apt-cache madison "$part" | awk -v wanted="$version" '$3 == wanted { print $3; exit }')
        echo "$part=${exact:-$(candidate "$part")}"
    done
}

fill() {
    note "fetching $package $version"
    for part in $(parts); do
        unpack "$part" "$1"
    done
    # The one place that names the other package by its installed path.
    sed -i "s|include /usr/src/|include $cache/headers-$release/usr/src/|" \
        "$1/usr/src/$package/Makefile"
}

package=
[ $# -eq 0 ] || package=linux-headers-$1
version=$(candidate "${package:-$meta}")
[ -n "$version" ] || die "apt offers no ${package:-$meta}: add Debian's main and security repositories to its sources, or give KDIR"
[ -n "$package" ] || package=$(apt-cache show "$meta=$version" | sed -n 's/^Depends: //p' |
    tr ',' '\n' | awk '$1 ~ /^linux-headers-/ { print $1; exit }')
release=${package#linux-headers-}
entry "headers-$release" fill >/dev/null
echo "$cache/headers-$release/usr/src/$package"
