//! What the gRPC health service says while a stage is loaded, wired, at work and failed.

use std::time::{Duration, Instant};

use baton_transport::HandOff;
use baton_transport::link::HandOffSender as _;
use tonic::transport::Endpoint;
use tonic_health::pb::HealthCheckRequest;
use tonic_health::pb::health_check_response::ServingStatus;
use tonic_health::pb::health_client::HealthClient;

use crate::harness::{Stage, contract, hand_off, step, within};

/// Waits until the health of this service, "" for the whole server, is as expected.
async fn says(stage: &Stage, service: &str, expected: ServingStatus) {
    let endpoint = Endpoint::from_shared(stage.hello.control_address.clone()).unwrap();
    let mut client = HealthClient::new(endpoint.connect().await.unwrap());
    let request = HealthCheckRequest { service: service.into() };
    let mut changes = client.watch(request).await.unwrap().into_inner();
    while within(changes.message()).await.unwrap().unwrap().status() != expected {}
}

#[tokio::test]
async fn a_stage_serves_once_it_is_wired_and_until_a_step_fails() {
    const STAGE: &str = "baton.v1.Stage";
    let stage = Stage::load(&contract(&[4, 6]), 1).await;
    says(&stage, STAGE, ServingStatus::NotServing).await;
    says(&stage, "", ServingStatus::Serving).await;
    let mut link = stage.wire_to_test().await;
    says(&stage, STAGE, ServingStatus::Serving).await;
    let mut steps = stage.run().await;
    let tokens: Vec<u32> = (0..40).collect();
    let soon = || Instant::now() + Duration::from_secs(5);
    steps.send(&step(1, 0, &tokens, 0)).await;
    link.send(hand_off(1, 40, 32), soon()).unwrap();
    assert_eq!(steps.result().await.failure, None);
    says(&stage, STAGE, ServingStatus::Serving).await;
    steps.send(&step(2, 40, &tokens[..1], 0)).await;
    link.send(HandOff { carry: None, ..hand_off(2, 1, 0) }, soon()).unwrap();
    steps.failure().await;
    // The process lives on and may be wired again.
    says(&stage, STAGE, ServingStatus::NotServing).await;
    says(&stage, "", ServingStatus::Serving).await;
    drop(steps);
    let _link = stage.wire_to_test().await;
    says(&stage, STAGE, ServingStatus::Serving).await;
}

#[tokio::test]
async fn a_stage_whose_stream_of_steps_ended_does_not_serve() {
    const STAGE: &str = "baton.v1.Stage";
    let stage = Stage::load(&contract(&[10]), 0).await;
    stage.wire(None).await.unwrap();
    let steps = stage.run().await;
    says(&stage, STAGE, ServingStatus::Serving).await;
    drop(steps);
    says(&stage, STAGE, ServingStatus::NotServing).await;
}
