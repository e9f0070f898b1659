//! podring's own layout: every block of a buffer is laid out as `[rows, 128]`, padded to a size class.
//!
//! XLA lowers a collective on `[k, rows, 128]` to a true one in a fraction of a second; the same bytes as one flat
//! dimension can take it most of a minute and an emulation. 128 is the width of a TPU's vector register; rows come in
//! multiples of a hardware tile (4 KiB). Size classes keep the number of programs small: at most 8 per doubling, so
//! that padding is at most one tile or one eighth.

/// Elements per row.
pub const LANES: usize = 128;

/// Bytes of a hardware tile: 8 rows of 32-bit elements.
pub const TILE: usize = 8 * LANES * 4;

/// Rows of the size class that holds `elements` of `element_bytes` each; at least one tile, also for none.
pub fn class_rows(elements: usize, element_bytes: usize) -> usize {
    // A tile is 8 rows of 32-bit elements; narrower elements are packed, so that a tile stays 4 KiB.
    let tile = (32 / element_bytes.max(1)).max(8);
    let tiles = elements.div_ceil(LANES).div_ceil(tile).max(1);
    let step = if tiles <= 8 { 1 } else { 1usize << (tiles.ilog2() - 3) };
    tiles.div_ceil(step) * step * tile
}

/// Copies blocks of `counts[i]` elements, one after another in `flat`, to slots of `slot` elements each in `laid`.
/// What pads a slot is left as it is.
pub fn lay_out(flat: &[u8], counts: &[usize], element_bytes: usize, slot: usize, laid: &mut [u8]) {
    let mut at = 0;
    for (index, count) in counts.iter().enumerate() {
        let bytes = count * element_bytes;
        let start = index * slot * element_bytes;
        laid[start..start + bytes].copy_from_slice(&flat[at..at + bytes]);
        at += bytes;
    }
}

/// The inverse of [`lay_out`].
pub fn gather_up(laid: &[u8], counts: &[usize], element_bytes: usize, slot: usize, flat: &mut [u8]) {
    let mut at = 0;
    for (index, count) in counts.iter().enumerate() {
        let bytes = count * element_bytes;
        let start = index * slot * element_bytes;
        flat[at..at + bytes].copy_from_slice(&laid[start..start + bytes]);
        at += bytes;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn classes_of_small_sizes() {
        assert_eq!(class_rows(0, 4), 8);
        assert_eq!(class_rows(1, 4), 8);
        assert_eq!(class_rows(1024, 4), 8);
        assert_eq!(class_rows(1025, 4), 16);
        assert_eq!(class_rows(1, 1), 32);
        assert_eq!(class_rows(1, 2), 16);
        assert_eq!(class_rows(1, 16), 8);
        // 64 MiB of bf16 is its own class.
        assert_eq!(class_rows(32 << 20, 2) * LANES, 32 << 20);
    }

    proptest! {
        #[test]
        fn a_class_holds_its_elements_wastes_little_and_is_stable(
            elements in 0usize..1 << 40, element in prop::sample::select(vec![1usize, 2, 4, 8, 16])
        ) {
            let rows = class_rows(elements, element);
            prop_assert!(rows * LANES >= elements);
            let tile = (32 / element).max(8) * LANES;
            prop_assert!(rows * LANES <= elements + tile + elements / 8 + tile);
            prop_assert_eq!(class_rows(rows * LANES, element), rows);
        }

        #[test]
        fn classes_grow_with_the_size(a in 0usize..1 << 30, b in 0usize..1 << 30) {
            prop_assert!(class_rows(a.min(b), 4) <= class_rows(a.max(b), 4));
        }

        #[test]
        fn blocks_come_back(counts in prop::collection::vec(0usize..9, 1..6), width in 1usize..4) {
            let total: usize = counts.iter().sum();
            let flat: Vec<u8> = (0..total * width).map(|byte| byte as u8).collect();
            let mut laid = vec![0xee; counts.len() * 9 * width];
            lay_out(&flat, &counts, width, 9, &mut laid);
            let mut back = vec![0; flat.len()];
            gather_up(&laid, &counts, width, 9, &mut back);
            prop_assert_eq!(back, flat);
        }
    }

    #[test]
    fn there_are_few_classes() {
        let classes: std::collections::HashSet<usize> = (0..1usize << 20).map(|n| class_rows(n * 64, 4)).collect();
        // 64 Ki elements ... 64 Mi elements: 8 per doubling.
        assert!(classes.len() <= 8 * 17, "{}", classes.len());
    }
}
