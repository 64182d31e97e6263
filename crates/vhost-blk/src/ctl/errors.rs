// SPDX-License-Identifier: Apache-2.0
//! `vhost-blk ctl set-errors`.

use super::Named;
use crate::values::{self, NewIoTimeout, OnError, OnReadError, word};
use clap::Args;
use serde_json::{Value, json};

/// Arguments of `vhost-blk ctl set-errors`.
#[derive(Args, Clone, Debug)]
#[command(group = clap::ArgGroup::new("errors").required(true).multiple(true))]
pub struct ErrorsArgs {
    /// The disk.
    #[command(flatten)]
    pub disk: Named,
    /// As --on-error of serve, for reads, too
    #[arg(long, value_name = "POLICY", group = "errors")]
    pub on_error: Option<OnError>,
    /// For reads alone
    #[arg(long, value_name = "POLICY", group = "errors")]
    pub on_read_error: Option<OnReadError>,
    /// As --io-timeout of serve; 0: none
    #[arg(long, value_name = "SECONDS", value_parser = values::new_io_timeout, group = "errors")]
    pub io_timeout: Option<NewIoTimeout>,
    /// Write these options into the file of the disk, too
    #[arg(long)]
    pub save: bool,
}

impl ErrorsArgs {
    /// The parameters of the call.
    pub(super) fn parameters(&self) -> Value {
        let ErrorsArgs { disk, on_error, on_read_error, io_timeout, save } = self;
        let seconds = |new: NewIoTimeout| new.0.map_or(0.0, |limit| limit.0.as_secs_f64());
        json!({
            "name": disk.name, "on_error": on_error.map(word),
            "on_read_error": on_read_error.map(word), "io_timeout": io_timeout.map(seconds),
            "save": save,
        })
    }
}
