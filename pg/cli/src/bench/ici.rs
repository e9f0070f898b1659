//! `podring bench ici`: what podring adds to a PJRT execution, with the ranks of a process group as threads over the
//! devices of XLA's CPU plugin. No TPU is timed.

use std::path::{Path, PathBuf};
use std::sync::{Arc, Barrier};
use std::time::Duration;

use podring_collective::{Blocks, Collective, DType, Kind, Layout, Part, Reduction, Tensor};
use podring_group::engine::{DeviceCall, Devices};
use podring_group::{Config, Error as GroupError, HubConfig, MemoryStore, ProcessGroup, Runtime};
use podring_ici::engine::{Machine, Options, Times, now};
use podring_ici::pjrt::{Client, Element, PjrtError, Plugin, Value, Want, find};
use serde::Serialize;
use smallvec::SmallVec;

use super::{Sizes, size};
use crate::terminal;

/// What one operation may take.
const LIMIT: Duration = Duration::from_secs(60);

/// Time what podring adds to a PJRT execution, on XLA's CPU devices
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Devices, a rank (a thread) for each
    #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u32).range(1..=64))]
    devices: u32,
    /// Bytes of each rank's float32 tensor, which is summed
    #[arg(long, value_delimiter = ',', value_parser = Sizes::parse, default_value = "8,64K,1M")]
    sizes: Vec<Sizes>,
    /// Operations measured per size
    #[arg(long, default_value_t = 500, value_parser = clap::value_parser!(u32).range(10..))]
    iters: u32,
    /// Write the rows as JSON (- for stdout)
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

/// Why nothing was measured.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Error {
    #[error(transparent)]
    Plugin(#[from] PjrtError),
    #[error(transparent)]
    Group(#[from] GroupError),
    #[error("a rank ended early")]
    Rank,
    #[error("cannot write {path}: {source}")]
    Write { path: String, source: std::io::Error },
}

/// Medians over operations, µs.
#[derive(Debug, Serialize)]
struct Row {
    bytes: u64,
    devices: u32,
    /// "device": buffers stay on the devices. "host": tensors in memory, lent or copied there and back.
    tensors: &'static str,
    /// From a rank's call to its arrival, its inputs on its device; the slowest rank. In the rank's own thread: nobody
    /// waits for it but who would wait for that rank.
    stage_us: f64,
    /// From the first rank's arrival to the last's.
    gather_us: f64,
    /// From the last rank's arrival to PJRT's execute.
    to_execute_us: f64,
    /// PJRT's execute call.
    execute_us: f64,
    /// From PJRT's execute call until the last device is done.
    run_us: f64,
    /// From a device's being done to its rank's Work being done, the slowest rank.
    to_done_us: f64,
    /// `to_execute_us` and `to_done_us` of each operation together.
    ours_us: f64,
    /// From a Work's being done to the return of its wait, the slowest rank.
    to_return_us: f64,
}

/// What one rank saw of one operation.
type Seen = (Times, u64);

/// What PyTorch aligns tensors in host memory to.
const ALIGNMENT: usize = 64;

/// As many zeros, from an aligned address on; with where they start.
fn zeros(count: usize) -> (Vec<f32>, usize) {
    let data = vec![0.0f32; count + ALIGNMENT / 4];
    let start = data.as_ptr().align_offset(ALIGNMENT);
    (data, start)
}

fn sum(data: &mut [f32]) -> Collective {
    let tensor = Tensor { data: data.as_mut_ptr().cast(), layout: Layout::flat(data.len()) };
    let both = Blocks::whole(tensor);
    let part = Part { dtype: DType::F32, reduction: Some(Reduction::Sum), inputs: both.clone(), outputs: both };
    Collective { kind: Kind::AllReduce, parts: SmallVec::from_iter([part]) }
}

/// One rank's share of a measurement.
fn rank(
    group: &ProcessGroup,
    machine: &Machine,
    bytes: u64,
    on_device: bool,
    iters: u32,
    start: &Barrier,
) -> Result<Vec<Seen>, Error> {
    let count = bytes.div_ceil(4).max(1) as usize;
    let (mut data, first) = zeros(count);
    // The program's own layout: whole tiles of 8 × 128 elements, in size classes.
    let rows = podring_ici::program::layout::class_rows(count, 4);
    let dims = [1, rows as i64, 128];
    let device = machine.client().devices()[group.rank() as usize];
    let mut buffer = None;
    if on_device {
        buffer = Some(machine.client().buffer(&vec![0; rows * 512], Element::F32, &dims, &device)?);
    }
    let mut seen = Vec::with_capacity(iters as usize);
    for round in 0..iters + iters / 5 {
        start.wait();
        let mut call = DeviceCall { donate: true, ..DeviceCall::staged(sum(&mut data[first..first + count])) };
        call.inputs = buffer.take().map(|buffer| SmallVec::from_iter([buffer]));
        let work = group.post_device(call)?;
        work.wait(Some(LIMIT), || false)?;
        let returned = now();
        if on_device {
            buffer = work.take_outputs().pop();
        }
        if round >= iters / 5 {
            seen.extend(work.times().map(|times| (times, returned)));
        }
    }
    Ok(seen)
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
}

/// Rows from what every rank saw.
fn row(bytes: u64, tensors: &'static str, ranks: &[Vec<Seen>]) -> Row {
    let operations = ranks.iter().map(Vec::len).min().unwrap_or(0);
    let us = |from: u64, to: u64| to.saturating_sub(from) as f64 / 1e3;
    let each = |value: &dyn Fn(&[Seen]) -> f64| {
        let of = |index: usize| value(&ranks.iter().map(|seen| seen[index]).collect::<Vec<Seen>>());
        median((0..operations).map(of).collect())
    };
    let last = |seen: &[Seen]| seen.iter().map(|one| one.0.arrived).max().unwrap_or(0);
    let to_execute = |seen: &[Seen]| us(last(seen), seen[0].0.launched);
    let to_done = |seen: &[Seen]| seen.iter().map(|one| us(one.0.computed, one.0.done)).fold(0.0, f64::max);
    Row {
        bytes,
        devices: ranks.len() as u32,
        tensors,
        stage_us: each(&|seen| seen.iter().map(|one| us(one.0.called, one.0.arrived)).fold(0.0, f64::max)),
        gather_us: each(&|seen| us(seen.iter().map(|one| one.0.arrived).min().unwrap_or(0), last(seen))),
        to_execute_us: each(&to_execute),
        execute_us: each(&|seen| us(seen[0].0.launched, seen[0].0.returned)),
        run_us: each(&|seen| us(seen[0].0.launched, seen.iter().map(|one| one.0.computed).max().unwrap_or(0))),
        to_done_us: each(&to_done),
        ours_us: each(&|seen| to_execute(seen) + to_done(seen)),
        to_return_us: each(&|seen| seen.iter().map(|one| us(one.0.done, one.1)).fold(0.0, f64::max)),
    }
}

fn measure(args: &Args, machine: &Arc<Machine>, bytes: u64, on_device: bool) -> Result<Row, Error> {
    let store = MemoryStore::default();
    let start = Barrier::new(args.devices as usize);
    let one = |me: u32| -> Result<Vec<Seen>, Error> {
        let devices = Devices { machine: machine.clone(), slices: 1, slice: 0 };
        let runtime = Runtime::start_on(HubConfig::default(), Some(devices))?;
        let store = Arc::new(store.clone());
        let config = Config {
            rank: me,
            size: args.devices,
            name: "bench".into(),
            global_ranks: None,
            timeout: LIMIT,
            store,
            rendezvous: None,
        };
        let group = ProcessGroup::form(&runtime, config, || false)?;
        let seen = rank(&group, machine, bytes, on_device, args.iters, &start);
        group.shutdown();
        runtime.stop();
        seen
    };
    let ranks: Result<Vec<Vec<Seen>>, Error> = std::thread::scope(|scope| {
        let running: Vec<_> = (0..args.devices).map(|me| scope.spawn(move || one(me))).collect();
        running.into_iter().map(|rank| rank.join().unwrap_or(Err(Error::Rank))).collect()
    });
    Ok(row(bytes, if on_device { "device" } else { "host" }, &ranks?))
}

/// Runs the command.
pub(super) fn run(args: &Args) -> Result<i32, Error> {
    // SAFETY: a CPU plugin, from the file that the user's settings or Python environment name.
    let plugin = unsafe { Plugin::load(&find(Want::Cpu, &[])?) }?;
    let client = Client::create(&plugin, &[("cpu_device_count", Value::Int(args.devices.into()))])?;
    let machine = Machine::start(client, Options::default())?;
    let to_stdout = args.json.as_deref() == Some(Path::new("-"));
    let say = |line: &str| if to_stdout { terminal::err(line) } else { terminal::out(line) };
    say(
        "      bytes  tensors    stage   gather  to execute  execute      run  to done     ours  to return  (medians, µs)",
    );
    let mut rows = Vec::new();
    for bytes in args.sizes.iter().flat_map(|sizes| &sizes.0) {
        for on_device in [true, false] {
            let row = measure(args, &machine, *bytes, on_device)?;
            say(&format!(
                "{:>11}  {:7} {:8.1} {:8.1} {:11.1} {:8.1} {:8.1} {:8.1} {:8.1} {:10.1}",
                size::display(row.bytes),
                row.tensors,
                row.stage_us,
                row.gather_us,
                row.to_execute_us,
                row.execute_us,
                row.run_us,
                row.to_done_us,
                row.ours_us,
                row.to_return_us
            ));
            rows.push(row);
        }
    }
    let Some(path) = &args.json else { return Ok(0) };
    let error = |source: std::io::Error| Error::Write { path: path.display().to_string(), source };
    let text = serde_json::to_string_pretty(&rows).map_err(|source| error(source.into()))?;
    if to_stdout {
        terminal::out(&text);
    } else {
        std::fs::write(path, text + "\n").map_err(error)?;
    }
    Ok(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_are_medians_over_operations() {
        let times = |arrived, launched, computed, done| Times {
            called: arrived - 500,
            arrived,
            gathered: launched,
            launched,
            returned: launched + 5_000,
            computed,
            done,
        };
        let first = vec![(times(1_000, 9_000, 20_000, 21_000), 22_000); 3];
        let second = vec![(times(7_000, 9_000, 30_000, 34_000), 35_000); 3];
        let row = row(8, "device", &[first, second]);
        assert_eq!(row.stage_us, 0.5);
        assert_eq!((row.gather_us, row.to_execute_us, row.execute_us), (6.0, 2.0, 5.0));
        assert_eq!((row.run_us, row.to_done_us, row.ours_us, row.to_return_us), (21.0, 4.0, 6.0, 1.0));
    }
}
