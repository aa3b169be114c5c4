//! Opens arbitrary bytes and uses whatever opens. Shared with the fuzz targets: it must neither panic nor take memory that
//! the bytes only claim.

use std::sync::Arc;

use aenv_block_device::BlockDevice;
use aenv_block_overlaybd::{Layer, MemoryFile, OverlayDevice, Source, Stack, Storage, Upper, ZFile, inspect};

/// A layer in any wrapping.
pub(crate) fn layer(bytes: Vec<u8>) {
    let source: Arc<dyn Source> = Arc::new(MemoryFile::new("layer", bytes));
    let _ = inspect(Arc::clone(&source));
    let Ok(layer) = Layer::open(source) else { return };
    let places: Vec<u64> = layer.index().entries().iter().take(64).map(|entry| entry.offset() * 512).collect();
    let Ok(stack) = Stack::new(vec![layer]) else { return };
    use_device(&stack, &places);
}

/// A ZFile.
pub(crate) fn zfile(bytes: Vec<u8>) {
    let Ok(Some(zfile)) = ZFile::open(Arc::new(MemoryFile::new("zfile", bytes))) else { return };
    let size = zfile.size();
    let mut buf = vec![0; 100_000];
    for offset in [0, 1, 4095, size / 2, size.saturating_sub(1)] {
        let length = (size.saturating_sub(offset)).min(buf.len() as u64) as usize;
        let _ = zfile.read_at(offset, &mut buf[..length]);
        zfile.forget(offset, 5000);
    }
    let _ = zfile.read_at(size, &mut [0]);
}

/// The files of an upper, over nothing.
pub(crate) fn upper(data: Vec<u8>, index: Option<Vec<u8>>) {
    let data: Arc<dyn Storage> = Arc::new(MemoryFile::new("data", data));
    let index = index.map(|index| Arc::new(MemoryFile::new("index", index)) as Arc<dyn Storage>);
    let Ok(upper) = Upper::open(data, index) else { return };
    // A sparse file of the claimed size is a hole on disk, but not in memory.
    if upper.virtual_size().get() > 16 << 20 {
        return;
    }
    let Ok(device) = OverlayDevice::new(Stack::new(Vec::new()).expect("no layers"), upper) else { return };
    use_device(&device, &[0, 4096, 65_536]);
    let _ = device.write_at(100, &[1; 5000]);
    let _ = device.discard(50, 9000);
    let _ = device.flush();
    let _ = device.upper().seal();
}

fn use_device(device: &dyn BlockDevice, places: &[u64]) {
    let size = device.size().get();
    let mut buf = vec![0; 20_000];
    for &offset in places.iter().chain(&[0, size / 2, size.saturating_sub(600)]) {
        let offset = offset.saturating_sub(100).min(size);
        let length = (size - offset).min(buf.len() as u64) as usize;
        let _ = device.read_at(offset, &mut buf[..length]);
    }
}
