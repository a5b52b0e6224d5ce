//! What holds on every link.

use std::io::Write as _;
use std::net::TcpStream;
use std::thread;
use std::time::Duration;

use baton_plan::{HiddenDtype, IndexDtype};

use super::*;
use crate::frame::{FrameError, encode};

fn limits() -> FrameLimits {
    FrameLimits {
        row_capacity: 1024,
        hidden_size: 4,
        hidden_dtype: HiddenDtype::F32,
        index_topk: 3,
        index_dtype: IndexDtype::I32,
    }
}

fn hello(digest: &str, epoch: u64, link: LinkKind) -> Hello {
    Hello { epoch, from_stage: 0, contract_digest: digest.into(), link }
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

fn pair(link: LinkKind) -> (LinkSender, LinkReceiver) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap().to_string();
    thread::scope(|scope| {
        let sender = scope.spawn(|| connect(&address, &hello("a", 1, link), limits(), soon()));
        let receiver = accept(&listener, &hello("a", 1, link), limits(), soon()).unwrap();
        (sender.join().unwrap().unwrap(), receiver)
    })
}

#[test]
fn hand_offs_arrive_in_order_and_are_counted_alike() {
    for link in LinkKind::ALL {
        let (mut sender, mut receiver) = pair(link);
        for step in 1..=20 {
            sender.send(hand_off(step, 2), soon()).unwrap();
            assert_eq!(receiver.recv(step, soon()).unwrap(), hand_off(step, 2));
        }
        assert_eq!(receiver.stats().payload_bytes, 20 * 32);
        assert_eq!(receiver.stats().frames, 20);
    }
}

#[test]
fn late_frames_are_dropped_by_id_and_early_ones_refused() {
    for link in LinkKind::ALL {
        let (mut sender, mut receiver) = pair(link);
        sender.send(hand_off(1, 1), soon()).unwrap();
        sender.send(hand_off(3, 1), soon()).unwrap();
        assert_eq!(receiver.recv(3, soon()).unwrap().step_id, 3);
        assert_eq!(receiver.stats().dropped, 1);
        sender.send(hand_off(9, 1), soon()).unwrap();
        let error = receiver.recv(4, soon()).unwrap_err();
        assert!(matches!(error, LinkError::OutOfOrder { found: 9, expected: 4, .. }), "{error}");
    }
}

#[test]
fn a_slow_receiver_holds_the_sender_back() {
    for link in LinkKind::ALL {
        let (mut sender, mut receiver) = pair(link);
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
}

#[test]
fn both_ends_name_both_digests_when_contracts_differ() {
    for link in LinkKind::ALL {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap().to_string();
        thread::scope(|scope| {
            let sender =
                scope.spawn(|| connect(&address, &hello("aaa", 1, link), limits(), soon()));
            let receiver = accept(&listener, &hello("bbb", 1, link), limits(), soon()).unwrap_err();
            let sender = sender.join().unwrap().unwrap_err();
            for error in [receiver.to_string(), sender.to_string()] {
                assert!(error.contains("aaa") && error.contains("bbb"), "{error}");
            }
        });
    }
}

#[test]
fn silence_ends_at_the_deadline_and_can_be_outlasted() {
    for link in LinkKind::ALL {
        let (mut sender, mut receiver) = pair(link);
        let error = receiver.recv(1, Instant::now() + Duration::from_millis(50)).unwrap_err();
        assert!(matches!(error, LinkError::Timeout { step_id: 1, .. }), "{error}");
        sender.send(hand_off(1, 1), soon()).unwrap();
        assert!(receiver.recv(1, soon()).is_ok());
    }
}

#[test]
fn a_peer_that_finished_is_named() {
    for link in LinkKind::ALL {
        let (sender, mut receiver) = pair(link);
        drop(sender);
        let error = receiver.recv(1, soon()).unwrap_err();
        assert!(matches!(error, LinkError::Closed { .. }), "{error}");
        // A stage that dies is often noticed first by its neighbour, whose error must not blame the neighbour.
        assert!(error.to_string().contains("from stage 0"), "{error}");
    }
}

/// What a receiver of a tcp link says of a peer that agrees, writes these bytes and ends.
fn refusal(bytes: Vec<u8>) -> LinkError {
    let link = LinkKind::Tcp;
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let peer = thread::spawn(move || {
        let mut stream = TcpStream::connect(address).unwrap();
        stream.write_all(&hello("a", 1, link).to_bytes()).unwrap();
        Hello::read(&mut stream, "peer").unwrap();
        stream.write_all(&bytes).unwrap();
    });
    let mut receiver = accept(&listener, &hello("a", 1, link), limits(), soon()).unwrap();
    let error = receiver.recv(1, soon()).unwrap_err();
    peer.join().unwrap();
    error
}

#[test]
fn a_peer_that_broke_off_differs_from_one_that_finished() {
    let mut frame = encode(hand_off(1, 2), &limits()).to_bytes();
    frame.pop();
    let error = refusal(frame);
    assert!(matches!(error, LinkError::Broken { .. }), "{error}");
}

#[test]
fn foreign_bytes_are_told_as_such() {
    let error = refusal(vec![b'x'; 64]);
    assert!(matches!(error, LinkError::Frame { error: FrameError::Magic { .. }, .. }), "{error}");
}

#[test]
fn frames_larger_than_the_ring_arrive_whole() {
    let limits = FrameLimits { row_capacity: 1024, hidden_size: 4096, ..limits() };
    for link in LinkKind::ALL {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let (mut sender, mut receiver) = thread::scope(|scope| {
            let sender = scope.spawn(|| connect(&address, &hello("a", 1, link), limits, soon()));
            let receiver = accept(&listener, &hello("a", 1, link), limits, soon()).unwrap();
            (sender.join().unwrap().unwrap(), receiver)
        });
        for step_id in 1..=3 {
            let hidden = (0..1024 * 4096 * 4_u64).map(|i| (i * i + step_id) as u8).collect();
            let sent = HandOff { hidden, ..hand_off(step_id, 1024) };
            sender.send(sent.clone(), soon()).unwrap();
            // Not by `assert_eq`, which would print megabytes.
            assert!(receiver.recv(step_id, soon()).unwrap() == sent, "{link}, step {step_id}");
        }
    }
}

#[test]
fn both_ends_name_both_links_when_these_differ() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let tcp = hello("a", 1, LinkKind::Tcp);
    thread::scope(|scope| {
        let sender = scope.spawn(|| connect(&address, &tcp, limits(), soon()).unwrap_err());
        let shm = hello("a", 1, LinkKind::Shm);
        let receiver = accept(&listener, &shm, limits(), soon()).unwrap_err();
        for error in [receiver.to_string(), sender.join().unwrap().to_string()] {
            assert!(error.contains("tcp") && error.contains("shm"), "{error}");
        }
    });
}

#[test]
fn a_sender_learns_that_its_receiver_has_gone() {
    for link in LinkKind::ALL {
        let (mut sender, receiver) = pair(link);
        drop(receiver);
        let begun = Instant::now();
        let gone = (1..).any(|step| {
            let deadline = Instant::now() + Duration::from_millis(100);
            thread::sleep(Duration::from_millis(1));
            match sender.send(hand_off(step, 100), deadline) {
                Err(LinkError::Timeout { .. }) | Ok(()) => {
                    assert!(begun.elapsed() < Duration::from_secs(3), "{link}: never told");
                    false
                }
                Err(_) => true,
            }
        });
        assert!(gone);
    }
}

#[test]
fn a_process_that_dies_without_a_word_is_noticed() {
    // What a killed process leaves: a closed connection, and in the shared memory no sign of its end.
    let link = LinkKind::Shm;
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let peer = thread::spawn(move || {
        let mut connection = connection::dial(&address, &hello("a", 1, link), soon()).unwrap();
        let file = tempfile::Builder::new().prefix("baton-link-").tempfile_in("/dev/shm").unwrap();
        file.as_file().set_len(1 << 16).unwrap();
        std::os::unix::fs::FileExt::write_all_at(file.as_file(), b"BTNRING1", 0).unwrap();
        connection.tell(file.path().to_str().unwrap().as_bytes()).unwrap();
        assert!(connection.hear(soon()).unwrap().is_empty());
    });
    let mut receiver = accept(&listener, &hello("a", 1, link), limits(), soon()).unwrap();
    peer.join().unwrap();
    let begun = Instant::now();
    let error = receiver.recv(1, soon()).unwrap_err();
    assert!(matches!(error, LinkError::Closed { .. }), "{error}");
    assert!(begun.elapsed() < Duration::from_secs(3));
}

#[test]
fn only_memory_of_links_is_opened() {
    let link = LinkKind::Shm;
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let peer = thread::spawn(move || {
        let mut connection = connection::dial(&address, &hello("a", 1, link), soon()).unwrap();
        connection.tell(b"/etc/hostname").unwrap();
        connection.hear(soon()).unwrap()
    });
    let error = accept(&listener, &hello("a", 1, link), limits(), soon()).unwrap_err();
    assert_eq!(error.kind(), "link-set-up");
    assert!(String::from_utf8(peer.join().unwrap()).unwrap().contains("/etc/hostname"));
}
