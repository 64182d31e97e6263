// SPDX-License-Identifier: Apache-2.0
//! All cases.

use crate::case::{Case, Set};
use crate::cases;
use crate::mode::Mode;

/// A case in a mode, short or long.
pub(crate) struct Row {
    pub(crate) case: &'static Case,
    pub(crate) mode: Mode,
    /// The longer version of a case that has a short one.
    is_second: bool,
    set: Set,
}

impl Row {
    /// Its name on the command line.
    pub(crate) fn name(&self) -> String {
        let suffix = if self.is_second { "-long" } else { "" };
        format!("{}{suffix}/{}", self.case.name, self.mode)
    }

    /// When it is run.
    pub(crate) fn set(&self) -> Set {
        self.set
    }
}

/// All of them: those that run at every change first.
pub(crate) fn rows() -> impl Iterator<Item = Row> {
    let short = cases_in_modes(|case| case.short).map(|(case, mode)| Row {
        case,
        mode,
        is_second: false,
        set: Set::Guest,
    });
    let long = cases_in_modes(|case| case.modes).filter_map(|(case, mode)| {
        let is_second = case.short.contains(&mode);
        (!is_second || case.has_long).then_some(Row { case, mode, is_second, set: Set::GuestFull })
    });
    short.chain(long)
}

fn cases_in_modes(
    modes: fn(&Case) -> &'static [Mode],
) -> impl Iterator<Item = (&'static Case, Mode)> {
    let all = cases::ALL.iter().copied().flatten();
    all.flat_map(move |case| modes(case).iter().map(move |&mode| (case, mode)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_differ_and_descriptions_are_one_line() {
        let rows: Vec<Row> = rows().collect();
        let mut names: Vec<String> = rows.iter().map(Row::name).collect();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), rows.len());
        assert!(rows.iter().all(|row| !row.case.about.contains(['\n', '\t'])));
    }

    #[test]
    fn what_runs_at_every_change_is_one_of_the_modes() {
        for case in cases::ALL.iter().copied().flatten() {
            let known = case.short.iter().all(|mode| case.modes.contains(mode));
            assert!(known && !case.modes.is_empty(), "{}", case.name);
        }
    }
}
