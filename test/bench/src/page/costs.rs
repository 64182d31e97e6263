// SPDX-License-Identifier: Apache-2.0
//! The cost table of the prediction: published figures of other machines, each as a range.

/// A published range, the cheap end first.
#[derive(Clone, Copy, Debug)]
pub(super) struct Cost {
    pub(super) name: &'static str,
    pub(super) unit: &'static str,
    /// The end that gives the greater rate, then the other one.
    pub(super) best: f64,
    pub(super) worst: f64,
    pub(super) source: &'static str,
}

/// Instructions of one cycle on average.
pub(super) const PER_CYCLE: Cost = Cost {
    name: "instructions of a cycle",
    unit: "instructions",
    best: 1.0,
    worst: 0.78,
    source: "B. Gregg, CPU Utilization is Wrong, 2017: a busy server with 0.78, and 1.0 as the limit \
             above which code is not bound by memory",
};

/// An exit of the guest and the entry after it, without caches that must be filled again.
pub(super) const EXIT: Cost = Cost {
    name: "an exit and the entry after it",
    unit: "cycles",
    best: 1344.0,
    worst: 2576.0,
    source: "linux-kernel, December 2020, on SEV-ES and vmload: 1344 around VMRUN, 2576 for the whole \
             call; Landau and others, SplitX, WIOV 2011: 2000, and caches can cost ten times as much",
};

/// An interrupt for a virtual CPU.
pub(super) const INTERRUPT: Cost = Cost {
    name: "an interrupt for another virtual CPU, sent and taken",
    unit: "cycles",
    best: 3644.8,
    worst: 6059.0,
    source: "kvm list, IPI virtualization support for VM (Intel): means of kvm-unit-tests, the least \
             with hardware support, the greatest without",
};

/// All constants.
pub(super) const ALL: [Cost; 3] = [PER_CYCLE, EXIT, INTERRUPT];

/// Cycles a second of the core for which the prediction is made: a unit, not a measurement.
pub(super) const CORE_HZ: f64 = 3e9;
