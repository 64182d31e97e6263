#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
#
# Puts the guest driver's sources into DKMS's directory, in the guest. `dkms install` then builds it
# for the running kernel, and DKMS itself for each kernel that is installed later.
#
#   packaging/dkms-guest/install.sh [ROOT]      ROOT: another directory than /, for packages
#   dkms install vhost-blk-guest/VERSION        VERSION as the script prints it

set -eu
here=$(cd "$(dirname "$0")" && pwd)
checkout=$here/../..

version=$(sed -n '/^\[workspace.package\]/,/^\[/s/^version = "\(.*\)"$/\1/p' "$checkout/Cargo.toml")
[ -n "$version" ] || {
    echo "dkms: Cargo.toml names no version" >&2
    exit 1
}
target=${1:-}/usr/src/vhost-blk-guest-$version
rm -rf "$target"
mkdir -p "$target/kernel"
cp -r "$checkout/kernel/virtio_blk" "$target/kernel"
sed "s/@VERSION@/$version/" "$here/dkms.conf" >"$target/dkms.conf"
echo "vhost-blk-guest/$version"
