//! Quick timing of the kernels: `cargo bench -p podring-fabric --bench kernel [words that the row must contain]`.
//!
//! Rates are bytes read plus bytes written per second, in GB/s (10^9), of the fastest of several repetitions. On a busy
//! machine only ratios of rows mean something.

use std::hint::black_box;
use std::time::{Duration, Instant};

use podring_collective::{DType, Layout, Reduction};
use podring_kernel::{Source, Target, copy, pack, reduce, unpack};

/// The most that one step of the engine moves.
const CHUNK: usize = 256 << 10;

fn time(bytes: usize, mut run: impl FnMut()) -> f64 {
    run();
    let mut best = f64::INFINITY;
    let begin = Instant::now();
    while begin.elapsed() < Duration::from_millis(60) {
        let repeat = (1 << 22) / bytes.max(1) + 1;
        let start = Instant::now();
        for _ in 0..repeat {
            run();
        }
        best = best.min(start.elapsed().as_secs_f64() / repeat as f64);
    }
    bytes as f64 / best / 1e9
}

fn main() {
    let words: Vec<String> = std::env::args().skip(1).filter(|word| !word.starts_with("--")).collect();
    let show = |row: &str, rate: &dyn Fn() -> f64| {
        if words.iter().all(|word| row.split(' ').any(|part| part == word)) {
            println!("{row:<64} {:>8.1} GB/s", rate());
        }
    };
    copies(&show);
    layouts(&show);
    reductions(&show);
}

fn copies(show: &dyn Fn(&str, &dyn Fn() -> f64)) {
    for bytes in [4 << 10, CHUNK, 4 << 20, 64 << 20] {
        show(&format!("copy {} KiB", bytes >> 10), &|| {
            let source = vec![1u8; bytes];
            let mut target = vec![0u8; bytes];
            // SAFETY: two vectors of `bytes` bytes.
            time(2 * bytes, || unsafe { copy(black_box(target.as_mut_ptr()), source.as_ptr(), bytes) })
        });
    }
}

fn layouts(show: &dyn Fn(&str, &dyn Fn() -> f64)) {
    for dtype in [DType::U8, DType::BF16, DType::F32, DType::F64, DType::C128] {
        let numel = 16 * CHUNK / dtype.size();
        let side = 1i64 << (numel.ilog2() / 2);
        let other = numel as i64 / side;
        let forms: [(&str, &[i64], &[i64]); 5] = [
            ("transposed", &[side, other], &[1, side]),
            ("rows-of-a-wider", &[side, other / 2], &[other, 1]),
            ("columns-of-2", &[numel as i64 / 4, 2], &[4, 1]),
            ("every-second", &[numel as i64 / 2], &[2]),
            ("channels-last", &[numel as i64 / 3 / 1024, 3, 1024], &[3 * 1024, 1, 3]),
        ];
        for (form, sizes, strides) in forms {
            let layout = Layout { sizes: sizes.into(), strides: strides.into(), conj: false, neg: false };
            let count = layout.numel().unwrap_or(0);
            let mut tensor = vec![1u8; numel * dtype.size()];
            let mut flat = vec![1u8; count * dtype.size()];
            let (tensor, flat) = (tensor.as_mut_ptr(), flat.as_mut_ptr());
            let step = CHUNK / dtype.size();
            let ranges = || (0..count).step_by(step).map(|start| start..count.min(start + step));
            let bytes = 2 * count * dtype.size();
            show(&format!("pack {dtype} {form}"), &|| {
                time(bytes, || {
                    for range in ranges() {
                        let at = flat.wrapping_add(range.start * dtype.size());
                        // SAFETY: the layout lies within `tensor`, and `flat` holds all its elements.
                        unsafe { pack(&layout, dtype, tensor, at, range) };
                    }
                })
            });
            show(&format!("unpack {dtype} {form}"), &|| {
                time(bytes, || {
                    for range in ranges() {
                        let at = flat.wrapping_add(range.start * dtype.size());
                        // SAFETY: as above.
                        unsafe { unpack(&layout, dtype, at, tensor, range) };
                    }
                })
            });
        }
    }
}

fn reductions(show: &dyn Fn(&str, &dyn Fn() -> f64)) {
    let reductions = [
        Reduction::Sum,
        Reduction::Avg,
        Reduction::Product,
        Reduction::Max,
        Reduction::BitXor,
        Reduction::PreMulSum(0.3),
    ];
    for &dtype in DType::ALL {
        for reduction in reductions.into_iter().filter(|reduction| reduction.supports(dtype)) {
            for (form, n) in [("apart", 2), ("in-place", 2), ("apart", 4), ("apart", 8)] {
                row(show, dtype, reduction, form, &vec![false; n], false);
            }
            if reduction == Reduction::Sum && dtype.accumulator() != dtype {
                row(show, dtype, reduction, "to-partial", &[false, false], true);
                row(show, dtype, reduction, "ring", &[true, false], true);
                row(show, dtype, reduction, "ring-end", &[true, false], false);
            }
        }
    }
}

fn row(
    show: &dyn Fn(&str, &dyn Fn() -> f64),
    dtype: DType,
    reduction: Reduction,
    form: &str,
    partials: &[bool],
    to_partial: bool,
) {
    let count = CHUNK / dtype.accumulator().size();
    let name = format!("{dtype} {} of {} {form}", reduction.name(), partials.len());
    show(&name, &|| {
        let size = |partial: bool| if partial { dtype.accumulator().size() } else { dtype.size() };
        // 0x3c bytes are ordinary numbers of every type.
        let sources: Vec<Vec<u8>> = partials.iter().map(|&partial| vec![0x3c; count * size(partial)]).collect();
        let mut target = vec![0x3c; count * size(to_partial)];
        let mut list: Vec<Source> =
            sources.iter().zip(partials).map(|(source, &partial)| Source { data: source.as_ptr(), partial }).collect();
        if form == "in-place" {
            list[0].data = target.as_ptr();
        }
        let bytes = partials.iter().map(|&partial| count * size(partial)).sum::<usize>() + target.len();
        let into = target.as_mut_ptr();
        let into = if to_partial { Target::Partial(into) } else { Target::Raw(into) };
        // SAFETY: vectors of `count` elements of their types.
        time(bytes, || unsafe { reduce(reduction, dtype, 3, black_box(&list), black_box(into), count) })
    });
}
