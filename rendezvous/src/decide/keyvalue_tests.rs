use proptest::prelude::*;

use super::*;

const SECOND: Duration = Duration::from_secs(1);

fn strings(keys: &[&str]) -> Vec<String> {
    keys.iter().map(|key| (*key).to_owned()).collect()
}

fn later(answer: Result<Answer<Outcome>, Refusal>) -> u64 {
    match answer {
        Ok(Answer::Later(id)) => id,
        other => panic!("answered at once: {other:?}"),
    }
}

#[test]
fn values() {
    let mut kv = KeyValue::default();
    assert_eq!(kv.add("n", 5), Ok(5));
    assert_eq!(kv.add("n", -7), Ok(-2));
    kv.set("text", b"abc".to_vec()).unwrap();
    assert_eq!(kv.add("text", 1), Err(Refusal::NotANumber { key: "text".into(), got: "abc".into() }));
    kv.set("big", i64::MAX.to_string().into_bytes()).unwrap();
    assert!(matches!(kv.add("big", 1), Err(Refusal::NotANumber { .. })));
    kv.append("text", b"def").unwrap();
    kv.append("new", b"x").unwrap();
    let read = |kv: &mut KeyValue, key: &str| kv.wait(SECOND, strings(&[key]), Want::Values, Duration::ZERO);
    assert_eq!(read(&mut kv, "text"), Ok(Answer::Now(Outcome::Values(vec![b"abcdef".to_vec()]))));
    assert_eq!(kv.num_keys(), 4);
    assert_eq!(kv.list("n"), ["n", "new"]);
    assert!(kv.delete("new") && !kv.delete("new"));
    let missing = Outcome::Missing { keys: strings(&["new"]), waited: Duration::ZERO };
    assert_eq!(read(&mut kv, "new"), Ok(Answer::Now(missing)));
}

#[test]
fn compare_set_as_torch_has_it() {
    let mut kv = KeyValue::default();
    let mut cas = |expected: &str, desired: &str| {
        String::from_utf8(kv.compare_set("k", expected.into(), desired.into()).unwrap()).unwrap()
    };
    assert_eq!(cas("something", "new"), "something");
    assert_eq!(cas("", "first"), "first");
    assert_eq!(cas("", "second"), "first");
    assert_eq!(cas("other", "second"), "first");
    assert_eq!(cas("first", "second"), "second");
}

#[test]
fn a_wait_needs_all_keys_at_one_moment() {
    let mut kv = KeyValue::default();
    let id = later(kv.wait(SECOND, strings(&["a", "b"]), Want::Values, SECOND));
    kv.set("a", b"1".to_vec()).unwrap();
    kv.delete("a");
    kv.set("b", b"2".to_vec()).unwrap();
    assert_eq!(kv.woken(), []);
    kv.set("a", b"3".to_vec()).unwrap();
    assert_eq!(kv.woken(), [(id, Outcome::Values(vec![b"3".to_vec(), b"2".to_vec()]))]);
    assert_eq!(kv.waiting(), 0);
}

#[test]
fn a_wait_ends_at_its_deadline_and_names_what_is_missing() {
    let mut kv = KeyValue::default();
    let id = later(kv.wait(SECOND, strings(&["a", "b"]), Want::Existence, 2 * SECOND));
    kv.set("a", vec![]).unwrap();
    assert_eq!(kv.next_deadline(), Some(3 * SECOND));
    kv.tick(3 * SECOND - Duration::from_millis(1));
    assert_eq!(kv.woken(), []);
    kv.tick(3 * SECOND);
    assert_eq!(kv.woken(), [(id, Outcome::Missing { keys: strings(&["b"]), waited: 2 * SECOND })]);
    let gone = later(kv.wait(SECOND, strings(&["b"]), Want::Existence, SECOND));
    kv.cancel(gone);
    kv.set("b", vec![]).unwrap();
    assert_eq!((kv.woken(), kv.next_deadline()), (vec![], None));
}

#[test]
fn queues_are_served_in_order_and_lookers_come_before_takers() {
    let mut kv = KeyValue::default();
    let first = later(kv.wait(SECOND, strings(&["q"]), Want::Pop, SECOND));
    let second = later(kv.wait(SECOND, strings(&["q"]), Want::Pop, SECOND));
    let looker = later(kv.wait(SECOND, strings(&["q"]), Want::Existence, SECOND));
    kv.push("q", b"1".to_vec()).unwrap();
    assert_eq!(kv.woken(), [(looker, Outcome::Exist), (first, Outcome::Values(vec![b"1".to_vec()]))]);
    assert_eq!(kv.queue_len("q"), 0);
    kv.push("q", b"2".to_vec()).unwrap();
    kv.push("q", b"3".to_vec()).unwrap();
    assert_eq!(kv.woken(), [(second, Outcome::Values(vec![b"2".to_vec()]))]);
    kv.unpop("q", b"2".to_vec());
    assert_eq!(kv.queue_len("q"), 2);
    let now = kv.wait(SECOND, strings(&["q"]), Want::Pop, Duration::ZERO);
    assert_eq!(now, Ok(Answer::Now(Outcome::Values(vec![b"2".to_vec()]))));
    assert!(kv.delete("q"));
    assert_eq!(kv.bytes(), 0);
}

#[test]
fn limits_are_refused_and_change_nothing() {
    let limits = Limits { key_bytes: 4, value_bytes: 8, keys_per_call: 2, keys: 3, bytes: 24, waiting: 1 };
    let mut kv = KeyValue::new(limits);
    let over = |what: &str, limit, got| Err(Refusal::TooMuch { what: what.into(), limit, got });
    assert_eq!(kv.set("abcde", vec![]), over("bytes of a key", 4, 5));
    assert_eq!(kv.set("a", vec![0; 9]), over("bytes of a value", 8, 9));
    assert_eq!(kv.check(&strings(&["a", "b", "c"])), Err(over("keys in one call", 2, 3).unwrap_err()));
    kv.set("a", vec![0; 8]).unwrap();
    kv.set("b", vec![0; 8]).unwrap();
    assert_eq!(kv.push("c", vec![0; 8]), over("bytes in the store", 24, 27));
    assert_eq!(kv.multi_set(&strings(&["c", "d"]), &[b"", b""]), over("keys in the store", 3, 4));
    kv.set("c", vec![]).unwrap();
    assert_eq!(kv.set("d", vec![]), over("keys in the store", 3, 4));
    assert_eq!(kv.append("a", &[0]), over("bytes of a value", 8, 9));
    kv.set("a", vec![1; 8]).unwrap();
    later(kv.wait(SECOND, strings(&["x"]), Want::Existence, SECOND));
    let second = kv.wait(SECOND, strings(&["y"]), Want::Existence, SECOND);
    assert_eq!(second, Err(over("calls that wait", 1, 2).unwrap_err()));
    assert_eq!(kv.bytes(), 19);
}

#[derive(Clone, Debug)]
enum Step {
    Set(u8, u8),
    Add(u8, i64),
    Append(u8, u8),
    Delete(u8),
    Push(u8, u8),
    MultiSet(Vec<u8>),
    Wait(Vec<u8>, u8, u8),
    Cancel(u8),
    Tick(u8),
}

fn step() -> impl Strategy<Value = Step> {
    let key = 0u8..4;
    prop_oneof![
        (key.clone(), any::<u8>()).prop_map(|(k, v)| Step::Set(k, v)),
        (key.clone(), -3i64..3).prop_map(|(k, v)| Step::Add(k, v)),
        (key.clone(), b'0'..=b'9').prop_map(|(k, v)| Step::Append(k, v)),
        key.clone().prop_map(Step::Delete),
        (key.clone(), any::<u8>()).prop_map(|(k, v)| Step::Push(k, v)),
        proptest::collection::vec(key.clone(), 0..3).prop_map(Step::MultiSet),
        (proptest::collection::vec(key, 1..4), 0u8..3, 1u8..6).prop_map(|(k, w, t)| Step::Wait(k, w, t)),
        (0u8..8).prop_map(Step::Cancel),
        (1u8..4).prop_map(Step::Tick),
    ]
}

/// The same semantics, written for plainness: every waiter is looked at after every change.
#[derive(Default)]
struct Naive {
    values: std::collections::BTreeMap<String, Vec<u8>>,
    queues: std::collections::BTreeMap<String, Vec<Vec<u8>>>,
    waiters: Vec<(u64, Vec<String>, Want, Duration)>,
}

impl Naive {
    fn has(&self, key: &String, want: Want) -> bool {
        let queue = self.queues.get(key).is_some_and(|queue| !queue.is_empty());
        match want {
            Want::Existence => queue || self.values.contains_key(key),
            Want::Values => self.values.contains_key(key),
            Want::Pop => queue,
        }
    }

    fn serve(&mut self, keys: &[String], want: Want) -> Option<Outcome> {
        if !keys.iter().all(|key| self.has(key, want)) {
            return None;
        }
        Some(match want {
            Want::Existence => Outcome::Exist,
            Want::Values => Outcome::Values(keys.iter().map(|key| self.values[key].clone()).collect()),
            Want::Pop => Outcome::Values(vec![self.queues.get_mut(&keys[0]).unwrap().remove(0)]),
        })
    }

    fn settle(&mut self) -> Vec<(u64, Outcome)> {
        let mut out = Vec::new();
        for pops in [false, true] {
            for waiter in std::mem::take(&mut self.waiters) {
                match ((waiter.2 == Want::Pop) == pops).then(|| self.serve(&waiter.1, waiter.2)).flatten() {
                    Some(outcome) => out.push((waiter.0, outcome)),
                    None => self.waiters.push(waiter),
                }
            }
        }
        out
    }
}

proptest! {
    #[test]
    fn the_store_is_the_naive_one(steps in proptest::collection::vec(step(), 0..60)) {
        let (mut kv, mut naive, mut now) = (KeyValue::default(), Naive::default(), Duration::ZERO);
        kv.keep_journal();
        // The keys' own numbers for hashes.
        kv.keep_presence(|key| key[3..].parse().unwrap());
        let mut present = BTreeSet::new();
        let mut journal = Vec::new();
        let key = |k: u8| format!("key{k}");
        let mut ids = Vec::new();
        for step in steps {
            let mut expected = Vec::new();
            match step {
                Step::Set(k, v) => {
                    kv.set(&key(k), vec![v]).unwrap();
                    naive.values.insert(key(k), vec![v]);
                }
                Step::Add(k, n) => {
                    let text = naive.values.get(&key(k)).map(|v| String::from_utf8_lossy(v).into_owned());
                    let old = text.map_or(Ok(0), |text| text.parse::<i64>());
                    let sum = kv.add(&key(k), n);
                    prop_assert_eq!(sum.clone().ok(), old.ok().and_then(|old| old.checked_add(n)));
                    if let Ok(sum) = sum {
                        naive.values.insert(key(k), sum.to_string().into_bytes());
                    }
                }
                Step::Append(k, v) => {
                    kv.append(&key(k), &[v]).unwrap();
                    naive.values.entry(key(k)).or_default().push(v);
                }
                Step::Delete(k) => {
                    let there = naive.has(&key(k), Want::Existence);
                    prop_assert_eq!(kv.delete(&key(k)), there);
                    naive.values.remove(&key(k));
                    naive.queues.remove(&key(k));
                }
                Step::Push(k, v) => {
                    kv.push(&key(k), vec![v]).unwrap();
                    naive.queues.entry(key(k)).or_default().push(vec![v]);
                }
                Step::MultiSet(keys) => {
                    let names: Vec<String> = keys.iter().map(|k| key(*k)).collect();
                    let values: Vec<Vec<u8>> = keys.iter().map(|k| vec![*k]).collect();
                    for (name, value) in names.iter().zip(&values) {
                        naive.values.insert(name.clone(), value.clone());
                    }
                    kv.multi_set(&names, &values).unwrap();
                }
                Step::Wait(keys, want, timeout) => {
                    let want = [Want::Existence, Want::Values, Want::Pop][want as usize];
                    let keys = if want == Want::Pop { &keys[..1] } else { &keys[..] };
                    let keys: Vec<String> = keys.iter().map(|k| key(*k)).collect();
                    let timeout = Duration::from_secs(u64::from(timeout));
                    match kv.wait(now, keys.clone(), want, timeout).unwrap() {
                        Answer::Now(outcome) => prop_assert_eq!(Some(outcome), naive.serve(&keys, want)),
                        Answer::Later(id) => {
                            prop_assert_eq!(None, naive.serve(&keys, want));
                            naive.waiters.push((id, keys, want, now + timeout));
                            ids.push(id);
                        }
                    }
                }
                Step::Cancel(index) => {
                    if let Some(id) = ids.get(index as usize) {
                        kv.cancel(*id);
                        naive.waiters.retain(|waiter| waiter.0 != *id);
                    }
                }
                Step::Tick(seconds) => {
                    now += Duration::from_secs(u64::from(seconds));
                    kv.tick(now);
                    expected = naive.waiters.iter().filter(|w| w.3 <= now).map(|w| w.0).collect();
                    naive.waiters.retain(|w| w.3 > now);
                }
            }
            let mut woken = kv.woken();
            woken.sort_by_key(|(id, _)| *id);
            if expected.is_empty() {
                let mut settled = naive.settle();
                settled.sort_by_key(|(id, _)| *id);
                prop_assert_eq!(woken, settled);
            } else {
                let missing = |(_, outcome): &(u64, Outcome)| matches!(outcome, Outcome::Missing { .. });
                prop_assert!(woken.iter().all(missing));
                expected.sort_unstable();
                prop_assert_eq!(woken.iter().map(|(id, _)| *id).collect::<Vec<_>>(), expected);
            }
            prop_assert_eq!(kv.waiting(), naive.waiters.len());
            journal.extend(kv.changes());
            kv.presence(|hash, exists| {
                let news = if exists { present.insert(hash) } else { present.remove(&hash) };
                assert!(news, "{hash}: {exists} twice");
            });
            for k in 0..=u64::from(u8::MAX) {
                prop_assert_eq!(present.contains(&k), naive.has(&format!("key{k}"), Want::Existence), "{}", k);
            }
        }
        // One who begins to look later sees the same.
        let mut later = BTreeSet::new();
        kv.keep_presence(|key| key[3..].parse().unwrap());
        kv.presence(|hash, exists| assert!(exists && later.insert(hash)));
        prop_assert_eq!(later, present);
        // What the journal says is what is there.
        let mut again = KeyValue::default();
        journal.into_iter().for_each(|change| again.replay(change));
        prop_assert_eq!(&again.values, &kv.values);
        prop_assert_eq!(&again.queues, &kv.queues);
        prop_assert_eq!((again.bytes(), again.queued), (kv.bytes(), kv.queued));
        let mut copy = KeyValue::default();
        kv.contents().for_each(|change| copy.replay(change));
        prop_assert_eq!((copy.values, copy.queues, copy.bytes), (kv.values, kv.queues, kv.bytes));
    }
}
