// SPDX-License-Identifier: Apache-2.0
//! libFuzzer's entry to [`vhost_blk_fuzz::image`].
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| vhost_blk_fuzz::image(data));
