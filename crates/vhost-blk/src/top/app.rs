// SPDX-License-Identifier: Apache-2.0
//! The state of `vhost-blk top` between two keys or samples.

use super::sample::{Disk, Sample, rates};
use crate::failure::Failure;
use clap::ValueEnum;
use ratatui::crossterm::event::{KeyCode, KeyEvent, KeyEventKind, KeyModifiers};
use std::cmp::Ordering;
use std::collections::{BTreeMap, VecDeque};

/// Maximum samples of the history of a disk.
const HISTORY_MAX: usize = 120;

/// The order of the disks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum SortKey {
    /// Bytes read and written per second, the most first
    Bandwidth,
    /// Requests per second, the most first
    Iops,
    /// Name
    Name,
    /// Latency below which 99 % of the requests are, the longest first
    P99,
}

impl SortKey {
    fn compare(self, one: &Disk, other: &Disk) -> Ordering {
        let (a, b) = (&one.rates, &other.rates);
        match self {
            SortKey::Bandwidth => b.bytes().total_cmp(&a.bytes()),
            SortKey::Iops => b.iops.total_cmp(&a.iops),
            SortKey::Name => Ordering::Equal,
            SortKey::P99 => b.p99_us.cmp(&a.p99_us),
        }
        .then_with(|| one.name.cmp(&other.name))
    }

    /// The name on the command line.
    pub(super) fn name(self) -> String {
        self.to_possible_value().map_or_else(String::new, |value| value.get_name().to_owned())
    }
}

/// The state.
pub(super) struct App {
    pub(super) disks: Vec<Disk>,
    pub(super) sort: SortKey,
    pub(super) reversed: bool,
    /// Name of the selected disk.
    pub(super) selected: Option<String>,
    /// The queues of the selected disk are shown.
    pub(super) in_depth: bool,
    /// The reason, while the daemon does not answer.
    pub(super) lost: Option<String>,
    /// Requests per second of each disk so far.
    pub(super) history: BTreeMap<String, VecDeque<u64>>,
    last: Option<Sample>,
}

impl App {
    pub(super) fn new(sort: SortKey) -> App {
        App {
            disks: Vec::new(),
            sort,
            reversed: false,
            selected: None,
            in_depth: false,
            lost: None,
            history: BTreeMap::new(),
            last: None,
        }
    }

    /// Adopts a sample, or the reason why there is none. The first sample after a loss gives no rates:
    /// another daemon may answer.
    pub(super) fn sampled(&mut self, sample: Result<Sample, Failure>) {
        let sample = match sample {
            Ok(sample) => sample,
            Err(failure) => {
                self.lost = Some(failure.to_string());
                self.last = None;
                return;
            }
        };
        self.lost = None;
        self.disks = rates(self.last.as_ref().unwrap_or(&sample), &sample);
        let disks = &sample.disks;
        self.history.retain(|name, _| disks.contains_key(name));
        for disk in self.disks.iter().filter(|_| self.last.is_some()) {
            let history = self.history.entry(disk.name.clone()).or_default();
            history.push_back(disk.rates.iops as u64);
            history.drain(..history.len().saturating_sub(HISTORY_MAX));
        }
        self.last = Some(sample);
        self.order();
    }

    /// Sorts the disks, and keeps one selected.
    fn order(&mut self) {
        let (sort, reversed) = (self.sort, self.reversed);
        self.disks.sort_by(|one, other| match reversed {
            false => sort.compare(one, other),
            true => sort.compare(other, one),
        });
        if self.selected_row().is_none() {
            self.selected = self.disks.first().map(|disk| disk.name.clone());
            self.in_depth = false;
        }
    }

    /// The row of the selected disk.
    pub(super) fn selected_row(&self) -> Option<usize> {
        let name = self.selected.as_ref()?;
        self.disks.iter().position(|disk| disk.name == *name)
    }

    /// Handles a key. Returns whether the program ends.
    pub(super) fn key(&mut self, key: KeyEvent) -> bool {
        if key.kind == KeyEventKind::Release {
            return false;
        }
        match key.code {
            KeyCode::Char('c') if key.modifiers.contains(KeyModifiers::CONTROL) => return true,
            KeyCode::Char('q') => return true,
            KeyCode::Esc if !self.in_depth => return true,
            KeyCode::Esc | KeyCode::Backspace => self.in_depth = false,
            KeyCode::Enter => self.in_depth = !self.in_depth && self.selected.is_some(),
            KeyCode::Up | KeyCode::Char('k') => self.select(-1),
            KeyCode::Down | KeyCode::Char('j') => self.select(1),
            KeyCode::Char('b') => self.sort = SortKey::Bandwidth,
            KeyCode::Char('i') => self.sort = SortKey::Iops,
            KeyCode::Char('n') => self.sort = SortKey::Name,
            KeyCode::Char('p') => self.sort = SortKey::P99,
            KeyCode::Char('r') => self.reversed = !self.reversed,
            _ => {}
        }
        self.order();
        false
    }

    fn select(&mut self, step: isize) {
        let row = self.selected_row().unwrap_or(0).saturating_add_signed(step);
        let row = row.min(self.disks.len().saturating_sub(1));
        self.selected = self.disks.get(row).map(|disk| disk.name.clone());
    }
}
