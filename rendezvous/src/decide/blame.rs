//! Whom a mismatch blames.

use std::collections::BTreeMap;

/// The ranks that differ from what more than half of all hold; none where no value has such a majority, because then
/// nothing tells who is right.
pub fn blamed<'a>(held: impl IntoIterator<Item = (u32, &'a str)>) -> Vec<u32> {
    let by_rank: BTreeMap<u32, &str> = held.into_iter().collect();
    let mut counts: BTreeMap<&str, usize> = BTreeMap::new();
    for value in by_rank.values() {
        *counts.entry(value).or_default() += 1;
    }
    let Some((right, _)) = counts.into_iter().find(|(_, count)| 2 * count > by_rank.len()) else {
        return Vec::new();
    };
    by_rank.into_iter().filter(|(_, value)| *value != right).map(|(rank, _)| rank).collect()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn the_few_are_blamed_and_a_tie_blames_nobody() {
        assert_eq!(blamed([(0, "a"), (1, "b"), (2, "a")]), [1]);
        assert_eq!(blamed([(0, "a"), (1, "b"), (2, "c"), (3, "a"), (4, "a")]), [1, 2]);
        assert_eq!(blamed([(0, "a"), (1, "b")]), [0; 0]);
        assert_eq!(blamed([(0, "a"), (1, "a")]), [0; 0]);
        assert_eq!(blamed([]), [0; 0]);
    }

    proptest! {
        #[test]
        fn fewer_than_half_are_blamed(values in proptest::collection::vec(0u8..3, 0..20)) {
            let names = values.iter().map(|v| v.to_string()).collect::<Vec<_>>();
            let table = names.iter().enumerate().map(|(rank, name)| (rank as u32, name.as_str()));
            let out = blamed(table);
            prop_assert!(2 * out.len() < values.len() || out.is_empty());
            let rest: Vec<_> = (0..values.len()).filter(|rank| !out.contains(&(*rank as u32))).collect();
            if !out.is_empty() {
                prop_assert!(rest.windows(2).all(|pair| values[pair[0]] == values[pair[1]]));
            }
        }
    }
}
