//! Dialling the coordinator and staying joined.

use std::sync::Arc;
use std::time::Duration;

use baton_proto::v1;
use baton_proto::v1::coordinator_client::CoordinatorClient;
use baton_proto::v1::stage_event::Event;
use baton_proto::v1::stage_order::Order;
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tokio_util::sync::CancellationToken;

use crate::service::Host;
use crate::{StageConfig, StageError};

/// Pause between two attempts to reach the coordinator.
const RETRY: Duration = Duration::from_millis(200);
/// Attempts before a stage that ends with its coordinator gives up.
const ATTEMPTS: usize = 50;

/// Why a stream to the coordinator ended.
enum Ended {
    Dismissed,
    /// It was never joined.
    Unreachable(String),
    /// It was joined, then lost.
    Lost(String),
}

/// Where this stage listens.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Ports {
    pub(crate) control: u16,
    pub(crate) link: u16,
    /// Absent when nobody may ask.
    pub(crate) metrics: Option<u16>,
}

pub(crate) async fn run(
    config: &StageConfig,
    host: &Arc<Host>,
    ports: Ports,
    shutdown: &CancellationToken,
) -> Result<(), StageError> {
    let mut failures = 0;
    loop {
        let session = session(config, host, ports, shutdown);
        let (reached, reason) = match session.await? {
            Ended::Dismissed => return Ok(()),
            Ended::Lost(reason) => (true, reason),
            Ended::Unreachable(reason) => (false, reason),
        };
        if shutdown.is_cancelled() {
            return Ok(());
        }
        failures = if reached { 0 } else { failures + 1 };
        if config.exit_with_coordinator && (reached || failures >= ATTEMPTS) {
            let address = config.coordinator.clone();
            return Err(StageError::Coordinator { address, reason });
        }
        tokio::select! {
            () = shutdown.cancelled() => return Ok(()),
            () = tokio::time::sleep(RETRY) => {}
        }
    }
}

/// One stream, from `Hello` to its end.
async fn session(
    config: &StageConfig,
    host: &Arc<Host>,
    ports: Ports,
    shutdown: &CancellationToken,
) -> Result<Ended, StageError> {
    let mut client = match CoordinatorClient::connect(config.coordinator.clone()).await {
        Ok(client) => client,
        Err(error) => return Ok(Ended::Unreachable(error.to_string())),
    };
    let name = advertised(config);
    let hello = v1::Hello {
        control_address: format!("http://{name}:{}", ports.control),
        link_address: config
            .advertise_link
            .clone()
            .unwrap_or_else(|| format!("{name}:{}", ports.link)),
        backend: host.backend_name().into(),
        config_digest: host.model.as_ref().map(|m| m.config.digest()).unwrap_or_default(),
        checkpoint_digest: host
            .model
            .as_ref()
            .map(|m| m.checkpoint.digest().to_owned())
            .unwrap_or_default(),
        // One that had a place before holds its slice.
        preferred_index: host.view().index.map(|index| index as u32),
        standby: config.standby,
        memory_bytes: config.memory_bytes.unwrap_or(0),
        process_id: std::process::id(),
        version: env!("CARGO_PKG_VERSION").into(),
        metrics_address: ports.metrics.map(|port| format!("{name}:{port}")).unwrap_or_default(),
    };
    let (events, outgoing) = mpsc::channel(8);
    let event = |event| v1::StageEvent { event: Some(event) };
    // The channel is empty and its receiver is at hand.
    let _ = events.send(event(Event::Hello(hello))).await;
    let mut orders = match client.join(ReceiverStream::new(outgoing)).await {
        Ok(response) => response.into_inner(),
        Err(status) => return Ok(Ended::Unreachable(status.message().to_owned())),
    };
    let mut beat = tokio::time::interval(Duration::from_millis(500));
    loop {
        tokio::select! {
            () = shutdown.cancelled() => {
                let leaving = v1::Leaving { reason: "the stage was told to stop".into() };
                let _ = events.send(event(Event::Leaving(leaving))).await;
                return Ok(Ended::Dismissed);
            }
            _ = beat.tick() => {
                if events.send(event(Event::Heartbeat(host.heartbeat()))).await.is_err() {
                    return Ok(Ended::Lost("the stream closed".into()));
                }
            }
            order = orders.message() => match order {
                Ok(Some(v1::StageOrder { order: Some(order) })) => match order {
                    Order::Welcome(welcome) => {
                        host.joined(welcome.stage_index);
                        tracing::info!("joined as stage {} of {}", welcome.stage_index, welcome.stages);
                    }
                    Order::Standby(standby) => {
                        tracing::info!("stands by: all {} stages are there", standby.stages);
                    }
                    Order::Refused(refused) => return Err(StageError::Refused(refused.reason)),
                    Order::Dismissed(_) => return Ok(Ended::Dismissed),
                },
                Ok(Some(_)) => {}
                Ok(None) => return Ok(Ended::Lost("the coordinator has gone".into())),
                Err(status) => return Ok(Ended::Lost(status.message().to_owned())),
            }
        }
    }
}

/// Host name or address for others: the given one, else the listening address, else the one that routes to the coordinator.
fn advertised(config: &StageConfig) -> String {
    if let Some(host) = &config.advertise {
        return host.clone();
    }
    let ip = config.listen.ip();
    if !ip.is_unspecified() {
        return ip.to_string();
    }
    let target = config.coordinator.trim_start_matches("http://").trim_end_matches('/');
    // A connected UDP socket sends nothing; it only asks the routing table.
    let route = std::net::UdpSocket::bind("0.0.0.0:0").and_then(|socket| {
        socket.connect(target)?;
        socket.local_addr()
    });
    route.map_or_else(|_| "127.0.0.1".into(), |address| address.ip().to_string())
}
