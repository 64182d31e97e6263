// SPDX-License-Identifier: Apache-2.0
//! Draws the state on a terminal of any size.

use super::app::App;
use super::sample::{Disk, Rates};
use ratatui::Frame;
use ratatui::layout::{Constraint, Layout, Rect};
use ratatui::style::{Color, Modifier, Style};
use ratatui::text::Line;
use ratatui::widgets::{Cell, Paragraph, Row, Sparkline, Table, TableState};
use std::collections::VecDeque;

const KEYS: &str = "q quit  enter queues  up/down select  sort: b i n p  r reverse";
/// Columns of the history in the list of disks.
const HISTORY_CELLS: usize = 16;

/// Draws all of it.
pub(super) fn draw(frame: &mut Frame<'_>, app: &App) {
    let layout =
        Layout::vertical([Constraint::Length(1), Constraint::Min(1), Constraint::Length(1)]);
    let [head, body, foot] = layout.areas(frame.area());
    frame.render_widget(head_line(app), head);
    match app.selected_row().filter(|_| app.in_depth) {
        Some(row) => draw_disk(frame, body, app, &app.disks[row]),
        None => draw_disks(frame, body, app),
    }
    frame.render_widget(Line::from(KEYS).style(Modifier::DIM), foot);
}

fn head_line(app: &App) -> Paragraph<'_> {
    match &app.lost {
        Some(why) => {
            let text = format!("no daemon, tries again: {why}");
            Paragraph::new(text).style(Style::new().fg(Color::Red).bold())
        }
        None => {
            let order = if app.reversed { ", reversed" } else { "" };
            let text = format!("{} disks, by {}{order}", app.disks.len(), app.sort.name());
            Paragraph::new(text).style(Modifier::BOLD)
        }
    }
}

fn draw_disks(frame: &mut Frame<'_>, area: Rect, app: &App) {
    let rows = app.disks.iter().map(|disk| {
        let guest = if disk.connected { "yes" } else { "no" };
        let history = app.history.get(&disk.name).map(bars).unwrap_or_default();
        let own = [disk.name.clone(), disk.state.clone(), disk.plane.clone(), guest.to_owned()];
        let cells = own.into_iter().chain(rate_cells(&disk.rates)).chain([history]);
        Row::new(cells.map(Cell::from)).style(style(disk))
    });
    let names =
        ["NAME", "STATE", "PLANE", "GUEST", "IOPS", "READ/S", "WRITE/S", "P50", "P99", "IOPS"];
    let longest = app.disks.iter().map(|disk| disk.name.len()).max().unwrap_or(0);
    let widths = [longest.clamp(8, 24) as u16, 8, 6, 5, 8, 8, 8, 7, 7, HISTORY_CELLS as u16];
    let table = Table::new(rows, widths.map(Constraint::Length))
        .header(Row::new(names).style(Modifier::UNDERLINED))
        .row_highlight_style(Modifier::REVERSED);
    let mut state = TableState::default().with_selected(app.selected_row());
    frame.render_stateful_widget(table, area, &mut state);
}

fn style(disk: &Disk) -> Style {
    match &*disk.state {
        "serving" if disk.rates.failed == 0.0 => Style::new(),
        "serving" | "halted" | "silent" | "failed" => Style::new().fg(Color::Red),
        _ => Style::new().fg(Color::Yellow),
    }
}

/// One disk in depth: its history, and its queues.
fn draw_disk(frame: &mut Frame<'_>, area: Rect, app: &App, disk: &Disk) {
    let rows = disk.queues.len() as u16 + 1; // at most 64 queues
    let layout = Layout::vertical([
        Constraint::Length(1),
        Constraint::Length(1),
        Constraint::Length(disk.jobs.len() as u16),
        Constraint::Max(5),
        Constraint::Max(rows + 1),
        Constraint::Min(rows.min(3)),
    ]);
    let [about, all, jobs, chart, queues, threads] = layout.areas(area);
    let lines: Vec<Line<'_>> = disk.jobs.iter().map(|job| Line::from(&**job)).collect();
    frame.render_widget(Paragraph::new(lines), jobs);
    let text = format!("{}: {}, data plane {}", disk.name, disk.state, disk.plane);
    frame.render_widget(Line::from(text).style(style(disk)), about);
    let [iops, read, write, p50, p99] = rate_cells(&disk.rates);
    let text = format!("{iops} requests/s, reads {read}, writes {write}, p50 {p50}, p99 {p99}");
    frame.render_widget(Line::from(text), all);
    let history = app.history.get(&disk.name).into_iter().flatten().rev().copied();
    let newest: Vec<u64> = history.take(chart.width.into()).collect();
    frame.render_widget(Sparkline::default().data(newest.into_iter().rev()), chart);
    let rows = disk.queues.iter().enumerate().map(|(index, rates)| {
        let more = [rates.failed, rates.kicks, rates.calls, rates.throttled].map(short);
        let cells = [index.to_string()].into_iter().chain(rate_cells(rates)).chain(more);
        Row::new(cells.map(Cell::from))
    });
    let names =
        ["QUEUE", "IOPS", "READ/S", "WRITE/S", "P50", "P99", "FAILED", "KICKS", "CALLS", "LIMITED"];
    let table = Table::new(rows, [Constraint::Length(8); 10])
        .header(Row::new(names).style(Modifier::UNDERLINED));
    frame.render_widget(table, queues);
    frame.render_widget(table_of_threads(&disk.queues), threads);
}

/// The work of the threads of the queues.
fn table_of_threads(queues: &[Rates]) -> Table<'static> {
    let percent = |share: f64| format!("{:.0}%", 100.0 * share);
    let rows = queues.iter().enumerate().map(|(index, rates)| {
        let hits =
            if rates.polls > 0.0 { percent(rates.poll_hits / rates.polls) } else { "-".into() };
        let holds = rates.choices.coalescing.map_or("-", |on| if on { "yes" } else { "no" });
        let batch = rates.choices.batch_size.map_or("-".to_owned(), |size| size.to_string());
        Row::new([
            index.to_string(),
            percent(rates.polling),
            short(rates.polls),
            hits,
            short(rates.suppressed),
            batch,
            holds.to_owned(),
            rates.recovered.to_string(),
        ])
    });
    let names = ["QUEUE", "POLLING", "POLLS", "HITS", "UNWANTED", "BATCH", "HOLDS", "RECOVERED"];
    Table::new(rows, [8, 8, 8, 8, 8, 8, 8, 9].map(Constraint::Length))
        .header(Row::new(names).style(Modifier::UNDERLINED))
}

/// Requests, bytes read and written, and latencies.
pub(super) fn rate_cells(rates: &Rates) -> [String; 5] {
    let [iops, read, write] = [rates.iops, rates.read_bytes, rates.write_bytes].map(short);
    [iops, read, write, time(rates.p50_us), time(rates.p99_us)]
}

/// A number with three digits or more of it, and K, M or G for thousands.
fn short(number: f64) -> String {
    match number {
        small if small < 9999.5 => format!("{small:.0}"),
        thousands if thousands < 9_999_500.0 => format!("{:.0}K", thousands / 1e3),
        millions if millions < 9_999_500_000.0 => format!("{:.0}M", millions / 1e6),
        more => format!("{:.0}G", more / 1e9),
    }
}

/// The bound of a latency.
fn time(bound_us: Option<u64>) -> String {
    match bound_us {
        None => "-".to_owned(),
        Some(us) if us < 1000 => format!("<{us}us"),
        Some(us) if us < 1_000_000 => format!("<{}ms", us.div_ceil(1000)),
        Some(us) => format!("<{}s", us.div_ceil(1_000_000)),
    }
}

/// The newest numbers of a history as bars of a text.
fn bars(history: &VecDeque<u64>) -> String {
    const BARS: [char; 9] = [' ', '▁', '▂', '▃', '▄', '▅', '▆', '▇', '█'];
    let newest = history.iter().skip(history.len().saturating_sub(HISTORY_CELLS));
    let most = newest.clone().max().copied().unwrap_or(0).max(1);
    newest.map(|&number| BARS[(number * 8).div_ceil(most) as usize]).collect()
}

#[cfg(test)]
mod tests {
    use super::super::app::SortKey;
    use super::super::sample::Choices;
    use super::*;
    use ratatui::Terminal;
    use ratatui::backend::TestBackend;
    use ratatui::crossterm::event::{KeyCode, KeyEvent, KeyModifiers};

    fn disk(name: &str, iops: f64, p99_us: Option<u64>) -> Disk {
        let rates = Rates { iops, read_bytes: iops * 4096.0, p99_us, ..Rates::default() };
        let choices = Choices { batch_size: Some(16), coalescing: Some(true) };
        let second = Rates { kicks: 7.0, suppressed: 7.0, polls: 40.0, ..Rates::default() };
        let second = Rates { poll_hits: 30.0, polling: 0.25, recovered: 3, choices, ..second };
        let queues = vec![rates, second];
        let (state, plane) = ("serving".to_owned(), "uring".to_owned());
        let jobs = vec!["mirror to /b: ready, 100%".to_owned(); usize::from(name == "slow")];
        Disk { name: name.to_owned(), state, plane, connected: true, jobs, rates, queues }
    }

    fn app() -> App {
        let mut app = App::new(SortKey::Iops);
        app.disks = vec![
            disk("idle", 0.0, None),
            disk("busy", 12_345.0, Some(128)),
            disk("slow", 50.0, Some(65_536)),
        ];
        app.history.insert("busy".into(), [0, 50, 100].into());
        press(&mut app, KeyCode::Null);
        app
    }

    fn press(app: &mut App, code: KeyCode) -> bool {
        app.key(KeyEvent::new(code, KeyModifiers::NONE))
    }

    fn drawn(app: &App, width: u16, height: u16) -> Vec<String> {
        let mut terminal = Terminal::new(TestBackend::new(width, height)).unwrap();
        terminal.draw(|frame| draw(frame, app)).unwrap();
        let text = terminal.backend().to_string();
        text.lines().map(|line| line.trim_matches('"').trim_end().to_owned()).collect()
    }

    fn names(app: &App) -> Vec<&str> {
        app.disks.iter().map(|disk| &*disk.name).collect()
    }

    #[test]
    fn the_list_has_a_row_for_each_disk_in_the_chosen_order() {
        let mut app = app();
        let lines = drawn(&app, 100, 8);
        assert_eq!(lines[0], "3 disks, by iops");
        assert!(lines[1].starts_with("NAME     STATE    PLANE  GUEST IOPS"), "{lines:#?}");
        let busy = "busy     serving  uring  yes   12K      51M      0        -       <128us   ▄█";
        assert_eq!(lines[2], busy);
        assert_eq!(names(&app), ["busy", "slow", "idle"]);
        for (key, order) in [
            ('p', ["slow", "busy", "idle"]),
            ('n', ["busy", "idle", "slow"]),
            ('r', ["slow", "idle", "busy"]),
            ('b', ["idle", "slow", "busy"]),
        ] {
            press(&mut app, KeyCode::Char(key));
            assert_eq!(names(&app), order, "{key}");
        }
        assert_eq!(app.selected.as_deref(), Some("busy"), "the selection moves with its disk");
    }

    #[test]
    fn a_disk_in_depth_has_its_queues() {
        let mut app = app();
        press(&mut app, KeyCode::Down);
        press(&mut app, KeyCode::Enter);
        let lines = drawn(&app, 90, 18);
        assert_eq!(lines[1], "slow: serving, data plane uring");
        assert_eq!(lines[2], "50 requests/s, reads 205K, writes 0, p50 -, p99 <66ms");
        assert_eq!(lines[3], "mirror to /b: ready, 100%");
        let of_second: Vec<&String> = lines.iter().filter(|line| line.starts_with("1  ")).collect();
        assert!(of_second[0].contains("7        0        0"), "{lines:#?}");
        let threads = "1        25%      40       75%      7        16       yes      3";
        assert_eq!(of_second[1], threads, "{lines:#?}");
        assert!(!press(&mut app, KeyCode::Esc) && !app.in_depth, "it ended");
        assert!(press(&mut app, KeyCode::Esc), "it goes on");
    }

    #[test]
    fn a_daemon_that_has_gone_is_told_and_the_rows_stay() {
        let mut app = app();
        app.sampled(Err(crate::failure::Failure::run("ask the daemon", "it has gone", "start it")));
        let lines = drawn(&app, 90, 8);
        assert!(
            lines[0].starts_with("no daemon, tries again: cannot ask the daemon"),
            "{lines:#?}"
        );
        assert!(lines[2].starts_with("busy"), "{lines:#?}");
    }

    #[test]
    fn no_size_of_a_terminal_panics() {
        let mut app = app();
        for in_depth in [false, true] {
            app.in_depth = in_depth;
            for (width, height) in [(1, 1), (2, 3), (10, 2), (40, 10), (300, 100)] {
                drawn(&app, width, height);
            }
        }
        drawn(&App::new(SortKey::Name), 80, 24);
    }

    #[test]
    fn numbers_are_short() {
        let shown = [0.4, 999.0, 9999.0, 10_000.0, 12e6, 3e12].map(short);
        assert_eq!(shown, ["0", "999", "9999", "10K", "12M", "3000G"]);
        let shown = [None, Some(512), Some(1024), Some(1 << 22)].map(time);
        assert_eq!(shown, ["-", "<512us", "<2ms", "<5s"]);
    }
}
