//! Amounts with their unit in the type.

use std::fmt;

use serde::{Deserialize, Serialize};

/// An amount of bytes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Bytes(pub u64);

impl Bytes {
    /// `n` times 1024.
    #[must_use]
    pub const fn kib(n: u64) -> Self {
        Self(n << 10)
    }

    /// `n` times 1024².
    #[must_use]
    pub const fn mib(n: u64) -> Self {
        Self(n << 20)
    }

    /// `n` times 1024³.
    #[must_use]
    pub const fn gib(n: u64) -> Self {
        Self(n << 30)
    }

    /// The plain number.
    #[must_use]
    pub const fn get(self) -> u64 {
        self.0
    }

    /// Whole MiB, rounded up: what an API field in MiB says of this amount.
    #[must_use]
    pub const fn to_mib_ceil(self) -> u64 {
        self.0.div_ceil(1 << 20)
    }

    /// The next multiple of `unit`, itself included.
    ///
    /// # Panics
    /// If `unit` is zero.
    #[must_use]
    pub const fn round_up(self, unit: Self) -> Self {
        Self(self.0.div_ceil(unit.0) * unit.0)
    }
}

impl fmt::Display for Bytes {
    /// In the largest binary unit that keeps one decimal readable: `512 B`, `1.5 MiB`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const UNITS: [&str; 5] = ["B", "KiB", "MiB", "GiB", "TiB"];
        let mut value = self.0 as f64;
        let mut unit = 0;
        while value >= 1024.0 && unit + 1 < UNITS.len() {
            value /= 1024.0;
            unit += 1;
        }
        if unit == 0 { write!(f, "{} B", self.0) } else { write!(f, "{value:.1} {}", UNITS[unit]) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn amounts_print_in_their_largest_unit() {
        assert_eq!(Bytes(512).to_string(), "512 B");
        assert_eq!(Bytes::kib(1536).to_string(), "1.5 MiB");
    }

    #[test]
    fn rounding_up_keeps_exact_multiples() {
        assert_eq!(Bytes::mib(2).round_up(Bytes::mib(1)), Bytes::mib(2));
        assert_eq!(Bytes(1).round_up(Bytes::mib(1)), Bytes::mib(1));
    }
}
