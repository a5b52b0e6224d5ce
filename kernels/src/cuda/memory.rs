//! Device memory with an owner.
#![allow(unsafe_code)]

use std::sync::Arc;

use cudarc::driver::result;

use super::arena::Arena;
use super::device::Device;
use crate::backend::KernelError;

/// Bytes on the device: weights and caches have their own allocation, tensors of a step a part of the arena.
pub(crate) struct Memory {
    address: u64,
    bytes: usize,
    home: Home,
}

enum Home {
    /// From the driver.
    Own,
    /// From an arena, at this offset.
    Part(Arc<Arena>, usize),
    /// Nothing: an empty tensor, or one that was not got (the device has failed then and launches nothing).
    None,
}

// SAFETY: an address; what reads and writes it is ordered by the device's stream.
unsafe impl Send for Memory {}
// SAFETY: as above.
unsafe impl Sync for Memory {}

impl Memory {
    /// An allocation of its own, for what lives as long as the model.
    ///
    /// # Errors
    /// When the device has too little memory.
    pub(crate) fn own(
        device: &Device,
        what: &'static str,
        bytes: usize,
    ) -> Result<Self, KernelError> {
        if bytes == 0 {
            return Ok(Self::none());
        }
        device.enter();
        // SAFETY: the context is current; the result is owned by this value.
        match unsafe { result::malloc_sync(bytes) } {
            Ok(address) => Ok(Self { address, bytes, home: Home::Own }),
            Err(e) if e.0 == cudarc::driver::sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY => {
                let (free, _) = device.memory()?;
                Err(KernelError::OutOfMemory { what, needed: bytes as u64, available: free })
            }
            Err(e) => Err(device.error(e)),
        }
    }

    /// A part of the device's arena, for the tensors of a step. When there is none the device has failed.
    pub(crate) fn part(device: &Device, what: &'static str, bytes: usize) -> Self {
        let arena = device.arena();
        if bytes == 0 {
            return Self::none();
        }
        match arena.take(bytes) {
            Some(offset) => Self {
                address: arena.base() + offset as u64,
                bytes,
                home: Home::Part(arena, offset),
            },
            None => {
                let available = arena.largest_hole() as u64;
                device.fail(KernelError::OutOfMemory { what, needed: bytes as u64, available });
                Self::none()
            }
        }
    }

    /// No memory: what stands in after a failure.
    pub(crate) fn none() -> Self {
        Self { address: 0, bytes: 0, home: Home::None }
    }

    /// Address of the byte at `offset`.
    pub(crate) fn at(&self, offset: usize) -> u64 {
        debug_assert!(
            self.address == 0 || offset <= self.bytes,
            "offset {offset} of {} bytes",
            self.bytes
        );
        self.address + offset as u64
    }

    pub(crate) fn len(&self) -> usize {
        self.bytes
    }

    /// Copies `bytes` to `offset`; the source may be changed when this returns.
    pub(crate) fn write(&self, device: &Device, offset: usize, bytes: &[u8]) {
        if bytes.is_empty() || device.failed() {
            return;
        }
        assert!(offset + bytes.len() <= self.bytes, "a write past the end of device memory");
        // SAFETY: the range was checked.
        unsafe { device.copy_in(self.at(offset), bytes) };
    }

    /// The first `into.len()` bytes, once everything queued before has run.
    pub(crate) fn read(&self, device: &Device, into: &mut [u8]) {
        if into.is_empty() || device.failed() {
            return;
        }
        assert!(into.len() <= self.bytes, "a read past the end of device memory");
        device.enter();
        // SAFETY: the range was checked, and the stream is waited for before `into` is looked at.
        device.note(unsafe { result::memcpy_dtoh_async(into, self.address, device.stream()) });
        device.synchronise();
    }

    /// Sets every byte.
    pub(crate) fn fill(&self, device: &Device, value: u8) {
        if self.bytes == 0 || device.failed() {
            return;
        }
        device.enter();
        // SAFETY: the range is this value's own.
        device.note(unsafe {
            result::memset_d8_async(self.address, value, self.bytes, device.stream())
        });
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        match &self.home {
            // SAFETY: allocated by `own` and freed once; the driver waits for work that uses it.
            Home::Own => drop(unsafe { result::free_sync(self.address) }),
            Home::Part(arena, offset) => arena.give_back(*offset, self.bytes),
            Home::None => {}
        }
    }
}

impl std::fmt::Debug for Memory {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} bytes of device memory", self.bytes)
    }
}
