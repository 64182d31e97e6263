// SPDX-License-Identifier: Apache-2.0
//! The change of a running disk by its file: all of its options, or none.
//!
//! The steps are commands to the disk. A step that is refused undoes those before it. A change to write-back is the
//! first step, because a front-end refuses it, and the last one otherwise, because a front-end refuses its undoing.

use crate::failure::Failure;
use crate::options::DiskArgs;
use crate::values::Cache;
use data_plane::{LimitChange, Limits};
use std::sync::Arc;
use std::time::Duration;
use vhost_user::{Answer, Command, Control, ErrorChange, Status};

/// Maximum wait for the end of a disk, and for the answer of one.
pub(super) const DISK_MAX: Duration = Duration::from_secs(8);

/// A command, and the one that undoes it with those after it that have none.
#[derive(Debug, PartialEq, Eq)]
struct Step {
    command: Command,
    undo: Option<Command>,
}

/// Makes a disk adopt the changed options that a running disk can adopt.
///
/// # Errors
/// [`Failure`] if it refuses one of them, or does not answer. Its text tells if the disk could not return to the old
/// ones.
pub(super) fn change(
    name: &str,
    control: &Control,
    old: &DiskArgs,
    new: &DiskArgs,
) -> Result<(), Failure> {
    let what = format!("change the disk {name}");
    let failed = |why: &str| Failure::told(&what, why);
    let status = status(&what, control)?;
    let steps = steps(old, new, &status);
    for (at, step) in steps.iter().enumerate() {
        if let Err(refusal) = order(control, step.command.clone()) {
            return Err(undo(control, &steps[..=at], refusal, failed));
        }
    }
    Ok(())
}

/// The present status of a disk.
///
/// # Errors
/// [`Failure`] of the command `what`, if the disk does not answer.
pub(super) fn status(what: &str, control: &Control) -> Result<Box<Status>, Failure> {
    match order(control, Command::Status) {
        Ok(Answer::Status(status)) => Ok(status),
        Ok(_) => Err(Failure::told(what, "the disk has sent no status; repeat the command")),
        Err(refusal) => Err(Failure::told(what, refusal.told())),
    }
}

/// The end of a command without success.
enum Refusal {
    /// The disk is as before.
    Refused(String),
    /// The disk carries it out when its storage answers.
    Silence,
}

impl Refusal {
    fn told(&self) -> &str {
        match self {
            Refusal::Refused(why) => why,
            Refusal::Silence => "it does not answer; check its storage",
        }
    }
}

fn order(control: &Control, command: Command) -> Result<Answer, Refusal> {
    match control.post(command).wait(Some(DISK_MAX)) {
        Some(Answer::Refused(why)) => Err(Refusal::Refused(why)),
        Some(answer) => Ok(answer),
        None => Err(Refusal::Silence),
    }
}

/// Undoes all steps, of which the last one has failed.
fn undo(
    control: &Control,
    steps: &[Step],
    refusal: Refusal,
    failed: impl Fn(&str) -> Failure,
) -> Failure {
    let (done, is_silent) = match refusal {
        Refusal::Refused(_) => (&steps[..steps.len() - 1], false),
        Refusal::Silence => (steps, true),
    };
    for command in done.iter().rev().filter_map(|step| step.undo.clone()) {
        // A disk that does not answer receives it after the steps.
        let posted = control.post(command);
        if is_silent {
            continue;
        }
        let why = match posted.wait(Some(DISK_MAX)) {
            Some(Answer::Refused(why)) => why,
            Some(_) => continue,
            None => "it does not answer".to_owned(),
        };
        let told = failed(refusal.told());
        let first = &told.why;
        let why = format!("{first}; a part of the change stays, because its undoing failed: {why}");
        return Failure { why, ..told };
    }
    failed(refusal.told())
}

/// The commands from `old` to `new`. `status`: the present state, which commands may have changed.
fn steps(old: &DiskArgs, new: &DiskArgs, status: &Status) -> Vec<Step> {
    let mut steps = Vec::new();
    if old.error_rules() != new.error_rules() {
        let command = Command::SetErrors(ErrorChange::to(new.error_rules()));
        let undo = Some(Command::SetErrors(ErrorChange::to(status.errors)));
        steps.push(Step { command, undo });
    }
    steps.extend(limits_steps(old, new, (status.limit_group.clone(), status.limits)));
    if old.cache != new.cache {
        let on = new.cache == Cache::Writeback;
        let undo = (on != status.writeback).then_some(Command::SetCache(!on));
        let step = Step { command: Command::SetCache(on), undo };
        let at = if on { 0 } else { steps.len() };
        steps.insert(at, step);
    }
    steps
}

/// `present`: the group of the disk, and the limits of that or of the disk.
fn limits_steps(old: &DiskArgs, new: &DiskArgs, present: (Option<Arc<str>>, Limits)) -> Vec<Step> {
    let (group, limits) = (&new.limit_group, new.limits());
    if (group, limits) == (&old.limit_group, old.limits()) {
        return Vec::new();
    }
    let command = match group {
        Some(group) => Command::Limit(Some(group.as_str().into()), LimitChange::of_member(limits)),
        None => Command::Limit(None, limits.into()),
    };
    let is_other_sort = group.is_some() != present.0.is_some();
    let undo = Some(Command::Limit(present.0, present.1.into()));
    if !is_other_sort {
        return vec![Step { command, undo }];
    }
    // The limits of a disk are not those of its group, neither in the change nor in its undoing.
    let none = Command::Limit(None, Limits::NONE.into());
    vec![Step { command: none.clone(), undo }, Step { command, undo: Some(none) }]
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Parser)]
    struct Serve {
        #[command(flatten)]
        args: DiskArgs,
    }

    fn args(words: &str) -> DiskArgs {
        Serve::parse_from(["serve"].into_iter().chain(words.split_whitespace())).args
    }

    /// The commands of a change, and those of its undoing.
    fn commands(old: &str, new: &str) -> [Vec<Command>; 2] {
        let (old, new) = (args(old), args(new));
        let present = (old.limit_group.as_deref().map(Arc::from), old.limits());
        let steps = limits_steps(&old, &new, present);
        let undoing = steps.iter().rev().filter_map(|step| step.undo.clone()).collect();
        [steps.into_iter().map(|step| step.command).collect(), undoing]
    }

    #[test]
    fn neither_a_change_nor_its_undoing_gives_limits_of_a_disk_to_a_group() {
        let own = |words| Command::Limit(None, args(words).limits().into());
        let of = |group: &str, words| {
            Command::Limit(Some(group.into()), LimitChange::of_member(args(words).limits()))
        };
        let (disk, gold, none) = ("--limit-iops 5", "--limit-iops 900 --limit-group gold", own(""));
        let joined = [none.clone(), of("gold", gold)];
        let left = [none.clone(), own(disk)];
        assert_eq!(commands(disk, gold), [joined.to_vec(), left.to_vec()]);
        assert_eq!(commands(gold, disk), [left.to_vec(), joined.to_vec()]);
        let adopts = "--limit-group gold";
        assert_eq!(commands(disk, adopts), [vec![none, of("gold", "")], left.to_vec()]);
        let (other, more) = ("--limit-iops 7 --limit-group iron", "--limit-iops 6");
        assert_eq!(commands(gold, other), [vec![of("iron", other)], vec![of("gold", gold)]]);
        assert_eq!(commands(disk, more), [vec![own(more)], vec![own(disk)]]);
        assert_eq!(commands(gold, gold), [vec![], vec![]]);
    }
}
