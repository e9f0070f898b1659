//! Conversions between float32 and the 16- and 8-bit floats, by bit operations that vectorise on every CPU.
//!
//! Narrowing rounds to nearest, ties to even, and agrees with torch's `.to(dtype)` bit for bit except on NaN, which is
//! always the positive quiet one (torch keeps the sign in some of its loops and not in others). In particular
//! float8_e4m3fn saturates to ±448, infinities included, and float8_e5m2 overflows to infinity.

const EXPONENT_BIAS: u32 = 127;
const MANTISSA: u32 = 23;
const MAGNITUDE: u32 = 0x7fff_ffff;
const INFINITY: u32 = 0x7f80_0000;
/// The quiet NaN that all results use.
pub(super) const NAN: u32 = 0x7fc0_0000;

/// A small binary format with `E` exponent and `M` mantissa bits below the sign and bias `2^(E-1) - 1`.
struct Format<const E: u32, const M: u32>;

impl<const E: u32, const M: u32> Format<E, M> {
    /// Mantissa bits that float32 has in excess.
    const EXCESS: u32 = MANTISSA - M;
    /// What to add to this format's biased exponent to get float32's, in float32's exponent field.
    const REBIAS: u32 = (EXPONENT_BIAS + 1 - (1 << (E - 1))) << MANTISSA;
    /// The smallest normal number, as float32 bits.
    const MIN_NORMAL: u32 = Self::REBIAS + (1 << MANTISSA);
    /// The power of two whose last float32 place is this format's smallest subnormal: adding it rounds to that place.
    const ROUND_TO_SUBNORMAL: u32 = Self::MIN_NORMAL + (Self::EXCESS << MANTISSA);

    /// The nearest number of this format after clamping the magnitude to `max` (float32 bits), with `nan` for NaN.
    #[inline(always)]
    fn narrow(value: f32, max: u32, nan: u32) -> u32 {
        let bits = value.to_bits();
        let sign = (bits >> 31) << (E + M);
        let unclamped = bits & MAGNITUDE;
        // Signed comparisons: magnitudes leave the top bit free, and older vector units have no unsigned ones.
        let magnitude = (unclamped as i32).min(max as i32) as u32;
        let odd = (magnitude >> Self::EXCESS) & 1;
        let half = (1 << (Self::EXCESS - 1)) - 1;
        let normal = magnitude.wrapping_add(half).wrapping_add(odd).wrapping_sub(Self::REBIAS) >> Self::EXCESS;
        let anchor = f32::from_bits(Self::ROUND_TO_SUBNORMAL);
        let subnormal = (f32::from_bits(magnitude) + anchor).to_bits().wrapping_sub(Self::ROUND_TO_SUBNORMAL);
        let rounded = if (magnitude as i32) < Self::MIN_NORMAL as i32 { subnormal } else { normal };
        if unclamped as i32 > INFINITY as i32 { nan } else { sign | rounded }
    }

    /// The value of `bits`, taking the topmost exponent for an ordinary one.
    #[inline(always)]
    fn widen(magnitude: u32) -> u32 {
        let shifted = magnitude << Self::EXCESS;
        let normal = shifted + Self::REBIAS;
        let subnormal = f32::from_bits(shifted + Self::MIN_NORMAL) - f32::from_bits(Self::MIN_NORMAL);
        if (magnitude as i32) < (1 << M) { subnormal.to_bits() } else { normal }
    }
}

/// float32 → float16.
#[inline(always)]
pub(super) fn to_f16(value: f32) -> u16 {
    const FIRST_OVERFLOW: u32 = (EXPONENT_BIAS + 16) << MANTISSA;
    Format::<5, 10>::narrow(value, FIRST_OVERFLOW, 0x7e00) as u16
}

/// float16 → float32, exact.
#[inline(always)]
pub(super) fn from_f16(bits: u16) -> f32 {
    let magnitude = u32::from(bits & 0x7fff);
    let finite = Format::<5, 10>::widen(magnitude);
    // Infinity and NaN: the exponent field goes from 31 + 112 to 255.
    let magnitude = if magnitude as i32 >= 0x7c00 { finite + Format::<5, 10>::REBIAS } else { finite };
    f32::from_bits(magnitude | u32::from(bits & 0x8000) << 16)
}

/// [`from_f16`] for `count` numbers at any alignment, by F16C instructions.
///
/// # Safety
/// `from` must be readable and `into` writable for `count` numbers, disjoint; the CPU must have F16C.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx,f16c")]
pub(super) unsafe fn widen_f16s(into: *mut f32, from: *const u16, count: usize) {
    use std::arch::x86_64::{_mm_loadu_si128, _mm256_cvtph_ps, _mm256_storeu_ps};
    let whole = count / 8 * 8;
    for at in (0..whole).step_by(8) {
        // SAFETY: eight numbers of each.
        unsafe { _mm256_storeu_ps(into.add(at), _mm256_cvtph_ps(_mm_loadu_si128(from.add(at).cast()))) };
    }
    for at in whole..count {
        // SAFETY: one number of each.
        unsafe { into.add(at).write_unaligned(from_f16(from.add(at).read_unaligned())) };
    }
}

/// [`to_f16`] for `count` numbers at any alignment, by F16C instructions.
///
/// # Safety
/// `from` must be readable and `into` writable for `count` numbers, disjoint; the CPU must have F16C.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx,f16c")]
pub(super) unsafe fn narrow_f16s(into: *mut u16, from: *const f32, count: usize) {
    use std::arch::x86_64::{
        _CMP_UNORD_Q, _MM_FROUND_TO_NEAREST_INT, _mm_storeu_si128, _mm256_blendv_ps, _mm256_cmp_ps, _mm256_cvtps_ph,
        _mm256_loadu_ps, _mm256_set1_ps,
    };
    let nan = _mm256_set1_ps(f32::from_bits(NAN));
    let whole = count / 8 * 8;
    for at in (0..whole).step_by(8) {
        // SAFETY: eight numbers of each.
        unsafe {
            let values = _mm256_loadu_ps(from.add(at));
            let values = _mm256_blendv_ps(values, nan, _mm256_cmp_ps::<_CMP_UNORD_Q>(values, values));
            _mm_storeu_si128(into.add(at).cast(), _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(values));
        }
    }
    for at in whole..count {
        // SAFETY: one number of each.
        unsafe { into.add(at).write_unaligned(to_f16(from.add(at).read_unaligned())) };
    }
}

/// No level of other architectures says that it has F16C.
///
/// # Safety
/// Isn't called.
#[cfg(not(target_arch = "x86_64"))]
pub(super) unsafe fn widen_f16s(_: *mut f32, _: *const u16, _: usize) {
    unreachable!()
}

/// As [`widen_f16s`].
///
/// # Safety
/// Isn't called.
#[cfg(not(target_arch = "x86_64"))]
pub(super) unsafe fn narrow_f16s(_: *mut u16, _: *const f32, _: usize) {
    unreachable!()
}

/// float32 → bfloat16, in the upper half; the lower half is arbitrary.
#[inline(always)]
fn to_upper_bf16(value: f32) -> u32 {
    let bits = value.to_bits();
    let rounded = bits.wrapping_add(0x7fff).wrapping_add((bits >> 16) & 1);
    if value.is_nan() { NAN } else { rounded }
}

/// float32 → bfloat16.
#[inline(always)]
pub(super) fn to_bf16(value: f32) -> u16 {
    (to_upper_bf16(value) >> 16) as u16
}

/// bfloat16 → float32, exact.
#[inline(always)]
pub(super) fn from_bf16(bits: u16) -> f32 {
    f32::from_bits(u32::from(bits) << 16)
}

/// Two bfloat16 as one word → float32: lower half, upper half. Which of them comes first in memory is the machine's
/// byte order's affair and the same for [`to_bf16_pair`].
#[inline(always)]
pub(super) fn from_bf16_pair(word: u32) -> [f32; 2] {
    [f32::from_bits(word << 16), f32::from_bits(word & 0xffff_0000)]
}

/// float32 → two bfloat16 as one word: lower half, upper half.
#[inline(always)]
pub(super) fn to_bf16_pair([lower, upper]: [f32; 2]) -> u32 {
    to_upper_bf16(lower) >> 16 | to_upper_bf16(upper) & 0xffff_0000
}

/// float32 → float8_e4m3fn.
#[inline(always)]
pub(super) fn to_e4m3fn(value: f32) -> u8 {
    const MAX: u32 = 448f32.to_bits();
    Format::<4, 3>::narrow(value, MAX, 0x7f) as u8
}

/// float8_e4m3fn → float32, exact.
#[inline(always)]
pub(super) fn from_e4m3fn(bits: u8) -> f32 {
    let magnitude = u32::from(bits & 0x7f);
    let finite = Format::<4, 3>::widen(magnitude);
    let magnitude = if magnitude == 0x7f { NAN } else { finite };
    f32::from_bits(magnitude | u32::from(bits & 0x80) << 24)
}

/// float32 → float8_e5m2.
#[inline(always)]
pub(super) fn to_e5m2(value: f32) -> u8 {
    const FIRST_OVERFLOW: u32 = (EXPONENT_BIAS + 16) << MANTISSA;
    Format::<5, 2>::narrow(value, FIRST_OVERFLOW, 0x7f) as u8
}

/// float8_e5m2 → float32, exact: it is the upper half of a float16.
#[inline(always)]
pub(super) fn from_e5m2(bits: u8) -> f32 {
    from_f16(u16::from(bits) << 8)
}
