//! Mesh assignment and replica groups on full pods. Targets: 10 ms and 5 ms for 9,216 chips.

#![allow(clippy::unwrap_used, missing_docs, reason = "a benchmark that cannot go on should stop")]

use criterion::{Criterion, criterion_group, criterion_main};
use podring_topology::{
    mesh::{Axis, MeshRequest, assign},
    parse,
};

fn request(sizes: &[i64]) -> MeshRequest {
    let axes = sizes.iter().enumerate().map(|(index, &size)| Axis::new(format!("a{index}"), size));
    MeshRequest::new(axes.collect())
}

fn benches(criterion: &mut Criterion) {
    for (name, sizes) in [
        ("v5p:16x16x24", vec![24, 256]),
        ("v5p:16x16x24", vec![96, 64]),
        ("tpu7x:16x24x24", vec![96, 192]),
        ("tpu7x:16x24x24", vec![2, 24, 24, 16]),
        ("tpu7x:16x24x24", vec![4, 4, 16, 9, 8]),
    ] {
        let slice = parse(name).unwrap();
        let request = request(&sizes);
        criterion.bench_function(&format!("assign {name} {sizes:?}"), |bencher| {
            bencher.iter(|| assign(&slice, &request).unwrap());
        });
        let mesh = assign(&slice, &request).unwrap();
        criterion.bench_function(&format!("groups of every axis {name} {sizes:?}"), |bencher| {
            bencher.iter(|| (0..sizes.len()).map(|axis| mesh.groups(axis)).collect::<Vec<_>>());
        });
        criterion.bench_function(&format!("classes of every group {name} {sizes:?}"), |bencher| {
            bencher.iter(|| (0..sizes.len()).filter(|&axis| mesh.report(&slice, axis).unwrap().uniform).count());
        });
    }
}

criterion_group!(assignment, benches);
criterion_main!(assignment);
