// SPDX-License-Identifier: Apache-2.0
//! The QEMU of the lab: the installed one if it is new enough, else a private one in the cache.
//!
//! The private one is Debian 13's, unpacked without installation. It runs with its own loader,
//! libraries and firmware, so the machine's packages stay unchanged.

use std::fmt;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};

use crate::cache::{Cache, key_of};
use crate::debian::{self, Variant};
use kit::interrupt;
use kit::process::run_to_end;

/// The oldest QEMU whose emulation runs several virtual CPUs safely.
///
/// Before 8.1 a virtual CPU reads the bytes that it translates without the page's lock. If another
/// CPU patches the guest kernel's code in the meantime, the translation of the old bytes stays in
/// use, and the guest dies of an `int3` that is no longer in its memory. QEMU 8.1 has the change
/// "accel/tcg: Always lock pages before translation". docs/lab.md has the measurements.
const OLDEST: Version = Version { major: 8, minor: 1 };

/// The emulator's program name in Debian.
const SYSTEM: &str = "qemu-system-x86_64";

/// All programs that the lab and the tests use.
const PROGRAMS: [&str; 4] = [SYSTEM, "qemu-storage-daemon", "qemu-img", "qemu-io"];

/// The Debian suite whose QEMU is unpacked.
const SUITE: &str = "trixie";

/// The suite whose QEMU (7.2) emulates machines with guests inside: under QEMU 10.0's emulation,
/// KVM does not get a guest to its first process within five minutes.
const NESTING_SUITE: &str = "bookworm";

const PACKAGES: &str = "qemu-system-x86,qemu-system-common,qemu-utils";

/// Runs an unpacked program with the loader and libraries that it was built with. They lie in `lib`
/// and `usr/lib` up to Debian 12, and in `usr/lib` since. QEMU looks for its firmware beside its
/// program file, which here is the loader, so the wrapper passes the directories.
const WRAPPER: &str = r#"#!/bin/sh
tree=$(dirname "$(dirname "$(readlink -f "$0")")")
libraries=$tree/usr/lib/x86_64-linux-gnu
old_libraries=$tree/lib/x86_64-linux-gnu
loader=$libraries/ld-linux-x86-64.so.2
[ -e "$loader" ] || loader=$old_libraries/ld-linux-x86-64.so.2
program=${0##*/}
export QEMU_MODULE_DIR="$libraries/qemu"
case $program in
qemu-system-*) set -- -L "$tree/usr/share/qemu" -L "$tree/usr/share/seabios" -L "$tree/usr/lib/ipxe/qemu" "$@" ;;
esac
exec "$loader" --argv0 "$program" --library-path "$libraries:$old_libraries" "$tree/usr/bin/$program" "$@"
"#;

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Version {
    major: u32,
    minor: u32,
}

impl Version {
    /// Reads `QEMU emulator version 10.0.2 (Debian ...)`.
    fn parse(text: &str) -> Option<Self> {
        let (_, rest) = text.split_once(" version ")?;
        let mut numbers = rest.split(|c: char| !c.is_ascii_digit()).map(str::parse);
        Some(Self { major: numbers.next()?.ok()?, minor: numbers.next()?.ok()? })
    }
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.major, self.minor)
    }
}

/// A QEMU that runs the lab's guests.
#[derive(Debug, Clone)]
pub struct Qemu {
    program: PathBuf,
    /// The first line of its `--version`.
    version: String,
    /// The reason for the choice.
    reason: String,
    /// QEMU's `-accel` value for emulation.
    tcg: &'static str,
}

impl Qemu {
    /// The installed QEMU if it is new enough, else the private one. If no other is available, an
    /// installed one that is too old runs with one thread for all virtual CPUs.
    pub fn cached(cache: &Cache) -> Result<Self> {
        let installed = Self::at(Path::new(SYSTEM)).ok();
        if let Some(qemu) = installed.as_ref().filter(|qemu| qemu.is_new_enough()) {
            return Ok(qemu.clone());
        }
        let reason = match &installed {
            Some(old) => format!("the installed one is older than {OLDEST}: {}", old.version),
            None => "none is installed".to_owned(),
        };
        match (private(cache, SUITE), installed) {
            (Ok(directory), _) => {
                let qemu = Self::at(&directory.join(SYSTEM))?;
                Ok(Self { reason: format!("Debian 13's, in the lab's cache: {reason}"), ..qemu })
            }
            (Err(error), Some(old)) => {
                interrupt::check()?;
                eprintln!(
                    "lab: {reason}; Debian 13's cannot be fetched ({error:#}). Emulated guests \
                     run on one thread, which is safe and slower. Install QEMU {OLDEST} or newer."
                );
                Ok(old)
            }
            (Err(error), None) => Err(error.context(format!(
                "no QEMU: {reason}, and Debian 13's cannot be fetched. Install qemu-system-x86 \
                 ({OLDEST} or newer), or give this machine access to a Debian mirror"
            ))),
        }
    }

    /// The QEMU that emulates machines with guests inside. Although it is older than `OLDEST`, it
    /// has a thread for each virtual CPU: the cases keep the kernel from patching its code while
    /// guests run (`test/cases/src/nested/kvm.rs:keep_one`).
    pub fn for_nested_guests(cache: &Cache) -> Result<Self> {
        let directory = private(cache, NESTING_SUITE).context("no QEMU for guests in guests")?;
        let reason = "Debian 12's, in the lab's cache, for guests inside".to_owned();
        Ok(Self { reason, tcg: "tcg,thread=multi", ..Self::at(&directory.join(SYSTEM))? })
    }

    /// The QEMU at `program`, a path or a name to look up in `$PATH`.
    pub fn at(program: &Path) -> Result<Self> {
        let text = run_to_end(&[&program.to_string_lossy(), "--version"])?;
        let line = text.lines().next().unwrap_or_default().to_owned();
        let version = Version::parse(&line)
            .with_context(|| format!("{} --version: cannot read `{line}`", program.display()))?;
        Ok(Self {
            program: program.to_owned(),
            version: line,
            reason: "installed".to_owned(),
            tcg: if version < OLDEST { "tcg,thread=single" } else { "tcg,thread=multi" },
        })
    }

    /// The program to start.
    pub fn program(&self) -> String {
        self.program.to_string_lossy().into_owned()
    }

    /// QEMU's `-accel` value for emulation: a thread for each virtual CPU if that is safe.
    pub fn tcg(&self) -> &'static str {
        self.tcg
    }

    fn is_new_enough(&self) -> bool {
        Version::parse(&self.version).is_some_and(|version| version >= OLDEST)
    }
}

impl fmt::Display for Qemu {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let version = self.version.trim_start_matches("QEMU emulator version ");
        write!(f, "QEMU {version}: {}", self.reason)
    }
}

/// A directory to append to `$PATH` for all of QEMU's programs; empty if all are installed.
pub fn missing_programs_directory(cache: &Cache) -> Result<Option<PathBuf>> {
    let is_installed = |name: &str| Command::new(name).arg("--version").output().is_ok();
    if PROGRAMS.iter().all(|name| is_installed(name)) {
        return Ok(None);
    }
    private(cache, SUITE).map(Some)
}

/// The directory with the programs of a suite's QEMU; unpacks it if it does not exist.
fn private(cache: &Cache, suite: &str) -> Result<PathBuf> {
    let key = key_of(&[suite, PACKAGES, WRAPPER]);
    let entry = cache.entry(&format!("qemu-{key}"), |staging| {
        eprintln!("lab: unpacking QEMU of Debian's {suite} into the cache (about half a minute)");
        let tree = staging.join("tree");
        debian::bootstrap(Variant::Extract, suite, PACKAGES, &tree)?;
        let bin = tree.join("bin-of-lab");
        fs::create_dir(&bin)?;
        for name in PROGRAMS {
            debian::install_program(&bin.join(name), WRAPPER)?;
            let said = run_to_end(&[&bin.join(name).to_string_lossy(), "--version"])
                .with_context(|| format!("the unpacked {name} does not start"))?;
            if !said.contains("version") {
                bail!("the unpacked {name} does not tell its version: {said}");
            }
        }
        Ok(())
    })?;
    Ok(entry.join("tree/bin-of-lab"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fake(version: &str) -> (tempfile::TempDir, PathBuf) {
        let dir = tempfile::tempdir().unwrap();
        let program = dir.path().join("qemu");
        let text = format!("#!/bin/sh\necho 'QEMU emulator version {version}'\n");
        debian::install_program(&program, &text).unwrap();
        (dir, program)
    }

    #[test]
    fn versions_are_compared_by_number() {
        let version = |text: &str| Version::parse(&format!("QEMU emulator version {text}"));
        assert!(version("7.2.22 (Debian 1:7.2+dfsg-7+deb12u18)").unwrap() < OLDEST);
        assert!(version("8.0.5").unwrap() < OLDEST);
        assert_eq!(version("8.1.0").unwrap(), OLDEST);
        assert!(version("10.0.2 (Debian 1:10.0.2+ds-2)").unwrap() > OLDEST);
        assert_eq!(version("of my own"), None);
        assert_eq!(Version::parse(""), None);
    }

    #[test]
    fn an_old_emulator_gets_one_thread_for_all_virtual_cpus() {
        for (version, tcg) in [("7.2.22", "tcg,thread=single"), ("8.1.0", "tcg,thread=multi")] {
            let (_dir, program) = fake(version);
            assert_eq!(Qemu::at(&program).unwrap().tcg(), tcg);
        }
    }

    #[test]
    fn an_unpacked_program_finds_its_loader_where_its_release_has_it() {
        for libraries in ["lib", "usr/lib"] {
            let tree = tempfile::tempdir().unwrap();
            let (bin, libraries) = (tree.path().join("bin"), tree.path().join(libraries));
            let libraries = libraries.join("x86_64-linux-gnu");
            fs::create_dir_all(&libraries).unwrap();
            fs::create_dir(&bin).unwrap();
            let loader = libraries.join("ld-linux-x86-64.so.2");
            debian::install_program(&loader, "#!/bin/sh\necho \"$@\"\n").unwrap();
            debian::install_program(&bin.join("qemu-img"), WRAPPER).unwrap();
            let said = run_to_end(&[&bin.join("qemu-img").to_string_lossy(), "info"]).unwrap();
            assert!(said.contains(&libraries.display().to_string()), "{said}");
            assert!(said.trim_end().ends_with("usr/bin/qemu-img info"), "{said}");
        }
    }

    #[test]
    fn a_program_that_is_no_qemu_is_refused() {
        let error = Qemu::at(Path::new("/bin/true")).unwrap_err();
        assert!(format!("{error:#}").contains("--version"), "{error:#}");
    }
}
