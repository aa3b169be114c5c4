//! Image configurations that are known to be good or bad.

use std::path::Path;

use aenv_block_client::{DeviceConfig, DeviceConfigError};
use serde_json::Value;

fn cases() -> Vec<Value> {
    let all: Value = serde_json::from_str(include_str!("fixtures/image-config.json")).unwrap();
    all["cases"].as_array().unwrap().clone()
}

#[test]
fn known_configurations_are_taken_or_refused() {
    for case in cases() {
        let mut config = case["config"].clone();
        if let Some(times) = case["repeat_lowers"].as_u64() {
            let lower = config["lowers"][0].clone();
            config["lowers"] = vec![lower; times as usize].into();
        }
        let id = &case["id"];
        let dir = tempfile::tempdir().unwrap();
        let base = dir.path().to_str().unwrap();
        let place = |text: &Value| text.as_str().unwrap().replace("<BASE>", base);
        let path = case.get("config_path").map_or_else(|| dir.path().join("image.json"), |path| place(path).into());
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(&path, config.to_string()).unwrap();
        let result = DeviceConfig::load(&path);
        assert_eq!(result.is_ok(), case["valid"].as_bool().unwrap(), "{id}: {result:?}");
        let Ok(config) = result else { continue };
        // What is written is read as the same.
        assert_eq!(DeviceConfig::parse(&config.to_json()).unwrap(), config, "{id}");
        let Some(resolved) = case.get("resolved") else { continue };
        let written: Value = serde_json::from_str(&config.to_json()).unwrap();
        let expected: Value = serde_json::from_str(&resolved.to_string().replace("<BASE>", base)).unwrap();
        for (number, lower) in expected["lowers"].as_array().unwrap().iter().enumerate() {
            assert_eq!(&written["lowers"][number], lower, "{id}");
        }
        for key in ["data", "index"] {
            assert_eq!(written["upper"][key], expected["upper"][key], "{id}");
        }
        assert_eq!(written["resultFile"], expected["resultFile"], "{id}");
    }
}

#[track_caller]
fn refused(json: &str, expected: &str) {
    let error = DeviceConfig::parse(json).unwrap_err();
    assert_eq!(error.to_string(), expected);
}

#[test]
fn an_error_names_the_field() {
    refused("{}", "device config: lowers: neither lowers nor an upper");
    refused(
        r#"{"lowers":[{"file":"a"},{"digest":"sha256:00"}]}"#,
        "device config: lowers[1].repoBlobUrl: a layer with a digest and no file needs it, here or for all",
    );
    refused(
        r#"{"lowers":[{"file":"a","size":"big"}]}"#,
        "device config: lowers[0].size: invalid type: string \"big\", expected u64 at line 1 column 35",
    );
    refused(
        r#"{"lowers":[{"file":"a","uuid":"x"}]}"#,
        "device config: lowers[0].uuid: invalid character: found `x` at 0",
    );
    refused(
        r#"{"lowers":[{"file":"a","gzipIndex":"i"}]}"#,
        "device config: lowers[0].gzipIndex: turbo layers are not supported",
    );
    refused(r#"{"upper":{"mode":"sparse"}}"#, "device config: upper.data: an upper needs it");
    assert!(matches!(DeviceConfig::parse("{} x").unwrap_err(), DeviceConfigError::Json { .. }));
    let error = DeviceConfig::load(Path::new("/nowhere/image.json")).unwrap_err();
    assert_eq!(error.to_string(), "read device config /nowhere/image.json");
}

#[test]
fn urls_are_no_paths_and_parents_of_the_root_are_the_root() {
    let mut config =
        DeviceConfig::parse(r#"{"lowers":[{"file":"s3://b/../k"},{"file":"/../../a//b/."},{"file":"../../../c"}]}"#)
            .unwrap();
    config.resolve(Path::new("/x/y"));
    let files: Vec<_> = config.lowers.iter().map(|lower| lower.file.as_deref().unwrap().to_str().unwrap()).collect();
    assert_eq!(files, ["s3://b/../k", "/a/b", "/c"]);
}
