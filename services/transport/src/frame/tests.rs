use proptest::prelude::*;

use super::*;
use crate::handoff::ExpectedStep;

fn limits() -> FrameLimits {
    FrameLimits {
        row_capacity: 16,
        hidden_size: 4,
        hidden_dtype: HiddenDtype::F32,
        index_topk: 3,
        index_dtype: IndexDtype::I32,
    }
}

fn contract(receives: Option<usize>) -> StageContract {
    StageContract {
        stage: 1,
        stages: 3,
        layers: 3..6,
        hidden_size: 4,
        hidden_dtype: HiddenDtype::F32,
        index_topk: 3,
        index_dtype: IndexDtype::I32,
        row_capacity: 16,
        block_size: 16,
        receives_from_layer: receives,
        sends_from_layer: None,
        config_digest: "c".into(),
    }
}

/// Rows at positions 1 (short) and 5, 6 (long).
fn step() -> ExpectedStep {
    ExpectedStep { epoch: 2, step_id: 7, positions: vec![1, 5, 6], padding: 1 }
}

fn sample(carry: bool) -> HandOff {
    HandOff {
        epoch: 2,
        step_id: 7,
        rows: 4,
        hidden: (0..64).collect(),
        residual: None,
        carry: carry.then(|| SentCarry {
            epoch: 2,
            step_id: 7,
            source_layer: 2,
            indices: vec![0, 1, 5, 2, 3, 6],
        }),
    }
}

fn refusal(change: impl FnOnce(&mut HandOff)) -> (String, &'static str) {
    let mut hand_off = sample(true);
    change(&mut hand_off);
    let error = hand_off.accept(&contract(Some(2)), &step()).unwrap_err();
    (error.to_string(), error.kind())
}

#[test]
fn an_accepted_carry_is_the_one_that_was_sent_and_is_relayed_unchanged() {
    let accepted = sample(true).accept(&contract(Some(2)), &step()).unwrap();
    let carry = accepted.carry().unwrap();
    assert_eq!(carry.indices(), [0, 1, 5, 2, 3, 6]);
    assert_eq!(Some(carry.relay()), sample(true).carry);
}

#[test]
fn a_missing_carry_names_stage_layer_source_and_step() {
    let (message, kind) = refusal(|h| h.carry = None);
    assert_eq!(kind, "missing-carry");
    for word in ["stage 1", "step 7", "layer 3", "layer 2"] {
        assert!(message.contains(word), "{message}");
    }
}

#[test]
fn rows_of_another_step_or_layer_are_refused() {
    let carry = |h: &mut HandOff, change: fn(&mut SentCarry)| change(h.carry.as_mut().unwrap());
    assert_eq!(refusal(|h| carry(h, |c| c.step_id = 6)).1, "stale-carry");
    assert_eq!(refusal(|h| carry(h, |c| c.epoch = 1)).1, "stale-carry");
    assert_eq!(refusal(|h| carry(h, |c| c.source_layer = 1)).1, "wrong-carry-source");
    assert_eq!(refusal(|h| carry(h, |c| c.indices.truncate(3))).1, "carry-size");
    assert_eq!(refusal(|h| carry(h, |c| c.indices[5] = 7)).1, "carry-entry");
    assert_eq!(refusal(|h| carry(h, |c| c.indices[0] = -1)).1, "carry-entry");
    assert_eq!(refusal(|h| carry(h, |c| c.indices[1] = 0)).1, "carry-entry");
    let unexpected = sample(true).accept(&contract(None), &step()).unwrap_err();
    assert_eq!(unexpected.kind(), "unexpected-carry");
}

#[test]
fn frames_of_another_step_size_or_epoch_are_refused() {
    assert_eq!(refusal(|h| h.epoch = 1).1, "wrong-epoch");
    assert_eq!(refusal(|h| h.step_id = 8).1, "wrong-step");
    assert_eq!(refusal(|h| h.rows = 3).1, "row-count");
    assert_eq!(refusal(|h| h.hidden.truncate(63)).1, "tensor-size");
    let mut small = contract(Some(2));
    small.row_capacity = 3;
    let error = sample(true).accept(&small, &step()).unwrap_err().to_string();
    assert!(error.contains("4 rows") && error.contains("allows 3"), "{error}");
}

#[test]
fn a_zero_row_step_with_a_carry_passes() {
    let empty = HandOff {
        rows: 0,
        hidden: vec![],
        carry: sample(true).carry.map(|c| SentCarry { indices: vec![], ..c }),
        ..sample(true)
    };
    let step = ExpectedStep { positions: vec![], padding: 0, ..step() };
    let decoded = decode(&encode(empty, &limits()).to_bytes(), &limits()).unwrap();
    assert!(decoded.accept(&contract(Some(2)), &step).unwrap().carry().is_some());
}

#[test]
fn glm_rows_cost_what_the_contract_says() {
    let glm = FrameLimits {
        row_capacity: 8,
        hidden_size: 6144,
        hidden_dtype: HiddenDtype::Bf16,
        index_topk: 2048,
        index_dtype: IndexDtype::I32,
    };
    let hidden = vec![0; 3 * 12_288];
    let plain = HandOff { epoch: 1, step_id: 1, rows: 3, hidden, residual: None, carry: None };
    let mut carried = plain.clone();
    carried.carry = Some(SentCarry {
        epoch: 1,
        step_id: 1,
        source_layer: 38,
        indices: vec![1_048_575; 3 * 2048],
    });
    assert_eq!(encode(plain, &glm).payload_bytes(), 3 * 12_288);
    let frame = encode(carried.clone(), &glm);
    assert_eq!(frame.payload_bytes(), 3 * 20_480);
    assert_eq!(decode(&frame.to_bytes(), &glm).unwrap(), carried);
}

#[test]
fn case_17_positions_of_a_million_survive_and_are_checked() {
    let last = 1_048_575;
    let step = ExpectedStep { epoch: 2, step_id: 7, positions: vec![last], padding: 0 };
    let sent = |newest: i32| HandOff {
        rows: 1,
        hidden: vec![0; 16],
        carry: sample(true)
            .carry
            .map(|c| SentCarry { indices: vec![65_536, newest - 1, newest], ..c }),
        ..sample(true)
    };
    let received = |newest| {
        let bytes = encode(sent(newest), &limits()).to_bytes();
        decode(&bytes, &limits()).unwrap().accept(&contract(Some(2)), &step)
    };
    let accepted = received(1_048_575).unwrap();
    assert_eq!(accepted.carry().unwrap().indices(), [65_536, 1_048_574, 1_048_575]);
    assert_eq!(received(1_048_576).unwrap_err().kind(), "carry-entry");
}

#[test]
fn u16_indices_take_half_the_bytes() {
    let short = FrameLimits { index_dtype: IndexDtype::U16, ..limits() };
    let frame = encode(sample(true), &short);
    assert_eq!(frame.payloads[1].len(), 12);
    assert_eq!(decode(&frame.to_bytes(), &short).unwrap(), sample(true));
    assert!(matches!(
        decode(&frame.to_bytes(), &limits()),
        Err(FrameError::Dtype { tensor: "topk_indices", .. })
    ));
}

#[test]
fn sizes_are_checked_before_anything_is_allocated() {
    let mut huge = encode(sample(false), &limits()).to_bytes();
    huge[24..28].copy_from_slice(&u32::MAX.to_le_bytes());
    assert!(matches!(
        decode(&huge, &limits()),
        Err(FrameError::TooLarge { what: "the number of rows", .. })
    ));
}

proptest! {
    #[test]
    fn every_cut_off_frame_is_an_error(carry: bool, at in 0usize..200) {
        let bytes = encode(sample(carry), &limits()).to_bytes();
        prop_assume!(at < bytes.len());
        prop_assert!(decode(&bytes[..at], &limits()).is_err());
    }

    #[test]
    fn every_flipped_bit_is_an_error(carry: bool, bit in 0usize..2000) {
        let mut bytes = encode(sample(carry), &limits()).to_bytes();
        prop_assume!(bit < bytes.len() * 8);
        bytes[bit / 8] ^= 1 << (bit % 8);
        prop_assert!(decode(&bytes, &limits()).is_err());
    }

    #[test]
    fn random_bytes_never_panic(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
        prop_assert!(decode(&bytes, &limits()).is_err());
    }
}
