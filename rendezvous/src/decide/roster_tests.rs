use proptest::prelude::*;

use super::*;

const SECOND: Duration = Duration::from_secs(1);

fn roster() -> Roster {
    Roster::new(Limits::default(), 10 * SECOND, 0)
}

fn says(agent: AgentId, world_size: u32, ranks: &[u32]) -> Announcement {
    Announcement {
        agent,
        host: format!("host{agent}"),
        world_size,
        ranks: ranks.to_vec(),
        details: ranks.iter().map(|rank| vec![*rank as u8]).collect(),
        last_epoch: 0,
        timeout: 5 * SECOND,
        hosts: Vec::new(),
        about: About::default(),
    }
}

/// By an agent that has heard of an epoch.
fn says_after(last_epoch: u64, agent: AgentId, world_size: u32, ranks: &[u32]) -> Announcement {
    Announcement { last_epoch, ..says(agent, world_size, ranks) }
}

fn formed(outbox: &Outbox) -> Arc<World> {
    match &outbox.last().expect("no event").1 {
        Event::Formed(world) => Arc::clone(world),
        other => panic!("{other:?}"),
    }
}

#[test]
fn an_epoch_forms_when_the_last_rank_is_there() {
    let mut roster = roster();
    assert_eq!(roster.announce(SECOND, says(7, 4, &[0, 2])), Ok(vec![]));
    let outbox = roster.announce(SECOND, says(3, 4, &[1, 3])).unwrap();
    let world = formed(&outbox);
    assert_eq!(outbox.iter().map(|(agent, _)| *agent).collect::<Vec<_>>(), [7, 3]);
    assert_eq!((world.epoch, world.world_size), (1, 4));
    assert_eq!(world.hosts[0], Host { name: "host7".into(), ranks: vec![0, 2], details: vec![vec![0], vec![2]] });
    assert_eq!((world.host_of(3), world.host_of(4)), (Some("host3"), None));
    assert!(roster.standing(7, 1, &[2]).is_ok());
    assert!(matches!(roster.standing(7, 1, &[1]), Err(Refusal::Invalid { .. })));
    assert_eq!(roster.standing(7, 2, &[0]).unwrap_err(), Refusal::Stale { yours: 2, current: 1 });
    assert_eq!(roster.standing(8, 1, &[0]).unwrap_err(), Refusal::UnknownSession);
}

#[test]
fn the_missing_are_named_with_their_hosts_to_everybody() {
    let mut roster = roster();
    let mut first = says(0, 4, &[0]);
    first.hosts = vec!["a".into(), "b".into()];
    roster.announce(SECOND, first).unwrap();
    let mut second = says(1, 4, &[1]);
    second.timeout = 2 * SECOND;
    roster.announce(SECOND, second).unwrap();
    assert_eq!(roster.next_deadline(), Some(3 * SECOND));
    let (_, outbox) = roster.tick(3 * SECOND);
    let missing = [2, 3].map(|rank| RankAt { rank, host: Some("b".into()) }).to_vec();
    let late = Late { missing, waited: 2 * SECOND, world_size: 4, refused: vec![] };
    assert_eq!(late.to_string(), "2 of 4 ranks missing after 2s: ranks 2 on b, 3 on b");
    let event = Event::Late(Arc::new(late));
    assert_eq!(outbox, [(0, event.clone()), (1, event)]);
    // Both may try again.
    roster.announce(4 * SECOND, says(0, 2, &[0])).unwrap();
    assert_eq!(formed(&roster.announce(4 * SECOND, says(1, 2, &[1])).unwrap()).world_size, 2);
}

#[test]
fn a_rank_that_was_there_once_is_named_with_that_host() {
    let mut roster = roster();
    roster.announce(SECOND, says(0, 2, &[0])).unwrap();
    roster.announce(SECOND, says(1, 2, &[1])).unwrap();
    roster.lost(1, "killed");
    roster.announce(SECOND, says_after(1, 0, 2, &[0])).unwrap();
    let (_, outbox) = roster.tick(7 * SECOND);
    let Event::Late(late) = &outbox[0].1 else { panic!("{outbox:?}") };
    assert_eq!(late.missing, [RankAt { rank: 1, host: Some("host1".into()) }]);
}

#[test]
fn twins_and_other_sizes_are_refused_and_named_when_it_is_late() {
    let mut roster = roster();
    roster.announce(SECOND, says(0, 3, &[0, 1])).unwrap();
    let twin = Refusal::Twin { rank: 1, holder: "host0".into(), second: "host5".into() };
    assert_eq!(roster.announce(SECOND, says(5, 3, &[1])), Err(twin));
    let sizes = Refusal::SizesDiffer { yours: 4, theirs: 3, host: "host0".into() };
    assert_eq!(roster.announce(SECOND, says(6, 4, &[3])), Err(sizes));
    let (_, outbox) = roster.tick(6 * SECOND);
    let Event::Late(late) = &outbox[0].1 else { panic!("{outbox:?}") };
    assert_eq!(late.refused.len(), 2, "{late}");
    // A twin of a rank in the formed epoch, too.
    let mut roster = self::roster();
    roster.announce(SECOND, says(0, 1, &[0])).unwrap();
    assert!(matches!(roster.announce(SECOND, says(1, 1, &[0])), Err(Refusal::Twin { rank: 0, .. })));
}

#[test]
fn malformed_announcements() {
    let mut roster = Roster::new(Limits { world_size: 8, detail_bytes: 2, ..Limits::default() }, SECOND, 0);
    let mut cases = vec![
        says(0, 0, &[0]),
        says(0, 2, &[]),
        says(0, 2, &[2]),
        says(0, 2, &[1, 0]),
        says(0, 2, &[1, 1]),
        says(0, 9, &[0]),
    ];
    for change in [
        |a: &mut Announcement| a.details.clear(),
        |a: &mut Announcement| a.details[0] = vec![0; 3],
        |a: &mut Announcement| a.host.clear(),
        |a: &mut Announcement| a.host = "h".repeat(256),
        |a: &mut Announcement| a.hosts = vec!["a".into(), "b".into(), "c".into()],
    ] {
        let mut case = says(0, 2, &[0]);
        change(&mut case);
        cases.push(case);
    }
    for case in cases {
        let refusal = roster.announce(SECOND, case.clone());
        assert!(matches!(refusal, Err(Refusal::Invalid { .. } | Refusal::TooMuch { .. })), "{case:?}: {refusal:?}");
    }
    assert_eq!(roster.next_deadline(), None);
}

#[test]
fn silence_is_a_loss_and_everybody_else_hears_it() {
    let mut roster = roster();
    roster.announce(SECOND, says(0, 3, &[0])).unwrap();
    roster.announce(SECOND, says(1, 3, &[1])).unwrap();
    roster.announce(SECOND, says(2, 3, &[2])).unwrap();
    roster.beat(5 * SECOND, 0).unwrap();
    roster.beat(5 * SECOND, 2).unwrap();
    let (gone, mut outbox) = roster.tick(11 * SECOND);
    outbox.sort_by_key(|(agent, _)| *agent);
    let lost =
        Arc::new(Lost { epoch: 1, host: "host1".into(), ranks: vec![1], how: "silent for 10s".into(), speaker: None });
    assert_eq!(gone, [Arc::clone(&lost)]);
    assert_eq!(outbox, [(0, Event::Lost(Arc::clone(&lost))), (2, Event::Lost(Arc::clone(&lost)))]);
    assert_eq!(roster.beat(11 * SECOND, 1), Err(Refusal::UnknownSession));
    assert_eq!(roster.gone(&[0, 1]), Some(lost));
    assert_eq!(roster.gone(&[0, 2]), None);
}

#[test]
fn a_restarted_coordinator_goes_on_above_the_highest_epoch() {
    let mut roster = roster();
    let mut first = says(0, 2, &[0]);
    first.last_epoch = 5;
    roster.announce(SECOND, first).unwrap();
    let mut second = says(1, 2, &[1]);
    second.last_epoch = 7;
    assert_eq!(formed(&roster.announce(SECOND, second).unwrap()).epoch, 8);
    assert_eq!(roster.standing(0, 5, &[0]).unwrap_err(), Refusal::Stale { yours: 5, current: 8 });
}

#[test]
fn a_member_that_announces_itself_again_breaks_the_epoch_once() {
    let mut roster = roster();
    for agent in 0..3 {
        roster.announce(SECOND, says(agent, 3, &[agent as u32])).unwrap();
    }
    let outbox = roster.announce(SECOND, says_after(1, 0, 3, &[0])).unwrap();
    assert_eq!(outbox.len(), 2, "{outbox:?}");
    assert!(matches!(&outbox[0].1, Event::Lost(lost) if lost.ranks == [0]));
    assert_eq!(roster.announce(SECOND, says_after(1, 1, 3, &[1])), Ok(vec![]));
    assert_eq!(formed(&roster.announce(SECOND, says_after(1, 2, 3, &[2])).unwrap()).epoch, 2);
}

#[test]
fn a_smaller_world_leaves_a_stale_member_behind() {
    let mut roster = roster();
    for agent in 0..3 {
        roster.announce(SECOND, says(agent, 3, &[agent as u32])).unwrap();
    }
    roster.announce(SECOND, says_after(1, 0, 2, &[0])).unwrap();
    assert_eq!(formed(&roster.announce(SECOND, says_after(1, 1, 2, &[1])).unwrap()).epoch, 2);
    assert_eq!(roster.standing(2, 1, &[2]).unwrap_err(), Refusal::Stale { yours: 1, current: 2 });
    assert!(matches!(roster.standing(2, 2, &[2]), Err(Refusal::Invalid { .. })));
}

#[test]
fn the_first_report_stands_and_the_few_are_blamed() {
    let mut roster = roster();
    for agent in 0..3 {
        roster.announce(SECOND, says(agent, 3, &[agent as u32])).unwrap();
    }
    let held = vec![(0, "float32".into()), (1, "float16".into()), (2, "float32".into())];
    let mismatch = Mismatch { sequence: 4, field: "dtype".into(), held, blamed: vec![] };
    let report = |by: u32, detail: &[u8], mismatch| Failure {
        epoch: 1,
        group: "g".into(),
        by,
        detail: detail.to_vec(),
        mismatch,
    };
    let (first, outbox) = roster.report(2, report(2, b"first", Some(mismatch))).unwrap();
    assert_eq!(first.mismatch.as_ref().unwrap().blamed, [1]);
    assert_eq!(outbox.len(), 2);
    let (second, outbox) = roster.report(0, report(0, b"second", None)).unwrap();
    assert_eq!((second, outbox), (first, vec![]));
    assert!(matches!(roster.report(0, report(1, b"", None)), Err(Refusal::Invalid { .. })));
    assert!(matches!(roster.report(0, report(0, &[0; 2 << 20], None)), Err(Refusal::TooMuch { .. })));
}

#[derive(Clone, Debug)]
enum Step {
    Announce(u8),
    Lose(u8),
    Leave(u8),
    Beat(u8),
    Tick(u8),
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        6 => (0u8..5).prop_map(Step::Announce),
        1 => (0u8..5).prop_map(Step::Lose),
        1 => (0u8..5).prop_map(Step::Leave),
        2 => (0u8..5).prop_map(Step::Beat),
        1 => (1u8..4).prop_map(Step::Tick),
    ]
}

proptest! {
    /// Agents 0..4 own one rank each of a world of 4; agent 4 is a twin of agent 0.
    #[test]
    fn epochs_only_rise_and_every_formed_world_is_whole(steps in proptest::collection::vec(step(), 0..80)) {
        let mut roster = roster();
        let mut now = Duration::ZERO;
        let mut last = 0;
        for step in steps {
            let outbox = match step {
                Step::Announce(agent) => {
                    let before = roster.lacking();
                    let answer = roster.announce(now, says_after(last, agent.into(), 4, &[u32::from(agent) % 4]));
                    if answer.is_err() {
                        prop_assert_eq!(roster.lacking(), before, "a refusal changed the lists");
                    }
                    answer.unwrap_or_default()
                }
                Step::Lose(agent) => roster.lost(agent.into(), "test").1,
                Step::Leave(agent) => {
                    roster.leave(agent.into());
                    Vec::new()
                }
                Step::Beat(agent) => {
                    let _ = roster.beat(now, agent.into());
                    Vec::new()
                }
                Step::Tick(seconds) => {
                    now += u32::from(seconds) * SECOND;
                    let outbox = roster.tick(now).1;
                    prop_assert!(roster.next_deadline().is_none_or(|deadline| deadline > now));
                    outbox
                }
            };
            let mut told = 0;
            for (agent, event) in &outbox {
                match event {
                    Event::Formed(world) => {
                        prop_assert!(world.epoch > last);
                        let ranks: Vec<u32> = world.hosts.iter().flat_map(|host| host.ranks.clone()).collect();
                        prop_assert_eq!(ranks, vec![0, 1, 2, 3]);
                        prop_assert!(roster.standing(*agent, world.epoch, &[]).is_ok());
                        told += 1;
                    }
                    Event::Lost(lost) => prop_assert!(lost.epoch == roster.epoch() || told > 0),
                    Event::Late(late) => prop_assert!(!late.missing.is_empty()),
                    Event::Failed(_) | Event::Closing => {}
                }
            }
            if told > 0 {
                prop_assert_eq!(told, 4);
                prop_assert_eq!(roster.epoch(), last + 1);
                last += 1;
            }
        }
    }
}

#[test]
fn an_agent_may_add_ranks_while_it_waits() {
    let mut roster = roster();
    roster.announce(SECOND, says(0, 4, &[0])).unwrap();
    let mut more = says(0, 4, &[0, 1]);
    more.timeout = 3 * SECOND;
    more.about.refused = vec!["host0: rank 1 twice".into()];
    more.about.expected = vec![0, 1, 2];
    roster.announce(2 * SECOND, more.clone()).unwrap();
    roster.announce(2 * SECOND, more).unwrap();
    let (_, outbox) = roster.tick(5 * SECOND);
    let Event::Late(late) = &outbox[0].1 else { panic!("{outbox:?}") };
    // From the first announcement, and each refusal once.
    let missing = vec![RankAt { rank: 2, host: Some("host0".into()) }, RankAt { rank: 3, host: None }];
    let refused = vec!["host0: rank 1 twice".to_owned()];
    assert_eq!(**late, Late { missing, waited: 4 * SECOND, world_size: 4, refused });
    // Alone, it may change the world's size.
    roster.announce(6 * SECOND, says(0, 3, &[0])).unwrap();
    assert_eq!(formed(&roster.announce(6 * SECOND, says(0, 1, &[0])).unwrap()).world_size, 1);
}

#[test]
fn some_of_an_agents_ranks_may_go() {
    let mut roster = roster();
    let mut first = says(7, 4, &[0, 1, 2]);
    first.about.speaker = Some(0);
    roster.announce(SECOND, first).unwrap();
    let mut second = says(8, 4, &[3]);
    second.about.speaker = Some(3);
    formed(&roster.announce(SECOND, second).unwrap());
    let (lost, outbox) = roster.part(7, &[1, 3], Some("killed"));
    let lost = lost.unwrap();
    assert_eq!((lost.ranks.as_slice(), lost.host.as_str(), lost.speaker), (&[1][..], "host7", None));
    assert_eq!(outbox, [(8, Event::Lost(lost))]);
    assert_eq!(roster.gone(&[0, 1]).unwrap().ranks, [1]);
    assert!(roster.standing(7, 1, &[0, 2]).is_ok() && roster.standing(7, 1, &[1]).is_err());
    assert_eq!(roster.part(7, &[1], Some("again")), (None, vec![]));
    // Left in order: nobody is told, but whoever needs it is.
    let (left, outbox) = roster.part(7, &[0], None);
    assert_eq!((left.unwrap().ranks.as_slice(), outbox.len()), (&[0][..], 0));
    // Its own rank has left: its end says nothing against rank 2.
    let (gone, outbox) = roster.lost(7, "its stream ended");
    assert_eq!((gone.unwrap().ranks.as_slice(), outbox.len()), (&[2][..], 0));
    let (lost, _) = roster.lost(8, "its stream ended");
    assert_eq!(lost.unwrap().speaker, Some(3));
}

#[test]
fn a_rank_that_goes_before_the_epoch_forms_is_missing() {
    let mut roster = roster();
    roster.announce(SECOND, says(0, 3, &[0, 1])).unwrap();
    assert_eq!(roster.part(0, &[1], Some("killed")), (None, vec![]));
    assert_eq!(roster.announce(SECOND, says(1, 3, &[2])), Ok(vec![]));
    let world = formed(&roster.announce(SECOND, says(2, 3, &[1])).unwrap());
    assert_eq!(world.hosts[0], Host { name: "host0".into(), ranks: vec![0], details: vec![vec![0]] });
}

#[test]
fn a_resident_agent_is_never_silent() {
    let mut roster = roster();
    roster.announce(SECOND, says(0, 2, &[0])).unwrap();
    roster.resident(0);
    roster.announce(SECOND, says(1, 2, &[1])).unwrap();
    let (lost, _) = roster.tick(100 * SECOND);
    assert_eq!(lost.iter().map(|lost| lost.ranks.clone()).collect::<Vec<_>>(), [[1]]);
    assert_eq!(roster.next_deadline(), None);
}

#[test]
fn an_agent_that_has_not_heard_of_its_epoch_stays_in_it() {
    let mut roster = roster();
    let mut first = says(7, 4, &[0, 1]);
    first.about.speaker = Some(0);
    roster.announce(SECOND, first).unwrap();
    let world = formed(&roster.announce(SECOND, says(8, 4, &[2, 3])).unwrap());
    // Once more, for one that it refused; nobody else hears of that.
    let again = roster.announce(SECOND, says(7, 4, &[0, 1])).unwrap();
    assert_eq!(again, [(7, Event::Formed(Arc::clone(&world)))]);
    // Without a rank that has died meanwhile: that one is lost, and the agent's own is not.
    let outbox = roster.announce(SECOND, says(7, 4, &[0])).unwrap();
    let lost = roster.gone(&[0, 1]).unwrap();
    assert_eq!((lost.ranks.as_slice(), lost.speaker), (&[1][..], None));
    let lost = Event::Lost(lost);
    assert_eq!(outbox, [(8, lost.clone()), (7, Event::Formed(world)), (7, lost)]);
    assert!(roster.standing(7, 1, &[0]).is_ok() && roster.standing(8, 1, &[2, 3]).is_ok());
    assert_eq!((roster.lacking(), roster.tick(8 * SECOND)), ((4, vec![]), (vec![], vec![])));
    // Who knows of it announces itself for the next.
    roster.announce(8 * SECOND, says_after(1, 7, 3, &[0])).unwrap();
    assert_eq!(formed(&roster.announce(8 * SECOND, says_after(1, 8, 3, &[1, 2])).unwrap()).epoch, 2);
}
