//! Files made by the reference tools read as their manifest says.

mod support;

use std::sync::Arc;

use aenv_block_device::BlockDevice;
use aenv_block_overlaybd::{Layer, OpenLayerError, Source, Stack, ZFile};
use support::*;

#[test]
fn the_fill_patterns_pass_their_self_test() {
    for test in MANIFEST["fills"]["self_test"].as_array().expect("tests") {
        let mut bytes = vec![0; number(&test["length"]) as usize];
        fill(test, number(&test["offset"]), &mut bytes);
        if let Some(hex) = test["hex"].as_str() {
            assert_eq!(hex::encode(&bytes), hex);
        } else if let Some(ascii) = test["ascii"].as_str() {
            assert_eq!(String::from_utf8_lossy(&bytes), ascii);
        } else {
            assert_eq!(sha256(&bytes), text(&test["sha256"]));
        }
    }
}

#[test]
fn every_layer_reads_right() {
    let mut seen = 0;
    for vector in vectors("layer") {
        let layer = Layer::open(open(vector)).unwrap_or_else(|error| panic!("{}: {error:?}", id(vector)));
        let facts = &vector["lsmt"];
        let trailer = layer.trailer();
        assert_eq!(u64::from(trailer.flags.0), number(&facts["trailer_flags"]), "{}", id(vector));
        assert_eq!(trailer.index_offset, number(&facts["index_offset"]), "{}", id(vector));
        assert_eq!(trailer.index_count, number(&facts["index_count"]), "{}", id(vector));
        assert_eq!(layer.payload().size(), number(&facts["payload_size"]), "{}", id(vector));
        let uuid = |key: &str| text(&facts[key]).parse().unwrap_or_default();
        assert_eq!((layer.identity().uuid, layer.identity().parent), (uuid("uuid"), uuid("parent_uuid")));
        assert_eq!(String::from_utf8_lossy(layer.identity().user_tag.as_bytes()), text(&facts["user_tag"]));
        let untagged = |sectors: Vec<(u64, Option<(u64, u64)>)>| -> Vec<_> {
            sectors.into_iter().map(|(at, data)| (at, data.map(|(position, _)| position))).collect()
        };
        if facts["disk_index"].is_array() {
            let (ours, theirs) = (sectors_of(layer.index().entries()), sectors_of_json(&facts["disk_index"]));
            assert!(untagged(ours) == untagged(theirs), "{}: index", id(vector));
        }
        check_device(id(vector), &Stack::new(vec![layer]).expect("stack"), &vector["expect"]);
        seen += 1;
    }
    assert_eq!(seen, 30);
}

#[test]
fn every_stack_reads_right() {
    for vector in vectors("stack") {
        let lowers = vector["lowers_bottom_to_top"].as_array().expect("lowers");
        let sources = lowers.iter().map(|lower| open(support::vector(text(lower))));
        let stack = Stack::open(sources).unwrap_or_else(|error| panic!("{}: {error:?}", id(vector)));
        check_device(id(vector), &stack, &vector["expect"]);
        let sources: Vec<_> = lowers.iter().map(|lower| open(support::vector(text(lower)))).collect();
        let parallel = Stack::open_parallel(&sources, 2).expect("open in parallel");
        assert_eq!(parallel.index(), stack.index(), "{}", id(vector));
        if let index @ serde_json::Value::Array(_) = &vector["expect"]["merged_lower_index"] {
            assert!(sectors_of(stack.index().entries()) == sectors_of_json(index), "{}: index", id(vector));
        }
        if let Some(sound) = vector["parent_uuid_chain_ok"].as_bool() {
            assert_eq!(stack.broken_parent().is_none(), sound, "{}: parents", id(vector));
        }
    }
}

#[test]
fn every_zfile_decompresses() {
    for vector in vectors("zfile") {
        let zfile = ZFile::open(open(vector)).expect("open").expect("a ZFile");
        let expect = &vector["expect"];
        let size = number(&expect["size"]);
        assert_eq!(zfile.size(), size, "{}", id(vector));
        let mut content = vec![0; size as usize];
        zfile.read_at(0, &mut content).expect("read");
        assert_eq!(sha256(&content), text(&expect["content_sha256"]), "{}", id(vector));
        assert!(content == expected(&expect["extents"], 0, size), "{}", id(vector));
        for (offset, length) in [(0, 1), (1, 4095), (4095, 2), (65_535, 70_001), (size - 1, 1), (size, 0)] {
            let offset = offset.min(size);
            let length = length.min(size - offset) as usize;
            let mut part = vec![0; length];
            zfile.read_at(offset, &mut part).expect("read");
            assert!(part == content[offset as usize..][..length], "{}: {length} at {offset}", id(vector));
        }
        zfile.read_at(size, &mut [0]).expect_err("beyond the end");
    }
}

#[test]
fn every_tar_is_recognised_or_not() {
    for vector in vectors("tar") {
        let opened = Layer::open(open(vector));
        if vector["recognised"] == false {
            let error = opened.expect_err("not recognised");
            assert!(matches!(error, OpenLayerError::Format { .. }), "{error:?}");
            continue;
        }
        let layer = opened.expect("open");
        let member = layer.packaging().tar.expect("a tar");
        assert_eq!(member.offset, number(&vector["payload_offset"]), "{}", id(vector));
        assert_eq!(member.size, number(&vector["payload_size"]), "{}", id(vector));
        check_device(id(vector), &Stack::new(vec![layer]).expect("stack"), &vector["expect"]);
    }
}

/// The damaged vectors that are layers or ZFiles; uppers have their own test.
#[test]
fn every_damage_is_refused_with_what_is_wrong_and_where() {
    let mut seen = 0;
    for vector in vectors("corrupt").filter(|vector| !id(vector).starts_with("bad-u-")) {
        let name = id(vector);
        let source = memory(name, damaged(vector));
        let base = text(&vector["patch"]["base"]);
        // ZFiles hold arbitrary bytes here, not layers.
        let opened: Result<Arc<dyn Source>, String> = if base.starts_with("zfile/") {
            match ZFile::open(source) {
                Ok(Some(zfile)) => Ok(Arc::new(zfile)),
                Ok(None) => Err(format!("{name} is no ZFile")),
                Err(error) => Err(chain(&error)),
            }
        } else {
            Layer::open(source).map(|layer| Arc::clone(layer.payload())).map_err(|error| chain(&error))
        };
        let may_succeed = vector["may_succeed"] == true;
        match (text(&vector["stage"]), opened) {
            ("open", Err(message)) => {
                assert!(message.contains(name), "{name}: which file? {message}");
                println!("{message}");
            }
            ("open", Ok(_)) => assert!(may_succeed, "{name}: opened"),
            ("read", Err(message)) => panic!("{name}: {message}"),
            (_, Ok(source)) => {
                if let Some(bad) = vector["bad_range"].as_array() {
                    let (offset, length) = (number(&bad[0]), number(&bad[1]) as usize);
                    match source.read_at(offset, &mut vec![0; length]) {
                        Ok(()) => assert!(may_succeed, "{name}: read"),
                        Err(error) => println!("{error}"),
                    }
                }
                for good in vector["good_ranges"].as_array().into_iter().flatten() {
                    let mut bytes = vec![0; number(&good["length"]) as usize];
                    source.read_at(number(&good["offset"]), &mut bytes).expect("good range");
                    assert_eq!(sha256(&bytes), text(&good["sha256"]), "{name}");
                }
            }
            other => panic!("{name}: {other:?}"),
        }
        seen += 1;
    }
    assert_eq!(seen, 33);
}

#[test]
fn writes_to_a_stack_are_refused() {
    let stack = Stack::open([open(vector("lsmt-basic"))]).expect("open");
    assert_eq!(stack.write_at(0, &[1]).expect_err("read-only").kind(), std::io::ErrorKind::ReadOnlyFilesystem);
    assert_eq!(stack.discard(0, 512).expect_err("read-only").kind(), std::io::ErrorKind::ReadOnlyFilesystem);
}

fn chain(error: &dyn std::error::Error) -> String {
    let mut message = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        message = format!("{message}: {cause}");
        source = cause.source();
    }
    message
}
