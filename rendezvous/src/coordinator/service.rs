//! The calls.
#![allow(clippy::result_large_err, reason = "tonic's Status is what its trait wants")]

use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use podring_proto as pb;
use podring_proto::rendezvous_server::Rendezvous;
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tokio_stream::{Stream, StreamExt as _};
use tonic::{Request, Response, Status, Streaming};

use super::state::{EVENTS, Shared};
use crate::decide::barrier::Arrival;
use crate::decide::invalid;
use crate::decide::keyvalue::{KeyValue, Outcome, Want};
use crate::decide::roster::{AgentId, Event};
use crate::refusal::Refusal;
use crate::secret::Token;
use crate::wire::{self, status};

/// What every call must carry. Looks at nothing else: a peer without the token reaches no state.
pub(super) fn admit(request: Request<()>, token: Option<&Token>) -> Result<Request<()>, Status> {
    let metadata = request.metadata();
    if let Some(token) = token {
        let given = metadata.get("authorization");
        if !given.is_some_and(|given| token.matches(given.as_bytes())) {
            return Err(status(&Refusal::Token { given: given.is_some() }));
        }
    }
    let yours = metadata.get(wire::VERSION_KEY).and_then(|value| value.to_str().ok()).unwrap_or_default();
    wire::compatible(yours).map_err(|refusal| status(&refusal))?;
    Ok(request)
}

pub(super) struct Service(pub(super) Arc<Shared>);

impl Service {
    /// The store, if the caller knows this one. 0 is a caller that doesn't care.
    fn store<R>(&self, instance: u64, act: impl FnOnce(&mut KeyValue) -> Result<R, Refusal>) -> Result<R, Status> {
        self.same(instance)?;
        self.0.with(|state, _| act(&mut state.store)).map_err(|refusal| status(&refusal))
    }

    fn same(&self, yours: u64) -> Result<(), Status> {
        self.0.same(yours).map_err(|refusal| status(&refusal))
    }

    async fn keys(&self, instance: u64, keys: Vec<String>, want: Want, ms: u32) -> Result<Vec<Vec<u8>>, Status> {
        self.same(instance)?;
        let pop = (want == Want::Pop).then(|| keys.first().cloned()).flatten();
        let ask = move |store: &mut KeyValue, now| store.wait(now, keys, want, wire::duration(ms));
        match self.0.store_answer(pop, ask).await.map_err(|refusal| status(&refusal))? {
            Outcome::Exist => Ok(Vec::new()),
            Outcome::Values(values) => Ok(values),
            Outcome::Missing { keys, waited } => Err(status(&Refusal::KeysMissing { keys, waited })),
        }
    }

    async fn one(&self, instance: u64, key: String, want: Want, ms: u32) -> Result<Response<pb::Value>, Status> {
        let mut values = self.keys(instance, vec![key], want, ms).await?;
        Ok(Response::new(pb::Value { value: values.pop().unwrap_or_default() }))
    }

    /// Announces, and gives the agent a stream if it hasn't one.
    fn announce(&self, announce: pb::Announce, line: Option<mpsc::Sender<Event>>) -> Result<(AgentId, u64), Refusal> {
        let announcement = wire::announcement(announce)?;
        let agent = announcement.agent;
        let line = line.map(|events| Box::new(move |event| events.try_send(event).is_ok()) as _);
        let serial = self.0.with(|state, now| state.announce(now, announcement, line))?;
        Ok((agent, serial))
    }

    /// Follows an agent's stream to its end.
    async fn follow(self, agent: AgentId, serial: u64, mut inbound: Streaming<pb::JoinRequest>) {
        use pb::join_request::What;
        let how = loop {
            match inbound.message().await {
                Ok(Some(pb::JoinRequest { what: Some(What::Announce(again)) })) => {
                    if let Err(refusal) = self.announce(again, None) {
                        break format!("its announcement was refused: {refusal}");
                    }
                }
                Ok(Some(pb::JoinRequest { what: Some(What::Leave(_)) })) => {
                    self.0.with(|state, _| {
                        if state.lines.get(&agent).is_some_and(|line| line.serial == serial) {
                            state.leave(agent);
                        }
                    });
                    return;
                }
                Ok(Some(pb::JoinRequest { what: Some(What::Part(pb::Part { ranks, how })) })) => {
                    let how = Some(how.as_str()).filter(|how| !how.is_empty());
                    self.0.with(|state, _| state.part(agent, &ranks, how));
                }
                // What a newer agent says.
                Ok(Some(pb::JoinRequest { what: None })) => {}
                Ok(None) => break "its stream ended".to_owned(),
                Err(error) => break format!("connection lost: {}", error.message()),
            }
        };
        self.0.with(|state, _| {
            if state.lines.get(&agent).is_some_and(|line| line.serial == serial) {
                state.lose(agent, &how);
            }
        });
    }
}

type Events<T> = Pin<Box<dyn Stream<Item = Result<T, Status>> + Send>>;

#[tonic::async_trait]
impl Rendezvous for Service {
    async fn hello(&self, _: Request<pb::HelloRequest>) -> Result<Response<pb::HelloReply>, Status> {
        Ok(Response::new(self.0.hello()))
    }

    type JoinStream = Events<pb::JoinEvent>;

    async fn join(&self, request: Request<Streaming<pb::JoinRequest>>) -> Result<Response<Self::JoinStream>, Status> {
        let mut inbound = request.into_inner();
        let first = tokio::time::timeout(self.0.silence, inbound.message());
        let first = first.await.map_err(|_| status(&invalid("join", "nothing announced")))??;
        let Some(pb::JoinRequest { what: Some(pb::join_request::What::Announce(announce)) }) = first else {
            return Err(status(&invalid("join", "the first message is no announcement")));
        };
        let (tx, rx) = mpsc::channel(EVENTS);
        let (agent, serial) = self.announce(announce, Some(tx)).map_err(|refusal| status(&refusal))?;
        tokio::spawn(Service(Arc::clone(&self.0)).follow(agent, serial, inbound));
        let shared = Arc::clone(&self.0);
        let message = move |event| Ok(wire::event(&event, |world| shared.formed(world)));
        Ok(Response::new(Box::pin(ReceiverStream::new(rx).map(message))))
    }

    type HeartbeatStream = Events<pb::Beat>;

    async fn heartbeat(
        &self,
        request: Request<Streaming<pb::Beat>>,
    ) -> Result<Response<Self::HeartbeatStream>, Status> {
        let shared = Arc::clone(&self.0);
        let answer = move |beat: Result<pb::Beat, Status>| {
            let beat = beat?;
            let heard =
                wire::agent_id(&beat.session).and_then(|agent| shared.with(|state, now| state.roster.beat(now, agent)));
            heard.map(|()| beat).map_err(|refusal| status(&refusal))
        };
        Ok(Response::new(Box::pin(request.into_inner().map(answer))))
    }

    async fn barrier(&self, request: Request<pb::BarrierRequest>) -> Result<Response<pb::BarrierReply>, Status> {
        let pb::BarrierRequest { session, epoch, name, ranks, members, timeout_ms } = request.into_inner();
        let agent = wire::agent_id(&session).map_err(|refusal| status(&refusal))?;
        let timeout = wire::duration(timeout_ms);
        let ask = |state: &mut super::state::State, now: Duration| {
            let world = state.roster.standing(agent, epoch, &ranks)?;
            let members = if members.is_empty() { (0..world.world_size).collect() } else { members };
            if let Some(lost) = state.roster.gone(&members) {
                return Err(Refusal::Lost(lost.as_ref().clone()));
            }
            state.barriers.arrive(now, Arrival { epoch, name, ranks, members: members.into(), timeout })
        };
        self.0.barrier_answer(ask).await.map_err(|refusal| status(&refusal))?;
        Ok(Response::new(pb::BarrierReply {}))
    }

    async fn report(&self, request: Request<pb::ReportRequest>) -> Result<Response<pb::ReportReply>, Status> {
        let pb::ReportRequest { session, failure } = request.into_inner();
        let first = wire::agent_id(&session).and_then(|agent| {
            let failure = failure.ok_or_else(|| invalid("report", "no failure in it"))?;
            self.0.with(|state, _| {
                let (first, outbox) = state.roster.report(agent, wire::from_failure(failure))?;
                state.deliver(outbox);
                Ok(first)
            })
        });
        let first = first.map_err(|refusal| status(&refusal))?;
        Ok(Response::new(pb::ReportReply { first: Some(wire::failure(&first)) }))
    }

    async fn status(&self, _: Request<pb::StatusRequest>) -> Result<Response<pb::StatusReply>, Status> {
        Ok(Response::new(self.0.status()))
    }

    async fn set(&self, request: Request<pb::SetRequest>) -> Result<Response<pb::Done>, Status> {
        let pb::SetRequest { instance, key, value } = request.into_inner();
        self.store(instance, |store| store.set(&key, value))?;
        Ok(Response::new(pb::Done {}))
    }

    async fn get(&self, request: Request<pb::GetRequest>) -> Result<Response<pb::Value>, Status> {
        let pb::GetRequest { instance, key, timeout_ms } = request.into_inner();
        self.one(instance, key, Want::Values, timeout_ms).await
    }

    async fn wait(&self, request: Request<pb::WaitRequest>) -> Result<Response<pb::Done>, Status> {
        let pb::WaitRequest { instance, keys, timeout_ms } = request.into_inner();
        self.keys(instance, keys, Want::Existence, timeout_ms).await?;
        Ok(Response::new(pb::Done {}))
    }

    async fn check(&self, request: Request<pb::CheckRequest>) -> Result<Response<pb::Flag>, Status> {
        let pb::CheckRequest { instance, keys } = request.into_inner();
        Ok(Response::new(pb::Flag { value: self.store(instance, |store| store.check(&keys))? }))
    }

    async fn add(&self, request: Request<pb::AddRequest>) -> Result<Response<pb::Number>, Status> {
        let pb::AddRequest { instance, key, amount } = request.into_inner();
        Ok(Response::new(pb::Number { value: self.store(instance, |store| store.add(&key, amount))? }))
    }

    async fn compare_set(&self, request: Request<pb::CompareSetRequest>) -> Result<Response<pb::Value>, Status> {
        let pb::CompareSetRequest { instance, key, expected, desired } = request.into_inner();
        let value = self.store(instance, |store| store.compare_set(&key, expected, desired))?;
        Ok(Response::new(pb::Value { value }))
    }

    async fn append(&self, request: Request<pb::AppendRequest>) -> Result<Response<pb::Done>, Status> {
        let pb::AppendRequest { instance, key, value } = request.into_inner();
        self.store(instance, |store| store.append(&key, &value))?;
        Ok(Response::new(pb::Done {}))
    }

    async fn delete(&self, request: Request<pb::DeleteRequest>) -> Result<Response<pb::Flag>, Status> {
        let pb::DeleteRequest { instance, key } = request.into_inner();
        Ok(Response::new(pb::Flag { value: self.store(instance, |store| Ok(store.delete(&key)))? }))
    }

    async fn multi_get(&self, request: Request<pb::MultiGetRequest>) -> Result<Response<pb::Values>, Status> {
        let pb::MultiGetRequest { instance, keys, timeout_ms } = request.into_inner();
        let values = self.keys(instance, keys, Want::Values, timeout_ms).await?;
        Ok(Response::new(pb::Values { values }))
    }

    async fn multi_set(&self, request: Request<pb::MultiSetRequest>) -> Result<Response<pb::Done>, Status> {
        let pb::MultiSetRequest { instance, keys, values } = request.into_inner();
        self.store(instance, |store| store.multi_set(&keys, &values))?;
        Ok(Response::new(pb::Done {}))
    }

    async fn queue_push(&self, request: Request<pb::QueuePushRequest>) -> Result<Response<pb::Done>, Status> {
        let pb::QueuePushRequest { instance, key, value } = request.into_inner();
        self.store(instance, |store| store.push(&key, value))?;
        Ok(Response::new(pb::Done {}))
    }

    async fn queue_pop(&self, request: Request<pb::QueuePopRequest>) -> Result<Response<pb::Value>, Status> {
        let pb::QueuePopRequest { instance, key, timeout_ms } = request.into_inner();
        self.one(instance, key, Want::Pop, timeout_ms).await
    }

    async fn queue_length(&self, request: Request<pb::QueueLengthRequest>) -> Result<Response<pb::Number>, Status> {
        let pb::QueueLengthRequest { instance, key } = request.into_inner();
        let value = self.store(instance, |store| Ok(store.queue_len(&key) as i64))?;
        Ok(Response::new(pb::Number { value }))
    }

    async fn num_keys(&self, request: Request<pb::NumKeysRequest>) -> Result<Response<pb::Number>, Status> {
        let pb::NumKeysRequest { instance } = request.into_inner();
        let value = self.store(instance, |store| Ok(store.num_keys() as i64))?;
        Ok(Response::new(pb::Number { value }))
    }

    async fn list_keys(&self, request: Request<pb::ListKeysRequest>) -> Result<Response<pb::Keys>, Status> {
        let pb::ListKeysRequest { instance, prefix } = request.into_inner();
        let keys = self.store(instance, |store| Ok(store.list(&prefix)))?;
        Ok(Response::new(pb::Keys { keys }))
    }
}
