#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
#
# Builds the Debian packages of the daemon and of both kernel modules (packaging/debian), and prints
# their paths. The version is that of Cargo.toml, times are those of the last commit: the same
# program gives the same packages, byte for byte.
#
#   scripts/deb.sh [--program FILE] [--output DIR] [--suffix TEXT]
#
#   --program FILE    this build of vhost-blk, not a release build made now
#   --output DIR      where the packages go (target/deb); packages that are there are replaced
#   --suffix TEXT     an addition to the version, for example +git5; dpkg sorts +... as newer, ~... as older

set -eu
say() { printf 'deb: %s\n' "$*" >&2; }
die() { say "$*"; exit 1; }

program=
output=
suffix=
while [ $# -gt 0 ]; do
    case $1 in
    --program | --output | --suffix) [ $# -ge 2 ] || die "$1 needs a value: see the head of scripts/deb.sh" ;;
    *) die "unknown argument '$1': use --program, --output or --suffix" ;;
    esac
    case $1 in
    --program) program=$(realpath -e -- "$2" 2>/dev/null) || die "no program at $2: build it, or leave --program out" ;;
    --output) output=$2 ;;
    --suffix) suffix=$2 ;;
    esac
    shift 2
done
case $suffix in
'' | [+~]*) ;;
*) die "--suffix '$suffix' must begin with + (newer) or ~ (older)" ;;
esac
case $suffix in *[!A-Za-z0-9.+~]*) die "--suffix '$suffix': a Debian version has only letters, digits and . + ~" ;; esac

mkdir -p -- "${output:=$(dirname "$0")/../target/deb}" || die "cannot make the directory $output: choose another --output"
output=$(realpath -- "$output")
cd "$(dirname "$0")/.."
checkout=$PWD
PATH=$PATH:$HOME/.cargo/bin
for tool in dpkg-buildpackage dh dh_dkms; do
    command -v "$tool" >/dev/null || die "$tool is missing: run scripts/setup.sh deb"
done

version=$(sed -n '/^\[workspace.package\]/,/^\[/s/^version = "\(.*\)"$/\1/p' Cargo.toml)
[ -n "$version" ] || die "Cargo.toml names no version"
# An environment that has the time is a build from a tree without git.
: "${SOURCE_DATE_EPOCH:=$(git log -1 --format=%ct 2>/dev/null || true)}"
[ -n "$SOURCE_DATE_EPOCH" ] || die "no time for the packages: build in a git checkout, or set SOURCE_DATE_EPOCH"
export SOURCE_DATE_EPOCH

if [ -z "$program" ]; then
    cargo build --release -p vhost-blk
    program=${CARGO_TARGET_DIR:-target}/release/vhost-blk
fi

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
trap 'exit 130' INT TERM HUP

# The files that packaging/debian/rules installs.
tree=$work/vhost-blk-$version
mkdir -p "$tree/built/completions" "$tree/scripts"
cp -r packaging kernel docs "$tree"
cp -r scripts/kernel "$tree/scripts"
cp Cargo.toml README.md SECURITY.md "$tree"
mv "$tree/packaging/debian" "$tree/debian"
for unit in vhost-blk.service vhost-blk@.service vhost-blk@.socket; do
    cp "packaging/$unit" "$tree/debian/$unit"
done
cp packaging/vhost-blk.sysusers.conf "$tree/debian/vhost-blk.sysusers"
cp packaging/60-vhost-blk.rules "$tree/debian/vhost-blk.udev"
cp "$program" "$tree/built/vhost-blk"
"$program" generate man "$tree/built/man" || die "$program cannot write its man pages: is it a vhost-blk?"
for shell in bash zsh fish; do
    "$program" generate completions "$shell" >"$tree/built/completions/$shell"
done
printf 'vhost-blk (%s) unstable; urgency=medium\n\n  * See CHANGELOG.md of this version.\n\n -- %s  %s\n' \
    "$version$suffix" "$(sed -n 's/^Maintainer: //p' packaging/debian/control)" \
    "$(LC_ALL=C date -u -R -d "@$SOURCE_DATE_EPOCH")" >"$tree/debian/changelog"

# The umask and the owner of the checkout must not show in the packages.
chmod -R u=rwX,go=rX "$tree"
(cd "$tree" && dpkg-buildpackage --build=binary --no-sign --no-check-builddeps) >"$work/log" 2>&1 || {
    cat "$work/log" >&2
    die "dpkg-buildpackage failed: see above"
}
rm -f -- "$output"/vhost-blk*.deb
mv -- "$work"/*.deb "$output"
cd "$checkout"
for package in "$output"/vhost-blk*.deb; do
    printf '%s\n' "$package"
done
