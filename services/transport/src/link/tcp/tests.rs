use baton_plan::{HiddenDtype, IndexDtype};

use super::*;
use crate::frame::FrameError;

fn limits() -> FrameLimits {
    FrameLimits {
        row_capacity: 1024,
        hidden_size: 4,
        hidden_dtype: HiddenDtype::F32,
        index_topk: 3,
        index_dtype: IndexDtype::I32,
    }
}

fn hello(digest: &str, epoch: u64) -> Hello {
    Hello { epoch, from_stage: 0, contract_digest: digest.into() }
}

fn soon() -> Instant {
    Instant::now() + Duration::from_secs(5)
}

fn hand_off(step_id: u64, rows: usize) -> HandOff {
    HandOff {
        epoch: 1,
        step_id,
        rows,
        hidden: vec![step_id as u8; rows * 16],
        residual: None,
        carry: None,
    }
}

fn pair() -> (TcpSender, TcpReceiver) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap().to_string();
    thread::scope(|scope| {
        let sender = scope.spawn(|| connect(&address, &hello("a", 1), limits(), soon()));
        let receiver = accept(&listener, &hello("a", 1), limits(), soon()).unwrap();
        (sender.join().unwrap().unwrap(), receiver)
    })
}

#[test]
fn hand_offs_arrive_in_order_and_are_counted_alike() {
    let (mut sender, mut receiver) = pair();
    for step in 1..=20 {
        sender.send(hand_off(step, 2), soon()).unwrap();
        assert_eq!(receiver.recv(step, soon()).unwrap(), hand_off(step, 2));
    }
    assert_eq!(receiver.stats().payload_bytes, 20 * 32);
    assert_eq!(receiver.stats().frames, 20);
}

#[test]
fn late_frames_are_dropped_by_id_and_early_ones_refused() {
    let (mut sender, mut receiver) = pair();
    sender.send(hand_off(1, 1), soon()).unwrap();
    sender.send(hand_off(3, 1), soon()).unwrap();
    assert_eq!(receiver.recv(3, soon()).unwrap().step_id, 3);
    assert_eq!(receiver.stats().dropped, 1);
    sender.send(hand_off(9, 1), soon()).unwrap();
    let error = receiver.recv(4, soon()).unwrap_err();
    assert!(matches!(error, LinkError::OutOfOrder { found: 9, expected: 4, .. }), "{error}");
}

#[test]
fn a_slow_receiver_holds_the_sender_back() {
    let (mut sender, mut receiver) = pair();
    // Far more than the socket's buffers and both queues hold.
    let mut sent = 0;
    while sent < 100_000 {
        let deadline = Instant::now() + Duration::from_millis(200);
        if sender.send(hand_off(sent + 1, 1000), deadline).is_err() {
            break;
        }
        sent += 1;
    }
    assert!(sent < 100_000, "nothing held the sender back");
    for step in 1..=sent {
        assert_eq!(receiver.recv(step, soon()).unwrap().step_id, step);
    }
}

#[test]
fn both_ends_name_both_digests_when_contracts_differ() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap().to_string();
    thread::scope(|scope| {
        let sender = scope.spawn(|| connect(&address, &hello("aaa", 1), limits(), soon()));
        let receiver = accept(&listener, &hello("bbb", 1), limits(), soon()).unwrap_err();
        let sender = sender.join().unwrap().unwrap_err();
        for error in [receiver.to_string(), sender.to_string()] {
            assert!(error.contains("aaa") && error.contains("bbb"), "{error}");
        }
    });
}

#[test]
fn silence_ends_at_the_deadline_and_can_be_outlasted() {
    let (mut sender, mut receiver) = pair();
    let error = receiver.recv(1, Instant::now() + Duration::from_millis(50)).unwrap_err();
    assert!(matches!(error, LinkError::Timeout { step_id: 1, .. }), "{error}");
    sender.send(hand_off(1, 1), soon()).unwrap();
    assert!(receiver.recv(1, soon()).is_ok());
}

#[test]
fn a_peer_that_finished_differs_from_one_that_broke_off() {
    let (sender, mut receiver) = pair();
    drop(sender);
    let error = receiver.recv(1, soon()).unwrap_err();
    assert!(matches!(error, LinkError::Closed { .. }), "{error}");
    // A stage that dies is often noticed first by its neighbour, whose error must not blame the neighbour.
    assert!(error.to_string().contains("from stage 0"), "{error}");

    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let peer = thread::spawn(move || {
        let mut stream = TcpStream::connect(address).unwrap();
        stream.write_all(&hello("a", 1).to_bytes()).unwrap();
        Hello::read(&mut stream, "peer").unwrap();
        let frame = encode(hand_off(1, 2), &limits()).to_bytes();
        stream.write_all(&frame[..frame.len() - 1]).unwrap();
    });
    let mut receiver = accept(&listener, &hello("a", 1), limits(), soon()).unwrap();
    assert!(matches!(receiver.recv(1, soon()).unwrap_err(), LinkError::Broken { .. }));
    peer.join().unwrap();
}

#[test]
fn foreign_bytes_are_told_as_such() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let peer = thread::spawn(move || {
        let mut stream = TcpStream::connect(address).unwrap();
        stream.write_all(&hello("a", 1).to_bytes()).unwrap();
        Hello::read(&mut stream, "peer").unwrap();
        stream.write_all(&[b'x'; 64]).unwrap();
    });
    let mut receiver = accept(&listener, &hello("a", 1), limits(), soon()).unwrap();
    let error = receiver.recv(1, soon()).unwrap_err();
    assert!(matches!(error, LinkError::Frame { error: FrameError::Magic { .. }, .. }), "{error}");
    peer.join().unwrap();
}
