// SPDX-License-Identifier: Apache-2.0
//! The gain of one choice over another, and whether it is more than chance.
//!
//! The rate of a device varies by 10 % and more from one window to the next. Four windows in the
//! order of [`Trial::tries_other`](crate::trial::Trial::tries_other) make a block, in which a
//! steady change affects both choices alike. The relative gains of the blocks have a mean and a
//! standard error: a trial goes on until the error is small enough for the mean, or until it has
//! its last block.

use crate::trial::Proof;

/// Standard deviation of a block's gain at least: a few blocks may agree by chance.
const DEVIATION_MIN: f64 = 0.05;
/// Blocks, and standard errors between the mean and the wanted gain, for a win before the last window. More errors than
/// at the end, because each block is another chance.
const EARLY_BLOCKS: u32 = 4;
const EARLY_ERRORS: f64 = 3.5;
/// Standard errors of a gain for a win with the last window.
const WIN_ERRORS: f64 = 2.5;
/// Standard errors between the mean and the wanted gain for a loss. Fewer: a trial costs the guest a part of its rate.
const LOSS_ERRORS: f64 = 2.0;

/// The gains of the blocks of a trial, as shares of the rate.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Gains {
    blocks: u32,
    sum: f64,
    squares: f64,
}

impl Gains {
    /// Takes the rates of a block, with the present choice and with the other one.
    pub(crate) fn count(&mut self, [present, other]: [f64; 2]) {
        // Over the mean of both: the quotient of two equal rates that vary is larger than 1 on average.
        let gain = 2.0 * (other - present) / (other + present);
        self.blocks += 1;
        self.sum += gain;
        self.squares += gain * gain;
    }

    /// Returns whether the other choice gains more than the share `wanted`, as soon as that is sure. Before the `last`
    /// block `None`: it is not. A negative share is a loss that the other choice may have.
    pub(crate) fn verdict(&self, wanted: f64, proof: Proof, last: bool) -> Option<bool> {
        if self.blocks < 2 {
            return last.then_some(false);
        }
        let blocks = f64::from(self.blocks);
        let mean = self.sum / blocks;
        let variance = (self.squares - self.sum * mean) / (blocks - 1.0);
        let error = (variance.max(DEVIATION_MIN * DEVIATION_MIN) / blocks).sqrt();
        if self.blocks >= EARLY_BLOCKS && mean - wanted > EARLY_ERRORS * error {
            return Some(true);
        }
        if mean + LOSS_ERRORS * error < wanted {
            return Some(false);
        }
        let needs_proof = proof != Proof::Likely && wanted >= 0.0;
        last.then_some(mean > wanted && (!needs_proof || mean > WIN_ERRORS * error))
    }
}

#[cfg(test)]
mod tests {
    use crate::trial::{GAIN, Proof, Step, Trial};

    /// The outcome of a trial with this gain, whose windows vary by the share `noise` (one standard deviation), and its
    /// windows.
    fn trial(
        random: &mut fastrand::Rng,
        proof: Proof,
        wanted: f64,
        gain: f64,
        noise: f64,
    ) -> (bool, u32) {
        let (mut trial, mut windows) = (Trial::new(proof), 0);
        loop {
            // Twelve uniform numbers have a variance of one.
            let normal = (0..12).map(|_| random.f64()).sum::<f64>() - 6.0;
            let rate = if trial.tries_other() { 1.0 + gain } else { 1.0 };
            windows += u32::from(trial.is_running());
            if let Step::Ended { changes } =
                trial.record_window(rate * (1.0 + noise * normal), wanted)
            {
                return (changes, windows);
            }
        }
    }

    /// The share of trials that the other choice wins, and their mean number of windows.
    fn trials(proof: Proof, wanted: f64, gain: f64, noise: f64) -> (f64, f64) {
        const TRIALS: u32 = 2000;
        let mut random = fastrand::Rng::with_seed(9);
        let all: Vec<_> =
            (0..TRIALS).map(|_| trial(&mut random, proof, wanted, gain, noise)).collect();
        let wins = all.iter().filter(|(wins, _)| *wins).count();
        let windows: u32 = all.iter().map(|(_, windows)| windows).sum();
        (wins as f64 / f64::from(TRIALS), f64::from(windows) / f64::from(TRIALS))
    }

    #[test]
    fn chance_changes_nothing() {
        for noise in [0.0, 0.02, 0.05, 0.1, 0.2] {
            for gain in [0.0, -0.02, -0.1] {
                let (wins, _) = trials(Proof::Sure, GAIN, gain, noise);
                assert!(wins < 0.04, "noise {noise}, gain {gain}: {wins} of the trials");
            }
        }
    }

    #[test]
    fn a_gain_is_found_although_the_rate_varies() {
        for (gain, noise, share) in
            [(0.06, 0.0, 1.0), (0.1, 0.05, 0.99), (0.1, 0.15, 0.9), (0.2, 0.2, 0.96)]
        {
            let (wins, _) = trials(Proof::Sure, GAIN, gain, noise);
            assert!(wins >= share, "noise {noise}, gain {gain}: {wins} of the trials");
        }
    }

    #[test]
    fn a_clear_outcome_is_found_soon() {
        for (gain, most) in [(0.3, 18.0), (-0.15, 10.0)] {
            let (_, windows) = trials(Proof::Sure, GAIN, gain, 0.05);
            assert!(windows < most, "gain {gain}: {windows} windows");
        }
    }

    #[test]
    fn a_small_loss_is_accepted_and_a_large_one_is_not() {
        for (noise, share) in [(0.0, 1.0), (0.05, 0.99), (0.1, 0.9)] {
            let (wins, _) = trials(Proof::Sure, -GAIN, 0.0, noise);
            assert!(wins >= share, "noise {noise}: {wins} of the trials");
            let (wins, _) = trials(Proof::Sure, -GAIN, -0.1, noise);
            assert!(wins < 0.02, "noise {noise}: {wins} of the trials");
        }
    }

    #[test]
    fn a_likely_gain_is_decided_soon_and_mostly_well() {
        let (wins, windows) = trials(Proof::Likely, -GAIN, 0.2, 0.25);
        assert!(wins > 0.85 && windows < 24.0, "{wins} of the trials in {windows} windows");
        let (wins, _) = trials(Proof::Likely, -GAIN, -0.3, 0.25);
        assert!(wins < 0.05, "{wins} of the trials");
    }
}
