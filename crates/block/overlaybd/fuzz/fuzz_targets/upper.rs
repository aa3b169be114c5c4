#![no_main]

use libfuzzer_sys::fuzz_target;

#[path = "../../tests/support/exercise.rs"]
#[allow(dead_code)]
mod exercise;

// The data file, after its length in four bytes, little-endian; the index file follows, none if there is nothing left.
fuzz_target!(|bytes: &[u8]| {
    let Some((length, rest)) = bytes.split_first_chunk::<4>() else { return };
    let (data, index) = rest.split_at((u32::from_le_bytes(*length) as usize).min(rest.len()));
    exercise::upper(data.to_vec(), (!index.is_empty()).then(|| index.to_vec()));
});
