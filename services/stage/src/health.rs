//! What the gRPC health service says.
//!
//! `baton.v1.Stage` serves while the stage is wired and its steps make progress: for readiness. The whole server (the empty
//! name) serves unless a step is stuck in this process for longer than a step may take: for liveness, since only a restart
//! cures that.

use std::sync::Arc;
use std::time::Duration;

use baton_proto::v1::stage_server::StageServer;
use tonic_health::ServingStatus;
use tonic_health::server::HealthReporter;

use crate::service::{Host, StageService};

/// How often the state is looked at.
const LOOK: Duration = Duration::from_millis(200);

/// Keeps the health service up to date. Never ends.
pub(crate) async fn follow(host: Arc<Host>, health: HealthReporter) {
    let mut look = tokio::time::interval(LOOK);
    let mut told = None;
    loop {
        look.tick().await;
        let now = (host.view().ready, !host.stuck());
        if told.replace(now) == Some(now) {
            continue;
        }
        let (ready, alive) = now;
        let name = <StageServer<StageService> as tonic::server::NamedService>::NAME;
        health.set_service_status(name, status(ready)).await;
        health.set_service_status("", status(alive)).await;
    }
}

fn status(serving: bool) -> ServingStatus {
    if serving { ServingStatus::Serving } else { ServingStatus::NotServing }
}
