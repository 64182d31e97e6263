// SPDX-License-Identifier: Apache-2.0
//! `scripts/setup.sh` against an apt-get that only records its arguments.

use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

/// Programs of the machine that the script itself uses. Programs that packages bring are not
/// listed, so that they are missing.
const TOOLS: [&str; 10] =
    ["sh", "sed", "awk", "sort", "tr", "dirname", "sleep", "cat", "cc", "pkg-config"];

/// Records its arguments; plans the content of `$PLAN` and fails if that has an error.
const APT_GET: &str = r#"#!/bin/sh
echo "$*" >>"$APT_LOG"
case " $* " in
*" --simulate "*)
    cat "$PLAN"
    while read -r line; do case $line in E:*) exit 100 ;; esac; done <"$PLAN"
    ;;
*" install "*)
    for package; do :; done
    printf '#!/bin/sh\n' >"$FAKE_BIN/$package"
    "$FAKE_CHMOD" +x "$FAKE_BIN/$package"
    ;;
esac
exit 0
"#;

const CONFLICT: &str = "The following packages will be REMOVED:\n  qemu-utils\n\
    The following NEW packages will be installed:\n  fio\n\
    E: Packages need to be removed but remove is disabled.\n";

struct Machine {
    dir: tempfile::TempDir,
}

impl Machine {
    /// A machine that lacks fio, on which apt plans `plan`.
    fn new(plan: &str) -> Self {
        let machine = Self { dir: tempfile::tempdir().unwrap() };
        fs::create_dir(machine.bin()).unwrap();
        for tool in TOOLS {
            symlink(find(tool), machine.bin().join(tool)).unwrap();
        }
        // The set's other needs: programs besides fio, and root.
        for (name, text) in [
            ("apt-get", APT_GET),
            ("cargo", "#!/bin/sh\n"),
            ("id", "#!/bin/sh\necho 0\n"),
            ("mmdebstrap", "#!/bin/sh\n"),
            ("blkid", "#!/bin/sh\n"),
            ("setpriv", "#!/bin/sh\n"),
            ("dpkg-deb", "#!/bin/sh\n"),
        ] {
            let path = machine.bin().join(name);
            fs::write(&path, text).unwrap();
            fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
        }
        fs::write(machine.dir.path().join("plan"), plan).unwrap();
        machine
    }

    fn bin(&self) -> PathBuf {
        self.dir.path().join("bin")
    }

    fn set_up(&self, arguments: &[&str]) -> Output {
        let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../scripts/setup.sh");
        Command::new(script)
            .args(arguments)
            .env_clear()
            .env("PATH", self.bin())
            .env("HOME", self.dir.path())
            .env("PLAN", self.dir.path().join("plan"))
            .env("APT_LOG", self.dir.path().join("apt.log"))
            .env("FAKE_BIN", self.bin())
            .env("FAKE_CHMOD", find("chmod"))
            .output()
            .unwrap()
    }

    /// Arguments of the apt-get calls, a line for each call.
    fn calls(&self) -> Vec<String> {
        let log = fs::read_to_string(self.dir.path().join("apt.log")).unwrap_or_default();
        log.lines().map(str::to_owned).collect()
    }

    /// Calls that change the installed packages.
    fn installations(&self) -> Vec<String> {
        let mut calls = self.calls();
        calls.retain(|call| call.contains(" install ") && !call.contains("--simulate"));
        calls
    }
}

fn find(tool: &str) -> PathBuf {
    let directories = ["/usr/bin", "/bin"].map(|directory| Path::new(directory).join(tool));
    directories.into_iter().find(|path| path.exists()).unwrap_or_else(|| panic!("no {tool}"))
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

#[test]
fn a_package_that_would_remove_another_is_refused_and_nothing_changes() {
    let machine = Machine::new(CONFLICT);
    let output = machine.set_up(&["bench"]);
    let said = text(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert!(said.contains("qemu-utils"), "the conflict is not named: {said}");
    assert!(said.contains("Nothing was changed"), "{said}");
    assert_eq!(machine.installations(), Vec::<String>::new());
}

#[test]
fn a_dry_run_shows_what_would_come_and_why_and_changes_nothing() {
    let machine = Machine::new("Inst fio (3.33-3 Debian:12/stable [amd64])\n");
    let output = machine.set_up(&["--dry-run", "bench"]);
    let said = text(&output.stdout);
    assert!(output.status.success(), "{said}{}", text(&output.stderr));
    assert!(said.contains("package fio, for fio, used by: bench"), "{said}");
    assert!(said.contains("apt would install: fio (3.33-3"), "{said}");
    assert!(
        machine.calls().iter().all(|call| call.contains("--simulate")),
        "{:?}",
        machine.calls()
    );
}

#[test]
fn what_is_missing_is_installed_without_leave_to_remove_or_downgrade() {
    let machine = Machine::new("Inst fio (3.33-3 Debian:12/stable [amd64])\n");
    let output = machine.set_up(&["bench"]);
    assert!(output.status.success(), "{}", text(&output.stderr));
    let [call] = &machine.installations()[..] else { panic!("{:?}", machine.calls()) };
    assert!(call.contains("--no-remove") && call.ends_with(" fio"), "{call}");
    assert!(!call.contains("downgrade"), "{call}");
}

#[test]
fn no_set_asks_for_a_package_of_qemu() {
    let script = include_str!("../../../scripts/setup.sh");
    let needs: Vec<&str> = script.lines().filter(|line| line.contains(") echo \"")).collect();
    assert!(needs.len() >= 6, "the table of needs is not found: {needs:?}");
    assert!(!needs.concat().contains("qemu"), "{needs:?}");
}

#[test]
fn an_unknown_set_is_refused() {
    let machine = Machine::new("");
    let output = machine.set_up(&["nonsense"]);
    assert_eq!(output.status.code(), Some(1));
    assert!(text(&output.stderr).contains("unknown set 'nonsense'"), "{}", text(&output.stderr));
    assert!(machine.calls().is_empty());
}
