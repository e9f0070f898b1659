//! Elements between a strided tensor and contiguous memory in logical (row-major) order.

use std::mem::MaybeUninit;
use std::ops::Range;

use podring_collective::{DType, Layout, MAX_DIMS};
use smallvec::SmallVec;

/// Gathers the logical elements `range` of the tensor at `src` into contiguous memory at `dst`, which receives
/// `range.len()` elements, that of `range.start` first. They are the values the tensor has: conjugated and negated as
/// its layout says.
///
/// # Safety
/// `src` must be the address of the layout's element (0, …, 0), with every element in `range` readable; `dst` must be
/// writable for `range.len()` elements, and apart from them. `range` must end within [`Layout::numel`], which isn't
/// `None`.
pub unsafe fn pack(layout: &Layout, dtype: DType, src: *const u8, dst: *mut u8, range: Range<usize>) {
    let count = range.len();
    // SAFETY: passed on; when gathering the strided side is only read.
    unsafe { walk::<true>(layout, dtype, src.cast_mut(), dst, range) };
    if layout.conj || layout.neg {
        // SAFETY: `dst` has `count` elements, just written.
        unsafe { flip(dtype, layout.conj, layout.neg, dst, count) };
    }
}

/// Scatters contiguous memory at `src`, which holds `range.len()` elements, into the logical elements `range` of the
/// tensor at `dst`. The tensor then has these values: under a conjugate or negative bit their conjugate or negative is
/// what is stored.
///
/// # Safety
/// `dst` must be the address of the layout's element (0, …, 0), with every element in `range` writable and no two in the
/// same place; `src` must be readable for `range.len()` elements, and apart from them. `range` must end within
/// [`Layout::numel`], which isn't `None`.
pub unsafe fn unpack(layout: &Layout, dtype: DType, src: *const u8, dst: *mut u8, range: Range<usize>) {
    if !layout.conj && !layout.neg {
        // SAFETY: passed on; when scattering the flat side is only read.
        return unsafe { walk::<false>(layout, dtype, dst, src.cast_mut(), range) };
    }
    #[repr(C, align(64))]
    struct Block(MaybeUninit<[u8; 8192]>);
    let mut block = Block(MaybeUninit::uninit());
    let turned = block.0.as_mut_ptr().cast::<u8>();
    let size = dtype.size();
    let mut start = range.start;
    while start < range.end {
        let count = (range.end - start).min(size_of::<Block>() / size);
        // SAFETY: `src` has the elements from `start` on, and the block has room for `count`.
        unsafe {
            std::ptr::copy_nonoverlapping(src.add((start - range.start) * size), turned, count * size);
            flip(dtype, layout.conj, layout.neg, turned, count);
            walk::<false>(layout, dtype, dst, turned, start..start + count);
        }
        start += count;
    }
}

/// One dimension: its size, and its stride in elements.
type Dim = (usize, isize);

/// The layout's dimensions without those of size 1, neighbours that step as one merged; at least one remains. Sizes of
/// 2 and more whose product fits 63 bits are at most 62, so that this never allocates.
fn collapse(layout: &Layout) -> SmallVec<[Dim; MAX_DIMS]> {
    let mut dims = SmallVec::<[Dim; MAX_DIMS]>::new();
    for (&size, &stride) in layout.sizes.iter().zip(&layout.strides) {
        let (size, stride) = (size as usize, stride as isize);
        match dims.last_mut() {
            _ if size == 1 => {}
            Some(outer) if outer.1 == stride.wrapping_mul(size as isize) => *outer = (outer.0 * size, stride),
            _ => dims.push((size, stride)),
        }
    }
    if dims.is_empty() {
        dims.push((1, 1));
    }
    dims
}

/// Moves `range` between the strided and the flat side; `PACK` reads the strided one.
unsafe fn walk<const PACK: bool>(layout: &Layout, dtype: DType, strided: *mut u8, flat: *mut u8, range: Range<usize>) {
    debug_assert!(layout.numel().is_some_and(|numel| range.end <= numel));
    if range.is_empty() {
        return;
    }
    let dims = collapse(layout);
    // SAFETY: passed on; only the size of an element matters here.
    unsafe {
        match dtype.size() {
            1 => walk_as::<u8, PACK>(&dims, strided.cast(), flat.cast(), range),
            2 => walk_as::<u16, PACK>(&dims, strided.cast(), flat.cast(), range),
            4 => walk_as::<u32, PACK>(&dims, strided.cast(), flat.cast(), range),
            8 => walk_as::<u64, PACK>(&dims, strided.cast(), flat.cast(), range),
            _ => walk_as::<u128, PACK>(&dims, strided.cast(), flat.cast(), range),
        }
    }
}

unsafe fn walk_as<T: Copy, const PACK: bool>(dims: &[Dim], strided: *mut T, mut flat: *mut T, range: Range<usize>) {
    let Some((&(length, stride), outer)) = dims.split_last() else { return };
    let (height, pitch) = outer.last().copied().unwrap_or((1, 0));
    // Lines are moved one by one where that is what memory likes: they are long, and not further apart within than
    // between. Else a group of lines is moved together.
    let together = stride.unsigned_abs() > pitch.unsigned_abs() || length * size_of::<T>() < 64;

    let mut index = [0usize; MAX_DIMS];
    let mut offset = 0isize;
    let mut line = range.start / length;
    for (at, &(size, stride)) in outer.iter().enumerate().rev() {
        index[at] = line % size;
        line /= size;
        offset += index[at] as isize * stride;
    }
    let mut begin = range.start % length;
    let mut left = range.len();
    while left > 0 {
        let whole =
            if begin == 0 && !outer.is_empty() { (left / length).min(height - index[outer.len() - 1]) } else { 0 };
        let (lines, count) = if together && whole > 1 {
            // SAFETY: lines of the range, in both memories.
            unsafe { move_lines::<T, PACK>(strided.wrapping_offset(offset), flat, (whole, pitch), (length, stride)) };
            (whole, whole * length)
        } else {
            let count = left.min(length - begin);
            let from = strided.wrapping_offset(offset + begin as isize * stride);
            // SAFETY: a part of a line that is in the range.
            unsafe { move_line::<T, PACK>(from, flat, count, stride) };
            (1, count)
        };
        flat = flat.wrapping_add(count);
        left -= count;
        begin = 0;
        // To the next line: `lines` stay within the last outer dimension, at its end the ones before it go on by one.
        let mut step = lines;
        for (at, &(size, stride)) in outer.iter().enumerate().rev() {
            index[at] += step;
            offset += step as isize * stride;
            if index[at] < size {
                break;
            }
            offset -= size as isize * stride;
            index[at] = 0;
            step = 1;
        }
    }
}

/// Moves one element. Inlined; the address on the strided side may be unaligned, as the flat one.
#[inline(always)]
unsafe fn move_one<T: Copy, const PACK: bool>(strided: *mut T, flat: *mut T) {
    // SAFETY: the caller has one element at both addresses.
    unsafe {
        if PACK {
            flat.write_unaligned(strided.read_unaligned());
        } else {
            strided.write_unaligned(flat.read_unaligned());
        }
    }
}

/// Moves `count` elements that are `stride` apart on the strided side.
unsafe fn move_line<T: Copy, const PACK: bool>(strided: *mut T, flat: *mut T, count: usize, stride: isize) {
    if stride == 1 {
        let bytes = count * size_of::<T>();
        let (from, into) = if PACK { (strided, flat) } else { (flat, strided) };
        // SAFETY: `count` elements of each, disjoint. By bytes, since neither need be aligned.
        unsafe { std::ptr::copy_nonoverlapping(from.cast::<u8>(), into.cast::<u8>(), bytes) };
    } else {
        for at in 0..count {
            // SAFETY: an element of the line.
            unsafe { move_one::<T, PACK>(strided.wrapping_offset(at as isize * stride), flat.wrapping_add(at)) };
        }
    }
}

/// Moves several lines together: `height` of them, `pitch` apart on the strided side, with `length` elements that are
/// `stride` apart there.
unsafe fn move_lines<T: Copy, const PACK: bool>(
    strided: *mut T,
    flat: *mut T,
    (height, pitch): Dim,
    (length, stride): Dim,
) {
    let width = const { tile_width(size_of::<T>()) };
    let at = |row: usize, column: usize| strided.wrapping_offset(row as isize * pitch + column as isize * stride);
    for top in (0..height).step_by(width) {
        let rows = width.min(height - top);
        let flat = flat.wrapping_add(top * length);
        if length < width {
            for column in 0..length {
                for row in 0..rows {
                    // SAFETY: an element of one of the lines.
                    unsafe { move_one::<T, PACK>(at(top + row, column), flat.wrapping_add(row * length + column)) };
                }
            }
            continue;
        }
        for left in (0..length).step_by(width) {
            // SAFETY: a part of the lines.
            unsafe {
                let (strided, flat) = (at(top, left), flat.wrapping_add(left));
                move_tile::<T, PACK>(strided, flat, (rows, pitch), (width.min(length - left), stride), length);
            }
        }
    }
}

/// Rows and columns of a tile: a cache line's worth of elements, or a few.
const fn tile_width(size: usize) -> usize {
    if size > 8 { 8 } else { 64 / size }
}

/// Moves a tile by way of the stack, so that each cache line on either side is touched once, in one go: lines a power of
/// two apart share a cache set, and would evict each other before they are used up. Flat lines are `length` long.
#[inline(always)]
unsafe fn move_tile<T: Copy, const PACK: bool>(
    strided: *mut T,
    flat: *mut T,
    (rows, pitch): Dim,
    (columns, stride): Dim,
    length: usize,
) {
    #[repr(C, align(64))]
    struct Tile(MaybeUninit<[u8; 4096]>);
    let width = const { tile_width(size_of::<T>()) };
    const { assert!(tile_width(size_of::<T>()).pow(2) * size_of::<T>() <= size_of::<Tile>()) };
    let mut tile = Tile(MaybeUninit::uninit());
    let tile = tile.0.as_mut_ptr().cast::<T>();
    // SAFETY: the tile has `width` rows of `width`; the elements are the caller's. A packed element is in the tile before
    // its row is copied out, an unpacked one after its row was copied in.
    unsafe {
        let line = |row: usize| {
            let (flat, tile) = (flat.wrapping_add(row * length).cast::<u8>(), tile.add(row * width).cast::<u8>());
            let (from, into) = if PACK { (tile, flat) } else { (flat, tile) };
            if columns == width {
                // A size known to the compiler needs no call.
                std::ptr::copy_nonoverlapping(from, into, const { tile_width(size_of::<T>()) * size_of::<T>() });
            } else {
                std::ptr::copy_nonoverlapping(from, into, columns * size_of::<T>());
            }
        };
        if !PACK {
            (0..rows).for_each(line);
        }
        for column in 0..columns {
            let strided = strided.wrapping_offset(column as isize * stride);
            for row in 0..rows {
                move_one::<T, PACK>(strided.wrapping_offset(row as isize * pitch), tile.add(row * width + column));
            }
        }
        if PACK {
            (0..rows).for_each(line);
        }
    }
}

/// Conjugates and negates `count` contiguous elements. Applied twice it changes nothing.
unsafe fn flip(dtype: DType, conj: bool, neg: bool, data: *mut u8, count: usize) {
    /// Replaces each of `count` values.
    #[inline(always)]
    unsafe fn each<T: Copy>(data: *mut u8, count: usize, f: impl Fn(T) -> T) {
        let data = data.cast::<T>();
        for at in 0..count {
            // SAFETY: the caller has `count` of them.
            unsafe { data.add(at).write_unaligned(f(data.add(at).read_unaligned())) };
        }
    }
    let sign = |turn: bool, bit: u64| if turn { bit } else { 0 };
    let (re, im) = (neg, conj != neg);
    // SAFETY: `count` elements of the dtype are the caller's.
    unsafe {
        match dtype {
            DType::C32 => {
                let (re, im) = (sign(re, 1 << 15) as u16, sign(im, 1 << 15) as u16);
                each(data, count, |[a, b]: [u16; 2]| [a ^ re, b ^ im]);
            }
            DType::C64 => {
                let (re, im) = (sign(re, 1 << 31) as u32, sign(im, 1 << 31) as u32);
                each(data, count, |[a, b]: [u32; 2]| [a ^ re, b ^ im]);
            }
            DType::C128 => {
                let (re, im) = (sign(re, 1 << 63), sign(im, 1 << 63));
                each(data, count, |[a, b]: [u64; 2]| [a ^ re, b ^ im]);
            }
            // Only complex numbers have a conjugate.
            _ if !neg => {}
            DType::F64 => each(data, count, |a: u64| a ^ 1 << 63),
            DType::F32 => each(data, count, |a: u32| a ^ 1 << 31),
            DType::F16 | DType::BF16 => each(data, count, |a: u16| a ^ 1 << 15),
            DType::F8E4M3FN | DType::F8E5M2 => each(data, count, |a: u8| a ^ 1 << 7),
            // 0x80 is NaN and 0 has one sign here.
            DType::F8E4M3FNUZ | DType::F8E5M2FNUZ => {
                each(data, count, |a: u8| if a & 0x7f == 0 { a } else { a ^ 1 << 7 });
            }
            DType::U8 | DType::I8 => each(data, count, u8::wrapping_neg),
            DType::U16 | DType::I16 => each(data, count, u16::wrapping_neg),
            DType::U32 | DType::I32 => each(data, count, u32::wrapping_neg),
            DType::U64 | DType::I64 => each(data, count, u64::wrapping_neg),
            // No negative: torch doesn't negate bools, and scales have no sign.
            DType::Bool | DType::F8E8M0FNU => {}
        }
    }
}
