//! The bytes of a hand-off: a header, a list of named tensor descriptors, then the payloads.
//!
//! ```text
//! magic "BTNF" | version u16 | tensors u16 | epoch u64 | step_id u64 | rows u32 | descriptor bytes u32 | header checksum u64
//! per tensor: name u8 | dtype u8 | reserved u16 | source layer u32 | epoch u64 | step_id u64 | bytes u64 | checksum u64
//! payloads, in descriptor order
//! ```
//! Little-endian. Checksums are xxh3; the header's covers the descriptors, a tensor's covers its payload. A descriptor names
//! the step its tensor was computed in, so that index rows of another step are known as such inside a frame that is otherwise
//! right. A hand-off without a carry has no trace of one in its bytes.

use baton_plan::{HiddenDtype, IndexDtype, StageContract};
use thiserror::Error;
use xxhash_rust::xxh3::xxh3_64;

use crate::handoff::{HandOff, SentCarry};

const MAGIC: [u8; 4] = *b"BTNF";
const VERSION: u16 = 1;
/// Bytes of the fixed part.
pub const HEADER_BYTES: usize = 40;
/// Bytes of one descriptor.
pub const DESCRIPTOR_BYTES: usize = 40;

const HIDDEN: u8 = 1;
const RESIDUAL: u8 = 2;
const INDICES: u8 = 3;

const F32: u8 = 1;
const BF16: u8 = 2;
const I32: u8 = 3;
const U16: u8 = 4;

/// What a receiver allows and expects before it has read a payload.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FrameLimits {
    /// Most rows.
    pub row_capacity: usize,
    /// Width of the hidden states.
    pub hidden_size: usize,
    /// Their type.
    pub hidden_dtype: HiddenDtype,
    /// Entries of an index row.
    pub index_topk: usize,
    /// Their type.
    pub index_dtype: IndexDtype,
}

/// Bytes that are not a hand-off of the agreed kind.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
#[non_exhaustive]
pub enum FrameError {
    /// Not a frame at all.
    #[error("the bytes {found:02x?} do not begin a hand-off frame")]
    Magic {
        /// What stood there.
        found: [u8; 4],
    },
    /// Another protocol version.
    #[error("frame version {found}, this side speaks {VERSION}")]
    Version {
        /// The version.
        found: u16,
    },
    /// The header or a payload was changed on the way.
    #[error("step {step_id}: checksum of {part} is {found:016x}, expected {expected:016x}")]
    Checksum {
        /// Step of the frame, as far as it can be told.
        step_id: u64,
        /// "header" or a tensor's name.
        part: &'static str,
        /// Checksum of what came.
        found: u64,
        /// Checksum it was sent with.
        expected: u64,
    },
    /// A tensor that this side does not know, or a second one of a kind.
    #[error("step {step_id}: tensor code {code} is unknown or repeated")]
    Tensor {
        /// Step of the frame.
        step_id: u64,
        /// Its code.
        code: u8,
    },
    /// A tensor of another type than agreed.
    #[error("step {step_id}: {tensor} has dtype code {found}, the contract says {expected}")]
    Dtype {
        /// Step of the frame.
        step_id: u64,
        /// Which tensor.
        tensor: &'static str,
        /// Code that came.
        found: u8,
        /// The agreed type.
        expected: String,
    },
    /// Larger than the contract allows.
    #[error("step {step_id}: {what} is {found}, the contract allows {limit}")]
    TooLarge {
        /// Step of the frame.
        step_id: u64,
        /// Rows, tensors or bytes.
        what: &'static str,
        /// How much came.
        found: u64,
        /// How much may.
        limit: u64,
    },
    /// No hidden states.
    #[error("step {step_id}: the frame has no hidden_states")]
    NoHiddenStates {
        /// Step of the frame.
        step_id: u64,
    },
    /// The bytes end inside the frame.
    #[error("the frame ends after {found} bytes, expected {expected}")]
    Truncated {
        /// Bytes there are.
        found: usize,
        /// Bytes needed.
        expected: usize,
    },
}

impl From<&StageContract> for FrameLimits {
    fn from(contract: &StageContract) -> Self {
        Self {
            row_capacity: contract.row_capacity,
            hidden_size: contract.hidden_size,
            hidden_dtype: contract.hidden_dtype,
            index_topk: contract.index_topk,
            index_dtype: contract.index_dtype,
        }
    }
}

impl FrameLimits {
    fn hidden_code(&self) -> u8 {
        match self.hidden_dtype {
            HiddenDtype::F32 => F32,
            HiddenDtype::Bf16 => BF16,
        }
    }

    fn index_code(&self) -> u8 {
        match self.index_dtype {
            IndexDtype::I32 => I32,
            IndexDtype::U16 => U16,
        }
    }

    fn limit(&self, code: u8) -> u64 {
        let row = match code {
            INDICES => self.index_topk * self.index_dtype.size(),
            _ => self.hidden_size * self.hidden_dtype.size(),
        };
        row as u64 * self.row_capacity as u64
    }
}

fn name(code: u8) -> &'static str {
    match code {
        HIDDEN => "hidden_states",
        RESIDUAL => "residual",
        _ => "topk_indices",
    }
}

/// A frame ready to be written: a small head and the payloads, which are not copied again.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EncodedFrame {
    /// Header and descriptors.
    pub head: Vec<u8>,
    /// In descriptor order.
    pub payloads: Vec<Vec<u8>>,
}

impl EncodedFrame {
    /// Bytes of the payloads.
    #[must_use]
    pub fn payload_bytes(&self) -> usize {
        self.payloads.iter().map(Vec::len).sum()
    }

    /// The whole frame in one piece.
    #[must_use]
    pub fn to_bytes(&self) -> Vec<u8> {
        let mut bytes = self.head.clone();
        for payload in &self.payloads {
            bytes.extend_from_slice(payload);
        }
        bytes
    }
}

/// The bytes of a hand-off.
#[must_use]
pub fn encode(hand_off: HandOff, limits: &FrameLimits) -> EncodedFrame {
    let (epoch, step_id) = (hand_off.epoch, hand_off.step_id);
    let mut tensors = vec![(HIDDEN, limits.hidden_code(), 0, epoch, step_id, hand_off.hidden)];
    if let Some(residual) = hand_off.residual {
        tensors.push((RESIDUAL, limits.hidden_code(), 0, epoch, step_id, residual));
    }
    if let Some(carry) = hand_off.carry {
        let bytes = match limits.index_dtype {
            IndexDtype::I32 => bytemuck::cast_slice(&carry.indices).to_vec(),
            // The contract allows u16 only where every position fits.
            IndexDtype::U16 => {
                carry.indices.iter().flat_map(|&i| (i as u16).to_le_bytes()).collect()
            }
        };
        let source = carry.source_layer as u32;
        tensors.push((INDICES, limits.index_code(), source, carry.epoch, carry.step_id, bytes));
    }
    let mut head = Vec::with_capacity(HEADER_BYTES + tensors.len() * DESCRIPTOR_BYTES);
    head.extend_from_slice(&MAGIC);
    head.extend_from_slice(&VERSION.to_le_bytes());
    head.extend_from_slice(&(tensors.len() as u16).to_le_bytes());
    head.extend_from_slice(&epoch.to_le_bytes());
    head.extend_from_slice(&step_id.to_le_bytes());
    head.extend_from_slice(&(hand_off.rows as u32).to_le_bytes());
    head.extend_from_slice(&((tensors.len() * DESCRIPTOR_BYTES) as u32).to_le_bytes());
    head.extend_from_slice(&[0; 8]);
    let mut payloads = Vec::with_capacity(tensors.len());
    for (code, dtype, source, epoch, step_id, payload) in tensors {
        head.extend_from_slice(&[code, dtype, 0, 0]);
        head.extend_from_slice(&source.to_le_bytes());
        head.extend_from_slice(&epoch.to_le_bytes());
        head.extend_from_slice(&step_id.to_le_bytes());
        head.extend_from_slice(&(payload.len() as u64).to_le_bytes());
        head.extend_from_slice(&xxh3_64(&payload).to_le_bytes());
        payloads.push(payload);
    }
    let checksum = xxh3_64(&head);
    head[HEADER_BYTES - 8..HEADER_BYTES].copy_from_slice(&checksum.to_le_bytes());
    EncodedFrame { head, payloads }
}

/// The fixed part, checked as far as it can be alone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    /// Wiring.
    pub epoch: u64,
    /// Step.
    pub step_id: u64,
    /// Rows.
    pub rows: usize,
    tensors: usize,
    checksum: u64,
}

/// One tensor's descriptor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Descriptor {
    code: u8,
    source_layer: u32,
    epoch: u64,
    step_id: u64,
    /// Bytes of its payload.
    pub bytes: usize,
    checksum: u64,
}

/// `N` bytes at `at`; the callers slice buffers whose length they checked.
fn take<const N: usize>(bytes: &[u8], at: usize) -> [u8; N] {
    let mut out = [0; N];
    out.copy_from_slice(&bytes[at..at + N]);
    out
}

/// Reads the fixed part.
///
/// # Errors
/// When it is not a frame's, or announces more than the limits allow.
pub fn decode_header(
    bytes: &[u8; HEADER_BYTES],
    limits: &FrameLimits,
) -> Result<Header, FrameError> {
    let magic = take::<4>(bytes, 0);
    if magic != MAGIC {
        return Err(FrameError::Magic { found: magic });
    }
    let version = u16::from_le_bytes(take(bytes, 4));
    if version != VERSION {
        return Err(FrameError::Version { found: version });
    }
    let header = Header {
        tensors: usize::from(u16::from_le_bytes(take(bytes, 6))),
        epoch: u64::from_le_bytes(take(bytes, 8)),
        step_id: u64::from_le_bytes(take(bytes, 16)),
        rows: u32::from_le_bytes(take(bytes, 24)) as usize,
        checksum: u64::from_le_bytes(take(bytes, 32)),
    };
    let step_id = header.step_id;
    let too_large = |what, found: usize, limit: usize| {
        Err(FrameError::TooLarge { step_id, what, found: found as u64, limit: limit as u64 })
    };
    if header.rows > limits.row_capacity {
        return too_large("the number of rows", header.rows, limits.row_capacity);
    }
    if header.tensors > 3 {
        return too_large("the number of tensors", header.tensors, 3);
    }
    let announced = u32::from_le_bytes(take(bytes, 28)) as usize;
    if announced != header.descriptor_bytes() {
        return too_large("the size of the descriptors", announced, header.descriptor_bytes());
    }
    Ok(header)
}

impl Header {
    /// Bytes of the descriptors that follow.
    #[must_use]
    pub fn descriptor_bytes(&self) -> usize {
        self.tensors * DESCRIPTOR_BYTES
    }
}

/// Reads the descriptors, checks the header's checksum and every size.
///
/// # Errors
/// When something was changed on the way, is unknown, or larger than agreed.
pub fn decode_descriptors(
    header: &Header,
    head: &[u8],
    limits: &FrameLimits,
) -> Result<Vec<Descriptor>, FrameError> {
    let expected = HEADER_BYTES + header.descriptor_bytes();
    if head.len() != expected {
        return Err(FrameError::Truncated { found: head.len(), expected });
    }
    let step_id = header.step_id;
    let mut plain = head.to_vec();
    plain[HEADER_BYTES - 8..HEADER_BYTES].fill(0);
    let found = xxh3_64(&plain);
    if found != header.checksum {
        let expected = header.checksum;
        return Err(FrameError::Checksum { step_id, part: "header", found, expected });
    }
    let mut descriptors: Vec<Descriptor> = Vec::with_capacity(header.tensors);
    for bytes in head[HEADER_BYTES..].chunks_exact(DESCRIPTOR_BYTES) {
        let (code, dtype) = (bytes[0], bytes[1]);
        if !(HIDDEN..=INDICES).contains(&code) || descriptors.iter().any(|d| d.code == code) {
            return Err(FrameError::Tensor { step_id, code });
        }
        let (agreed, name_of_agreed) = match code {
            INDICES => (limits.index_code(), limits.index_dtype.to_string()),
            _ => (limits.hidden_code(), limits.hidden_dtype.to_string()),
        };
        if dtype != agreed {
            let (tensor, found, expected) = (name(code), dtype, name_of_agreed);
            return Err(FrameError::Dtype { step_id, tensor, found, expected });
        }
        let size = u64::from_le_bytes(take(bytes, 24));
        let limit = limits.limit(code);
        if size > limit {
            return Err(FrameError::TooLarge { step_id, what: name(code), found: size, limit });
        }
        descriptors.push(Descriptor {
            code,
            source_layer: u32::from_le_bytes(take(bytes, 4)),
            epoch: u64::from_le_bytes(take(bytes, 8)),
            step_id: u64::from_le_bytes(take(bytes, 16)),
            bytes: size as usize,
            checksum: u64::from_le_bytes(take(bytes, 32)),
        });
    }
    Ok(descriptors)
}

/// Puts the hand-off together.
///
/// # Errors
/// When a payload was changed on the way or the hidden states are missing.
pub fn assemble(
    header: &Header,
    descriptors: &[Descriptor],
    payloads: Vec<Vec<u8>>,
    limits: &FrameLimits,
) -> Result<HandOff, FrameError> {
    let step_id = header.step_id;
    let (mut hidden, mut residual, mut carry) = (None, None, None);
    for (descriptor, payload) in descriptors.iter().zip(payloads) {
        let (found, expected) = (xxh3_64(&payload), descriptor.checksum);
        if found != expected {
            let part = name(descriptor.code);
            return Err(FrameError::Checksum { step_id, part, found, expected });
        }
        match descriptor.code {
            HIDDEN => hidden = Some(payload),
            RESIDUAL => residual = Some(payload),
            _ => {
                let indices = match limits.index_dtype {
                    IndexDtype::I32 => {
                        payload.chunks_exact(4).map(|b| i32::from_le_bytes(take(b, 0))).collect()
                    }
                    IndexDtype::U16 => payload
                        .chunks_exact(2)
                        .map(|b| i32::from(u16::from_le_bytes(take(b, 0))))
                        .collect(),
                };
                carry = Some(SentCarry {
                    epoch: descriptor.epoch,
                    step_id: descriptor.step_id,
                    source_layer: descriptor.source_layer as usize,
                    indices,
                });
            }
        }
    }
    let hidden = hidden.ok_or(FrameError::NoHiddenStates { step_id })?;
    Ok(HandOff { epoch: header.epoch, step_id, rows: header.rows, hidden, residual, carry })
}

/// Reads a whole frame.
///
/// # Errors
/// When the bytes are not exactly one frame of the agreed kind.
pub fn decode(bytes: &[u8], limits: &FrameLimits) -> Result<HandOff, FrameError> {
    let truncated = |expected| FrameError::Truncated { found: bytes.len(), expected };
    let fixed: &[u8; HEADER_BYTES] = bytes.first_chunk().ok_or_else(|| truncated(HEADER_BYTES))?;
    let header = decode_header(fixed, limits)?;
    let head_bytes = HEADER_BYTES + header.descriptor_bytes();
    let head = bytes.get(..head_bytes).ok_or_else(|| truncated(head_bytes))?;
    let descriptors = decode_descriptors(&header, head, limits)?;
    let total = head_bytes + descriptors.iter().map(|d| d.bytes).sum::<usize>();
    if bytes.len() != total {
        return Err(truncated(total));
    }
    let mut rest = &bytes[head_bytes..];
    let payloads = descriptors
        .iter()
        .map(|d| {
            let (payload, after) = rest.split_at(d.bytes);
            rest = after;
            payload.to_vec()
        })
        .collect();
    assemble(&header, &descriptors, payloads, limits)
}

#[cfg(test)]
mod tests;
