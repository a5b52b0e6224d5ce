//! Where the tensors of a step live: one region, divided anew all the time without asking the driver.
//!
//! All work runs on one stream, so a part may be given out again as soon as its owner drops it: whatever the new owner
//! queues runs after everything the old one queued. Parts are chosen by a fixed rule (the smallest hole that fits, the
//! lowest of these), so the same sequence of requests gives the same addresses: a recorded step can be run again.

use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};

use super::memory::Memory;

/// Parts start at multiples of this: enough for every vector load and for TMA.
const ALIGNMENT: usize = 256;

/// A region and its holes.
pub(crate) struct Arena {
    region: Option<Memory>,
    /// Offset -> length of every hole; neighbours are merged.
    holes: Mutex<BTreeMap<usize, usize>>,
}

impl Arena {
    pub(crate) fn empty() -> Self {
        Self { region: None, holes: Mutex::default() }
    }

    pub(crate) fn new(region: Memory) -> Self {
        let size = region.len();
        Self { region: Some(region), holes: Mutex::new(BTreeMap::from([(0, size)])) }
    }

    /// Address of the region's first byte.
    pub(crate) fn base(&self) -> u64 {
        self.region.as_ref().map_or(0, |r| r.at(0))
    }

    /// Offset of a part of `bytes` bytes, if one is free.
    pub(crate) fn take(&self, bytes: usize) -> Option<usize> {
        let bytes = round(bytes);
        let mut holes = self.holes.lock().unwrap_or_else(PoisonError::into_inner);
        let (&offset, &length) = holes
            .iter()
            .filter(|(_, length)| **length >= bytes)
            .min_by_key(|(offset, length)| (**length, **offset))?;
        holes.remove(&offset);
        if length > bytes {
            holes.insert(offset + bytes, length - bytes);
        }
        Some(offset)
    }

    /// Takes a part back.
    pub(crate) fn give_back(&self, mut offset: usize, bytes: usize) {
        let mut bytes = round(bytes);
        let mut holes = self.holes.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((&before, &length)) = holes.range(..offset).next_back()
            && before + length == offset
        {
            holes.remove(&before);
            offset = before;
            bytes += length;
        }
        if let Some(length) = holes.remove(&(offset + bytes)) {
            bytes += length;
        }
        holes.insert(offset, bytes);
    }

    /// Bytes of the largest hole.
    pub(crate) fn largest_hole(&self) -> usize {
        let holes = self.holes.lock().unwrap_or_else(PoisonError::into_inner);
        holes.values().copied().max().unwrap_or(0)
    }
}

fn round(bytes: usize) -> usize {
    bytes.max(1).next_multiple_of(ALIGNMENT)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn arena(size: usize) -> Arena {
        Arena { region: None, holes: Mutex::new(BTreeMap::from([(0, size)])) }
    }

    #[test]
    fn the_same_requests_get_the_same_places() {
        let run = || {
            let arena = arena(1 << 16);
            let a = arena.take(1000).unwrap();
            let b = arena.take(10).unwrap();
            arena.give_back(a, 1000);
            let c = arena.take(300).unwrap();
            let d = arena.take(5000).unwrap();
            (a, b, c, d)
        };
        assert_eq!(run(), run());
        let (a, b, c, d) = run();
        assert_eq!((a, b, c), (0, 1024, 0), "the hole that fits best is taken");
        assert_eq!(d, 1280);
    }

    #[test]
    fn holes_merge_when_everything_is_given_back() {
        let arena = arena(1 << 16);
        let sizes = [100, 256, 257, 4096, 1];
        let mut parts: Vec<(usize, usize)> =
            sizes.iter().map(|&s| (arena.take(s).unwrap(), s)).collect();
        assert!(arena.take(1 << 16).is_none());
        parts.swap(0, 3);
        for (offset, size) in parts {
            arena.give_back(offset, size);
        }
        assert_eq!(arena.largest_hole(), 1 << 16);
    }
}
