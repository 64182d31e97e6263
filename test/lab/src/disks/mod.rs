// SPDX-License-Identifier: Apache-2.0
//! The helper of a guest machine, on the real machine: serves disks that are not QEMU's own, as the
//! cases ask.
//!
//! It is a process of its own (`lab serve-disks`), lives as long as the VM and ends with the lab. It
//! has one connection at a time: QEMU's, which is the other end of a serial port of the machine.
//!
//! * `served`: what can be behind a socket.
//! * `journal`: a disk that keeps all writes, for power cuts.
//! * `liar`: a device that lies.

mod journal;
mod liar;
mod served;

use std::collections::HashMap;
use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

use kit::disks::{Answer, Ask};

use served::{Served, sized_file};

/// Serves until killed.
pub fn run(directory: &Path) -> Result<()> {
    let socket = directory.join("helper");
    let listener = UnixListener::bind(&socket).with_context(|| socket.display().to_string())?;
    let mut helper = Helper { directory: directory.to_owned(), served: HashMap::new() };
    for stream in listener.incoming() {
        if let Err(why) = helper.listen(&stream?) {
            eprintln!("helper: {why:#}");
        }
    }
    Ok(())
}

struct Helper {
    directory: PathBuf,
    served: HashMap<String, Served>,
}

impl Helper {
    fn listen(&mut self, stream: &UnixStream) -> Result<()> {
        let mut out = stream;
        for line in BufReader::new(stream).lines() {
            let line = line?;
            let answer = match serde_json::from_str::<Ask>(&line) {
                Ok(ask) => self.answer(&ask).unwrap_or_else(|why| {
                    eprintln!("helper: {line}: {why:#}");
                    Answer::Error(format!("{why:#}"))
                }),
                Err(why) => Answer::Error(format!("'{line}': {why}")),
            };
            writeln!(out, "{}", serde_json::to_string(&answer)?)?;
        }
        Ok(())
    }

    fn answer(&mut self, ask: &Ask) -> Result<Answer> {
        let socket = |name: &str| self.directory.join(format!("{name}.socket"));
        Ok(match ask {
            Ask::Image { name, bytes } => {
                let path = self.directory.join(name);
                sized_file(&path, *bytes)?;
                Answer::Path(path)
            }
            Ask::RemoveImage { name } => {
                fs::remove_file(self.directory.join(name))?;
                Answer::Done
            }
            Ask::Daemon { name, args } => self.serve(
                name,
                Served::daemon(&socket(name), &self.directory.join(format!("{name}.log")), args)?,
            ),
            Ask::Journal { name, bytes, physical_block_bytes: block } => {
                self.serve(name, Served::journal(&socket(name), *bytes, *block)?)
            }
            Ask::Liar { name, lie, after, seed } => {
                self.serve(name, Served::liar(&socket(name), *lie, *after, *seed)?)
            }
            Ask::Signal { name, signal } => {
                self.of(name)?.signal(signal)?;
                Answer::Done
            }
            Ask::Control { name, words } => {
                self.of(name)?.control(words)?;
                Answer::Done
            }
            Ask::Count { journal } => Answer::Count(self.of(journal)?.log()?.entries()),
            Ask::Hold { journal, held } => {
                self.of(journal)?.log()?.hold(*held);
                Answer::Done
            }
            Ask::Cut { journal, image, at, seed } => {
                let path = self.directory.join(image);
                let lost = self.of(journal)?.log()?.cut(&path, *at, *seed)?;
                eprintln!("helper: {image}: {lost} writes lost");
                Answer::Path(path)
            }
            Ask::Stop { name } => {
                self.of(name)?;
                if let Some(served) = self.served.remove(name) {
                    served.stop()?;
                }
                Answer::Done
            }
        })
    }

    fn serve(&mut self, name: &str, served: Served) -> Answer {
        let path = served.socket().to_owned();
        self.served.insert(name.to_owned(), served);
        Answer::Path(path)
    }

    fn of(&mut self, name: &str) -> Result<&mut Served> {
        self.served.get_mut(name).with_context(|| format!("nothing is called {name}"))
    }
}
