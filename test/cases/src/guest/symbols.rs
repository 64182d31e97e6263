// SPDX-License-Identifier: Apache-2.0
//! Locations of a module's functions, precise enough to find them in a stack.

use std::ops::Range;

use anyhow::{Context, Result};
use kit::faults::Fault;

use crate::guest::system::read;

/// Addresses of a module's functions, in ascending order.
#[derive(Debug)]
pub(crate) struct Symbols {
    module: String,
    functions: Vec<(u64, String)>,
}

/// A range of code, which ends at the start of the function after it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Code(Range<u64>);

impl Symbols {
    /// Reads the symbols of a loaded module.
    pub(crate) fn of(module: &str) -> Result<Self> {
        Ok(Self::parse(module, &read("/proc/kallsyms")?))
    }

    fn parse(module: &str, symbols: &str) -> Self {
        let of_module = format!("[{module}]");
        let mut functions: Vec<(u64, String)> = symbols
            .lines()
            .filter_map(|line| {
                let mut words = line.split_whitespace();
                let (address, kind, name) = (words.next()?, words.next()?, words.next()?);
                let is_function = matches!(kind, "t" | "T") && words.next() == Some(&of_module);
                let address = u64::from_str_radix(address, 16).ok()?;
                is_function.then(|| (address, name.to_owned()))
            })
            .collect();
        functions.sort_unstable();
        Self { module: module.to_owned(), functions }
    }

    /// The code of all functions except the last, whose end is unknown.
    pub(crate) fn all(&self) -> Result<Code> {
        let ends = self.functions.first().zip(self.functions.last());
        let code = ends.map(|((first, _), (last, _))| Code(*first..*last));
        let code = code.filter(|code| !code.0.is_empty());
        code.with_context(|| format!("the kernel does not say where {} is", self.module))
    }

    /// The code of one function.
    pub(crate) fn function(&self, name: &str) -> Result<Code> {
        let start = self.functions.iter().find(|(_, known)| known == name).map(|(at, _)| *at);
        // Several names can have the same address.
        let end = self.functions.iter().map(|(at, _)| *at).find(|&at| Some(at) > start);
        let code = start.zip(end).map(|(start, end)| Code(start..end));
        code.with_context(|| format!("the kernel does not say where {} has {name}", self.module))
    }
}

/// Allocations that are refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Refused {
    /// Allocations in contexts that cannot wait.
    Atomic,
    /// All allocations.
    Any,
}

impl Code {
    /// Refuses a percentage of the allocations by this code and its callees.
    ///
    /// # Errors
    /// A skip if this kernel does not support it.
    pub(crate) fn refuse_memory(&self, refused: Refused, percent: u32) -> Result<Fault> {
        let waiting_is_spared = if refused == Refused::Atomic { "Y" } else { "N" };
        let only_there = [
            ("ignore-gfp-wait", waiting_is_spared),
            ("require-start", &*format!("{:#x}", self.0.start)),
            ("require-end", &*format!("{:#x}", self.0.end)),
        ];
        Fault::on("failslab", percent, &only_there)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SYMBOLS: &str = "ffffffffc0100040 t second\t[virtio_blk]\n\
                           ffffffff81000000 T of_the_kernel\n\
                           ffffffffc0100000 t first\t[virtio_blk]\n\
                           ffffffffc0100010 t alias_of_it\t[virtio_blk]\n\
                           ffffffffc0100010 t first_and_half\t[virtio_blk]\n\
                           ffffffffc0100020 d data\t[virtio_blk]\n\
                           ffffffffc0100080 t third\t[virtio_blk]\n\
                           ffffffffc0200000 t other\t[nvme]\n";

    #[test]
    fn a_function_ends_where_the_next_one_begins() {
        let symbols = Symbols::parse("virtio_blk", SYMBOLS);
        let code = |name| symbols.function(name).ok().map(|code| code.0);
        assert_eq!(code("first"), Some(0xffff_ffff_c010_0000..0xffff_ffff_c010_0010));
        assert_eq!(code("alias_of_it"), Some(0xffff_ffff_c010_0010..0xffff_ffff_c010_0040));
        assert_eq!((code("third"), code("data"), code("other")), (None, None, None));
    }

    #[test]
    fn all_of_a_module_is_from_its_first_function_to_its_last() {
        let all = |module| Symbols::parse(module, SYMBOLS).all().ok().map(|code| code.0);
        assert_eq!(all("virtio_blk"), Some(0xffff_ffff_c010_0000..0xffff_ffff_c010_0080));
        assert_eq!(all("missing"), None);
    }
}
