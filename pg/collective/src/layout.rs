//! Where a tensor's elements lie.

use smallvec::SmallVec;

/// More dimensions than this are refused (torch's own TensorIterator stops at 64; real tensors stay below 8).
pub const MAX_DIMS: usize = 64;

/// A tensor's shape and strides, in elements, plus torch's lazy conjugate and negative bits.
///
/// A collective sees a tensor as the sequence of its elements in logical (row-major) order, whatever their strides.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Layout {
    /// Extent of each dimension; empty for a 0-dim tensor of one element.
    pub sizes: SmallVec<[i64; 6]>,
    /// Elements to step per dimension; may be zero or negative for inputs.
    pub strides: SmallVec<[i64; 6]>,
    /// Elements are to be read conjugated.
    pub conj: bool,
    /// Elements are to be read negated.
    pub neg: bool,
}

impl Layout {
    /// `numel` elements one after another.
    pub fn flat(numel: usize) -> Self {
        Layout {
            sizes: SmallVec::from_slice(&[numel as i64]),
            strides: SmallVec::from_slice(&[1]),
            conj: false,
            neg: false,
        }
    }

    /// Number of elements; `None` if it overflows 63 bits or a size is negative.
    pub fn numel(&self) -> Option<usize> {
        let mut product: i64 = 1;
        for &size in &self.sizes {
            if size < 0 {
                return None;
            }
            product = product.checked_mul(size)?;
        }
        usize::try_from(product).ok()
    }

    /// Elements lie one after another in logical order, and are read as they stand.
    pub fn is_plain(&self) -> bool {
        if self.conj || self.neg {
            return false;
        }
        if self.sizes.contains(&0) {
            return true;
        }
        let mut expected = 1i64;
        for (&size, &stride) in self.sizes.iter().zip(&self.strides).rev() {
            if size != 1 {
                if stride != expected {
                    return false;
                }
                expected = expected.saturating_mul(size);
            }
        }
        true
    }

    /// Two different indices may name the same memory, so that it can't be written to.
    ///
    /// Sufficient and, for layouts torch makes by expanding, slicing and transposing, exact: with dimensions ordered
    /// by stride, each must step over all that the smaller ones reach.
    pub fn may_overlap(&self) -> bool {
        if self.sizes.contains(&0) {
            return false;
        }
        let mut dims: SmallVec<[(i64, i64); 6]> = SmallVec::new();
        for (&size, &stride) in self.sizes.iter().zip(&self.strides) {
            if size > 1 {
                dims.push((stride.saturating_abs(), size));
            }
        }
        dims.sort_unstable();
        let mut reach = 0i64;
        for (stride, size) in dims {
            if stride <= reach {
                return true;
            }
            reach = reach.saturating_add(stride.saturating_mul(size - 1));
        }
        false
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::HashSet;

    fn layout(sizes: &[i64], strides: &[i64]) -> Layout {
        Layout { sizes: SmallVec::from_slice(sizes), strides: SmallVec::from_slice(strides), conj: false, neg: false }
    }

    #[test]
    fn plain_ignores_strides_of_unit_and_empty_dimensions() {
        assert!(layout(&[2, 1, 3], &[3, 77, 1]).is_plain());
        assert!(layout(&[0, 5], &[9, 9]).is_plain());
        assert!(layout(&[], &[]).is_plain());
        assert!(!layout(&[3, 2], &[1, 3]).is_plain());
    }

    #[test]
    fn expanded_overlaps_transposed_does_not() {
        assert!(layout(&[3, 2], &[0, 1]).may_overlap());
        assert!(!layout(&[3, 2], &[1, 3]).may_overlap());
        assert!(!layout(&[1, 2], &[0, 1]).may_overlap());
    }

    #[test]
    fn numel_refuses_overflow() {
        assert_eq!(layout(&[i64::MAX, 2], &[1, 1]).numel(), None);
        assert_eq!(layout(&[], &[]).numel(), Some(1));
    }

    proptest! {
        #[test]
        fn no_overlap_means_distinct_addresses(dims in prop::collection::vec((0i64..5, 0i64..12), 0..4)) {
            let (sizes, strides): (Vec<_>, Vec<_>) = dims.into_iter().unzip();
            let layout = layout(&sizes, &strides);
            if !layout.may_overlap() {
                let mut seen = HashSet::new();
                let total: i64 = sizes.iter().product();
                for index in 0..total {
                    let (mut rest, mut at) = (index, 0);
                    for (size, stride) in sizes.iter().zip(&strides).rev() {
                        at += rest % size * stride;
                        rest /= size;
                    }
                    prop_assert!(seen.insert(at));
                }
            }
        }
    }
}
