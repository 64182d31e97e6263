// SPDX-License-Identifier: Apache-2.0
//! What one boot does: case after case.

use std::time::Duration;

use crate::suite::case::{Case, Set};
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
        # Where everyone stands, for the log.
        echo w >/proc/sysrq-trigger
        echo l >/proc/sysrq-trigger
    fi
    echo
    echo "lab: case $name ends"
    mark "case $name ends"
    say "end $name $code"
}
"#;

/// After the last case: the module goes, and with it everything it had. The second scan reports
/// what was not referred to in the first.
const LAST: &str = r#"cat >/run/unload.sh <<'END'
cd /
[ "$2" = loaded ] || [ -e "/sys/module/$1" ] || { echo "it is not loaded"; exit 0; }
rmmod "$1" || exit 1
leaks=/sys/kernel/debug/kmemleak
[ -e "$leaks" ] || { echo "unloaded; this kernel has no kmemleak"; exit 0; }
sleep 6
echo scan >"$leaks" && sleep 1 && echo scan >"$leaks"
cat "$leaks"
[ -z "$(head -c 1 "$leaks")" ]
END
"#;

/// The check after the last case.
pub(crate) fn last_case(machine: Machine) -> Case {
    let (name, set, module) = match machine {
        Machine::Host => ("module-unload", Set::Gating, "vhost_blk loaded"),
        // The cases load it, and the last may have been in need of another one.
        Machine::Guest => ("guest-unload", Set::Guest, "virtio_blk perhaps"),
    };
    Case {
        name: name.to_owned(),
        set,
        description:
            "after all cases the module unloads, and kmemleak, where there is one, finds nothing"
                .to_owned(),
        command: format!("sh /run/unload.sh {module}"),
    }
}

/// By which a case's part of the kernel's log and of the output begins and ends.
pub(crate) fn marks(name: &str) -> (String, String) {
    (format!("lab: case {name} begins"), format!("lab: case {name} ends"))
}

/// The script that runs the cases.
pub(crate) fn script_for<'a>(cases: impl IntoIterator<Item = (&'a Case, Duration)>) -> String {
    let mut script = format!("{PRELUDE}{LAST}");
    for (case, timeout) in cases {
        let Case { name, command, .. } = case;
        script.push_str(&format!("case_of {name} {} {command}\n", timeout.as_secs()));
    }
    script
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_script_is_valid_shell_and_runs_each_case_within_its_time() {
        let case = last_case(Machine::Host);
        let script = script_for([(&case, Duration::from_secs(7))]);
        assert!(
            script.ends_with("case_of module-unload 7 sh /run/unload.sh vhost_blk loaded\n"),
            "{script}"
        );
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), script).unwrap();
        crate::process::run_to_end(&["sh", "-n", &file.path().to_string_lossy()]).unwrap();
    }
}
