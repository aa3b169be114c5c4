//! Machines that a request asks for.

use aenv_model::{Bytes, MachineShape};

use super::App;
use super::error::ApiError;

/// Largest machine.
const MAX_VCPUS: u32 = 64;
const MIN_MEMORY_MIB: u32 = 128;

impl App {
    /// The machine with what `cpuCount` and `memoryMB` ask for, and the node's defaults for the rest.
    pub(super) fn shape(&self, cpu_count: Option<u32>, memory_mb: Option<u32>) -> Result<MachineShape, ApiError> {
        let default = self.config.machine.shape();
        let shape = MachineShape {
            vcpus: cpu_count.unwrap_or(default.vcpus),
            memory: memory_mb.map_or(default.memory, |mib| Bytes::mib(mib.into())),
        };
        if !(1..=MAX_VCPUS).contains(&shape.vcpus) {
            let message = format!("invalid field cpuCount: {}, expected 1 to {MAX_VCPUS}", shape.vcpus);
            return Err(ApiError::bad_request(message));
        }
        if let Some(mib) = memory_mb.filter(|mib| *mib < MIN_MEMORY_MIB) {
            let message = format!("invalid field memoryMB: {mib}, expected at least {MIN_MEMORY_MIB}");
            return Err(ApiError::bad_request(message));
        }
        if shape.memory > self.memory {
            let (asked, host) = (shape.memory.to_mib_ceil(), self.memory);
            return Err(ApiError::bad_request(format!("invalid field memoryMB: {asked}, this node has {host}")));
        }
        Ok(shape)
    }
}
