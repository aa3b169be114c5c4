//! The host's time-stamp counter.

#![allow(unsafe_code, reason = "the TSC is read by an intrinsic; the block says why it is sound")]

use std::sync::OnceLock;

/// Frequency of the host's time-stamp counter in kHz, measured once against `CLOCK_MONOTONIC_RAW` to about 5 ppm.
/// `None` where the architecture has none.
///
/// Measured rather than read: the kernel tells it only in its log, which may not be readable, and CPUID leaves it out
/// on many virtual machines. Blocking: the first call takes about 20 ms.
#[must_use]
pub fn host_tsc_khz() -> Option<u64> {
    static KHZ: OnceLock<Option<u64>> = OnceLock::new();
    *KHZ.get_or_init(measure)
}

#[cfg(target_arch = "x86_64")]
fn measure() -> Option<u64> {
    let (ticks_before, nanos_before) = sample();
    std::thread::sleep(std::time::Duration::from_millis(20));
    let (ticks_after, nanos_after) = sample();
    let nanos = u128::from(nanos_after.checked_sub(nanos_before)?);
    let ticks = u128::from(ticks_after.checked_sub(ticks_before)?);
    (nanos > 0).then(|| u64::try_from(ticks * 1_000_000 / nanos).ok()).flatten()
}

/// The counter and the clock at one instant: of several tries the one least disturbed by preemption.
#[cfg(target_arch = "x86_64")]
fn sample() -> (u64, u64) {
    let ticks = || {
        // SAFETY: RDTSC reads a register; every x86-64 CPU has it and Linux leaves it enabled for user space.
        unsafe { core::arch::x86_64::_rdtsc() }
    };
    let best = (0..32).map(|_| {
        let before = ticks();
        let now = rustix::time::clock_gettime(rustix::time::ClockId::MonotonicRaw);
        let after = ticks();
        let nanos = now.tv_sec.unsigned_abs() * 1_000_000_000 + now.tv_nsec.unsigned_abs();
        (after.wrapping_sub(before), before + after.wrapping_sub(before) / 2, nanos)
    });
    best.min().map_or((0, 0), |(_, ticks, nanos)| (ticks, nanos))
}

#[cfg(not(target_arch = "x86_64"))]
fn measure() -> Option<u64> {
    None
}

#[cfg(all(test, target_arch = "x86_64"))]
mod tests {
    use super::*;

    #[test]
    fn two_measurements_of_the_counter_agree() {
        let (a, b) = (measure().unwrap(), measure().unwrap());
        assert!(a > 100_000, "{a} kHz");
        assert!(a.abs_diff(b) * 1000 < a, "{a} and {b} kHz differ by more than 0.1 %");
    }
}
