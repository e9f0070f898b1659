//! A compile that takes long says so: whoever waits for it sees nothing else meanwhile. Quick ones say nothing.

use std::{
    fmt,
    sync::mpsc::{Receiver, RecvTimeoutError, channel},
    thread,
    time::{Duration, Instant},
};

use crate::program::{Program, Role};

/// What is compiled, for people.
pub(crate) struct Subject<'a> {
    pub program: &'a Program,
    pub group: &'a str,
    pub devices: usize,
}

impl fmt::Display for Subject<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Subject { program, group, devices } = self;
        let data = program.inputs.iter().filter(|port| matches!(port.role, Role::Data(_)));
        let bytes: usize = data.map(|port| port.bytes()).sum();
        write!(f, "{} of {bytes} bytes a rank for {devices} devices", program.name())?;
        if group.is_empty() { Ok(()) } else { write!(f, " of group {group}") }
    }
}

/// When the compile's n-th word is due, counted from 0.
fn due(said: u32) -> Duration {
    const FIRST: [u64; 3] = [2, 10, 30];
    let seconds = FIRST.get(said as usize).copied();
    Duration::from_secs(seconds.unwrap_or_else(|| 60 * u64::from(said - 2)))
}

/// What a compile that has lasted so long, and has said so many words, does next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Next {
    Wait(Duration),
    /// Say it; that many words have been due by then.
    Say(u32),
}

fn next(elapsed: Duration, said: u32, due: fn(u32) -> Duration) -> Next {
    match due(said).checked_sub(elapsed) {
        Some(left) if !left.is_zero() => Next::Wait(left),
        // Once, however many were missed.
        _ => Next::Say((said + 1..).find(|&next| due(next) > elapsed).unwrap_or(u32::MAX)),
    }
}

/// Compiles, and says that it does if it lasts.
pub(crate) fn watched<R, E>(subject: &Subject, compile: impl FnOnce() -> Result<R, E>) -> Result<R, E> {
    let speak = |elapsed: Duration| tracing::warn!("compiling {subject}: {} s so far", elapsed.as_secs());
    let began = Instant::now();
    let (outcome, said) = speaking(due, speak, compile);
    if said > 0 {
        let seconds = began.elapsed().as_secs_f64();
        match &outcome {
            Ok(_) => tracing::warn!("compiled {subject} in {seconds:.1} s"),
            Err(_) => tracing::warn!("compiling {subject} failed after {seconds:.1} s"),
        }
    }
    outcome
}

/// Does something, and speaks when that is due while it lasts; how many words have been due.
fn speaking<R>(due: fn(u32) -> Duration, speak: impl Fn(Duration) + Send, act: impl FnOnce() -> R) -> (R, u32) {
    let (done, ended) = channel();
    thread::scope(|scope| {
        // Dropped when this ends, also by a panic: the scope waits for the other thread.
        let done = done;
        let other = thread::Builder::new().name("podring-compile".to_owned());
        // Without a thread it is compiled in silence.
        let other = other.spawn_scoped(scope, move || attend(&ended, due, speak)).ok();
        let outcome = act();
        drop::<std::sync::mpsc::Sender<()>>(done);
        (outcome, other.and_then(|other| other.join().ok()).unwrap_or(0))
    })
}

fn attend(ended: &Receiver<()>, due: fn(u32) -> Duration, speak: impl Fn(Duration)) -> u32 {
    let (began, mut said) = (Instant::now(), 0);
    loop {
        match next(began.elapsed(), said, due) {
            Next::Wait(left) => match ended.recv_timeout(left) {
                Err(RecvTimeoutError::Timeout) => {}
                Ok(()) | Err(RecvTimeoutError::Disconnected) => return said,
            },
            Next::Say(now) => {
                speak(began.elapsed());
                said = now;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU32, Ordering};

    use super::*;

    #[test]
    fn quick_ones_say_nothing_and_long_ones_ever_less() {
        let seconds = Duration::from_secs;
        assert_eq!(next(seconds(0), 0, due), Next::Wait(seconds(2)));
        assert_eq!(next(Duration::from_millis(1999), 0, due), Next::Wait(Duration::from_millis(1)));
        assert_eq!(next(seconds(2), 0, due), Next::Say(1));
        assert_eq!(next(seconds(2), 1, due), Next::Wait(seconds(8)));
        assert_eq!(next(seconds(10), 1, due), Next::Say(2));
        // A process that was stopped meanwhile says one word, not all that it missed.
        assert_eq!(next(seconds(200), 1, due), Next::Say(6));
        assert_eq!(next(seconds(200), 6, due), Next::Wait(seconds(40)));
        let times: Vec<u64> = (0..6).map(|said| due(said).as_secs()).collect();
        assert_eq!(times, [2, 10, 30, 60, 120, 180]);
    }

    #[test]
    fn words_come_while_it_lasts() {
        let words = AtomicU32::new(0);
        let (said, heard) = channel();
        let speak = |_: Duration| {
            words.fetch_add(1, Ordering::SeqCst);
            let _ = said.send(());
        };
        let every = |said: u32| Duration::from_millis(5) * (said + 1);
        let (third, count) = speaking(every, speak, || (0..3).map(|_| heard.recv_timeout(due(2))).collect::<Vec<_>>());
        assert_eq!(third, [Ok(()); 3]);
        assert!(count >= 3 && words.load(Ordering::SeqCst) <= count, "{count}");
        let silent = |_: Duration| unreachable!("nothing was due");
        assert_eq!(speaking(due, silent, || 7), (7, 0));
    }

    #[test]
    fn a_subject_names_program_bytes_and_group() {
        use crate::program::{Backend, Groups, Op, PartSpec, Spec, build};
        let part = PartSpec { dtype: podring_collective::DType::U8, reduction: None, elements: 4096 };
        let (op, groups) = (Op::Broadcast, Groups::all(4));
        let spec = Spec { op, parts: vec![part], groups, backend: Backend::Tpu, exact: false, donate: false };
        let program = build(&spec).unwrap();
        let subject = Subject { program: &program, group: "dp", devices: 4 };
        assert_eq!(subject.to_string(), "broadcast of 4096 bytes a rank for 4 devices of group dp");
    }
}
