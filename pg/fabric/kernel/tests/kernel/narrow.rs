//! Narrow floats, through the reductions that only convert.

use podring_collective::{DType, Reduction};
use podring_kernel::{Source, Target, reduce};

use crate::naive;

const TYPES: [DType; 4] = [DType::F16, DType::BF16, DType::F8E4M3FN, DType::F8E5M2];

fn narrow(dtype: DType, values: &[f32]) -> Vec<u16> {
    let mut target = vec![0u8; values.len() * dtype.size()];
    let source = Source { data: values.as_ptr().cast(), partial: true };
    // SAFETY: both have as many elements as `values`, of float32 and of the dtype.
    unsafe { reduce(Reduction::Sum, dtype, 1, &[source], Target::Raw(target.as_mut_ptr()), values.len()) };
    elements(dtype, &target)
}

fn elements(dtype: DType, bytes: &[u8]) -> Vec<u16> {
    match dtype.size() {
        1 => bytes.iter().copied().map(u16::from).collect(),
        _ => bytes.chunks(2).map(|pair| u16::from_ne_bytes([pair[0], pair[1]])).collect(),
    }
}

#[test]
fn rounds_as_torch_does() {
    let tables = [
        include_str!("../data/to_float16.txt"),
        include_str!("../data/to_bfloat16.txt"),
        include_str!("../data/to_float8_e4m3fn.txt"),
        include_str!("../data/to_float8_e5m2.txt"),
    ];
    for (dtype, table) in TYPES.into_iter().zip(tables) {
        let rows = naive::rows(table);
        assert!(rows.len() > 2000);
        let values: Vec<f32> = rows.iter().map(|row| f32::from_bits(row.0)).collect();
        let mut nans = 0;
        for ((value, got), (_, want)) in values.iter().zip(narrow(dtype, &values)).zip(&rows) {
            if value.is_nan() {
                nans += 1;
                assert!(naive::widen(dtype, *want as u16).is_nan());
                assert_eq!(got, naive::narrow(dtype, f32::NAN), "{dtype} of {:08x}", value.to_bits());
            } else {
                assert_eq!(u32::from(got), *want, "{dtype} of {value} = {:08x}", value.to_bits());
            }
        }
        assert!(nans > 3);
    }
}

/// Every float32 that differs in the bits a narrower type keeps, with the dropped bits next to every tie.
#[test]
fn rounds_to_nearest_even_at_every_boundary() {
    for dtype in TYPES {
        let (dropped, tie) = match dtype {
            DType::F16 => (13, 0x1000u32),
            DType::BF16 => (16, 0x8000),
            _ => (16, 0x8000),
        };
        let lows = [0, 1, tie - 1, tie, tie + 1, 2 * tie - 1];
        for high in 0..1u32 << (32 - dropped) {
            // Searching is slow: a part of the 8-bit floats' many equal cases will do.
            if dtype.size() == 1 && high % 3 != 0 && high % 16 != 0 {
                continue;
            }
            let values = lows.map(|low| f32::from_bits(high << dropped | low));
            let want = values.map(|value| naive::narrow(dtype, value));
            assert_eq!(narrow(dtype, &values), want, "{dtype} of {values:?}");
        }
    }
}

#[test]
fn widens_every_number_exactly() {
    for dtype in TYPES {
        let codes: Vec<u16> = (0..=(1u32 << (8 * dtype.size())) - 1).map(|code| code as u16).collect();
        let bytes: Vec<u8> = codes.iter().flat_map(|code| code.to_ne_bytes()[..].to_vec()).collect();
        // One byte each for the small types, on either kind of machine.
        let bytes = if dtype.size() == 1 { codes.iter().map(|&code| code as u8).collect() } else { bytes };
        let mut target = vec![0f32; codes.len()];
        let source = Source { data: bytes.as_ptr(), partial: false };
        // SAFETY: as many elements as codes, of the dtype and of float32.
        unsafe {
            reduce(Reduction::Sum, dtype, 1, &[source], Target::Partial(target.as_mut_ptr().cast()), codes.len())
        };
        for (&code, got) in codes.iter().zip(target) {
            let want = naive::widen(dtype, code);
            let want = if want.is_nan() { 0x7fc0_0000 } else { want.to_bits() };
            assert_eq!(got.to_bits(), want, "{dtype} {code:04x}");
        }
    }
}
