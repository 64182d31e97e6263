// SPDX-License-Identifier: Apache-2.0
//! The definition of a case, and the list of all cases.
//!
//! A module adds its cases with one table, [`cases!`]; no other place names them.

use anyhow::Result;
use kit::set::Set;

use crate::guest::{self, mode::Mode};
use crate::host::env::Env;
use crate::nested;

/// One case.
pub(crate) struct Case {
    /// Name on the command line; a guest case has the mode as a second part.
    pub(crate) name: &'static str,
    /// Description, in one sentence.
    pub(crate) about: &'static str,
    /// Machine, needs and body.
    pub(crate) kind: Kind,
}

/// Machine, needs and body of a case. An error of the body is a failure, or, with
/// [`kit::outcome::Skip`] at its root, a reason to skip the case.
pub(crate) enum Kind {
    /// In the host machine, on `/dev/vhost-blk` or through the daemon.
    Host(Set, fn(&Env) -> Result<()>),
    /// In the nested machine, with guests inside it.
    Nested(nested::Needs, fn(&nested::Setup) -> Result<()>),
    /// In the guest machine, once for each mode of the driver.
    Guest(guest::Modes, fn(&guest::Context) -> Result<()>),
}

/// The cases of one module.
pub(crate) struct Table {
    /// Path of the module.
    pub(crate) module: &'static str,
    /// Cases of the module, in order.
    pub(crate) cases: &'static [Case],
}

inventory::collect!(Table);

/// Declares the cases of a module: the kind, then the name, the needs (the set of a host case), the
/// description and the body of each case.
///
/// ```ignore
/// cases! { Host;
///     "requests-brd", Gating, "every request type on a RAM disk", |env| all(env, brd());
/// }
/// ```
macro_rules! cases {
    ($kind:ident; $($name:literal, $needs:expr, $about:expr, $body:expr;)*) => {
        inventory::submit! {
            $crate::case::Table {
                module: module_path!(),
                cases: &[$($crate::case::Case {
                    name: $name,
                    about: $about,
                    kind: $crate::case::Kind::$kind($needs, $body),
                },)*],
            }
        }
    };
}
pub(crate) use cases;

/// Modules in the order in which their cases are listed and run. Modules whose cases turn off
/// checks of the kernel come late. Modules that this list does not name follow in the order of
/// their names.
const ORDER: &[&str] = &[
    "host::abi",
    "host::requests",
    "host::durability",
    "host::power_loss",
    "host::ranges",
    "host::notify",
    "host::integrity",
    "host::control",
    "host::control::race",
    "host::over_daemon",
    "host::engines::nvme",
    "host::engines::nbd",
    "host::engines::raid",
    "host::engines::iscsi",
    "host::engines::multipath",
    "host::engines::drbd",
    "host::engines::rbd",
    "host::suite",
    "host::owner",
    "host::removal",
    "host::faults",
    "host::hostile",
    "host::visibility",
    "host::failure",
    "host::charge",
    "host::fuzz",
    "nested::guest_killed",
    "nested::migrate",
    "nested::migrate_nvme",
    "nested::demo_storage",
    "nested::engines",
    "nested::pause",
    "nested::reconnect",
    "nested::switch",
    "nested::driver",
    "guest::data",
    "guest::file_systems",
    "guest::stacked",
    "guest::swap",
    "guest::memory",
    "guest::requests",
    "guest::accounting",
    "guest::queues",
    "guest::cpus",
    "guest::turns",
    "guest::change",
    "guest::cycle",
    "guest::power",
    "guest::order",
    "guest::flushes",
    "guest::silent",
    "guest::parameters",
    "guest::installed",
    "guest::hostile",
];

/// A line of the list: a case, with the mode of a guest case.
pub(crate) struct Row {
    /// Name on the command line.
    pub(crate) name: String,
    /// Set of the case, which says when it runs.
    pub(crate) set: Set,
    /// The case.
    pub(crate) case: &'static Case,
    /// The driver's mode, for a guest case.
    pub(crate) mode: Option<Mode>,
}

/// The tables of all modules, in any order.
fn tables() -> impl Iterator<Item = &'static Table> {
    inventory::iter::<Table>.into_iter()
}

/// All rows. Guest cases that run at every change come before other guest cases.
pub(crate) fn rows() -> Vec<Row> {
    let mut tables: Vec<&Table> = tables().collect();
    tables.sort_by_key(|table| place(table.module));
    let cases = tables.into_iter().flat_map(|table| table.cases);
    let mut rows: Vec<Row> = cases.flat_map(rows_of).collect();
    rows.sort_by_key(|row| row.set == Set::GuestFull);
    rows
}

fn place(module: &'static str) -> (usize, &'static str) {
    let module = module.split_once("::").map_or(module, |(_, path)| path);
    (ORDER.iter().position(|known| *known == module).unwrap_or(ORDER.len()), module)
}

fn rows_of(case: &'static Case) -> Vec<Row> {
    let plain = |set| vec![Row { name: case.name.to_owned(), set, case, mode: None }];
    match &case.kind {
        Kind::Host(set, _) => plain(*set),
        Kind::Nested(..) => plain(Set::Nested),
        Kind::Guest(modes, _) => {
            let row = |(mode, set, suffix)| {
                let name = format!("{}{suffix}/{mode}", case.name);
                Row { name, set, case, mode: Some(mode) }
            };
            modes.variants().map(row).collect()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_differ_and_descriptions_are_one_line() {
        let rows = rows();
        let mut names: Vec<&str> = rows.iter().map(|row| row.name.as_str()).collect();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), rows.len());
        assert!(rows.iter().all(|row| !row.case.about.contains(['\n', '\t'])));
    }

    #[test]
    fn each_module_of_the_order_has_cases() {
        for module in ORDER {
            let found = tables().any(|table| table.module.ends_with(&format!("::{module}")));
            assert!(found, "{module} has no cases");
        }
    }

    #[test]
    fn the_modes_at_every_change_are_modes_of_the_case() {
        for case in tables().flat_map(|table| table.cases) {
            if let Kind::Guest(modes, _) = &case.kind {
                assert!(modes.are_sound(), "{}", case.name);
            }
        }
    }
}
