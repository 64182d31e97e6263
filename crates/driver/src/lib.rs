// SPDX-License-Identifier: Apache-2.0
//! To be written.
