//! What is where: the cache's memory of its slots, and who is fetching what. Pure: no I/O, no clock but the one given.
//!
//! A slot's generation changes whenever its content may: a reader that finds the same one before and after reading has
//! read what it looked up.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;

use super::flight::Flight;
use super::layout::{BLOCK, Held, Sums};
use super::{BlobKey, CacheStats};

/// Number of a blob in the table; never reused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct BlobId(u32);

/// No slot, in a blob's list of blocks.
const NOWHERE: u32 = u32::MAX;

/// A block in a slot.
#[derive(Debug, Clone)]
pub(super) struct Hit {
    pub(super) slot: u32,
    pub(super) generation: u32,
    pub(super) length: u32,
    pub(super) sums: Sums,
}

/// A slot to be filled by whoever got it.
#[derive(Debug)]
pub(super) struct Claim {
    pub(super) slot: u32,
    /// Whether its record on disk tells of another block.
    pub(super) used: bool,
}

#[derive(Debug)]
struct Slot {
    generation: u32,
    /// Read since the hand last passed.
    hot: bool,
    content: Content,
}

#[derive(Debug)]
enum Content {
    Nothing,
    /// Between claim and settle.
    Filling,
    Block {
        blob: BlobId,
        block: u64,
        length: u32,
        sums: Sums,
    },
}

#[derive(Debug)]
struct Blob {
    key: BlobKey,
    /// Slot of each block, as far as blocks were ever kept.
    slots: Vec<u32>,
    /// What was fetched is not what the digest says.
    condemned: bool,
}

#[derive(Debug)]
pub(super) struct Table {
    slots: Vec<Slot>,
    free: Vec<u32>,
    capacity: u32,
    hand: usize,
    ids: HashMap<BlobKey, BlobId>,
    blobs: Vec<Blob>,
    flights: HashMap<(BlobId, u64), Arc<Flight>>,
    pub(super) stats: CacheStats,
}

impl Table {
    /// An empty table of at most `capacity` slots.
    pub(super) fn new(capacity: u32) -> Self {
        Self {
            slots: Vec::new(),
            free: Vec::new(),
            capacity,
            hand: 0,
            ids: HashMap::new(),
            blobs: Vec::new(),
            flights: HashMap::new(),
            stats: CacheStats::default(),
        }
    }

    /// Adds a slot with what was found in it.
    pub(super) fn adopt(&mut self, held: Option<Held>) {
        let slot = self.slots.len() as u32;
        self.slots.push(Slot { generation: 0, hot: false, content: Content::Nothing });
        match held {
            // Two slots of one block can't be, but one more check is cheaper than a wrong proof.
            Some(held) if self.slot(self.ids.get(&held.key).copied(), held.block).is_none() => {
                let blob = self.blob(&held.key);
                self.put(slot, blob, &held);
            }
            _ => self.free.push(slot),
        }
    }

    /// The blob of that key, new if need be.
    pub(super) fn blob(&mut self, key: &BlobKey) -> BlobId {
        if let Some(id) = self.ids.get(key) {
            return *id;
        }
        let id = BlobId(self.blobs.len() as u32);
        self.blobs.push(Blob { key: *key, slots: Vec::new(), condemned: false });
        self.ids.insert(*key, id);
        id
    }

    pub(super) fn key(&self, blob: BlobId) -> BlobKey {
        self.blobs[blob.0 as usize].key
    }

    fn slot(&self, blob: Option<BlobId>, block: u64) -> Option<u32> {
        let slot = *self.blobs[blob?.0 as usize].slots.get(usize::try_from(block).ok()?)?;
        (slot != NOWHERE).then_some(slot)
    }

    /// A block that is in a slot. `touch` if somebody wants it, rather than we.
    pub(super) fn find(&mut self, blob: BlobId, block: u64, touch: bool) -> Option<Hit> {
        let number = self.slot(Some(blob), block)?;
        let slot = &mut self.slots[number as usize];
        let Content::Block { length, sums, .. } = slot.content else { return None };
        slot.hot |= touch;
        Some(Hit { slot: number, generation: slot.generation, length, sums })
    }

    pub(super) fn flight(&self, blob: BlobId, block: u64) -> Option<Arc<Flight>> {
        self.flights.get(&(blob, block)).cloned()
    }

    /// The longest run of blocks around `block`, within `bounds`, that are neither here nor on their way.
    pub(super) fn missing_run(&self, blob: BlobId, block: u64, bounds: Range<u64>) -> Range<u64> {
        let missing =
            |block: &u64| self.slot(Some(blob), *block).is_none() && !self.flights.contains_key(&(blob, *block));
        let before = (bounds.start..block).rev().take_while(missing).count() as u64;
        let after = (block + 1..bounds.end).take_while(missing).count() as u64;
        block - before..block + 1 + after
    }

    pub(super) fn depart(&mut self, blob: BlobId, blocks: Range<u64>, flight: &Arc<Flight>) {
        for block in blocks {
            self.flights.insert((blob, block), Arc::clone(flight));
        }
    }

    /// Whether what `flight` brings for a block is still wanted, rather than forgotten on its way.
    pub(super) fn expects(&self, blob: BlobId, block: u64, flight: &Arc<Flight>) -> bool {
        self.flights.get(&(blob, block)).is_some_and(|known| Arc::ptr_eq(known, flight))
    }

    pub(super) fn arrive(&mut self, blob: BlobId, block: u64, flight: &Arc<Flight>) {
        if self.expects(blob, block, flight) {
            self.flights.remove(&(blob, block));
        }
    }

    /// No longer expects what is on its way for a blob's `blocks`: the next reader fetches anew.
    pub(super) fn divert(&mut self, blob: BlobId, blocks: &Range<u64>) {
        self.flights.retain(|(other, block), _| *other != blob || !blocks.contains(block));
    }

    /// Whether the slot still holds what it held at `generation`.
    pub(super) fn is_current(&self, slot: u32, generation: u32) -> bool {
        self.slots[slot as usize].generation == generation
    }

    /// Takes a slot to fill: an empty one, a new one if the cache `may_grow`, or one that nobody has read since the hand
    /// last passed it. `None` if all are being filled.
    pub(super) fn claim(&mut self, may_grow: bool) -> Option<Claim> {
        if may_grow {
            if let Some(slot) = self.free.pop() {
                return Some(self.begin(slot, false));
            }
            if (self.slots.len() as u64) < self.capacity.into() {
                let slot = self.slots.len() as u32;
                self.slots.push(Slot { generation: 0, hot: false, content: Content::Nothing });
                return Some(self.begin(slot, false));
            }
        }
        // Two rounds: the first may find everything hot, and cools it.
        for _ in 0..2 * self.slots.len() {
            let slot = self.hand;
            self.hand = (self.hand + 1) % self.slots.len();
            match &mut self.slots[slot] {
                Slot { content: Content::Block { .. }, hot: hot @ true, .. } => *hot = false,
                Slot { content: Content::Block { .. }, .. } => {
                    self.stats.evicted += 1;
                    self.unmap(slot as u32);
                    return Some(self.begin(slot as u32, true));
                }
                _ => {}
            }
        }
        None
    }

    fn begin(&mut self, slot: u32, used: bool) -> Claim {
        let entry = &mut self.slots[slot as usize];
        entry.content = Content::Filling;
        entry.hot = false;
        entry.generation = entry.generation.wrapping_add(1);
        Claim { slot, used }
    }

    /// Ends a claim: the slot holds the block now, or nothing if it could not be filled.
    pub(super) fn settle(&mut self, claim: Claim, filled: Option<(BlobId, &Held)>) {
        match filled {
            Some((blob, held)) if self.slot(Some(blob), held.block).is_none() => self.put(claim.slot, blob, held),
            _ => {
                self.slots[claim.slot as usize].content = Content::Nothing;
                self.free.push(claim.slot);
            }
        }
    }

    fn put(&mut self, slot: u32, blob: BlobId, held: &Held) {
        let &Held { block, length, sums, .. } = held;
        self.slots[slot as usize].content = Content::Block { blob, block, length, sums };
        let slots = &mut self.blobs[blob.0 as usize].slots;
        let index = block as usize;
        if slots.len() <= index {
            slots.resize(index + 1, NOWHERE);
        }
        slots[index] = slot;
        self.stats.blocks += 1;
    }

    fn unmap(&mut self, slot: u32) {
        let entry = &mut self.slots[slot as usize];
        if let Content::Block { blob, block, .. } = entry.content {
            entry.content = Content::Nothing;
            entry.generation = entry.generation.wrapping_add(1);
            self.blobs[blob.0 as usize].slots[block as usize] = NOWHERE;
            self.stats.blocks -= 1;
        }
    }

    /// Lets go of what a slot held at `generation`. The slot is claimed, for its record to be erased before it is settled.
    pub(super) fn drop_slot(&mut self, slot: u32, generation: u32) -> Option<Claim> {
        let entry = &self.slots[slot as usize];
        if entry.generation != generation || !matches!(entry.content, Content::Block { .. }) {
            return None;
        }
        self.unmap(slot);
        Some(self.begin(slot, true))
    }

    /// The slots of a blob's `blocks`, with their generations.
    pub(super) fn slots_of(&self, blob: BlobId, blocks: Range<u64>) -> Vec<(u32, u32)> {
        let slots = &self.blobs[blob.0 as usize].slots;
        let end = blocks.end.min(slots.len() as u64) as usize;
        let start = (blocks.start as usize).min(end);
        let kept = slots[start..end].iter().filter(|slot| **slot != NOWHERE);
        kept.map(|slot| (*slot, self.slots[*slot as usize].generation)).collect()
    }

    pub(super) fn is_condemned(&self, blob: BlobId) -> bool {
        self.blobs[blob.0 as usize].condemned
    }

    pub(super) fn condemn(&mut self, blob: BlobId, condemned: bool) {
        self.blobs[blob.0 as usize].condemned = condemned;
    }

    /// Slots at most.
    pub(super) fn capacity(&self) -> u32 {
        self.capacity
    }

    /// Bytes of blocks that are kept, whole slots counted.
    pub(super) fn bytes(&self) -> u64 {
        self.stats.blocks * BLOCK
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn held(table: &Table, blob: BlobId, block: u64) -> Held {
        Held { key: table.key(blob), block, length: BLOCK as u32, sums: [0; 16] }
    }

    fn insert(table: &mut Table, blob: BlobId, block: u64) {
        let claim = table.claim(true).unwrap();
        let held = held(table, blob, block);
        table.settle(claim, Some((blob, &held)));
    }

    #[test]
    fn what_was_read_survives_what_was_not() {
        let mut table = Table::new(3);
        let blob = table.blob(&BlobKey::of("a"));
        (0..3).for_each(|block| insert(&mut table, blob, block));
        assert!(table.find(blob, 0, true).is_some());
        assert!(table.find(blob, 1, false).is_some());
        insert(&mut table, blob, 3);
        insert(&mut table, blob, 4);
        let kept: Vec<_> = (0..5).map(|block| table.find(blob, block, false).is_some()).collect();
        assert_eq!(kept, [true, false, false, true, true]);
        assert_eq!((table.stats.blocks, table.stats.evicted), (3, 2));
    }

    #[test]
    fn a_slot_that_is_being_filled_is_nobody_elses() {
        let mut table = Table::new(2);
        let (first, second) = (table.claim(true).unwrap(), table.claim(true).unwrap());
        assert_ne!(first.slot, second.slot);
        assert!(table.claim(true).is_none());
        table.settle(first, None);
        assert!(table.claim(false).is_none(), "an empty slot may need space");
        assert!(table.claim(true).is_some());
    }

    #[test]
    fn a_run_ends_where_a_block_is_here_or_on_its_way() {
        let mut table = Table::new(9);
        let blob = table.blob(&BlobKey::of("a"));
        insert(&mut table, blob, 1);
        let flight = Flight::new();
        table.depart(blob, 6..7, &flight);
        assert_eq!(table.missing_run(blob, 3, 0..10), 2..6);
        assert_eq!(table.missing_run(blob, 3, 3..5), 3..5);
        assert_eq!(table.missing_run(blob, 8, 0..10), 7..10);
        table.divert(blob, &(5..7));
        assert!(!table.expects(blob, 6, &flight));
        assert_eq!(table.missing_run(blob, 8, 0..10), 2..10);
    }

    #[test]
    fn a_reused_slot_is_not_what_it_was() {
        let mut table = Table::new(1);
        let blob = table.blob(&BlobKey::of("a"));
        insert(&mut table, blob, 0);
        let hit = table.find(blob, 0, false).unwrap();
        insert(&mut table, blob, 1);
        assert!(!table.is_current(hit.slot, hit.generation));
        assert!(table.drop_slot(hit.slot, hit.generation).is_none());
        assert!(table.find(blob, 0, false).is_none());
    }
}
