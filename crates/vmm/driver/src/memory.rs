//! Guest memory as seen from outside the VMM.

/// Guest memory in the address space of process `pid`: what `PAGEMAP_SCAN` and `process_vm_readv` need.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GuestMemory {
    /// The VMM process.
    pub pid: u32,
    /// Ranges in guest-physical order.
    pub ranges: Vec<MemoryRange>,
}

/// A contiguous piece of guest memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MemoryRange {
    /// Where it starts in the VMM's address space.
    pub host_address: u64,
    /// Where it starts in the memory image file, in bytes.
    pub image_offset: u64,
    /// Its length in bytes.
    pub length: u64,
}
