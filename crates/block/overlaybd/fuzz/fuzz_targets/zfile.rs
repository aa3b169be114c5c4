#![no_main]

use libfuzzer_sys::fuzz_target;

#[path = "../../tests/support/exercise.rs"]
#[allow(dead_code)]
mod exercise;

fuzz_target!(|bytes: &[u8]| exercise::zfile(bytes.to_vec()));
