//! The way to an export's device, which can be shut.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use aenv_block_device::BlockDevice;

/// Lets requests through to the device until it is shut, and knows when the last of them has left.
pub(crate) struct Gate {
    state: Mutex<State>,
    left: Condvar,
}

struct State {
    /// None once shut.
    device: Option<Arc<dyn BlockDevice>>,
    inside: usize,
}

/// One request's use of the device.
pub(crate) struct Pass {
    gate: Arc<Gate>,
    /// None only while the pass is dropped.
    device: Option<Arc<dyn BlockDevice>>,
}

impl Gate {
    pub(crate) fn new(device: Arc<dyn BlockDevice>) -> Arc<Self> {
        Arc::new(Self { state: Mutex::new(State { device: Some(device), inside: 0 }), left: Condvar::new() })
    }

    /// None if the gate is shut.
    pub(crate) fn enter(self: &Arc<Self>) -> Option<Pass> {
        let mut state = self.lock();
        let device = Arc::clone(state.device.as_ref()?);
        state.inside += 1;
        Some(Pass { gate: Arc::clone(self), device: Some(device) })
    }

    /// Lets nobody in any more. Does not wait.
    pub(crate) fn shut(&self) {
        let device = self.lock().device.take();
        drop(device); // with the lock released: the last reference may run a long way
    }

    /// Waits until everybody has left. To be called after [`shut`](Self::shut).
    pub(crate) fn wait(&self) {
        let mut state = self.lock();
        while state.inside > 0 {
            state = self.left.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Pass {
    pub(crate) fn device(&self) -> Option<&dyn BlockDevice> {
        self.device.as_deref()
    }
}

impl Drop for Pass {
    fn drop(&mut self) {
        self.device = None; // before leaving: whoever waits may take the device apart
        let mut state = self.gate.lock();
        state.inside -= 1;
        if state.inside == 0 {
            self.gate.left.notify_all();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::thread;

    use aenv_block_device::test_support::MemoryDevice;
    use aenv_model::Bytes;

    use super::*;

    #[test]
    fn a_shut_gate_lets_nobody_in_and_the_last_one_out_frees_the_device() {
        let device: Arc<dyn BlockDevice> = Arc::new(MemoryDevice::new(Bytes::mib(1)));
        let gate = Gate::new(Arc::clone(&device));
        let pass = gate.enter().expect("open");
        gate.shut();
        assert!(gate.enter().is_none());
        assert_eq!(pass.device().map(BlockDevice::size), Some(Bytes::mib(1)));
        thread::scope(|scope| {
            let waiter = scope.spawn(|| {
                gate.wait();
                Arc::strong_count(&device)
            });
            assert!(!waiter.is_finished());
            drop(pass);
            assert_eq!(waiter.join().expect("join"), 1);
        });
    }
}
