// SPDX-License-Identifier: Apache-2.0
//! Moments of a kill or a cancel.

use std::time::{Duration, Instant};

/// Moments at which an operation is ended by force, before its completion or after it. The first ones
/// approach the completion until both outcomes have occurred. The later ones are random.
pub(crate) struct Moments {
    random: fastrand::Rng,
    /// Duration of the operation that nothing ends.
    usual_us: u64,
    last_us: u64,
    /// The last moment before the completion.
    early_us: Option<u64>,
    /// The last moment after the completion.
    late_us: Option<u64>,
    early: u64,
    late: u64,
}

impl Moments {
    /// Moments for an operation that is carried out once without an end by force.
    pub(crate) fn of(act: impl FnOnce()) -> Moments {
        let random = random();
        let begun = Instant::now();
        act();
        let usual_us = begun.elapsed().as_micros() as u64;
        println!("usually {usual_us} us");
        let (early_us, late_us) = (None, None);
        Moments { random, usual_us, last_us: 0, early_us, late_us, early: 0, late: 0 }
    }

    /// Waits for the next moment, after the begin of the operation.
    pub(crate) fn wait(&mut self) {
        self.last_us = match (self.early_us, self.late_us) {
            (None, None) => self.usual_us,
            (Some(early), None) => early * 2,
            (None, Some(late)) => late / 2,
            // Half of the moments are near the completion, the others are anywhere.
            (Some(early), Some(late)) if self.random.bool() => {
                self.random.u64(early.min(late) / 2..=early.max(late) * 3 / 2)
            }
            _ => self.random.u64(..=self.usual_us * 2),
        };
        std::thread::sleep(Duration::from_micros(self.last_us));
    }

    /// Takes the outcome at the last moment.
    pub(crate) fn learn(&mut self, is_complete: bool) {
        let (count, moment) = match is_complete {
            true => (&mut self.late, &mut self.late_us),
            false => (&mut self.early, &mut self.early_us),
        };
        *count += 1;
        *moment = Some(self.last_us);
    }

    /// Expects that both outcomes have occurred.
    #[track_caller]
    pub(crate) fn assert_both(&self) {
        let told = format!("{} before the completion, {} after it", self.early, self.late);
        println!("{told}");
        assert!(self.early > 0 && self.late > 0, "{told}");
    }
}

/// Random numbers of a seed that is printed.
fn random() -> fastrand::Rng {
    let seed = fastrand::u64(..);
    println!("seed {seed}");
    fastrand::Rng::with_seed(seed)
}
