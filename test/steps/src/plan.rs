// SPDX-License-Identifier: Apache-2.0
//! The list of steps. Each limit is for hangs: several times the duration on two cores.

use anyhow::Result;

use crate::run::{Passed, Run};

/// A part of the set `guest`, one case of each kind: the emulated debug kernel is slow. `make lab`
/// runs all of them on it.
const GUEST_CASES_ON_DEBUG: &[&str] = &[
    "guest-verify/bio",
    "guest-unplug/request",
    "guest-surprise/bio",
    "guest-bind/bio",
    "guest-hostile-ring/request",
];

/// Instructions for each request, over those that are kept; the same on a busy machine.
const PATH_LENGTHS: &[&str] = &[
    "target/release/lab",
    "exec",
    "--icount",
    "--",
    "/lab/bin/bench",
    "icount",
    "--check",
    "--who=kernel,uring",
];

/// The same for the guest driver.
const GUEST_PATH_LENGTHS: &[&str] = &[
    "target/release/lab",
    "exec",
    "--machine",
    "guest",
    "--icount",
    "--",
    "/lab/bin/cases",
    "guest-icount",
    "--check",
];

/// Builds the debug kernel, or waits for its builder.
const DEBUG_KERNEL: &[&str] = &["scripts/kernel/debug.sh"];

const FORMATTING: &str = "if cargo fmt --version >/dev/null 2>&1; then cargo fmt --all --check
    else echo 'SKIP: rustfmt is not installed (rustup component add rustfmt)'; fi";
/// The packages of Debian sid are not always available (exit code 69); the cached kernel is sufficient.
const SID: &str = "code=0; scripts/kernel/sid.sh || code=$?; [ $code = 69 ] || exit $code
    echo 'SKIP: sid is not to be had, nothing was tested on its kernel'";

/// Runs all steps, but none that needs a failed one.
///
/// # Errors
/// The run was interrupted, or a log cannot be written.
pub fn run_all(run: &mut Run) -> Result<()> {
    run.step(5, "formatting", &["sh", "-c", FORMATTING])?;
    run.step(5, "prose", &["scripts/check-prose.sh"])?;
    // From an empty cache it takes ten minutes of both CPUs, or more.
    let debug_kernel = run.start_early("debug-kernel.log", DEBUG_KERNEL)?;
    let build = ["cargo", "build", "--workspace", "--all-targets"];
    if run.step(45, "build", &build)? == Passed::No {
        return Ok(());
    }
    // `cargo run -p lab` would build its crates anew, with the features of this package alone.
    let fetch = ["target/debug/lab", "fetch"];
    let name = "set-up: QEMU, guest kernel, root image, accelerator";
    if run.step(45, name, &fetch)? == Passed::No {
        return Ok(());
    }
    run.add_to_path(&["target/debug/lab", "qemu-path"])?;
    let sid = run.step(30, "set-up: sid's kernel", &["sh", "-c", SID])?;
    run.cargo_tests(60)?;
    let mut build = vec!["cargo", "build", "--release"];
    build.extend(["-p", "vhost-blk", "-p", "lab", "-p", "cases", "-p", "bench"]);
    let has_programs = run.step(45, "build for the VMs", &build)? != Passed::No;
    if has_programs {
        run_plain_cases(run)?;
    }
    let has_kernel =
        has_programs && run.step(60, "set-up: debug kernel", DEBUG_KERNEL)? != Passed::No;
    drop(debug_kernel);
    // One emulated VM leaves CPU time to these.
    let lint = run.start_early("kernel-lint.log", &["scripts/kernel/lint.sh"])?;
    let dkms = run.start_early("dkms.log", &["scripts/kernel/dkms.sh"])?;
    let fuzz = run.start_early("fuzz-smoke.log", &["scripts/fuzz-smoke.sh"])?;
    if has_kernel {
        let debug = ["--kernel", "debug", "--set", "gating"];
        run.lab_cases(60, "kernel module: debug kernel", "gating-debug", &debug)?;
        let debug = [&["--kernel", "debug"], GUEST_CASES_ON_DEBUG].concat();
        run.lab_cases(45, "guest driver: debug kernel", "guest-debug", &debug)?;
    }
    if has_programs && sid == Passed::Yes {
        let reload = ["--kernel", "sid", "module-reload"];
        run.lab_cases(15, "kernel module: sid's kernel", "sid", &reload)?;
    }
    run.early_step(15, "kernel module: checkpatch, gcc, sparse", lint)?;
    run.early_step(15, "kernel modules: as DKMS builds them", dkms)?;
    run.early_step(15, "fuzz targets, a short run", fuzz)?;
    Ok(())
}

/// Runs what needs no debug kernel in VMs: its build has the CPU time that they leave.
fn run_plain_cases(run: &mut Run) -> Result<()> {
    run.step(15, "path lengths", PATH_LENGTHS)?;
    run.step(15, "path lengths of the guest driver", GUEST_PATH_LENGTHS)?;
    let plain = ["--kernel", "6.12", "--vms", "2", "--set", "plain,uring"];
    run.lab_cases(45, "kernel module and daemon: plain kernel", "plain", &plain)?;
    // File systems below the image take too long on the emulated debug kernel.
    let power = ["--kernel", "6.12", "power-loss-ext4", "power-loss-lies"];
    run.lab_cases(20, "losses of power below a file system", "power", &power)?;
    let guest = ["--kernel", "6.12", "--set", "guest"];
    run.lab_cases(45, "guest driver", "guest", &guest)
}
