//! Layers against a model: a map from paths to content, with the rules written down once more, plainly.

use std::collections::BTreeMap;
use std::path::Path;

use aenv_model::Bytes;
use proptest::prelude::*;

use super::layer::{Tar, sha256};
use super::*;

/// A path, and the content of a file or nothing for a directory.
type State = BTreeMap<String, Option<u8>>;

#[derive(Debug, Clone)]
pub(crate) enum Change {
    File(u8),
    Directory,
    Whiteout,
    Opaque,
}

fn below<'a>(path: &'a str, state: &'a State) -> impl Iterator<Item = String> + 'a {
    let prefix = format!("{path}/");
    state.keys().filter(move |key| key.starts_with(&prefix)).cloned()
}

fn remove(path: &str, state: &mut State) {
    for key in below(path, state).collect::<Vec<_>>() {
        state.remove(&key);
    }
    state.remove(path);
}

fn ancestors(path: &str) -> impl Iterator<Item = &str> {
    path.match_indices('/').map(|(at, _)| &path[..at])
}

/// What a layer means.
fn apply(changes: &[(String, Change)], state: &mut State) {
    for (path, change) in changes {
        match change {
            Change::Directory if state.get(path).is_some_and(Option::is_some) => remove(path, state),
            _ => {}
        }
    }
    for (path, change) in changes {
        match change {
            Change::Whiteout => remove(path, state),
            Change::Opaque => {
                for key in below(path, state).collect::<Vec<_>>() {
                    state.remove(&key);
                }
            }
            _ => {}
        }
    }
    for (path, change) in changes {
        let content = match change {
            Change::File(content) => Some(*content),
            Change::Directory => None,
            _ => continue,
        };
        for ancestor in ancestors(path) {
            if state.get(ancestor) != Some(&None) {
                state.insert(ancestor.to_owned(), None);
            }
        }
        if content.is_some() {
            remove(path, state);
        }
        state.insert(path.clone(), content);
    }
}

pub(crate) fn written(changes: &[(String, Change)]) -> Vec<u8> {
    let mut tar = Tar::default();
    for (path, change) in changes {
        match change {
            Change::File(content) => tar.file(path, &[*content]),
            Change::Directory => tar.dir(&format!("{path}/")),
            Change::Opaque => tar.file(&format!("{path}/.wh..wh..opq"), b""),
            Change::Whiteout => match path.rsplit_once('/') {
                Some((folder, name)) => tar.file(&format!("{folder}/.wh.{name}"), b""),
                None => tar.file(&format!(".wh.{path}"), b""),
            },
        };
    }
    tar.finish()
}

fn found(root: &Path, folder: &str, state: &mut State) {
    for entry in std::fs::read_dir(root.join(folder)).unwrap() {
        let entry = entry.unwrap();
        let name = entry.file_name().into_string().unwrap();
        let path = if folder.is_empty() { name } else { format!("{folder}/{name}") };
        if entry.file_type().unwrap().is_dir() {
            state.insert(path.clone(), None);
            found(root, &path, state);
        } else {
            state.insert(path, Some(std::fs::read(entry.path()).unwrap()[0]));
        }
    }
}

/// One layer, in any order. A path is changed once; a file has nothing below it in its own layer.
pub(crate) fn layer() -> impl Strategy<Value = Vec<(String, Change)>> {
    let change = prop_oneof![
        4 => any::<u8>().prop_map(Change::File),
        3 => Just(Change::Directory),
        2 => Just(Change::Whiteout),
        1 => Just(Change::Opaque),
    ];
    prop::collection::btree_map("[abc](/[abc]){0,2}", change, 0..9)
        .prop_map(|changes| {
            let files: Vec<String> = changes
                .iter()
                .filter(|(_, change)| matches!(change, Change::File(_)))
                .map(|(path, _)| path.clone())
                .collect();
            let keeps = |path: &str, change: &Change| match change {
                Change::File(_) | Change::Directory => {
                    !ancestors(path).any(|above| files.iter().any(|file| file == above))
                }
                _ => true,
            };
            changes.into_iter().filter(|(path, change)| keeps(path, change)).collect::<Vec<_>>()
        })
        .prop_shuffle()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 150, ..ProptestConfig::default() })]

    #[test]
    fn layers_in_any_order_give_what_the_model_says(layers in prop::collection::vec(layer(), 1..5)) {
        if !rustix::process::geteuid().is_root() {
            return Ok(());
        }
        let root = tempfile::tempdir().unwrap();
        let budget = Budget::new(Bytes::mib(1), Bytes::mib(1), 1000);
        let mut unpacker = Unpacker::new(root.path(), true, budget, CancellationToken::new()).unwrap();
        let mut expected = State::new();
        for changes in &layers {
            let bytes = written(changes);
            unpacker.apply(&sha256(&bytes).parse().unwrap(), || Ok(bytes.as_slice())).unwrap();
            apply(changes, &mut expected);
        }
        unpacker.finish().unwrap();
        let mut state = State::new();
        found(root.path(), "", &mut state);
        prop_assert_eq!(state, expected);
    }
}
