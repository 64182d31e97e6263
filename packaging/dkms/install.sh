#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
#
# Puts the module's sources into DKMS's directory. `dkms install` then builds the module for the
# running kernel, and DKMS itself for each kernel that is installed later.
#
#   packaging/dkms/install.sh [ROOT]        ROOT: another directory than /, for packages
#   dkms install vhost-blk/VERSION          VERSION as the script prints it

set -eu
here=$(cd "$(dirname "$0")" && pwd)
checkout=$here/../..

version=$(sed -n '/^\[workspace.package\]/,/^\[/s/^version = "\(.*\)"$/\1/p' "$checkout/Cargo.toml")
[ -n "$version" ] || {
    echo "dkms: Cargo.toml names no version" >&2
    exit 1
}
target=${1:-}/usr/src/vhost-blk-$version
rm -rf "$target"
mkdir -p "$target/scripts/kernel"
cp -r "$checkout/kernel" "$target"
cp "$checkout/scripts/kernel/lib.sh" "$checkout/scripts/kernel/vhost-private.sh" "$target/scripts/kernel"
cp "$here/pre-build.sh" "$target"
sed "s/@VERSION@/$version/" "$here/dkms.conf" >"$target/dkms.conf"
echo "vhost-blk/$version"
