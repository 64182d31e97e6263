// SPDX-License-Identifier: Apache-2.0
//! `vhost-blk info`: describes an image and its backing files, and never changes one.

use super::readable_bytes;
use crate::failure::Failure;
use crate::output::print;
use backend::lock::User;
use backend::{Marked, quoted};
use clap::Args;
use qcow2::AllowBacking;
use qcow2::inspect::{self, FileFacts, Inspection, Needs, Qcow2Facts, Refusal};
use serde_json::{Value, json};
use std::fmt::Write as _;
use std::path::{Path, PathBuf};

/// Arguments of `vhost-blk info`.
#[derive(Args, Debug)]
pub struct InfoArgs {
    /// An image or a block device; it may be in use
    pub path: PathBuf,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

/// Runs `vhost-blk info`.
///
/// # Errors
/// [`Failure`] if the image cannot be read. One that the daemon refuses is described.
pub fn info(args: &InfoArgs) -> Result<(), Failure> {
    let found = inspect::inspect(&args.path).map_err(|why| Failure::told("read the image", why))?;
    print(if args.json { as_json(&args.path, &found) } else { as_text(&args.path, &found) })
}

/// The options of `serve` for the image.
pub(crate) fn options(path: &Path, needs: Needs) -> String {
    let mut text = format!("--blk-file {}", quoted(path));
    if needs.qcow2 {
        text.push_str(" --format qcow2");
    }
    match needs.allow_backing {
        AllowBacking::Off => {}
        AllowBacking::SameDir => text.push_str(" --allow-backing same-dir"),
        AllowBacking::Any => text.push_str(" --allow-backing any"),
    }
    if needs.read_only {
        text.push_str(" --read-only");
    }
    text
}

fn user_text(user: &User) -> String {
    let holder = user.holder.as_deref().unwrap_or("another program");
    format!("{holder}, which {}", if user.writes { "may write" } else { "reads" })
}

fn size_text(bytes: u64) -> String {
    match bytes {
        0..1024 => readable_bytes(bytes),
        _ => format!("{} ({bytes} bytes)", readable_bytes(bytes)),
    }
}

fn as_text(path: &Path, found: &Inspection) -> String {
    let mut text = String::new();
    for (number, file) in found.files.iter().enumerate() {
        let key = if number == 0 { "image" } else { "backing file" };
        lines_of(key, file, &mut text);
    }
    if let Some(broken) = &found.broken {
        line(&mut text, "backing file", &format!("{}; {}", broken.what, broken.remedy));
    }
    let serve = match &found.serve {
        Ok(needs) => format!("with {}", options(path, *needs)),
        Err(Refusal { what, remedy }) => format!("refused: {what}; {remedy}"),
    };
    line(&mut text, "serve", &serve);
    text
}

fn line(text: &mut String, key: &str, value: &str) {
    writeln!(text, "{:<15}{value}", format!("{key}:")).expect("a string grows");
}

/// The format of a file, in words.
pub(crate) fn format(file: &FileFacts) -> String {
    match (&file.qcow2, file.is_device) {
        (Some(qcow2), _) => format!(
            "qcow2, version {}, clusters of {}, {}-bit refcounts",
            qcow2.version,
            readable_bytes(qcow2.cluster_bytes),
            qcow2.refcount_bits
        ),
        (None, true) => "raw, a block device".to_owned(),
        (None, false) => "raw".to_owned(),
    }
}

fn lines_of(key: &str, file: &FileFacts, text: &mut String) {
    line(text, key, &file.path.display().to_string());
    line(text, "  format", &format(file));
    line(text, "  size", &size_text(file.virtual_bytes));
    line(text, "  on disk", &size_text(file.disk_bytes));
    if let Some(Qcow2Facts { features, snapshots, backing, .. }) = &file.qcow2 {
        let none = || "none".to_owned();
        line(text, "  features", &if features.is_empty() { none() } else { features.join(", ") });
        if *snapshots > 0 {
            line(text, "  snapshots", &snapshots.to_string());
        }
        if let Some((name, format)) = backing {
            let format = format.as_deref().unwrap_or("format not named");
            line(text, "  backed by", &format!("{name} ({format})"));
        }
    }
    if let Some(user) = &file.user {
        line(text, "  in use by", &user_text(user));
    }
    if let Some(mark) = &file.mark {
        let newer = "has newer data: serve that";
        let (key, of, effect) = match mark {
            Marked::Overlay { overlay, .. } => {
                ("  overlay", overlay, "the daemon refuses to write to it")
            }
            Marked::Merged { backing, .. } => ("  merged into", backing, newer),
            Marked::Moved { storage, .. } => ("  moved to", storage, newer),
        };
        line(text, key, &format!("{} ({effect})", of.display()));
    }
    for Refusal { what, remedy } in &file.refusals {
        line(text, "  refused", &format!("{what}; {remedy}"));
    }
}

fn refusal_json(refusal: &Refusal) -> Value {
    json!({ "reason": refusal.what, "remedy": refusal.remedy })
}

fn as_json(path: &Path, found: &Inspection) -> String {
    let files: Vec<Value> = found.files.iter().map(file_json).collect();
    let serve = match &found.serve {
        Ok(needs) => json!({ "accepted": true, "options": options(path, *needs) }),
        Err(reason) => {
            json!({ "accepted": false, "reason": reason.what, "remedy": reason.remedy })
        }
    };
    let broken = found.broken.as_ref().map(refusal_json);
    let reply = json!({ "files": files, "broken_chain": broken, "serve": serve });
    format!("{reply:#}\n")
}

fn file_json(file: &FileFacts) -> Value {
    let shown = |path: &Path| path.display().to_string();
    let (mut overlay, mut merged_into, mut moved_to) = (None, None, None);
    match &file.mark {
        None => {}
        Some(Marked::Overlay { overlay: of, .. }) => overlay = Some(shown(of)),
        Some(Marked::Merged { backing, .. }) => merged_into = Some(shown(backing)),
        Some(Marked::Moved { storage, .. }) => moved_to = Some(shown(storage)),
    }
    let mut reply = json!({
        "path": file.path.display().to_string(),
        "format": if file.qcow2.is_some() { "qcow2" } else { "raw" },
        "block_device": file.is_device,
        "virtual_bytes": file.virtual_bytes,
        "disk_bytes": file.disk_bytes,
        "user": file.user.as_ref().map(|user| json!({
            "holder": user.holder,
            "writes": user.writes,
        })),
        "overlay": overlay,
        "merged_into": merged_into,
        "moved_to": moved_to,
        "refusals": file.refusals.iter().map(refusal_json).collect::<Vec<_>>(),
    });
    if let Some(qcow2) = &file.qcow2 {
        let (name, format) = match &qcow2.backing {
            Some((name, format)) => (Some(name), format.as_ref()),
            None => (None, None),
        };
        reply["qcow2"] = json!({
            "version": qcow2.version,
            "cluster_bytes": qcow2.cluster_bytes,
            "refcount_bits": qcow2.refcount_bits,
            "features": qcow2.features,
            "snapshots": qcow2.snapshots,
            "backing": name,
            "backing_format": format,
        });
    }
    reply
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_with_a_space_is_one_word_of_the_options() {
        let of = |path: &str| options(Path::new(path), Needs::default());
        assert_eq!(of("/a b"), "--blk-file '/a b'");
        assert_eq!(of("/a-b.img"), "--blk-file /a-b.img");
    }
}
