// SPDX-License-Identifier: Apache-2.0
//! The Mann-Whitney U test, exact, with ties.
//!
//! Samples of a measurement are few and not normally distributed, so that the test goes by ranks
//! and counts all ways to deal the ranks out instead of relying on an approximation.

/// A difference counts below this probability of chance.
pub const ALPHA: f64 = 0.05;

/// Probability that a difference of this size or greater, in either direction, is chance; `None`
/// if even the greatest difference of so few samples would not count.
pub fn p_value(a: &[f64], b: &[f64]) -> Option<f64> {
    let all: Vec<f64> = a.iter().chain(b).copied().collect();
    if 2.0 / ways(all.len(), a.len()) > ALPHA {
        return None;
    }
    let ranks = double_ranks(&all);
    let seen: usize = ranks[..a.len()].iter().sum();
    let counts = sums(&ranks, a.len());
    let total: f64 = counts.iter().sum();
    // The mean of twice the rank sum.
    let mean = a.len() * (all.len() + 1);
    let as_far: f64 = counts
        .iter()
        .enumerate()
        .filter(|(sum, _)| sum.abs_diff(mean) >= seen.abs_diff(mean))
        .map(|(_, count)| count)
        .sum();
    Some(as_far / total)
}

/// Ways to choose `k` of `n`.
fn ways(n: usize, k: usize) -> f64 {
    (0..k).map(|i| (n - i) as f64 / (i + 1) as f64).product()
}

/// Twice the rank of each value; equal values share the mean of their ranks.
fn double_ranks(values: &[f64]) -> Vec<usize> {
    let rank = |value: &f64| {
        let less = values.iter().filter(|other| *other < value).count();
        let equal = values.iter().filter(|other| *other == value).count();
        2 * less + equal + 1
    };
    values.iter().map(rank).collect()
}

/// For each sum, the number of ways to choose `k` ranks that have it.
fn sums(ranks: &[usize], k: usize) -> Vec<f64> {
    let greatest: usize = ranks.iter().sum();
    let mut ways = vec![vec![0.0; greatest + 1]; k + 1];
    ways[0][0] = 1.0;
    for &rank in ranks {
        for chosen in (1..=k).rev() {
            for sum in rank..=greatest {
                let fewer = ways[chosen - 1][sum - rank];
                ways[chosen][sum] += fewer;
            }
        }
    }
    ways.swap_remove(k)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn separate_samples_differ_and_mixed_ones_do_not() {
        // The two extreme of 252 ways; published tables: U = 0 for 5 and 5 is 0.0079.
        let apart = p_value(&[1.0, 2.0, 3.0, 4.0, 5.0], &[6.0, 7.0, 8.0, 9.0, 10.0]).unwrap();
        assert!((apart - 2.0 / 252.0).abs() < 1e-12, "{apart}");
        let mixed = p_value(&[1.0, 4.0, 5.0, 8.0, 9.0], &[2.0, 3.0, 6.0, 7.0, 10.0]).unwrap();
        assert!(mixed > 0.5, "{mixed}");
    }

    #[test]
    fn the_value_agrees_with_a_published_table() {
        // U = 2 for 5 and 5: two-sided 0.0317; U = 3: 0.0556.
        let (b, c) = ([4.0, 6.0, 7.0, 8.0, 9.0], [5.0, 6.0, 7.0, 8.0, 9.0]);
        let u2 = p_value(&[1.0, 2.0, 3.0, 4.5, 4.6], &b).unwrap();
        assert!((u2 - 8.0 / 252.0).abs() < 1e-12, "{u2}");
        let u3 = p_value(&[1.0, 2.0, 3.0, 4.0, 7.5], &c).unwrap();
        assert!((u3 - 14.0 / 252.0).abs() < 1e-12, "{u3}");
    }

    #[test]
    fn either_side_may_be_the_greater_one() {
        let (a, b) = ([1.0, 2.0, 2.0, 3.0], [2.0, 3.0, 4.0, 5.0, 6.0]);
        assert_eq!(p_value(&a, &b), p_value(&b, &a));
    }

    #[test]
    fn equal_samples_do_not_differ() {
        assert_eq!(p_value(&[7.0; 5], &[7.0; 5]), Some(1.0));
    }

    #[test]
    fn three_samples_are_too_few() {
        assert_eq!(p_value(&[1.0, 2.0, 3.0], &[7.0, 8.0, 9.0]), None);
        assert_eq!(p_value(&[], &[1.0]), None);
        assert!(p_value(&[1.0; 4], &[2.0; 4]).is_some());
    }
}
