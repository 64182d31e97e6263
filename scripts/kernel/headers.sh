#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
#
# Prints a directory to build modules in (KDIR) for one of Debian's kernels; installs nothing.
#
#   scripts/kernel/headers.sh [RELEASE]     as `uname -r` says it; default: the newest 6.12 for
#                                           virtual machines whose source there is, too

set -eu
# shellcheck source=scripts/kernel/lib.sh
. "$(dirname "$0")/lib.sh"

meta=linux-headers-6.12-cloud-amd64

# The packages that a headers package depends on, with their versions.
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

# The newest version of the default whose source, which has vhost.h, is available too. During the
# update of a mirror one of the two is ahead of the other.
newest_with_source() {
    newest=$(candidate "$meta")
    apt-cache madison "$meta" | awk '{ print $3 }' | sort -Vr | while read -r one; do
        has_vhost_h "$one" || continue
        [ "$one" = "$newest" ] ||
            note "apt has no source of $meta $newest (an update of the mirror?): taking $one"
        echo "$one"
        break
    done
}

# The newest headers in the cache whose vhost.h is there.
newest_in_cache() {
    for directory in "$cache"/headers-6.12.*-cloud-amd64/usr/src/linux-headers-*-cloud-amd64; do
        if [ -d "$directory" ] && has_vhost_h "$(debian_version "$directory")"; then echo "$directory"; fi
    done | sort -V | tail -n 1
}

package=
if [ $# -gt 0 ]; then
    package=linux-headers-$1
    # A kernel of the cache may be one that apt does not offer any more.
    [ ! -d "$cache/headers-$1" ] || { echo "$cache/headers-$1/usr/src/$package" && exit; }
    version=$(candidate "$package")
else
    version=$(newest_with_source)
    known=$(newest_in_cache)
    if [ -z "$version" ] && [ -n "$known" ]; then
        note "apt has no $meta with its source (an update of the mirror?): taking what the cache has"
        echo "$known"
        exit
    fi
fi
[ -n "$version" ] || die "apt offers no ${package:-$meta with the linux-source-6.12 of its version}: add Debian's main and security repositories to its sources, try again when the mirror's update is over, or give KDIR"
[ -n "$package" ] || package=$(apt-cache show "$meta=$version" | sed -n 's/^Depends: //p' |
    tr ',' '\n' | awk '$1 ~ /^linux-headers-/ { print $1; exit }')
release=${package#linux-headers-}
entry "headers-$release" fill >/dev/null
echo "$cache/headers-$release/usr/src/$package"
