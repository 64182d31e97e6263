// SPDX-License-Identifier: Apache-2.0
//! One command in a host VM; the lab passes on its output and its exit code.

use std::fs::File;
use std::io::{self, Read, Write};
use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};

use crate::vm::boot::{Vm, VmBase, VmShape};
use crate::vm::payload::Payload;
use crate::vm::stall::Cpus;
use kit::interrupt;
use kit::process::TICK;

/// Lines of the console to show when the VM does not end well.
const TAIL_LINES: usize = 40;

/// The command, and the machine it runs in.
#[derive(Debug, Clone)]
pub struct ExecOptions {
    /// The machine.
    pub shape: VmShape,
    /// The program and its arguments.
    pub command: Vec<String>,
    /// Time limit of the whole, booting included.
    pub timeout: Duration,
    /// File for the kernel's log.
    pub console: Option<PathBuf>,
}

/// Runs the command; returns its exit code.
pub fn exec(base: &VmBase, payload: &Payload, options: &ExecOptions) -> Result<u8> {
    let words: Vec<String> = options.command.iter().map(|word| quoted(word)).collect();
    let mut vm = Vm::boot(base, &options.shape, payload, &format!("{}\n", words.join(" ")))?;
    let ended = follow(&mut vm, options.timeout);
    if let Some(path) = &options.console {
        std::fs::write(path, vm.console())
            .with_context(|| format!("cannot write {}", path.display()))?;
    }
    let code = ended.and_then(|()| {
        let report = vm.report();
        if let Some(why) = report.value("fail") {
            bail!("{why}");
        }
        report.value("exit").context("the VM ended before the command did")?.parse().context("exit")
    });
    code.with_context(|| format!("in the VM\n{}{}", vm.qemu_log(), tail_of(&vm.console())))
}

/// Passes on the command's output until the VM ends.
fn follow(vm: &mut Vm, timeout: Duration) -> Result<()> {
    let deadline = Instant::now() + timeout;
    let (mut output, mut errors) = (vm.stream("stdout")?, vm.stream("stderr")?);
    loop {
        let ended = vm.has_ended()?;
        pass_on(&mut output, &mut io::stdout())?;
        pass_on(&mut errors, &mut io::stderr())?;
        match vm.look_at_cpus()? {
            Cpus::Lost(fault) if !vm.report().has_verdict() => return Err(fault.into()),
            Cpus::Woken => eprintln!("lab: the VM stood still; its CPUs were woken by an NMI"),
            Cpus::Lost(_) | Cpus::Fine => {}
        }
        if ended {
            return Ok(());
        }
        interrupt::check()?;
        if Instant::now() >= deadline {
            bail!("the command did not end within {} s (--timeout)", timeout.as_secs());
        }
        std::thread::sleep(TICK);
    }
}

fn pass_on(from: &mut File, to: &mut impl Write) -> Result<()> {
    let mut bytes = Vec::new();
    from.read_to_end(&mut bytes)?;
    to.write_all(&bytes)?;
    Ok(to.flush()?)
}

/// The last lines of a console.
pub(crate) fn tail_of(console: &str) -> String {
    let lines: Vec<&str> = console.lines().collect();
    let tail = &lines[lines.len().saturating_sub(TAIL_LINES)..];
    tail.iter().map(|line| format!("  console| {line}\n")).collect()
}

/// Quotes a word for the shell.
pub(crate) fn quoted(word: &str) -> String {
    format!("'{}'", word.replace('\'', r"'\''"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_quoted_word_survives_the_shell() {
        let word = "a 'b' $c \"d\" \\ `e`";
        let script = format!("printf %s {}", quoted(word));
        assert_eq!(kit::process::run_to_end(&["sh", "-c", &script]).unwrap(), word);
    }
}
