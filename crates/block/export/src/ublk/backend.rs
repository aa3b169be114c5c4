//! A device's requests, as calls of it.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use aenv_block_device::BlockDevice;
use rustix::io::Errno;
use tracing::{error, warn};

use super::wire::{Descriptor, SECTOR, data_position, operation};
use crate::buffers::Buffers;
use crate::errno::errno;
use crate::gate::Gate;
use crate::lane::Lane;

/// What stands behind one ublk device.
pub(super) struct Backend {
    pub(super) name: String,
    pub(super) gate: Arc<Gate>,
    pub(super) lane: Arc<Lane>,
    pub(super) buffers: Arc<Buffers>,
    /// The character device: requests come from it, and their data lies in it.
    pub(super) channel: File,
    /// The largest request, in bytes.
    pub(super) largest: usize,
    /// Failed requests so far.
    pub(super) failures: AtomicU64,
}

impl Backend {
    /// Does what a request asks for. Gives what the driver wants to hear: bytes moved, or an error's negative number.
    pub(super) fn serve(&self, queue: u16, tag: u16, request: &Descriptor) -> i32 {
        // Shut only if the export was dropped.
        let Some(pass) = self.gate.enter() else { return -Errno::IO.raw_os_error() };
        let Some(device) = pass.device() else { return -Errno::IO.raw_os_error() };
        // A device that panics has broken its own promises, not ours to all the others.
        let done = catch_unwind(AssertUnwindSafe(|| self.act(device, data_position(queue, tag), request)));
        match done {
            Ok(Ok(moved)) => moved,
            Ok(Err(error)) => {
                let errno = errno(&error);
                let failures = self.failures.fetch_add(1, Ordering::Relaxed) + 1;
                // The first, and ever fewer of the later ones.
                if failures.is_power_of_two() {
                    let what = request.op_flags as u8;
                    warn!(device = %self.name, what, %error, ?errno, failures, "request to an exported device failed");
                }
                -errno.raw_os_error()
            }
            Err(_) => {
                error!(device = %self.name, "an exported device panicked");
                -Errno::IO.raw_os_error()
            }
        }
    }

    fn act(&self, device: &dyn BlockDevice, data: u64, request: &Descriptor) -> io::Result<i32> {
        let offset = request.start_sector.saturating_mul(SECTOR);
        let length = u64::from(request.nr_sectors) * SECTOR;
        match request.op_flags as u8 {
            operation::READ => {
                let mut buffer = self.buffers.take(self.checked(length)?);
                device.read_at(offset, &mut buffer)?;
                self.channel.write_all_at(&buffer, data)?;
                Ok(buffer.len() as i32)
            }
            operation::WRITE => {
                let mut buffer = self.buffers.take(self.checked(length)?);
                self.channel.read_exact_at(&mut buffer, data)?;
                device.write_at(offset, &buffer)?;
                Ok(buffer.len() as i32)
            }
            operation::FLUSH => device.flush().map(|()| 0),
            // That zeros take their space at once, nobody can promise here; that they are zeros, a discard does.
            operation::DISCARD | operation::WRITE_ZEROES => device.discard(offset, length).map(|()| 0),
            _ => Err(io::ErrorKind::Unsupported.into()), // none of which the parameters said that it can be done
        }
    }

    /// The driver keeps to what it was told. If it did not, a buffer should not become gigabytes.
    fn checked(&self, length: u64) -> io::Result<usize> {
        usize::try_from(length).ok().filter(|length| *length <= self.largest).ok_or(io::ErrorKind::InvalidInput.into())
    }
}
