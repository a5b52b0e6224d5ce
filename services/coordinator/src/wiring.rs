//! From joined stages to a running pipeline.

use std::sync::Arc;
use std::time::Duration;

use baton_plan::{Contract, StageContract};
use baton_proto::v1;
use baton_proto::v1::load_event::Event;
use baton_proto::v1::stage_client::StageClient;
use futures::future::try_join_all;
use tonic::transport::{Channel, Endpoint};

use crate::registry::{Joined, Registry};
use crate::startup::{Start, Startup};
use crate::{CoordinatorError, StartupEvent};

/// How long each part may take.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Times {
    pub(crate) join: Duration,
    pub(crate) load: Duration,
    pub(crate) wire: Duration,
    pub(crate) step: Duration,
}

/// What stages are told of the model.
#[derive(Clone, Debug)]
pub(crate) struct ModelIdentity {
    pub(crate) checkpoint_digest: String,
    pub(crate) link: String,
    pub(crate) max_kv_blocks: u32,
}

/// A wired pipeline.
pub(crate) struct Wired {
    pub(crate) epoch: u64,
    pub(crate) kv_blocks: u32,
    /// In stage order.
    pub(crate) clients: Vec<StageClient<Channel>>,
    pub(crate) links: Vec<String>,
    /// What is known of them since the start.
    pub(crate) starts: Vec<Start>,
}

/// What every wiring of the pipeline is made from.
pub(crate) struct Wiring {
    pub(crate) registry: Arc<Registry>,
    pub(crate) contract: Contract,
    pub(crate) model: ModelIdentity,
    pub(crate) times: Times,
    pub(crate) startup: Startup,
}

/// Pauses between attempts to wire again.
const FIRST_PAUSE: Duration = Duration::from_millis(500);
const LONGEST_PAUSE: Duration = Duration::from_secs(10);

impl Wiring {
    /// The first wiring. Stages that stand by take part when half of the time to join is over.
    pub(crate) async fn wire_first(&self) -> Result<Wired, CoordinatorError> {
        let joined = tokio::time::timeout(self.times.join / 2, self.join(false)).await;
        let joined = match joined {
            Ok(joined) => joined,
            Err(_) => {
                let rest = tokio::time::timeout(self.times.join / 2, self.join(true)).await;
                rest.map_err(|_| self.missing())?
            }
        };
        self.wire(&joined, 1).await
    }

    /// Wires again under the next epoch, in as many attempts as it takes.
    pub(crate) async fn wire_again(&self, mut epoch: u64) -> Wired {
        let mut pause = FIRST_PAUSE;
        loop {
            epoch += 1;
            let joined = self.join(true).await;
            match self.wire(&joined, epoch).await {
                Ok(wired) => return wired,
                Err(error) => {
                    tracing::warn!("the pipeline cannot be wired again yet: {error}");
                    self.startup.start_over();
                }
            }
            tokio::time::sleep(pause).await;
            pause = (pause * 2).min(LONGEST_PAUSE);
        }
    }

    /// Waits for all stages, in order.
    async fn join(&self, with_standbys: bool) -> Vec<Joined> {
        let mut changes = self.registry.changes();
        loop {
            changes.mark_unchanged();
            if with_standbys {
                self.registry.promote();
            }
            if let Some(all) = self.registry.take() {
                return all;
            }
            if changes.changed().await.is_err() {
                std::future::pending::<()>().await;
            }
        }
    }

    fn missing(&self) -> CoordinatorError {
        let stages = self.contract.stages.len();
        let missing = self.registry.missing();
        let names: Vec<String> = missing.iter().map(|i| format!("stage {i}")).collect();
        CoordinatorError::Missing {
            joined: stages - missing.len(),
            stages,
            timeout: self.times.join,
            missing: names.join(", "),
        }
    }

    /// Loads these stages and connects them.
    async fn wire(&self, joined: &[Joined], epoch: u64) -> Result<Wired, CoordinatorError> {
        let Self { contract, model, times, startup, .. } = self;
        let mut lost = self.registry.lost();
        let work = async {
            let clients = try_join_all(joined.iter().enumerate().map(connect)).await?;
            let loads = clients
                .iter()
                .zip(&contract.stages)
                .map(|(client, contract)| load(client.clone(), contract, model, times, startup));
            let kv_blocks = try_join_all(loads).await?.into_iter().min().unwrap_or(0);
            let wires = clients.iter().enumerate().map(|(stage, client)| {
                let next = joined.get(stage + 1);
                let request = v1::WireRequest {
                    epoch,
                    kv_blocks,
                    link: model.link.clone(),
                    next_address: next.map(|next| next.hello.link_address.clone()),
                    contract_digest: contract.digest(),
                    timeout_millis: times.wire.as_millis() as u32,
                    step_timeout_millis: times.step.as_millis() as u32,
                };
                wire_stage(client.clone(), stage, request, times.wire, startup)
            });
            let links = try_join_all(wires).await?;
            Ok(Wired { epoch, kv_blocks, clients, links, starts: startup.now() })
        };
        tokio::select! {
            wired = work => wired,
            // A stage that dies while another one loads must not be waited for.
            gone = lost.wait_for(Option::is_some) => {
                let (stage, reason) =
                    gone.ok().and_then(|gone| gone.clone()).unwrap_or((0, "it is gone".into()));
                Err(CoordinatorError::Stage { stage, reason })
            }
        }
    }
}

async fn connect(
    (stage, joined): (usize, &Joined),
) -> Result<StageClient<Channel>, CoordinatorError> {
    let failed = |reason: String| CoordinatorError::Stage { stage, reason };
    let endpoint = Endpoint::from_shared(joined.hello.control_address.clone())
        .map_err(|e| failed(e.to_string()))?
        .connect_timeout(Duration::from_secs(5))
        .tcp_nodelay(true);
    let channel = endpoint.connect().await.map_err(|e| {
        failed(format!("cannot be reached at {}: {e}", joined.hello.control_address))
    })?;
    Ok(StageClient::new(channel))
}

async fn load(
    mut client: StageClient<Channel>,
    contract: &StageContract,
    model: &ModelIdentity,
    times: &Times,
    startup: &Startup,
) -> Result<u32, CoordinatorError> {
    let stage = contract.stage;
    let failed = |reason: String| CoordinatorError::Stage { stage, reason };
    let request = v1::LoadRequest {
        contract: Some(message(contract)),
        checkpoint_digest: model.checkpoint_digest.clone(),
        max_kv_blocks: model.max_kv_blocks,
    };
    let stuck = |_| failed(format!("no progress in loading for {:?}", times.load));
    let mut events = tokio::time::timeout(times.load, client.load(request))
        .await
        .map_err(stuck)?
        .map_err(|e| failed(e.message().to_owned()))?
        .into_inner();
    loop {
        let event = tokio::time::timeout(times.load, events.message())
            .await
            .map_err(stuck)?
            .map_err(|e| failed(format!("loading: {}", e.message())))?
            .ok_or_else(|| failed("its loading ended without a result".into()))?;
        match event.event {
            Some(Event::Progress(progress)) => {
                startup.tell(StartupEvent::Loading {
                    stage,
                    bytes_done: progress.bytes_done,
                    bytes_total: progress.bytes_total,
                });
            }
            Some(Event::Done(done)) => {
                startup.tell(StartupEvent::Loaded {
                    stage,
                    device: done.device,
                    bytes_read: done.bytes_read,
                    bytes_needed: done.bytes_needed,
                    seconds: done.seconds,
                    kv_blocks: done.kv_blocks,
                    held: done.held,
                });
                return Ok(done.kv_blocks);
            }
            None => {}
        }
    }
}

async fn wire_stage(
    mut client: StageClient<Channel>,
    stage: usize,
    request: v1::WireRequest,
    timeout: Duration,
    startup: &Startup,
) -> Result<String, CoordinatorError> {
    let failed = |reason: String| CoordinatorError::Stage { stage, reason };
    // The stage keeps the deadline itself; this one is for a stage that does not answer at all.
    let reply = tokio::time::timeout(timeout * 2, client.wire(request))
        .await
        .map_err(|_| failed(format!("did not wire within {timeout:?}")))?
        .map_err(|e| failed(format!("wiring: {}", e.message())))?;
    let link = reply.into_inner().link;
    startup.tell(StartupEvent::Wired { stage, link: link.clone() });
    Ok(link)
}

fn message(contract: &StageContract) -> v1::StageContract {
    v1::StageContract {
        stage: contract.stage as u32,
        stages: contract.stages as u32,
        first_layer: contract.layers.start as u32,
        end_layer: contract.layers.end as u32,
        hidden_size: contract.hidden_size as u32,
        hidden_dtype: contract.hidden_dtype.to_string(),
        index_topk: contract.index_topk as u32,
        index_dtype: contract.index_dtype.to_string(),
        row_capacity: contract.row_capacity as u32,
        block_size: contract.block_size as u32,
        receives_from_layer: contract.receives_from_layer.map(|l| l as u32),
        sends_from_layer: contract.sends_from_layer.map(|l| l as u32),
        config_digest: contract.config_digest.clone(),
    }
}
