use super::*;

const SMALL: DiskSize = DiskSize { minimum: Bytes::mib(8), slack: Bytes::mib(1) };

/// A directory to make a file system of; these tests don't need root, as nothing in it belongs to others.
fn tree(fill: impl Fn(&Path)) -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    std::fs::create_dir(dir.path().join("root")).unwrap();
    fill(&dir.path().join("root"));
    dir
}

async fn make(dir: &Path, tally: Tally, size: DiskSize) -> Result<Bytes, ImportError> {
    build(&dir.join("root"), &dir.join("image"), tally, size, &CancellationToken::new()).await
}

#[tokio::test]
async fn small_files_find_room_and_inodes() {
    let dir = tree(|root| {
        for number in 0..3000 {
            std::fs::write(root.join(format!("a-file-of-no-great-size-{number}")), "x").unwrap();
        }
    });
    let blocks = 3000 + 1 + 3000 * 40 / 3584;
    let size = make(dir.path(), Tally { inodes: 3001, blocks }, SMALL).await.unwrap();
    assert!(size < Bytes::mib(24), "{size}");
}

#[tokio::test]
async fn a_plan_that_was_too_small_is_corrected() {
    let dir = tree(|root| std::fs::write(root.join("large"), vec![1; 13 << 20]).unwrap());
    let nothing = Tally { inodes: 2, blocks: 1 };
    let planned = SMALL.plan(nothing).size;
    let size = make(dir.path(), nothing, SMALL).await.unwrap();
    assert!(size > planned, "{size}");
    assert_eq!(std::fs::metadata(dir.path().join("image")).unwrap().len(), size.get());
}

#[tokio::test]
async fn what_can_not_fit_is_an_error_in_the_tools_words() {
    let dir = tree(|root| std::fs::write(root.join("large"), vec![1; 60 << 20]).unwrap());
    let error = make(dir.path(), Tally { inodes: 2, blocks: 1 }, SMALL).await.unwrap_err();
    assert!(error.report().contains("Could not allocate"), "{}", error.report());
}

#[tokio::test]
async fn a_cancelled_build_ends() {
    let dir = tree(|_| {});
    let cancel = CancellationToken::new();
    cancel.cancel();
    let error = build(&dir.path().join("root"), &dir.path().join("image"), Tally::default(), SMALL, &cancel).await;
    assert!(matches!(error, Err(ImportError::Cancelled)), "{error:?}");
}

#[tokio::test]
async fn a_complaint_of_debugfs_is_a_failure_though_it_exits_with_success() {
    let dir = tree(|_| {});
    make(dir.path(), Tally::default(), SMALL).await.unwrap();
    let mut debugfs = tool("debugfs");
    debugfs.args(["-w", "-f", "-"]).arg(dir.path().join("image"));
    let script = "set_inode_field /missing mode 0644\n".to_owned();
    let result = run(debugfs, Some(script), &CancellationToken::new()).await;
    assert!(matches!(result, Err(Failure::Tool(ToolError::Failed { .. }))));
}

#[test]
fn sizes_grow_with_content_and_slack_and_never_fall_below_the_minimum() {
    let size = DiskSize { minimum: Bytes::gib(1), slack: Bytes::mib(256) };
    assert_eq!(size.plan(Tally { inodes: 10, blocks: 10 }).size, Bytes::gib(1));
    let large = size.plan(Tally { inodes: 100_000, blocks: 1 << 20 });
    assert!(large.size > Bytes::mib(4096 + 256) && large.size < Bytes::gib(5), "{large:?}");
    assert_eq!(large.journal, Bytes::mib(64));
}
