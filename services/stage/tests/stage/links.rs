//! Peers that go away or hold another contract.

use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::time::{Duration, Instant};

use baton_plan::LinkKind;
use baton_transport::FrameLimits;
use baton_transport::frame::encode;
use baton_transport::link::{self, HELLO_BYTES, HandOffSender as _, Hello};

use crate::harness::{Stage, contract, hand_off, step};

/// A peer that agrees by repeating what the stage says, sends these bytes and is gone.
fn peer_that_dies(address: String, bytes: Vec<u8>) {
    std::thread::spawn(move || {
        let mut stream = TcpStream::connect(address).unwrap();
        let mut hello = [0; HELLO_BYTES];
        stream.read_exact(&mut hello).unwrap();
        stream.write_all(&hello).unwrap();
        stream.write_all(&bytes).unwrap();
    });
}

#[tokio::test]
async fn a_peer_that_dies_is_named_with_the_step() {
    let contract = contract(&[4, 6]);
    let limits = FrameLimits::from(&contract.stages[1]);
    let frame = encode(hand_off(1, 10, 2), &limits).to_bytes();
    let tokens: Vec<u32> = (0..10).collect();
    let half = frame[..frame.len() / 2].to_vec();
    for (bytes, kind) in [(vec![], "link-closed"), (half, "link-broken")] {
        let stage = Stage::load(&contract, 1).await;
        peer_that_dies(stage.hello.link_address.clone(), bytes);
        stage.wire(None).await.unwrap();
        let mut steps = stage.run().await;
        let sent = Instant::now();
        steps.send(&step(1, 0, &tokens, 0)).await;
        let (found, message) = steps.failure().await;
        assert_eq!(found, kind, "{message}");
        for word in ["stage 1", "step 1", "from stage 0"] {
            assert!(message.contains(word), "no {word:?}: {message}");
        }
        assert!(sent.elapsed() < Duration::from_secs(2), "it waited for the step's time to pass");
        assert!(stage.is_running());
    }
}

#[tokio::test]
async fn a_peer_that_stays_silent_is_given_up_in_time() {
    let stage = Stage::load(&contract(&[4, 6]), 1).await;
    let link = stage.wire_to_test().await;
    let mut steps = stage.run().await;
    let sent = Instant::now();
    steps.send(&step(1, 0, &[1, 2, 3], 0)).await;
    let (kind, message) = steps.failure().await;
    assert_eq!(kind, "hand-off-timeout");
    assert!(message.contains("stage 1, step 1") && message.contains("from stage 0"), "{message}");
    assert!(sent.elapsed() >= Duration::from_secs(2), "the step had two seconds");
    drop(link);
}

#[tokio::test]
async fn a_stage_whose_successor_dies_says_so() {
    // The first stage alone; the test takes its hand-offs and stops.
    let contract = contract(&[4, 6]);
    let (first, second) = (Stage::load(&contract, 0).await, Stage::load(&contract, 1).await);
    let (one, other) = tokio::join!(first.wire(Some(&second)), second.wire(None));
    one.and(other).unwrap();
    let mut steps = first.run().await;
    drop(second);
    // What was written before the loss shows may still seem to have gone out.
    let mut start = 0;
    let failure = loop {
        let tokens = [3; 8];
        steps.send(&step(1 + start as u64 / 8, start, &tokens, 0)).await;
        start += tokens.len();
        let result = steps.result().await;
        if let Some(failure) = result.failure {
            break failure;
        }
        assert!(start < 800, "nobody takes the hand-offs and the stage does not notice");
        tokio::time::sleep(Duration::from_millis(20)).await;
    };
    assert!(failure.message.contains("to stage 1"), "{failure:?}");
    assert!(failure.kind.starts_with("link-"), "{failure:?}");
}

/// Handoff case 22: a peer with another contract is not wired, and both digests are told.
#[tokio::test]
async fn a_peer_with_another_contract_is_turned_away() {
    let (ours, theirs) = (contract(&[4, 6]), contract(&[5, 5]));
    let stage = Stage::load(&ours, 1).await;
    let address = stage.hello.link_address.clone();
    let hello =
        Hello { epoch: 1, from_stage: 0, contract_digest: theirs.digest(), link: LinkKind::Tcp };
    let limits = FrameLimits::from(&theirs.stages[1]);
    let connecting = tokio::task::spawn_blocking(move || {
        let connected =
            link::connect(&address, &hello, limits, Instant::now() + Duration::from_secs(5));
        connected.map(|link| link.stats())
    });
    let refusal = stage.wire(None).await.unwrap_err();
    let other_side = connecting.await.unwrap().unwrap_err().to_string();
    for message in [refusal.message(), &other_side] {
        for digest in [ours.digest(), theirs.digest()] {
            assert!(message.contains(&digest), "no {digest}: {message}");
        }
    }
}
