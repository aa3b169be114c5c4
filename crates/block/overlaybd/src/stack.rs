//! Finished layers on top of each other, seen as one device that cannot be written.

use std::io;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};
use std::thread;

use aenv_block_device::BlockDevice;
use aenv_model::Bytes;

use crate::gather::Gather;
use crate::index::{Content, Index};
use crate::layer::{Layer, MAX_ENTRIES, OpenLayerError};
use crate::mapping::{MAX_VIRTUAL_SIZE, SECTOR};
use crate::merge::merge;
use crate::source::Source;

/// Layers in one stack, at most: the tag of an entry has eight bits, and one value is the upper's.
pub const MAX_LAYERS: usize = 255;

/// A read-only stack. Its index is that of all layers, merged: a read looks once, however deep the data is.
#[derive(Debug, Clone)]
pub struct Stack {
    /// Bottom first.
    layers: Vec<Layer>,
    index: Arc<Index>,
    size: Bytes,
}

/// Why layers could not be stacked.
#[derive(Debug, thiserror::Error)]
pub enum StackError {
    /// More than [`MAX_LAYERS`].
    #[error("{0} layers, more than {MAX_LAYERS}")]
    TooDeep(usize),
    /// The merged index would be too large.
    #[error("{0} index entries in one stack, more than {MAX_ENTRIES}")]
    TooManyEntries(u64),
    /// The topmost size is more than an index can address.
    #[error("{file} claims a device of {size} bytes, more than {MAX_VIRTUAL_SIZE}")]
    TooLarge {
        /// Which layer.
        file: String,
        /// What it says.
        size: u64,
    },
    /// A layer could not be opened.
    #[error("open a layer")]
    Open(#[from] OpenLayerError),
}

impl Stack {
    /// Opens `sources`, bottom first.
    pub fn open(sources: impl IntoIterator<Item = Arc<dyn Source>>) -> Result<Self, StackError> {
        let layers = sources.into_iter().map(Layer::open).collect::<Result<_, _>>()?;
        Self::new(layers)
    }

    /// Like [`open`](Self::open), `threads` layers at a time: for sources that are far away. Of several errors, that of the
    /// lowest layer is given.
    pub fn open_parallel(sources: &[Arc<dyn Source>], threads: usize) -> Result<Self, StackError> {
        let next = AtomicUsize::new(0);
        let opened: Vec<OnceLock<_>> = sources.iter().map(|_| OnceLock::new()).collect();
        thread::scope(|scope| {
            for _ in 0..threads.clamp(1, sources.len().max(1)) {
                scope.spawn(|| {
                    loop {
                        let number = next.fetch_add(1, Ordering::Relaxed);
                        let Some((source, slot)) = sources.get(number).zip(opened.get(number)) else { return };
                        let _ = slot.set(Layer::open(Arc::clone(source))); // each number is taken once
                    }
                });
            }
        });
        let layers = opened.into_iter().filter_map(OnceLock::into_inner).collect::<Result<_, _>>()?;
        Self::new(layers)
    }

    /// Stacks `layers`, bottom first. None make a device of size 0.
    ///
    /// The topmost non-zero size is the device's, even if layers below are larger.
    pub fn new(layers: Vec<Layer>) -> Result<Self, StackError> {
        Self::check_limits(&layers)?;
        let size = Self::size_of(&layers)?;
        if let [only] = &layers[..] {
            let index = only.shared_index(); // its tags are 0 already
            return Ok(Self { layers, index, size });
        }
        let tagged = (0..=u8::MAX).zip(layers.iter().rev()).map(|(tag, layer)| layer.index().tagged(tag));
        let index = Arc::new(Index::from_sorted(merge(tagged.collect())));
        Ok(Self { layers, index, size })
    }

    fn check_limits(layers: &[Layer]) -> Result<(), StackError> {
        if layers.len() > MAX_LAYERS {
            return Err(StackError::TooDeep(layers.len()));
        }
        let entries: u64 = layers.iter().map(|layer| layer.index().entries().len() as u64).sum();
        if entries > MAX_ENTRIES { Err(StackError::TooManyEntries(entries)) } else { Ok(()) }
    }

    /// The topmost size that is not 0.
    fn size_of(layers: &[Layer]) -> Result<Bytes, StackError> {
        let Some(layer) = layers.iter().rev().find(|layer| layer.virtual_size() != Bytes(0)) else {
            return Ok(Bytes(0));
        };
        let size = layer.virtual_size();
        if size.get() > MAX_VIRTUAL_SIZE {
            return Err(StackError::TooLarge { file: layer.payload().name().to_owned(), size: size.get() });
        }
        Ok(size)
    }

    /// This stack with `layer` on top. Touches every entry once, whatever the depth.
    pub fn with_top(&self, layer: Layer) -> Result<Self, StackError> {
        let mut layers = self.layers.clone();
        layers.push(layer);
        if self.layers.is_empty() {
            return Self::new(layers);
        }
        Self::check_limits(&layers)?;
        // Everything below moves down by one.
        let below = self.index.entries().iter().map(|entry| entry.with_tag(entry.tag() + 1)).collect();
        let top = layers[layers.len() - 1].index().tagged(0);
        let size = Self::size_of(&layers)?;
        Ok(Self { layers, index: Arc::new(Index::from_sorted(merge(vec![top, below]))), size })
    }

    /// The layers, bottom first.
    #[must_use]
    pub fn layers(&self) -> &[Layer] {
        &self.layers
    }

    /// The merged index; tag 0 is the topmost layer.
    #[must_use]
    pub fn index(&self) -> &Index {
        &self.index
    }

    /// The file that entries with `tag` point into.
    pub(crate) fn file(&self, tag: u8) -> &dyn Source {
        let from_bottom = self.layers.len() - 1 - usize::from(tag);
        &**self.layers[from_bottom].payload()
    }

    /// The layer that is not a child of the one below it, by its UUIDs: the number of the first, from the bottom.
    #[must_use]
    pub fn broken_parent(&self) -> Option<usize> {
        let broken = |pair: &[Layer]| pair[1].identity().parent != pair[0].identity().uuid;
        self.layers.windows(2).position(broken).map(|below| below + 1)
    }

    /// Plans the read of sectors `from..to` into `buf`, which begins at byte `buf_offset` of the device.
    pub(crate) fn plan<'s, 'b>(&'s self, request: (u64, u64), mut buf: &'b mut [u8], gather: &mut Gather<'s, 'b>) {
        let (offset, end) = request;
        for span in self.index.spans(offset / SECTOR, end.div_ceil(SECTOR)) {
            let (start, stop) = ((span.offset * SECTOR).max(offset), ((span.offset + span.length) * SECTOR).min(end));
            let (piece, rest) = buf.split_at_mut((stop - start) as usize);
            buf = rest;
            match span.content {
                Content::Hole | Content::Zeroed => piece.fill(0),
                Content::Data { tag, position } => {
                    let at = position * SECTOR + (start - span.offset * SECTOR);
                    gather.push(u16::from(tag), self.file(tag), at, piece);
                }
            }
        }
    }
}

impl BlockDevice for Stack {
    fn size(&self) -> Bytes {
        self.size
    }

    fn read_at(&self, offset: u64, buf: &mut [u8]) -> io::Result<()> {
        let end = check_range(self.size, offset, buf.len() as u64)?;
        let mut gather = Gather::default();
        self.plan((offset, end), buf, &mut gather);
        gather.read()
    }

    fn write_at(&self, _: u64, _: &[u8]) -> io::Result<()> {
        Err(read_only())
    }

    fn discard(&self, _: u64, _: u64) -> io::Result<()> {
        Err(read_only())
    }

    fn flush(&self) -> io::Result<()> {
        Ok(())
    }
}

fn read_only() -> io::Error {
    io::Error::new(io::ErrorKind::ReadOnlyFilesystem, "the device has no writable upper")
}

/// The end of a range, if it lies within a device of `size`.
pub(crate) fn check_range(size: Bytes, offset: u64, length: u64) -> io::Result<u64> {
    match offset.checked_add(length) {
        Some(end) if end <= size.get() => Ok(end),
        _ => Err(io::Error::new(
            io::ErrorKind::InvalidInput,
            format!("{length} bytes at {offset} are beyond the end of a device of {} bytes", size.get()),
        )),
    }
}
