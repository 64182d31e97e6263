// SPDX-License-Identifier: Apache-2.0
//! The shell script of a boot: it runs one case after the other.

use std::time::Duration;

use kit::set::Set;

use crate::suite::case::Case;
use crate::vm::kernel::KernelName;
use crate::vm::machine::Machine;

/// Marks in the kernel's log and on the output; reports on the results port.
const PRELUDE: &str = r#"say() { echo "$*" >"$LAB_RESULTS"; }
mark() { echo "<5>lab: $*" >/dev/kmsg; }
case_of() {
    name=$1
    seconds=$2
    shift 2
    mark "case $name begins"
    echo "lab: case $name begins"
    say "begin $name"
    timeout --kill-after=10 "$seconds" "$@" 2>&1
    code=$?
    if [ $code -eq 124 ] || [ $code -eq 137 ]; then
        # Stacks of blocked tasks and of all CPUs, for the log.
        echo w >/proc/sysrq-trigger
        echo l >/proc/sysrq-trigger
    fi
    echo
    echo "lab: case $name ends"
    mark "case $name ends"
    is_checking_locks || say "spoilt $name"
    say "end $name $code"
}
# False once lockdep has given up, whoever was to blame: it looks at nothing any more.
is_checking_locks() {
    [ ! -e /proc/lockdep_stats ] || grep -q '^ debug_locks: *1$' /proc/lockdep_stats
}
# A case of the list. A spoilt kernel checks its module's unloading and runs no other case.
listed() {
    case_of "$@"
    is_checking_locks || finish
}
"#;

/// Ends a boot: the module goes, and with it everything it had. The second scan reports what was
/// not referred to in the first. A kmemleak that has given up refuses to scan.
const UNLOAD: &str = r#"cat >/run/unload.sh <<'END'
cd /
[ "$2" = perhaps ] && [ ! -e "/sys/module/$1" ] || rmmod "$1" || exit 1
leaks=/sys/kernel/debug/kmemleak
if [ ! -e "$leaks" ]; then
    [ "$3" = none ] || { echo "this kernel has no kmemleak, though it should"; exit 1; }
    echo "unloaded; this kernel has no kmemleak"
    exit 0
fi
sleep 6
for scan in first second; do
    echo scan >"$leaks" || { echo "kmemleak refuses the $scan scan"; exit 1; }
    sleep 1
done
cat "$leaks"
[ -z "$(head -c 1 "$leaks")" ] && echo "unloaded; kmemleak finds nothing"
END
"#;

/// The check at the end of each boot.
pub(crate) fn unload_case(machine: Machine, kernel: KernelName) -> Case {
    let (name, set, module) = match machine {
        Machine::Host | Machine::Nested => ("module-unload", Set::Gating, "vhost_blk loaded"),
        // The cases load it, and the last may have been in need of another one.
        Machine::Guest => ("guest-unload", Set::Guest, "virtio_blk perhaps"),
        Machine::Debian12 => ("debian12-unload", Set::Debian12, "vhost_blk perhaps"),
        Machine::Debian13 => ("debian13-unload", Set::Debian13, "vhost_blk perhaps"),
        Machine::Libvirt => ("libvirt-unload", Set::Libvirt, "vhost_blk perhaps"),
        Machine::Ceph => ("ceph-unload", Set::Ceph, "vhost_blk loaded"),
    };
    let kmemleak = if kernel == KernelName::Debug { "kmemleak" } else { "none" };
    Case {
        name: name.to_owned(),
        set,
        description: "at the end of a boot the module unloads, and kmemleak, which the debug \
                      kernel has, finds nothing"
            .to_owned(),
        command: format!("sh /run/unload.sh {module} {kmemleak}"),
    }
}

/// Beginning of the marks.
pub(crate) const MARK: &str = "lab: case ";

/// By which a case's part of the kernel's log and of the output begins and ends.
pub(crate) fn marks(name: &str) -> (String, String) {
    (format!("{MARK}{name} begins"), format!("{MARK}{name} ends"))
}

/// The script that runs the cases and then `unload`, each within its time.
pub(crate) fn script_for<'a>(
    cases: impl IntoIterator<Item = (&'a Case, Duration)>,
    unload: &Case,
) -> String {
    let seconds = unload.set.timeout().as_secs();
    let mut script = format!(
        "{PRELUDE}{UNLOAD}finish() {{\n    case_of {} {seconds} {}\n    exit\n}}\n",
        unload.name, unload.command
    );
    for (case, timeout) in cases {
        let Case { name, command, .. } = case;
        script.push_str(&format!("listed {name} {} {command}\n", timeout.as_secs()));
    }
    script.push_str("finish\n");
    script
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_script_is_valid_shell_and_ends_with_the_unloading() {
        let unload = unload_case(Machine::Host, KernelName::Debug);
        let case = Case { name: "a".to_owned(), command: "true".to_owned(), ..unload.clone() };
        let script = script_for([(&case, Duration::from_secs(7))], &unload);
        assert!(script.ends_with("\nlisted a 7 true\nfinish\n"), "{script}");
        let check = "case_of module-unload 300 sh /run/unload.sh vhost_blk loaded kmemleak\n";
        assert!(script.contains(check), "{script}");
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), script).unwrap();
        kit::process::run_to_end(&["sh", "-n", &file.path().to_string_lossy()]).unwrap();
    }

    #[test]
    fn only_the_debug_kernel_must_have_kmemleak() {
        let command = |kernel| unload_case(Machine::Guest, kernel).command;
        assert!(command(KernelName::Debug).ends_with(" virtio_blk perhaps kmemleak"));
        assert!(command(KernelName::Stable).ends_with(" virtio_blk perhaps none"));
    }
}
