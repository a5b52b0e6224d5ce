//! Stages that dial in.

use std::collections::VecDeque;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use baton_proto::v1;
use baton_proto::v1::stage_event::Event;
use baton_proto::v1::stage_order::Order;
use futures::Stream;
use tokio::sync::{mpsc, watch};
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Request, Response, Status, Streaming};

use crate::StartupEvent;
use crate::startup::Startup;

/// A stage whose heartbeat is this late is dead.
const SILENCE: Duration = Duration::from_secs(5);

type Orders = mpsc::Sender<Result<v1::StageOrder, Status>>;

/// Who has joined.
pub(crate) struct Registry {
    config_digest: String,
    checkpoint_digest: String,
    seats: Mutex<Seats>,
    /// Told whenever a stage came or went.
    changes: watch::Sender<()>,
    /// The first stage of the taken pipeline that was lost, and why.
    lost: watch::Sender<Option<(usize, String)>>,
    startup: Startup,
}

#[derive(Debug)]
struct Seats {
    /// By index.
    stages: Vec<Option<Joined>>,
    /// Stages without an index, first come first.
    standby: VecDeque<Joined>,
    /// Whether a pipeline was made of them: from then on a stage that leaves is lost, until then it only makes room.
    taken: bool,
    next_id: u64,
}

/// One joined stage.
#[derive(Clone, Debug)]
pub(crate) struct Joined {
    /// Of this stream: a stage that dials again is another one.
    id: u64,
    pub(crate) hello: v1::Hello,
    orders: Orders,
}

impl Joined {
    fn prefers(&self, index: usize) -> bool {
        self.hello.preferred_index.is_some_and(|preferred| preferred as usize == index)
    }

    /// An order that does not wait: the channel has room for the few there ever are, and a stage that has gone needs none.
    fn order(&self, order: Order) {
        let _ = self.orders.try_send(Ok(v1::StageOrder { order: Some(order) }));
    }
}

impl Seats {
    fn free(&self, index: usize) -> bool {
        self.stages.get(index).is_some_and(Option::is_none)
    }

    /// Gives a stage its index.
    fn seat(&mut self, index: usize, joined: Joined, startup: &Startup) {
        joined.order(Order::Welcome(v1::Welcome {
            stage_index: index as u32,
            stages: self.stages.len() as u32,
            heartbeat_millis: 500,
        }));
        let hello = &joined.hello;
        startup.tell(StartupEvent::Joined {
            stage: index,
            backend: hello.backend.clone(),
            address: hello.control_address.clone(),
            metrics: hello.metrics_address.clone(),
        });
        self.stages[index] = Some(joined);
    }
}

impl Registry {
    pub(crate) fn new(
        stages: usize,
        config_digest: String,
        checkpoint_digest: String,
        startup: Startup,
    ) -> Self {
        let (stages, standby) = (vec![None; stages], VecDeque::new());
        Self {
            config_digest,
            checkpoint_digest,
            seats: Mutex::new(Seats { stages, standby, taken: false, next_id: 0 }),
            changes: watch::Sender::new(()),
            lost: watch::Sender::new(None),
            startup,
        }
    }

    fn seats(&self) -> MutexGuard<'_, Seats> {
        // A stage is in one place at every moment of a change.
        self.seats.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn changes(&self) -> watch::Receiver<()> {
        self.changes.subscribe()
    }

    /// Of the pipeline that was taken last.
    pub(crate) fn lost(&self) -> watch::Receiver<Option<(usize, String)>> {
        self.lost.subscribe()
    }

    /// Indices that nobody has taken.
    pub(crate) fn missing(&self) -> Vec<usize> {
        let seats = self.seats();
        (0..seats.stages.len()).filter(|&i| seats.free(i)).collect()
    }

    /// Stages that wait to take another one's place.
    pub(crate) fn standbys(&self) -> usize {
        self.seats().standby.len()
    }

    /// Gives free places to stages that stand by; one that asked for the very place goes first.
    pub(crate) fn promote(&self) {
        let mut seats = self.seats();
        for index in 0..seats.stages.len() {
            if !seats.free(index) {
                continue;
            }
            let at = seats.standby.iter().position(|joined| joined.prefers(index)).unwrap_or(0);
            let Some(joined) = seats.standby.remove(at) else { return };
            seats.seat(index, joined, &self.startup);
        }
    }

    /// All stages in order, when none is missing. From then on a stage that leaves is lost.
    pub(crate) fn take(&self) -> Option<Vec<Joined>> {
        let mut seats = self.seats();
        let all: Vec<Joined> = seats.stages.iter().cloned().collect::<Option<_>>()?;
        seats.taken = true;
        self.lost.send_replace(None);
        Some(all)
    }

    /// Tells every stage that the coordinator goes away.
    pub(crate) async fn dismiss(&self) {
        {
            let seats = self.seats();
            for joined in seats.stages.iter().flatten().chain(&seats.standby) {
                joined.order(Order::Dismissed(v1::Dismissed {}));
            }
        }
        // Lets the orders reach the sockets before the server stops.
        tokio::time::sleep(Duration::from_millis(50)).await;
    }

    /// Gives the stage an index or lets it stand by, or says why not. Returns the id of its stream.
    fn admit(&self, hello: &v1::Hello, orders: &Orders) -> Result<u64, String> {
        for (what, theirs, ours) in [
            ("config", &hello.config_digest, &self.config_digest),
            ("checkpoint", &hello.checkpoint_digest, &self.checkpoint_digest),
        ] {
            if theirs.is_empty() && !ours.is_empty() {
                return Err(format!(
                    "the stage has no model (backend {:?}), the coordinator serves one",
                    hello.backend
                ));
            }
            if theirs != ours {
                return Err(format!(
                    "{what} digests differ: the stage has {theirs:?}, the coordinator {ours:?}"
                ));
            }
        }
        let mut seats = self.seats();
        let joined = Joined { id: seats.next_id, hello: hello.clone(), orders: orders.clone() };
        seats.next_id += 1;
        let (id, stages) = (joined.id, seats.stages.len());
        // One that stands by takes only the place it had before.
        let preferred = (0..stages).find(|&i| joined.prefers(i) && seats.free(i));
        let any = (0..stages).find(|&i| !hello.standby && seats.free(i));
        match preferred.or(any) {
            Some(index) => seats.seat(index, joined, &self.startup),
            None => {
                tracing::info!("{} stands by", hello.control_address);
                joined.order(Order::Standby(v1::Standby { stages: stages as u32 }));
                seats.standby.push_back(joined);
            }
        }
        drop(seats);
        self.changes.send_replace(());
        Ok(id)
    }

    /// A stage's stream has ended.
    fn lose(&self, id: u64, reason: String) {
        let mut seats = self.seats();
        seats.standby.retain(|joined| joined.id != id);
        let held = |joined: &Option<Joined>| joined.as_ref().is_some_and(|joined| joined.id == id);
        if let Some(index) = seats.stages.iter().position(held) {
            seats.stages[index] = None;
            self.startup.forget(index);
            if seats.taken {
                self.lost.send_if_modified(|lost| {
                    let first = lost.is_none();
                    if first {
                        *lost = Some((index, reason));
                    }
                    first
                });
            } else {
                tracing::warn!("stage {index} left before all had joined: {reason}");
            }
        }
        drop(seats);
        self.changes.send_replace(());
    }
}

/// `Coordinator`, over a [`Registry`].
pub(crate) struct JoinService {
    registry: Arc<Registry>,
}

impl JoinService {
    pub(crate) fn new(registry: Arc<Registry>) -> Self {
        Self { registry }
    }
}

#[tonic::async_trait]
impl v1::coordinator_server::Coordinator for JoinService {
    type JoinStream = Pin<Box<dyn Stream<Item = Result<v1::StageOrder, Status>> + Send>>;

    async fn join(
        &self,
        request: Request<Streaming<v1::StageEvent>>,
    ) -> Result<Response<Self::JoinStream>, Status> {
        let mut events = request.into_inner();
        let (orders, stream) = mpsc::channel(8);
        let registry = Arc::clone(&self.registry);
        tokio::spawn(async move {
            let Ok(Some(v1::StageEvent { event: Some(Event::Hello(hello)) })) =
                events.message().await
            else {
                return;
            };
            let order = |order| Ok(v1::StageOrder { order: Some(order) });
            let id = match registry.admit(&hello, &orders) {
                Ok(id) => id,
                Err(reason) => {
                    tracing::warn!("{} refused: {reason}", hello.control_address);
                    let _ = orders.send(order(Order::Refused(v1::Refused { reason }))).await;
                    // The stage closes the stream: a reset from this side could overtake the reason.
                    let closed = async { while let Ok(Some(_)) = events.message().await {} };
                    let _ = tokio::time::timeout(SILENCE, closed).await;
                    return;
                }
            };
            let reason = loop {
                match tokio::time::timeout(SILENCE, events.message()).await {
                    Err(_) => break format!("no heartbeat for {SILENCE:?}"),
                    Ok(Ok(Some(v1::StageEvent { event: Some(Event::Leaving(leaving)) }))) => {
                        break leaving.reason;
                    }
                    Ok(Ok(Some(_))) => {}
                    Ok(Ok(None)) => break "it closed its connection".into(),
                    Ok(Err(_)) => break "its connection broke".into(),
                }
            };
            registry.lose(id, reason);
        });
        Ok(Response::new(Box::pin(ReceiverStream::new(stream))))
    }
}
