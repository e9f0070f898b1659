use super::*;

const SOON: Duration = Duration::from_secs(10);

/// An agent in the coordinator's process, run by the test, and the other end of its own rank's line.
fn agent(coordinator: Coordinator) -> (Agent, Line) {
    let (own, rank) = Line::pair().unwrap();
    let (commands, handle) = {
        let (sender, commands) = mpsc::channel();
        let bell = Arc::new(Guarded::new(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).unwrap()));
        (commands, Handle { commands: sender, bell })
    };
    let place = coordinator.resident(1);
    let agent = Agent {
        listener: None,
        handle,
        commands,
        access: None,
        upstream: Upstream::Resident { coordinator, place },
        callers: BTreeMap::from([(OWN, Caller::new(own))]),
        next: OWN + 1,
        seats: Seats::default(),
        speaker: 0,
        began: Instant::now(),
        world: None,
        fallen: Vec::new(),
        silence: None,
        refusals: Seldom::default(),
        over: false,
        alive: mpsc::channel().0,
    };
    (agent, rank)
}

impl Agent {
    fn call(&mut self, line: Line) -> u64 {
        self.callers.insert(self.next, Caller::new(line));
        self.next += 1;
        self.next - 1
    }

    fn sit(&mut self, id: u64, rank: u32) {
        let seat = pb::Seat {
            version: wire::VERSION.to_owned(),
            rank,
            world_size: 3,
            host: "here".to_owned(),
            timeout_ms: wire::milliseconds(SOON),
            ..pb::Seat::default()
        };
        self.heard(id, Said::Seat(seat));
    }
}

/// All that a rank was told so far.
fn told(line: &Line) -> Vec<Says> {
    let mut inbox = Inbox::new(SAID);
    line.read_into(&mut inbox).unwrap();
    std::iter::from_fn(|| inbox.next::<pb::AgentSays>().unwrap()).filter_map(|says| says.what).collect()
}

#[test]
fn a_rank_that_dies_before_its_agent_hears_of_the_world_is_the_only_one_lost() {
    let coordinator = Coordinator::start(crate::coordinator::Config::default()).unwrap();
    let (elsewhere, (heard, events)) = (coordinator.resident(2), mpsc::channel());
    let (mut agent, rank_0) = agent(coordinator);
    agent.sit(OWN, 0);
    let (line, rank_1) = Line::pair().unwrap();
    let id = agent.call(line);
    agent.sit(id, 1);
    let there = Announcement {
        agent: elsewhere.agent(),
        host: "there".to_owned(),
        world_size: 3,
        ranks: vec![2],
        details: vec![Vec::new()],
        last_epoch: 0,
        timeout: SOON,
        hosts: Vec::new(),
        about: About { speaker: Some(2), ..About::default() },
    };
    elsewhere.announce(there, move |event| drop(heard.send(event))).unwrap();
    let Ok(Event::Formed(world)) = events.recv_timeout(SOON) else { panic!("not formed") };
    // The agent reads that rank's end before the news.
    drop(rank_1);
    agent.read(id);
    // A rank that it refuses is told of to nobody else, either.
    let (line, _twin) = Line::pair().unwrap();
    let twin = agent.call(line);
    agent.sit(twin, 0);
    let how = "its process ended".to_owned();
    let lost = Lost { epoch: world.epoch, host: "here".to_owned(), ranks: vec![1], how, speaker: None };
    assert_eq!(events.try_iter().collect::<Vec<_>>(), [Event::Lost(Arc::new(lost.clone()))]);
    while let Ok(command) = agent.commands.try_recv() {
        agent.command(command);
    }
    let here = pb::FormedHere { world: Some(wire::world(&world)), speaker: 0 };
    assert_eq!(told(&rank_0), [Says::Formed(here), Says::Lost(wire::lost(&lost))]);
    // The agent stands for its own rank as before.
    let failure = Failure { epoch: world.epoch, group: "g".to_owned(), by: 0, detail: Vec::new(), mismatch: None };
    agent.report(OWN, failure);
    assert!(matches!(events.try_recv(), Ok(Event::Failed(failure)) if failure.by == 0));
    elsewhere.leave();
    agent.gone(OWN, None);
    assert!(agent.over);
}
