// SPDX-License-Identifier: Apache-2.0
//! Runs the fuzz targets on pseudo-random inputs, a bounded number of them, the same for the same
//! seed. Each target runs in its own process, so that a panic, a signal or a hang is caught and
//! reported with the iteration that reproduces it.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::process::{Child, Command, ExitCode, ExitStatus};
use std::time::{Duration, Instant};
use vhost_blk_fuzz::{Rng, TARGETS, Target, mutate};

const USAGE: &str = "usage: fuzz-smoke [--seed N] [--target call|chain|image|request|message] \
                     [--iterations N] [--first N]";
const SEED: u64 = 0x7668_6f73_7462_6c6b;
/// One iteration takes a fraction of a millisecond.
const ITERATION_LIMIT: Duration = Duration::from_secs(60);
/// Iterations after which a target has opened all the descriptors that it keeps.
const WARM_UP: u64 = 50;
/// Descriptors that the data plane's thread may close a little later; a leak adds thousands.
const CLOSED_LATER: usize = 16;

struct Args {
    seed: u64,
    target: Option<String>,
    iterations: Option<u64>,
    first: u64,
    /// The file in which a child records its iteration.
    progress: Option<String>,
}

fn main() -> ExitCode {
    let args = match parse(std::env::args().skip(1)) {
        Ok(args) => args,
        Err(error) => {
            eprintln!("fuzz-smoke: {error}\n{USAGE}");
            return ExitCode::from(2);
        }
    };
    let wanted = |target: &&Target| args.target.as_deref().is_none_or(|name| name == target.name);
    let targets: Vec<_> = TARGETS.iter().filter(wanted).collect();
    if targets.is_empty() {
        eprintln!("fuzz-smoke: there is no such target\n{USAGE}");
        return ExitCode::from(2);
    }
    if let Some(progress) = &args.progress {
        end_at_a_panic();
        run(targets[0], &args, progress);
        return ExitCode::SUCCESS;
    }
    println!("seed {:#x}", args.seed);
    let is_fine = std::thread::scope(|scope| {
        let runs: Vec<_> =
            targets.iter().map(|target| scope.spawn(|| supervise(target, &args))).collect();
        runs.into_iter().all(|run| run.join().is_ok_and(|good| good)) // the scope waits for the rest
    });
    if is_fine { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

fn parse(mut words: impl Iterator<Item = String>) -> Result<Args, String> {
    let mut args = Args { seed: SEED, target: None, iterations: None, first: 0, progress: None };
    while let Some(word) = words.next() {
        let value = words.next().ok_or(format!("{word} wants a value"))?;
        match word.as_str() {
            "--seed" => args.seed = number(&value)?,
            "--target" => args.target = Some(value),
            "--iterations" => args.iterations = Some(number(&value)?),
            "--first" => args.first = number(&value)?,
            "--progress" => args.progress = Some(value),
            _ => return Err(format!("unknown option {word}")),
        }
    }
    Ok(args)
}

fn number(text: &str) -> Result<u64, String> {
    let parsed = match text.strip_prefix("0x") {
        Some(hex) => u64::from_str_radix(hex, 16),
        None => text.parse(),
    };
    parsed.map_err(|_| format!("{text} is no number"))
}

/// Iterations of one to four minutes in a debug build, beside the other targets on two busy cores.
fn default_iterations(target: &Target) -> u64 {
    match target.name {
        "message" => 50_000,
        // Each one makes files.
        "image" => 2_000,
        _ => 60_000,
    }
}

/// A panic of any thread ends the process: no thread joins those of the data plane.
fn end_at_a_panic() {
    let report = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |info| {
        report(info);
        std::process::abort();
    }));
}

/// Runs the iterations in the child.
fn run(target: &Target, args: &Args, progress: &str) {
    let note = File::options().write(true).open(progress).expect("the progress file");
    let iterations = args.iterations.unwrap_or(default_iterations(target));
    let mut opened = 0;
    for iteration in args.first..args.first + iterations {
        note.write_all_at(&iteration.to_le_bytes(), 0).expect("a note of the progress");
        let mut rng = Rng::new(args.seed, iteration);
        let mut data = (target.seed)(&mut rng);
        mutate::mutate(&mut rng, &mut data);
        (target.body)(&data);
        if iteration - args.first == WARM_UP {
            opened = open_descriptors();
        }
    }
    if iterations > WARM_UP {
        let now = open_descriptors();
        assert!(now <= opened + CLOSED_LATER, "{now} descriptors are open, {opened} were before");
    }
}

fn open_descriptors() -> usize {
    std::fs::read_dir("/proc/self/fd").expect("the list of descriptors").count()
}

/// Runs a target in a child; returns its result.
fn supervise(target: &Target, args: &Args) -> bool {
    let progress =
        std::env::temp_dir().join(format!("fuzz-smoke-{}-{}", std::process::id(), target.name));
    std::fs::write(&progress, [0; 8]).expect("a progress file");
    let begun = Instant::now();
    let mut command = Command::new(std::env::current_exe().expect("this program"));
    command.args(["--target", target.name, "--seed", &args.seed.to_string()]);
    command.args(["--first", &args.first.to_string()]).arg("--progress").arg(&progress);
    if let Some(iterations) = args.iterations {
        command.args(["--iterations", &iterations.to_string()]);
    }
    let ended = wait(command.spawn().expect("a child"), &progress);
    let at = reached(&progress);
    let _ = std::fs::remove_file(&progress);
    let name = target.name;
    match ended {
        Some(status) if status.success() => {
            let count = args.iterations.unwrap_or(default_iterations(target));
            println!("{name}: {count} iterations in {:.1} s", begun.elapsed().as_secs_f32());
            return true;
        }
        Some(status) => println!("FAILED: {name}: {status} at iteration {at}"),
        None => println!("FAILED: {name}: iteration {at} does not end"),
    }
    println!(
        "to see it again: fuzz-smoke --target {name} --seed {:#x} --first {at} --iterations 1",
        args.seed
    );
    false
}

fn reached(progress: &std::path::Path) -> u64 {
    let bytes = std::fs::read(progress).unwrap_or_default();
    bytes.try_into().map_or(0, u64::from_le_bytes)
}

/// Exit status of the child; `None`: it was killed because one iteration did not end.
fn wait(mut child: Child, progress: &std::path::Path) -> Option<ExitStatus> {
    let (mut last, mut since) = (u64::MAX, Instant::now());
    loop {
        if let Some(status) = child.try_wait().expect("the child") {
            return Some(status);
        }
        let at = reached(progress);
        if at != last {
            (last, since) = (at, Instant::now());
        } else if since.elapsed() > ITERATION_LIMIT {
            let _ = child.kill();
            let _ = child.wait();
            return None;
        }
        std::thread::sleep(Duration::from_millis(20));
    }
}
