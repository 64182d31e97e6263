// SPDX-License-Identifier: Apache-2.0
//! The Debian packages that `scripts/deb.sh` builds: their files, their scripts, and its refusals.
//! The lab's set `debian12` installs and uses the daemon's.

mod common;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use kit::process::run_to_end;
use lab::cache::Cache;
use tempfile::TempDir;

/// All packages.
const PACKAGES: [&str; 3] = ["vhost-blk", "vhost-blk-dkms", "vhost-blk-guest-dkms"];

/// Packages of the daemon from the sources, without debugging symbols.
struct Built {
    directory: TempDir,
}

impl Built {
    fn new(daemon: &Path, suffix: &str) -> Self {
        let directory = tempfile::tempdir_in(Cache::open().unwrap().dir()).unwrap();
        let output = deb(&[
            "--program",
            &daemon.to_string_lossy(),
            "--output",
            &directory.path().to_string_lossy(),
            "--suffix",
            suffix,
        ]);
        assert!(output.status.success(), "{}", text(&output.stderr));
        Self { directory }
    }

    /// The path of a package.
    fn package(&self, name: &str) -> PathBuf {
        let is_it = |path: &PathBuf| {
            let file = path.file_name().unwrap().to_string_lossy().into_owned();
            file.starts_with(&format!("{name}_"))
        };
        let mut all =
            fs::read_dir(self.directory.path()).unwrap().map(|entry| entry.unwrap().path());
        all.find(is_it).unwrap_or_else(|| panic!("no package {name}"))
    }

    /// The names of the files in a package, with their modes and owners.
    fn files(&self, name: &str) -> String {
        run_to_end(&["dpkg-deb", "--contents", &self.package(name).to_string_lossy()]).unwrap()
    }

    fn field(&self, name: &str, field: &str) -> String {
        let path = self.package(name).to_string_lossy().into_owned();
        run_to_end(&["dpkg-deb", "--field", &path, field]).unwrap().trim().to_owned()
    }
}

fn deb(arguments: &[&str]) -> Output {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../scripts/deb.sh");
    let mut command = Command::new(script);
    command.args(arguments).env("DEB_BUILD_OPTIONS", "noautodbgsym");
    // The slowest compression would be half of the test.
    command.envs([("DPKG_DEB_COMPRESSOR_TYPE", "gzip"), ("DPKG_DEB_COMPRESSOR_LEVEL", "1")]);
    command.output().unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// One test, because each test is a process of its own, and a build takes long.
#[test]
fn the_packages_are_whole_sound_and_the_same_from_build_to_build() {
    let daemon = common::build_daemon();
    let built = Built::new(&daemon, "+test1");
    the_daemons_package_has_all_files_that_belong_to_the_system(&built, &daemon);
    all_files_belong_to_root_and_only_root_may_write_them(&built);
    the_packages_of_the_modules_have_the_sources_that_dkms_builds(&built);
    for name in PACKAGES {
        let expected = format!("{}+test1", env!("CARGO_PKG_VERSION"));
        assert_eq!(built.field(name, "Version"), expected);
    }
    lintian_finds_nothing(&built);
    let again = Built::new(&daemon, "+test1");
    for name in PACKAGES {
        let (one, two) = (fs::read(built.package(name)).unwrap(), fs::read(again.package(name)));
        assert!(one == two.unwrap(), "{name} differs from build to build");
    }
}

fn the_daemons_package_has_all_files_that_belong_to_the_system(built: &Built, daemon: &Path) {
    let files = built.files("vhost-blk");
    for file in [
        "./usr/bin/vhost-blk",
        "./etc/needrestart/conf.d/vhost-blk.conf",
        "./lib/systemd/system/vhost-blk.service",
        "./lib/systemd/system/vhost-blk@.service",
        "./lib/systemd/system/vhost-blk@.socket",
        "./lib/udev/rules.d/60-vhost-blk.rules",
        "./usr/lib/sysusers.d/vhost-blk.conf",
        "./usr/lib/tmpfiles.d/vhost-blk.conf",
        "./usr/libexec/vhost-blk/after-upgrade",
        "./usr/share/bash-completion/completions/vhost-blk",
        "./usr/share/zsh/vendor-completions/_vhost-blk",
        "./usr/share/fish/vendor_completions.d/vhost-blk.fish",
        "./usr/share/qemu/vhost-user/50-vhost-blk.json",
        "./usr/share/doc/vhost-blk/examples/grafana/vhost-blk.json",
        "./usr/share/doc/vhost-blk/examples/prometheus/vhost-blk.rules.yml",
        "./usr/share/doc/vhost-blk/examples/proxmox/vhost-blk-hook",
        "./usr/share/doc/vhost-blk/examples/kubevirt/onDefineDomain",
    ] {
        assert!(files.lines().any(|line| line.ends_with(file)), "no {file} in:\n{files}");
    }
    let pages = tempfile::tempdir().unwrap();
    let directory = pages.path().to_string_lossy().into_owned();
    run_to_end(&[&daemon.to_string_lossy(), "generate", "man", &directory]).unwrap();
    for page in fs::read_dir(pages.path()).unwrap() {
        let name = page.unwrap().file_name().to_string_lossy().into_owned();
        assert!(files.contains(&format!("./usr/share/man/man1/{name}.gz")), "no man page {name}");
    }
}

fn all_files_belong_to_root_and_only_root_may_write_them(built: &Built) {
    for line in PACKAGES
        .iter()
        .flat_map(|name| built.files(name).lines().map(str::to_owned).collect::<Vec<_>>())
    {
        let mut words = line.split_whitespace();
        let (mode, owner) = (words.next().unwrap(), words.next().unwrap());
        assert_eq!(owner, "root/root", "{line}");
        let others = [mode.as_bytes()[5], mode.as_bytes()[8]];
        assert!(mode.starts_with('l') || !others.contains(&b'w'), "{line}");
    }
}

fn the_packages_of_the_modules_have_the_sources_that_dkms_builds(built: &Built) {
    for (name, package) in [("vhost-blk-dkms", "dkms"), ("vhost-blk-guest-dkms", "dkms-guest")] {
        let files = built.files(name);
        let root = tempfile::tempdir().unwrap();
        let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../packaging").join(package);
        let install = script.join("install.sh").to_string_lossy().into_owned();
        let root_text = root.path().to_string_lossy().into_owned();
        run_to_end(&[&install, &root_text]).unwrap();
        let installed = run_to_end(&["find", &root_text, "-type", "f"]).unwrap();
        assert!(installed.lines().count() > 10, "{installed}");
        for file in installed.lines() {
            let file = file.replacen(&root_text, ".", 1);
            assert!(files.lines().any(|line| line.ends_with(&file)), "{name} has no {file}");
        }
        assert!(built.field(name, "Depends").contains("dkms"), "{name} does not depend on dkms");
    }
}

fn lintian_finds_nothing(built: &Built) {
    let mut command = vec!["lintian".to_owned(), "--fail-on=error,warning".to_owned()];
    command.extend(PACKAGES.map(|name| built.package(name).to_string_lossy().into_owned()));
    let command: Vec<&str> = command.iter().map(String::as_str).collect();
    run_to_end(&command).unwrap();
}

#[test]
fn a_wrong_argument_is_refused_with_the_remedy_and_nothing_is_built() {
    let directory = tempfile::tempdir().unwrap();
    let output = directory.path().to_string_lossy().into_owned();
    for (arguments, words) in [
        (&["--program", "/no-such-program"][..], "no program at /no-such-program: build it"),
        (&["--program", "/bin/false"], "/bin/false cannot write its man pages"),
        (&["--suffix", "5"], "must begin with + (newer) or ~ (older)"),
        (&["--suffix", "+a_b"], "has only letters, digits"),
        (&["--fast"], "unknown argument '--fast': use --program"),
        (&["--suffix"], "--suffix needs a value"),
    ] {
        let failed = deb(&[&["--output", &output], arguments].concat());
        assert_eq!(failed.status.code(), Some(1), "{arguments:?}");
        assert!(text(&failed.stderr).contains(words), "{arguments:?}: {}", text(&failed.stderr));
        assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 0, "{arguments:?}");
    }
    let beside = deb(&["--output", "/dev/null/directory", "--program", "/bin/true"]);
    assert!(text(&beside.stderr).contains("choose another --output"), "{}", text(&beside.stderr));
}
