//! Stages that dial in.

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
    slots: Mutex<Slots>,
    /// Number of joined stages, to wait on.
    joined: watch::Sender<usize>,
    /// The first stage of the taken pipeline that was lost, and why.
    lost: watch::Sender<Option<(usize, String)>>,
    startup: Startup,
}

/// Stages by index.
#[derive(Debug)]
struct Slots {
    stages: Vec<Option<Joined>>,
    /// Whether a pipeline was made of them: from then on a stage that leaves is lost, until then it only makes room.
    taken: bool,
}

/// One joined stage.
#[derive(Clone, Debug)]
pub(crate) struct Joined {
    pub(crate) hello: v1::Hello,
    orders: Orders,
}

impl Registry {
    pub(crate) fn new(
        stages: usize,
        config_digest: String,
        checkpoint_digest: String,
        startup: Startup,
    ) -> Self {
        Self {
            config_digest,
            checkpoint_digest,
            slots: Mutex::new(Slots { stages: vec![None; stages], taken: false }),
            joined: watch::Sender::new(0),
            lost: watch::Sender::new(None),
            startup,
        }
    }

    fn slots(&self) -> MutexGuard<'_, Slots> {
        // Every change under the lock is one assignment.
        self.slots.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn joined(&self) -> watch::Receiver<usize> {
        self.joined.subscribe()
    }

    pub(crate) fn lost(&self) -> watch::Receiver<Option<(usize, String)>> {
        self.lost.subscribe()
    }

    /// Indices that nobody has taken.
    pub(crate) fn missing(&self) -> Vec<usize> {
        let slots = self.slots();
        (0..slots.stages.len()).filter(|&i| slots.stages[i].is_none()).collect()
    }

    /// All stages in order, when none is missing. From then on a stage that leaves is lost.
    pub(crate) fn take(&self) -> Option<Vec<Joined>> {
        let mut slots = self.slots();
        let all: Option<Vec<Joined>> = slots.stages.iter().cloned().collect();
        slots.taken |= all.is_some();
        all
    }

    /// Tells every stage that the coordinator goes away.
    pub(crate) async fn dismiss(&self) {
        let stages: Vec<Joined> = self.slots().stages.iter().flatten().cloned().collect();
        for stage in stages {
            let order = v1::StageOrder { order: Some(Order::Dismissed(v1::Dismissed {})) };
            // A stage that has gone needs no order.
            let _ = stage.orders.send(Ok(order)).await;
        }
        // Lets the orders reach the sockets before the server stops.
        tokio::time::sleep(Duration::from_millis(50)).await;
    }

    /// Gives the stage an index, or says why not.
    fn admit(&self, hello: &v1::Hello, orders: &Orders) -> Result<usize, String> {
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
        let mut slots = self.slots();
        let preferred = hello.preferred_index.map(|i| i as usize);
        let stages = &mut slots.stages;
        let free = |i: &usize| stages.get(*i).is_some_and(Option::is_none);
        let index = preferred
            .filter(free)
            .or_else(|| (0..stages.len()).find(free))
            .ok_or_else(|| format!("all {} stages have joined already", stages.len()))?;
        stages[index] = Some(Joined { hello: hello.clone(), orders: orders.clone() });
        let count = stages.iter().flatten().count();
        // Told under the lock and before the count: what follows from a stage that joined comes after it.
        self.startup.tell(StartupEvent::Joined {
            stage: index,
            backend: hello.backend.clone(),
            address: hello.control_address.clone(),
            metrics: hello.metrics_address.clone(),
        });
        drop(slots);
        self.joined.send_replace(count);
        Ok(index)
    }

    fn lose(&self, index: usize, reason: String) {
        let (taken, count) = {
            let mut slots = self.slots();
            slots.stages[index] = None;
            if !slots.taken {
                self.startup.forget(index);
            }
            (slots.taken, slots.stages.iter().flatten().count())
        };
        self.joined.send_replace(count);
        if !taken {
            tracing::warn!("stage {index} left before all had joined: {reason}");
            return;
        }
        self.lost.send_if_modified(|lost| {
            let first = lost.is_none();
            if first {
                *lost = Some((index, reason));
            }
            first
        });
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
            let index = match registry.admit(&hello, &orders) {
                Ok(index) => index,
                Err(reason) => {
                    tracing::warn!("{} refused: {reason}", hello.control_address);
                    let _ = orders.send(order(Order::Refused(v1::Refused { reason }))).await;
                    // The stage closes the stream: a reset from this side could overtake the reason.
                    let closed = async { while let Ok(Some(_)) = events.message().await {} };
                    let _ = tokio::time::timeout(SILENCE, closed).await;
                    return;
                }
            };
            let welcome = v1::Welcome {
                stage_index: index as u32,
                stages: registry.slots().stages.len() as u32,
                heartbeat_millis: 500,
            };
            let _ = orders.send(order(Order::Welcome(welcome))).await;
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
            registry.lose(index, reason);
        });
        Ok(Response::new(Box::pin(ReceiverStream::new(stream))))
    }
}
