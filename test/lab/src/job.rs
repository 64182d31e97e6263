// SPDX-License-Identifier: Apache-2.0
//! Jobs of guests: shell scripts, run by the guest's first process.
//!
//! A script reports to the lab by lines on the results port: a word, then its value. `stage` names
//! the next step (so that a failure can be placed), `fail` is the reason of an early end, and the
//! guest's first process adds `exit`.

/// A shell script for one boot of the guest.
#[derive(Debug, Clone)]
pub struct Job {
    script: String,
}

/// Helpers at the head of each script; `$disk` is the disk under test.
const PRELUDE: &str = r#"set -eu
disk=/dev/vda
say() { echo "$*" >>"$LAB_RESULTS"; }
fio() { command fio --eta=never "$@"; }
stage() { say "stage $*"; echo "== $*"; }
fail() { say "fail $*"; echo "FAILED: $*"; exit 1; }
stage find the disk
modprobe virtio_blk
tries=0
while [ ! -b "$disk" ]; do
    tries=$((tries + 1))
    [ "$tries" -lt 100 ] || fail "no disk appeared at $disk"
    sleep 0.1
done
say "disk_bytes $(blockdev --getsize64 "$disk")"
"#;

/// File system, files and data written, read back, and read back again after a new mount.
const VERIFY: &str = r#"
verify() {
    fio --name=verify --filename=/mnt/verify.dat --size=48m --direct=1 --ioengine=io_uring \
        --iodepth=16 --rw=randwrite --bssplit=4k/40:12k/20:64k/30:256k/10 \
        --verify=crc32c --verify_fatal=1 --end_fsync=1 --output=/run/verify.txt "$@" ||
        { cat /run/verify.txt; fail "fio found data that is not what it wrote"; }
}
stage make the file system
mkfs.ext4 -q -F "$disk"
mount "$disk" /mnt
stage write and verify with fio
verify --do_verify=1
stage copy files
cp -a /usr/bin /mnt/files
(cd /mnt && find files -type f -exec sha256sum {} + >/mnt/sums)
stage fill the file for the measurement
dd if=/dev/zero of=/mnt/measure.dat bs=1M count="$measure_mib" oflag=direct status=none
stage sync and unmount
sync
umount /mnt
stage verify again after a new mount
echo 3 >/proc/sys/vm/drop_caches
mount "$disk" /mnt
verify --verify_only
(cd /mnt && sha256sum --quiet -c sums) || fail "a copied file is not what was written"
umount /mnt
stage check the file system
e2fsck -fn "$disk" || fail "e2fsck found errors"
say "verified $(du -sm /usr/bin | cut -f1) MiB of files and 48 MiB by fio"
"#;

/// `$turns` has the disks in the order of their turns, by number.
const MEASURE: &str = r#"
measure() {
    mount "$2" /mnt
    for pattern in randread randwrite; do
        for depth in 1 32; do
            stage "measure $pattern iodepth $depth"
            fio --name=measure --filename=/mnt/measure.dat --rw="$pattern" --bs=4k \
                --iodepth="$depth" --direct=1 --ioengine=io_uring --time_based \
                --runtime="$seconds" --ramp_time=1 --output-format=json --output=/run/fio.json ||
                fail "fio $pattern iodepth $depth"
            say "fio $1 $pattern $depth $(tr -d '\n' </run/fio.json)"
        done
    done
    umount /mnt
}
for number in $turns; do
    say "turn $number"
    measure "$number" "/dev/vd$(echo "$number" | tr 012 abc)"
done
"#;

const WRITE_UNTIL_KILLED: &str = r#"
stage make the file system
mkfs.ext4 -q -F "$disk"
mount "$disk" /mnt
stage write what must survive
dd if=/dev/urandom of=/mnt/kept bs=1M count=8 status=none
(cd /mnt && sha256sum kept >kept.sum)
sync
stage write until killed
fio --name=load --filename=/mnt/load --size=64m --direct=1 --ioengine=io_uring --iodepth=8 \
    --rw=randwrite --bs=4k --fsync=16 --time_based --runtime=600 --output=/dev/null &
(
    number=0
    while :; do
        number=$((number + 1))
        mkdir -p "/mnt/tree/$((number % 50))"
        echo "$number" >"/mnt/tree/$((number % 50))/$number"
        [ $((number % 100)) -ne 0 ] || sync
    done
) &
sleep 3
say "writing"
sleep 600
"#;

const AFTER_POWER_CUT: &str = r#"
stage mount after the power cut
dmesg -C
mount "$disk" /mnt
dmesg | grep -q 'recovery complete' || fail "ext4 replayed no journal: nothing was being written"
stage look at what must have survived
(cd /mnt && sha256sum --quiet -c kept.sum) || fail "data that had been synced is gone"
umount /mnt
stage check the file system
e2fsck -fn "$disk" || fail "e2fsck found errors"
"#;

/// MiB of the file that measurements run on.
const MEASURE_MIB: u32 = 256;

impl Job {
    /// A caller's script; it can use `PRELUDE`'s helpers and a `$disk` that exists.
    pub fn on_disk(body: &str) -> Self {
        Self { script: format!("{PRELUDE}{body}") }
    }

    /// Runs the commands of [`kit::agent::Agent`].
    pub fn agent() -> Self {
        Self::on_disk(&format!("set +eu\n{}", kit::agent::SCRIPT))
    }

    /// A script that uses no disk.
    pub fn without_disk(body: &str) -> Self {
        Self { script: body.to_owned() }
    }

    /// Formats, mounts, writes, verifies, unmounts, mounts, verifies, checks.
    pub fn format_and_verify() -> Self {
        Self::on_disk(&format!("measure_mib={MEASURE_MIB}\n{VERIFY}"))
    }

    /// Measures 4 KiB random I/O on the disk that [`Job::format_and_verify`] left, by the guest's
    /// disks with these numbers in this order, one after the other. They are ways to the same disk:
    /// a file system that one has unmounted is mounted by the next.
    pub fn measure(seconds: u32, turns: &[usize]) -> Self {
        let turns: Vec<String> = turns.iter().map(usize::to_string).collect();
        Self::on_disk(&format!("seconds={seconds}\nturns='{}'\n{MEASURE}", turns.join(" ")))
    }

    /// Writes without end; reports `writing` once writes are in full progress.
    pub fn write_until_killed() -> Self {
        Self::on_disk(WRITE_UNTIL_KILLED)
    }

    /// Checks the disk after [`Job::write_until_killed`] was cut short.
    pub fn check_after_power_cut() -> Self {
        Self::on_disk(AFTER_POWER_CUT)
    }

    /// A shell on the guest's console.
    pub fn shell() -> Self {
        let body = "modprobe virtio_blk\nlsblk\necho 'Leave with exit, or Ctrl-A X.'\n\
                    PS1='guest# ' setsid -c sh </dev/ttyS0 >/dev/ttyS0 2>&1\n";
        Self::without_disk(body)
    }

    /// A shell on the host VM's console.
    pub fn vm_shell() -> Self {
        let body = "uname -r\nls /lab/modules /lab/bin\necho 'Leave with exit, or Ctrl-A X.'\n\
                    PS1='vm# ' setsid -c sh </dev/ttyS0 >/dev/ttyS0 2>&1\n";
        Self::without_disk(body)
    }

    /// The script's text.
    pub fn script(&self) -> &str {
        &self.script
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_script_is_valid_shell() {
        let jobs = [
            Job::format_and_verify(),
            Job::measure(2, &[0, 1, 1, 0]),
            Job::write_until_killed(),
            Job::check_after_power_cut(),
            Job::shell(),
            Job::agent(),
        ];
        for job in jobs {
            let file = tempfile::NamedTempFile::new().unwrap();
            std::fs::write(file.path(), job.script()).unwrap();
            let path = file.path().to_string_lossy().into_owned();
            kit::process::run_to_end(&["sh", "-n", &path]).unwrap();
        }
    }
}
