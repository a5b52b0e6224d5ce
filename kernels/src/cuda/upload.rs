//! Weights on their way to the device: copied by many threads into page-locked buffers, from where the device fetches one
//! while the next is filled.
#![allow(unsafe_code)]

use cudarc::driver::result::{self, DriverError};
use cudarc::driver::sys;
use rayon::prelude::*;

/// Bytes of one buffer.
const BUFFER: usize = 16 << 20;
/// Buffers that the device may be behind.
const BUFFERS: usize = 4;
/// Bytes that one thread copies at a time: each touches pages of a mapped file that may still have to be read.
const PIECE: usize = 256 << 10;
/// Fewer bytes go through the driver's own staging.
pub(super) const WORTHWHILE: usize = 1 << 20;

/// Page-locked buffers, used in turn.
#[derive(Default)]
pub(super) struct Upload {
    buffers: Vec<Buffer>,
    next: usize,
}

/// Page-locked memory, and the event after which the device has fetched it.
struct Buffer {
    address: *mut u8,
    fetched: sys::CUevent,
}

// SAFETY: memory and an event that nothing but the owner of this value uses.
unsafe impl Send for Buffer {}

impl Upload {
    /// Queues copies of `bytes` to the device memory at `to` on `stream`. The source may be changed when this returns.
    ///
    /// # Safety
    /// `to` starts at least `bytes.len()` bytes of device memory, and the device's context is current.
    pub(super) unsafe fn copy(
        &mut self,
        to: u64,
        bytes: &[u8],
        stream: sys::CUstream,
    ) -> Result<(), DriverError> {
        for (at, part) in bytes.chunks(BUFFER).enumerate() {
            let buffer = self.buffer()?;
            // SAFETY: the event was made with the buffer; once it is reached nothing reads the buffer any more.
            unsafe { result::event::synchronize(buffer.fetched)? };
            // SAFETY: the buffer holds BUFFER bytes, and no other reference to them exists while `self` is borrowed.
            let locked = unsafe { std::slice::from_raw_parts_mut(buffer.address, part.len()) };
            let pieces = locked.par_chunks_mut(PIECE).zip(part.par_chunks(PIECE));
            pieces.for_each(|(to, from)| to.copy_from_slice(from));
            // SAFETY: the caller's range; the buffer is not touched before `fetched` is reached.
            unsafe {
                result::memcpy_htod_async(to + (at * BUFFER) as u64, locked, stream)?;
                result::event::record(buffer.fetched, stream)?;
            }
        }
        Ok(())
    }

    /// The buffer whose turn it is.
    fn buffer(&mut self) -> Result<&Buffer, DriverError> {
        if self.buffers.len() < BUFFERS {
            use sys::CUevent_flags_enum::CU_EVENT_DISABLE_TIMING;
            // SAFETY: the context is current, as `copy` asks for.
            let buffer = unsafe {
                Buffer {
                    address: result::malloc_host(BUFFER, 0)?.cast(),
                    fetched: result::event::create(CU_EVENT_DISABLE_TIMING)?,
                }
            };
            self.buffers.push(buffer);
            self.next = self.buffers.len() - 1;
        } else {
            self.next = (self.next + 1) % BUFFERS;
        }
        Ok(&self.buffers[self.next])
    }

    /// Frees the buffers, once the device has fetched them.
    pub(super) fn clear(&mut self) {
        for buffer in self.buffers.drain(..) {
            // SAFETY: both were made by `buffer`, and are forgotten here. A failure leaves nothing to be done.
            unsafe {
                let _ = result::event::synchronize(buffer.fetched);
                let _ = result::event::destroy(buffer.fetched);
                let _ = result::free_host(buffer.address.cast());
            }
        }
    }
}
