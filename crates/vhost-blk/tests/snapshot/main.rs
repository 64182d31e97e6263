// SPDX-License-Identifier: Apache-2.0
//! `vhost-blk ctl snapshot` and `commit`: a guest goes on in an overlay, and in its backing file.

#[path = "../common/mod.rs"]
mod common;
mod crash;
mod hangs;
#[path = "../common/images.rs"]
mod images;
#[path = "../../../vhost-user/tests/common/load.rs"]
#[allow(dead_code, unreachable_pub, reason = "each test program uses its part")]
mod load;
mod merged;
#[path = "../common/moments.rs"]
mod moments;
mod refused;
#[path = "../common/rig.rs"]
#[allow(dead_code, reason = "each test program uses its part")]
mod rig;
#[path = "../common/stamped.rs"]
mod stamped;
mod taken;

use common::{pattern, wait_until};
use images::{
    BYTES, QUEUES, add, add_raw, begin, check_after_kill, content, error_of, fill, guest, image,
    mark, text, unmark, while_rewritten,
};
use kit::mount;
