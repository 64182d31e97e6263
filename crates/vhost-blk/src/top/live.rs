// SPDX-License-Identifier: Apache-2.0
//! The live view on a terminal.

use super::app::App;
use super::sample::Sample;
use super::{Sampler, TopArgs, view};
use crate::failure::Failure;
use ratatui::DefaultTerminal;
use ratatui::crossterm::event::{self, Event};
use ratatui::crossterm::terminal::disable_raw_mode;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;
use std::io;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::Duration;

/// Time that the main thread has to end after a signal. A terminal that takes no output holds it for
/// ever.
const END_MAX: Duration = Duration::from_secs(2);

/// A reason to draw again, or to end.
enum Message {
    Sampled(Result<Sample, Failure>),
    Terminal(Event),
    End,
}

/// Restores the terminal when it is dropped. `ratatui::try_init` makes a panic do so, too.
struct Screen(DefaultTerminal);

impl Drop for Screen {
    fn drop(&mut self) {
        ratatui::restore();
    }
}

/// Shows the disks until a key or a signal ends it.
pub(super) fn run(args: &TopArgs, first: Sample) -> Result<(), Failure> {
    let failed =
        |error: io::Error| Failure::run("use the terminal", error, "use --once, or another one");
    let (sender, messages) = channel();
    wait_for_signals(sender.clone()).map_err(failed)?;
    sample_on(args, sender.clone()).map_err(failed)?;
    let mut screen = Screen(ratatui::try_init().map_err(failed)?);
    std::thread::Builder::new()
        .name("keys".into())
        .spawn(move || read_keys(&sender))
        .map_err(failed)?;
    let mut app = App::new(args.sort);
    app.sampled(Ok(first));
    show(&mut screen.0, app, &messages).map_err(failed)
}

fn show(
    terminal: &mut DefaultTerminal,
    mut app: App,
    messages: &Receiver<Message>,
) -> io::Result<()> {
    loop {
        terminal.draw(|frame| view::draw(frame, &app))?;
        match messages.recv() {
            Ok(Message::Sampled(sample)) => app.sampled(sample),
            Ok(Message::Terminal(Event::Key(key))) if app.key(key) => return Ok(()),
            Ok(Message::Terminal(_)) => {} // the next drawing adopts a new size
            Ok(Message::End) | Err(_) => return Ok(()),
        }
    }
}

/// Sends a sample after each interval.
fn sample_on(args: &TopArgs, sender: Sender<Message>) -> io::Result<()> {
    let args = args.clone();
    let body = move || {
        let mut sampler = Sampler::new(&args.control_path);
        loop {
            std::thread::sleep(args.interval);
            if sender.send(Message::Sampled(sampler.sample())).is_err() {
                return;
            }
        }
    };
    std::thread::Builder::new().name("samples".into()).spawn(body).map(drop)
}

fn read_keys(sender: &Sender<Message>) {
    loop {
        let message = event::read().map_or(Message::End, Message::Terminal);
        let is_end = matches!(message, Message::End);
        if sender.send(message).is_err() || is_end {
            return;
        }
    }
}

fn wait_for_signals(sender: Sender<Message>) -> io::Result<()> {
    let mut signals = Signals::new([SIGHUP, SIGINT, SIGTERM])?;
    let body = move || {
        let number = signals.forever().next().unwrap_or(SIGTERM);
        let _ = sender.send(Message::End); // the main thread may have ended
        std::thread::sleep(END_MAX);
        let _ = disable_raw_mode(); // needs no output; the rest of the screen cannot be restored
        std::process::exit(128 + number);
    };
    std::thread::Builder::new().name("signals".into()).spawn(body).map(drop)
}
