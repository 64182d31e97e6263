#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
#
# Installs the missing Debian packages of the make targets. It names each one with its reason, asks
# no question, and never removes or downgrades a package. It does not install Rust (Debian's is too
# old) and QEMU (the lab takes the installed one, or unpacks one of its own into its cache).
#
#   scripts/setup.sh [--dry-run] [SET...]     (no set: all of them; --dry-run only shows)
#   build    a C linker for cargo          run    the tools that make and check disks and guests
#   modules  tools that build modules      lab    the same, and tools that build a kernel
#   test     the needs of `make test`      bench  the needs of `make bench`
#   deb      the tools that build the Debian packages

# Lists of packages must be split into words; /etc/os-release is not ours.
# shellcheck disable=SC1091,SC2086
set -eu
say() { printf 'setup: %s\n' "$*"; }
die() { say "$*" >&2; exit 1; }
# Waits for another apt, such as the daily one of a machine that has just booted.
apt() { LC_ALL=C DEBIAN_FRONTEND=noninteractive apt-get -q -y -o DPkg::Lock::Timeout=600 "$@" </dev/null; }

# One word for each thing: the command (or file) whose presence proves it, and its package.
needs_of() {
    case $1 in
    build) echo "cc:gcc /usr/include/stdlib.h:libc6-dev pkg-config:pkg-config" ;;
    run) echo "mmdebstrap:mmdebstrap mke2fs:e2fsprogs e2fsck:e2fsprogs blkid:util-linux setpriv:util-linux dpkg-deb:dpkg" ;;
    modules) echo "cc:gcc make:make xz:xz-utils dpkg-deb:dpkg flock:util-linux" ;;
    lab) echo "$(needs_of run) $(needs_of modules) depmod:kmod flex:flex bison:bison bc:bc /usr/include/gelf.h:libelf-dev" ;;
    deb) echo "$(needs_of build) dpkg-buildpackage:dpkg-dev dh:debhelper dh_dkms:dh-dkms lintian:lintian" ;;
    test) echo "$(needs_of build) sparse:sparse dkms:dkms pahole:pahole mkfs.xfs:xfsprogs mkfs.btrfs:btrfs-progs nbdkit:nbdkit pip3:python3-pip $(needs_of lab) $(needs_of deb)" ;;
    bench) echo "fio:fio $(needs_of run)" ;;
    *) die "unknown set '$1': use build, run, modules, lab, deb, test or bench" ;;
    esac
}

has() {
    case $1 in /*) [ -e "$1" ] ;; *) PATH=$PATH:/usr/sbin:/sbin command -v "$1" >/dev/null 2>&1 ;; esac
}

# Sets $missing, a line `PACKAGE COMMAND SET` for each missing thing of the sets, and $packages.
look() {
    missing=$(for set_name in "$@"; do
        for pair in $(needs_of "$set_name"); do
            has "${pair%%:*}" || echo "${pair#*:} ${pair%%:*} $set_name"
        done
    done | sort -u)
    packages=$(echo "$missing" | awk '!seen[$1]++ { printf "%s%s", space, $1; space = " " }')
}

# column PACKAGE NUMBER: the commands (2) or the sets (3) of a missing package, each once.
column() { echo "$missing" | awk -v name="$1" -v n="$2" '$1 == name && !seen[$n]++ { printf " %s", $n }'; }

# A mirror fails for a moment during its update: try again.
refresh_index() {
    for wait_seconds in 2 8 20; do
        ! apt update || return 0
        say "apt-get update failed, next try in ${wait_seconds} s"
        sleep "$wait_seconds"
    done
    apt update || die "apt-get update failed four times: check the network and /etc/apt, then run this again"
}

# Lets apt plan the installation, and refuses a plan that removes a package.
check_plan() {
    plan=$(apt --simulate --no-remove --no-install-recommends install "$@" 2>&1) || {
        printf '%s\n' "$plan" | sed -n '/will be REMOVED:/,/^[^ ]/p; /will be DOWNGRADED:/,/^[^ ]/p
            /unmet dependencies:/,/^[^ ]/p; /^E: /p' | sort -u | sed 's/^/setup: apt says: /' >&2
        die "$* cannot be installed without removing or downgrading what apt names above. Nothing was \
changed. Install these packages by hand, in versions that fit, then run this again"
    }
    printf '%s\n' "$plan" | sed -n 's/^Inst /setup: apt would install: /p'
}

check_machine() {
    [ -r /etc/os-release ] || die "no /etc/os-release: this script knows Debian only"
    . /etc/os-release
    case " ${ID:-} ${ID_LIKE:-} " in *" debian "*) return ;; esac
    die "this is '${ID:-unknown}', not Debian: install by hand: $packages"
}

case ${1:-} in --dry-run) dry_run=yes && shift ;; *) dry_run= ;; esac
[ $# -gt 0 ] || set -- build run modules lab deb test bench
for set_name in "$@"; do needs_of "$set_name" >/dev/null; done
rust=$(sed -n 's/^rust-version = "\(.*\)"$/\1/p' "$(dirname "$0")/../Cargo.toml")
command -v cargo >/dev/null 2>&1 || [ -x "$HOME/.cargo/bin/cargo" ] ||
    no_cargo="cargo is not there: install Rust $rust or newer (by rustup), then run this again"
# The home of sudo's root has no cargo, and installing packages needs none.
if [ -n "${no_cargo:-}" ]; then
    [ -n "$dry_run${SUDO_USER:-}" ] || die "$no_cargo"
    say "$no_cargo"
fi

look "$@"
[ -n "$missing" ] || { say "ready ($*)" && exit; }
for package in $packages; do
    say "missing: package $package, for$(column "$package" 2), used by:$(column "$package" 3)"
done
check_machine
[ -n "$dry_run" ] || [ "$(id -u)" -eq 0 ] || die "must be root to install packages: run it with sudo"
[ -n "$dry_run" ] || refresh_index
check_plan $packages
[ -z "$dry_run" ] || { say "nothing was installed (--dry-run)" && exit; }
apt install --no-remove --no-install-recommends $packages ||
    die "apt-get install failed: its message is above; see what it says about: $packages"
look "$@"
[ -z "$missing" ] || die "still missing after the installation: $packages"
say "ready ($*)"
