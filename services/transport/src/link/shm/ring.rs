//! A ring of bytes in memory that two processes map: one writes, one reads.
//!
//! ```text
//! 0     magic u64
//! 64    bytes written since the start u64
//! 128   bytes read since the start u64
//! 192   changes of `written` u32, woken on        256   changes of `read` u32, woken on
//! 320   the writer has finished u32               324   the reader has gone u32
//! 4096  the bytes
//! ```
//! Each side alone advances its counter, after it has copied; what lies between the counters belongs to the reader, the rest
//! to the writer.
#![allow(unsafe_code)]

use std::fs::File;
use std::io::{self, ErrorKind, IoSlice, Read, Write};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use memmap2::MmapRaw;
use rustix::fs::{FallocateFlags, fallocate};
use rustix::thread::futex;
use rustix::time::Timespec;

const MAGIC: u64 = u64::from_le_bytes(*b"BTNRING1");
const WRITTEN: usize = 64;
const READ: usize = 128;
const DATA_SIGNAL: usize = 192;
const SPACE_SIGNAL: usize = 256;
const FINISHED: usize = 320;
const GONE: usize = 324;
/// Where the bytes begin.
const DATA: usize = 4096;

/// Most bytes copied before the other side is told of them, so that both copy at the same time.
const PIECE: usize = 256 << 10;
/// Looks at the counters before a side goes to sleep.
const SPINS: usize = 200;
/// How long a side sleeps at most before it looks whether the other still lives.
const NAP: Timespec = Timespec { tv_sec: 0, tv_nsec: 100_000_000 };

/// Tells whether the other process is still there.
pub(super) trait Watch {
    fn is_there(&self) -> bool;
}

/// The mapped memory.
#[derive(Debug)]
pub(super) struct Ring {
    map: MmapRaw,
    capacity: usize,
}

impl Ring {
    /// Gives the file memory and makes a ring of it.
    ///
    /// # Errors
    /// When the system has not that much. Asked for here, since a page that cannot be had later would kill the process.
    pub(super) fn create(file: &File, capacity: u64) -> io::Result<Self> {
        fallocate(file, FallocateFlags::empty(), 0, DATA as u64 + capacity)?;
        let ring = Self { map: MmapRaw::map_raw(file)?, capacity: capacity as usize };
        ring.counter(0).store(MAGIC, Ordering::Release);
        Ok(ring)
    }

    /// Maps a ring that another process made.
    ///
    /// # Errors
    /// When the file is not one.
    pub(super) fn open(file: &File) -> io::Result<Self> {
        let map = MmapRaw::map_raw(file)?;
        let capacity = map.len().checked_sub(DATA).filter(|bytes| *bytes > 0);
        let capacity = capacity.ok_or_else(|| io::Error::other("too small for a ring"))?;
        let ring = Self { map, capacity };
        if ring.counter(0).load(Ordering::Acquire) != MAGIC {
            return Err(io::Error::other("not a ring"));
        }
        Ok(ring)
    }

    fn counter(&self, offset: usize) -> &AtomicU64 {
        // SAFETY: `offset` is a multiple of 8 within the first page, which every ring has, and the mapping lives as long as
        // `self`. Both processes use these words as atomics only.
        unsafe { AtomicU64::from_ptr(self.map.as_mut_ptr().add(offset).cast()) }
    }

    fn word(&self, offset: usize) -> &AtomicU32 {
        // SAFETY: as above, with multiples of 4.
        unsafe { AtomicU32::from_ptr(self.map.as_mut_ptr().add(offset).cast()) }
    }

    /// Bytes that wait to be read.
    ///
    /// # Errors
    /// When the counters contradict each other: the other side is not to be believed.
    fn waiting(&self) -> io::Result<usize> {
        let (written, read) = (self.counter(WRITTEN), self.counter(READ));
        // Of the two, the other side's may grow meanwhile; either order is right for the side that asks.
        let (written, read) = (written.load(Ordering::Acquire), read.load(Ordering::Acquire));
        let waiting = written.wrapping_sub(read);
        if waiting > self.capacity as u64 {
            return Err(io::Error::other(format!(
                "{waiting} bytes wait in a ring of {} bytes",
                self.capacity
            )));
        }
        Ok(waiting as usize)
    }

    /// Lets the other side know that a counter has moved, or that this side goes.
    fn signal(&self, offset: usize) {
        self.word(offset).fetch_add(1, Ordering::Release);
        // Nobody may be asleep; a failure could only be a wrong address.
        let _ = futex::wake(self.word(offset), futex::Flags::empty(), 1);
    }

    /// Sleeps until the word at `offset` is no longer `seen`, or for a nap.
    fn sleep(&self, offset: usize, seen: u32) -> io::Result<()> {
        match futex::wait(self.word(offset), futex::Flags::empty(), seen, Some(&NAP)) {
            Ok(()) => Ok(()),
            Err(
                rustix::io::Errno::AGAIN | rustix::io::Errno::INTR | rustix::io::Errno::TIMEDOUT,
            ) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }

    /// Waits until `ready` gives something. Ends with `None` when the other side has said that it goes (`flag`) or died.
    fn wait(
        &self,
        signal: usize,
        flag: usize,
        watch: &impl Watch,
        ready: impl Fn() -> io::Result<usize>,
    ) -> io::Result<Option<usize>> {
        loop {
            let seen = self.word(signal).load(Ordering::Acquire);
            // Asked before the counters: what was written before the end is still read.
            let over = self.word(flag).load(Ordering::Acquire) != 0;
            for _ in 0..SPINS {
                let bytes = ready()?;
                if bytes > 0 {
                    return Ok(Some(bytes));
                }
                if over {
                    return Ok(None);
                }
                std::hint::spin_loop();
            }
            self.sleep(signal, seen)?;
            // A process that is killed says nothing. What it had written before counts.
            if self.word(signal).load(Ordering::Acquire) == seen && !watch.is_there() {
                return Ok(Some(ready()?).filter(|bytes| *bytes > 0));
            }
        }
    }

    /// Tells the writer, and a read under way, that nobody reads any more.
    pub(super) fn close_reader(&self) {
        self.word(GONE).store(1, Ordering::Release);
        self.word(FINISHED).store(1, Ordering::Release);
        self.signal(SPACE_SIGNAL);
        self.signal(DATA_SIGNAL);
    }

    /// The two stretches that `bytes` bytes from `position` on take.
    fn stretches(&self, position: u64, bytes: usize) -> [(usize, usize); 2] {
        let start = (position % self.capacity as u64) as usize;
        let first = bytes.min(self.capacity - start);
        [(DATA + start, first), (DATA, bytes - first)]
    }

    /// Copies in from `position` on.
    fn put(&self, position: u64, bytes: &[u8]) {
        let [(at, first), (start, rest)] = self.stretches(position, bytes.len());
        // SAFETY: both stretches lie in the mapping, and the protocol leaves them to the writer until `written` is
        // advanced past them; `bytes` is not part of the mapping. A peer that breaks the protocol can spoil the bytes,
        // which are checked when they have been copied out.
        unsafe {
            let base = self.map.as_mut_ptr();
            base.add(at).copy_from_nonoverlapping(bytes.as_ptr(), first);
            base.add(start).copy_from_nonoverlapping(bytes[first..].as_ptr(), rest);
        }
    }

    /// Copies out from `position` on.
    fn take(&self, position: u64, bytes: &mut [u8]) {
        let [(at, first), (start, rest)] = self.stretches(position, bytes.len());
        // SAFETY: as for `put`, with the stretches that are the reader's until `read` is advanced past them.
        unsafe {
            let base = self.map.as_ptr();
            base.add(at).copy_to_nonoverlapping(bytes.as_mut_ptr(), first);
            base.add(start).copy_to_nonoverlapping(bytes[first..].as_mut_ptr(), rest);
        }
    }
}

/// The side that writes.
#[derive(Debug)]
pub(super) struct Writer<W> {
    ring: Arc<Ring>,
    watch: W,
}

/// The side that reads.
#[derive(Debug)]
pub(super) struct Reader<W> {
    ring: Arc<Ring>,
    watch: W,
}

impl<W: Watch> Writer<W> {
    pub(super) fn new(ring: Arc<Ring>, watch: W) -> Self {
        Self { ring, watch }
    }

    /// Says that nothing more follows.
    pub(super) fn close(&self) {
        self.ring.word(FINISHED).store(1, Ordering::Release);
        self.ring.signal(DATA_SIGNAL);
    }
}

impl<W: Watch> Reader<W> {
    pub(super) fn new(ring: Arc<Ring>, watch: W) -> Self {
        Self { ring, watch }
    }
}

impl<W: Watch> Write for Writer<W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.write_vectored(&[IoSlice::new(bytes)])
    }

    fn write_vectored(&mut self, pieces: &[IoSlice<'_>]) -> io::Result<usize> {
        let ring = &self.ring;
        if ring.word(GONE).load(Ordering::Acquire) != 0 {
            return Err(ErrorKind::BrokenPipe.into());
        }
        let free = || Ok(ring.capacity - ring.waiting()?);
        let free =
            ring.wait(SPACE_SIGNAL, GONE, &self.watch, free)?.ok_or(ErrorKind::BrokenPipe)?;
        let mut room = free.min(PIECE);
        let start = ring.counter(WRITTEN).load(Ordering::Relaxed);
        let mut position = start;
        for piece in pieces {
            let bytes = &piece[..piece.len().min(room)];
            ring.put(position, bytes);
            position += bytes.len() as u64;
            room -= bytes.len();
        }
        ring.counter(WRITTEN).store(position, Ordering::Release);
        ring.signal(DATA_SIGNAL);
        Ok((position - start) as usize)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl<W: Watch> Read for Reader<W> {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        let ring = &self.ring;
        if bytes.is_empty() {
            return Ok(0);
        }
        let waiting = ring.wait(DATA_SIGNAL, FINISHED, &self.watch, || ring.waiting())?;
        // The end of the stream, as a socket tells it.
        let Some(waiting) = waiting else { return Ok(0) };
        let count = bytes.len().min(waiting).min(PIECE);
        let position = ring.counter(READ).load(Ordering::Relaxed);
        ring.take(position, &mut bytes[..count]);
        ring.counter(READ).store(position + count as u64, Ordering::Release);
        ring.signal(SPACE_SIGNAL);
        Ok(count)
    }
}
