//! Damaged files of any kind are errors or other content, never a panic.

#[path = "support/exercise.rs"]
mod exercise;
mod support;

use proptest::prelude::*;
use support::*;

/// Where and how a file is damaged. Half of the changes go where the structure is.
#[derive(Debug, Clone)]
enum Change {
    Byte { near_end: bool, at: prop::sample::Index, value: u8 },
    Word { at: prop::sample::Index, value: u64 },
    Cut { at: prop::sample::Index },
    Grow { by: usize },
}

fn changes() -> impl Strategy<Value = Vec<Change>> {
    let value = prop_oneof![any::<u64>(), Just(0), Just(u64::MAX), Just(1 << 40), 0..100_000_u64];
    let change = prop_oneof![
        6 => (any::<bool>(), any::<prop::sample::Index>(), any::<u8>())
            .prop_map(|(near_end, at, value)| Change::Byte { near_end, at, value }),
        3 => (any::<prop::sample::Index>(), value).prop_map(|(at, value)| Change::Word { at, value }),
        1 => any::<prop::sample::Index>().prop_map(|at| Change::Cut { at }),
        1 => (1..5000_usize).prop_map(|by| Change::Grow { by }),
    ];
    prop::collection::vec(change, 1..6)
}

fn apply(mut bytes: Vec<u8>, changes: &[Change]) -> Vec<u8> {
    for change in changes {
        let length = bytes.len();
        if length < 16 {
            break;
        }
        match change {
            Change::Byte { near_end: true, at, value } => bytes[length - 1 - at.index(length.min(4500))] = *value,
            Change::Byte { near_end: false, at, value } => bytes[at.index(length)] = *value,
            Change::Word { at, value } => {
                let words = length.min(600) / 8;
                // A field of the header, or of the trailer.
                let word = at.index(2 * words);
                let start = if word < words { word * 8 } else { length.saturating_sub(4096) + (word - words) * 8 };
                if let Some(field) = bytes.get_mut(start..start + 8) {
                    field.copy_from_slice(&value.to_le_bytes());
                }
            }
            Change::Cut { at } => bytes.truncate(at.index(length)),
            Change::Grow { by } => bytes.resize(length + by, 0xA5),
        }
    }
    bytes
}

fn golden(path: &str) -> Vec<u8> {
    std::fs::read(fixture(path)).expect("golden")
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 500, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn damaged_layers_do_not_panic(
        which in prop::sample::select(vec![
            "lsmt/lsmt-basic.commit", "lsmt/lsmt-sealed-log.sealed", "lsmt/orig-commit.commit", "stack/st-top.commit",
            "zlsmt/zl-lz4-4k.commit", "zlsmt/zl-zstd-64k-nocrc.commit", "zlsmt/zl-tar-lz4-4k.commit", "tar/tar-ustar.tar",
            "zfile/z-legacy-nodigest.zfile",
        ]),
        changes in changes(),
    ) {
        exercise::layer(apply(golden(which), &changes));
    }

    #[test]
    fn damaged_zfiles_do_not_panic(
        which in prop::sample::select(vec![
            "zfile/z-legacy-nodigest.zfile", "zfile/z-tiny.zfile", "zfile/z-zstd-4k-nocrc.zfile", "zfile/z-exact.zfile",
        ]),
        changes in changes(),
    ) {
        exercise::zfile(apply(golden(which), &changes));
    }

    #[test]
    fn damaged_uppers_do_not_panic(
        which in prop::sample::select(vec!["upper-log", "upper-hybrid", "upper-empty"]),
        to_data in changes(),
        to_index in changes(),
        both in 0..3_u8,
    ) {
        let data = golden(&format!("upper/{}.data", if which == "upper-empty" { "upper-empty" } else { which }));
        let index = golden(&format!("upper/{which}.index"));
        let data = if both != 0 { apply(data, &to_data) } else { data };
        let index = if both != 1 { apply(index, &to_index) } else { index };
        exercise::upper(data, Some(index));
    }
}
