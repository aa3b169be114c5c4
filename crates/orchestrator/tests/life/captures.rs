//! Pauses, snapshots, forks and rollbacks.

use super::support::*;

#[tokio::test]
async fn a_paused_sandbox_has_no_machine_and_goes_on_when_it_is_resumed() {
    let bench = Bench::new().await;
    let id = bench.running().await;
    let ended = bench.orchestrator.route(id).unwrap().ended;
    assert!(bench.orchestrator.pause(id, HowToPause::default()).await.unwrap());
    assert!(ended.is_cancelled(), "traffic goes on");
    assert_eq!(bench.phase(id), Some(Phase::Paused));
    assert!(bench.orchestrator.route(id).is_none());
    eventually(|| bench.vmm.live().is_empty().then_some(())).await.expect("the machine is gone");
    assert!(!bench.orchestrator.pause(id, HowToPause::default()).await.unwrap(), "paused already");
    assert_eq!(bench.captures().await, 1);

    assert!(bench.orchestrator.resume(id, Duration::from_secs(60)).await.unwrap());
    assert_eq!(bench.phase(id), Some(Phase::Running));
    let spec = bench.vmm.spec(&format!("aenv-{id}")).unwrap();
    let memory = spec.memory_image.expect("the memory of the capture");
    assert_eq!(std::fs::read_to_string(&memory).unwrap(), memory.file_name().unwrap().to_str().unwrap());
    assert!(spec.kernel.starts_with(bench.dir.path().join("captures")), "the kernel it was booted with");
    assert_eq!(bench.vmm.is_paused(&format!("aenv-{id}")), Some(false));
    assert_eq!(bench.guest.inits.lock().unwrap().len(), 2, "told the time, its tokens and entropy again");
    assert!(!bench.orchestrator.connect(id, Duration::from_secs(1), false).await.unwrap(), "it runs");

    bench.orchestrator.delete(id).await.unwrap();
    bench.assert_nothing_is_held();
    assert_eq!(bench.captures().await, 0);
    assert_eq!(bench.backing.visible(), Vec::<String>::new());
}

#[tokio::test]
async fn layers_of_memory_pile_up_over_pauses_and_old_captures_go() {
    let bench = Bench::new().await;
    let id = bench.running().await;
    for round in 1..=3 {
        bench.orchestrator.pause(id, HowToPause::default()).await.unwrap();
        // The one that it ran on goes behind its back.
        eventually(|| (count(&bench.dir.path().join("captures")) == 1).then_some(())).await.expect("one is left");
        let dir = std::fs::read_dir(bench.dir.path().join("captures")).unwrap().next().unwrap().unwrap().path();
        let layers = std::fs::read_dir(&dir)
            .unwrap()
            .filter(|entry| entry.as_ref().unwrap().file_name().to_string_lossy().starts_with("memory-"));
        assert_eq!(layers.count(), round);
        bench.orchestrator.resume(id, Duration::from_secs(60)).await.unwrap();
    }
    bench.orchestrator.delete(id).await.unwrap();
    assert_eq!(bench.captures().await, 0);
}

#[tokio::test]
async fn a_pause_that_fails_lets_the_sandbox_run_on() {
    let bench = Bench::new().await;
    let id = bench.running().await;
    bench.backing.fail_with(Some(io::ErrorKind::StorageFull));
    let error = bench.orchestrator.pause(id, HowToPause::default()).await.unwrap_err();
    assert!(matches!(error, AskError::Capture { .. }), "{error:?}");
    assert_eq!(bench.phase(id), Some(Phase::Running));
    assert!(bench.orchestrator.route(id).is_some());
    assert_eq!(bench.vmm.is_paused(&format!("aenv-{id}")), Some(false));
    assert_eq!(bench.captures().await, 0);
    bench.backing.fail_with(None);
    assert!(bench.orchestrator.pause(id, HowToPause::default()).await.unwrap());
    bench.orchestrator.delete(id).await.unwrap();
    bench.assert_nothing_is_held();
    assert_eq!(bench.captures().await, 0);
}

#[tokio::test]
async fn a_resume_that_fails_costs_nothing() {
    let bench = Bench::new().await;
    let id = bench.running().await;
    bench.orchestrator.pause(id, HowToPause::default()).await.unwrap();
    bench.vmm.plan_next(FakePlan { boot_fails: Some("no".into()), ..FakePlan::default() });
    let error = bench.orchestrator.resume(id, Duration::from_secs(60)).await.unwrap_err();
    assert!(matches!(error, AskError::Resume { .. }), "{error:?}");
    assert_eq!(bench.phase(id), Some(Phase::Paused));
    assert_eq!(bench.captures().await, 1);
    assert!(bench.orchestrator.resume(id, Duration::from_secs(60)).await.unwrap());
    bench.orchestrator.delete(id).await.unwrap();
    bench.assert_nothing_is_held();
}

#[tokio::test]
async fn many_who_resume_at_once_share_one_machine() {
    let bench = Bench::new().await;
    let id = bench.running().await;
    bench.orchestrator.pause(id, HowToPause::default()).await.unwrap();
    let before = bench.vmm.started();
    let connects = (0..8).map(|n| bench.orchestrator.connect(id, Duration::from_secs(60 + n), false));
    let outcomes = futures::future::join_all(connects).await;
    assert!(outcomes.iter().all(Result::is_ok), "{outcomes:?}");
    assert_eq!(bench.vmm.started() - before, 1);
    assert!(bench.orchestrator.get(id).unwrap().end_at > jiff::Timestamp::now() + jiff::SignedDuration::from_secs(60));
}

#[tokio::test]
async fn a_pause_of_the_disk_alone_boots_when_it_is_resumed() {
    let bench = Bench::new().await;
    let id = bench.running().await;
    bench.orchestrator.pause(id, DISK_ONLY).await.unwrap();
    assert!(bench.orchestrator.get(id).unwrap().disk_only);
    bench.orchestrator.resume(id, Duration::from_secs(60)).await.unwrap();
    assert!(!bench.orchestrator.get(id).unwrap().disk_only);
    assert_eq!(bench.vmm.spec(&format!("aenv-{id}")).unwrap().memory_image, None);
    // Its memory has nothing to do with what it was booted on.
    bench.orchestrator.pause(id, HowToPause::default()).await.unwrap();
    bench.orchestrator.resume(id, Duration::from_secs(60)).await.unwrap();
    assert!(bench.vmm.spec(&format!("aenv-{id}")).unwrap().memory_image.is_some());
    bench.orchestrator.delete(id).await.unwrap();
    bench.assert_nothing_is_held();
}

#[tokio::test]
async fn forks_share_a_capture_that_goes_with_the_last_of_them() {
    let bench = Bench::new().await;
    let id = bench.running().await;
    let children = bench.orchestrator.fork(id, 4, None).await.unwrap().children;
    let children: Vec<_> = children.into_iter().map(|child| child.unwrap()).collect();
    assert_eq!(bench.phase(id), Some(Phase::Running));
    let mut tokens: Vec<_> = children.iter().map(|child| child.access_token.clone().unwrap()).collect();
    tokens.sort();
    tokens.dedup();
    assert_eq!(tokens.len(), 4, "each has tokens of its own");
    let memory = |id| bench.vmm.spec(&format!("aenv-{id}")).unwrap().memory_image;
    assert!(children.iter().all(|child| memory(child.id) == memory(children[0].id)), "one memory for all");
    assert_eq!(bench.captures().await, 1);
    for child in &children {
        assert_eq!(bench.captures().await, 1);
        bench.orchestrator.delete(child.id).await.unwrap();
    }
    assert_eq!(bench.captures().await, 0);
    bench.orchestrator.delete(id).await.unwrap();
    bench.assert_nothing_is_held();
}

#[tokio::test]
async fn a_capture_that_is_kept_starts_others_and_one_that_is_doomed_does_not_stay() {
    let bench = Bench::new().await;
    let id = bench.running().await;
    let taken = bench.orchestrator.capture(id, false).await.unwrap();
    bench.orchestrator.delete(id).await.unwrap();
    let source = Source { capture: Some(taken.capture.clone()), image: None };
    let other = bench.orchestrator.create(NewSandbox { spec: (*taken.spec).clone(), source }).await.unwrap();
    bench.orchestrator.delete(other.id).await.unwrap();
    assert_eq!(bench.captures().await, 1);
    taken.capture.doom();
    drop(taken);
    assert_eq!(bench.captures().await, 0);
    bench.assert_nothing_is_held();
}

#[tokio::test]
async fn a_rollback_swaps_machines_and_leaves_one() {
    let bench = Bench::new().await;
    let id = bench.running().await;
    let taken = bench.orchestrator.capture(id, false).await.unwrap();
    let before = bench.orchestrator.get(id).unwrap();
    let (first, way_in) = (bench.vmm.live(), bench.orchestrator.route(id).unwrap());
    for _ in 0..2 {
        let after = bench.orchestrator.roll_back(id, taken.capture.clone()).await.unwrap();
        assert_eq!((after.id, after.phase, after.end_at), (id, Phase::Running, before.end_at));
        assert_eq!(after.access_token, before.access_token);
        // Answered by the new machine's driver, which has ended the other one by then.
        bench.orchestrator.extend(id, Duration::ZERO).await.unwrap();
        assert_eq!(bench.vmm.live().len(), 1);
    }
    assert!(way_in.ended.is_cancelled(), "whoever was connected is not any more");
    assert_ne!(bench.vmm.live(), first);
    taken.capture.doom();
    drop(taken);
    assert_eq!(bench.captures().await, 1, "the machine is over it");
    bench.orchestrator.pause(id, HowToPause::default()).await.unwrap();
    assert!(bench.orchestrator.resume(id, Duration::from_secs(60)).await.unwrap());
    bench.orchestrator.delete(id).await.unwrap();
    assert_eq!(bench.captures().await, 0);
    bench.assert_nothing_is_held();
}

#[tokio::test]
async fn a_rollback_that_fails_leaves_the_machine_as_it_is() {
    let bench = Bench::new().await;
    let id = bench.running().await;
    let capture = bench.orchestrator.capture(id, false).await.unwrap().capture;
    let (machines, way_in) = (bench.vmm.live(), bench.orchestrator.route(id).unwrap());
    bench.disks.full.store(true, Ordering::SeqCst);
    let error = bench.orchestrator.roll_back(id, capture.clone()).await.unwrap_err();
    assert!(matches!(&error, AskError::Rollback { source, .. } if matches!(**source, CreateError::NoSpace { .. })));
    assert_eq!((bench.phase(id), bench.vmm.live()), (Some(Phase::Running), machines));
    assert!(!way_in.ended.is_cancelled(), "nobody has noticed");
    bench.disks.full.store(false, Ordering::SeqCst);
    bench.orchestrator.pause(id, HowToPause::default()).await.unwrap();
    let busy = bench.orchestrator.roll_back(id, capture).await.unwrap_err();
    assert!(matches!(busy, AskError::Busy { phase: Phase::Paused, .. }));
    bench.orchestrator.delete(id).await.unwrap();
    bench.assert_nothing_is_held();
}

#[tokio::test]
async fn what_a_rollback_could_not_give_back_goes_later() {
    let bench = Bench::new().await;
    let id = bench.running().await;
    let capture = bench.orchestrator.capture(id, false).await.unwrap().capture;
    let disks = |bench: &Bench| count(&bench.disks.dir);
    let roll_back = async |fails: usize| {
        bench.disks.remove_fails.store(fails, Ordering::SeqCst);
        let done = bench.orchestrator.roll_back(id, capture.clone()).await;
        // Answered by the new machine's driver, which has tried to end the other one by then.
        bench.orchestrator.extend(id, Duration::ZERO).await.unwrap();
        done
    };
    roll_back(1).await.unwrap();
    assert_eq!(disks(&bench), 2, "the other machine's disk would not go");
    roll_back(0).await.unwrap();
    assert_eq!(disks(&bench), 1, "the next rollback had to end it first");
    roll_back(1).await.unwrap();
    let error = roll_back(1).await.unwrap_err();
    assert!(
        matches!(&error, AskError::Rollback { source, .. } if source.to_string().contains("remove disk")),
        "{error:?}"
    );
    assert_eq!((bench.phase(id), disks(&bench)), (Some(Phase::Running), 2));
    bench.orchestrator.pause(id, HowToPause::default()).await.unwrap();
    assert!(bench.orchestrator.resume(id, Duration::from_secs(60)).await.unwrap());
    assert_eq!(disks(&bench), 1, "a pause gives back all");
    roll_back(1).await.unwrap();
    bench.orchestrator.delete(id).await.unwrap();
    bench.assert_nothing_is_held();
}

#[tokio::test]
async fn a_delete_ends_a_rollback_and_both_machines() {
    let bench = Bench::new().await;
    let id = bench.running().await;
    let capture = bench.orchestrator.capture(id, false).await.unwrap().capture;
    bench.guest.silent.store(true, Ordering::SeqCst);
    let asked = tokio::spawn({
        let orchestrator = bench.orchestrator.clone();
        async move { orchestrator.roll_back(id, capture).await }
    });
    eventually(|| (bench.vmm.live().len() == 2).then_some(())).await.expect("it is under way");
    assert_eq!(bench.phase(id), Some(Phase::RollingBack));
    assert!(bench.orchestrator.route(id).is_some(), "traffic flows meanwhile");
    bench.orchestrator.delete(id).await.unwrap();
    assert!(matches!(asked.await.unwrap(), Err(AskError::NotFound { .. })));
    bench.assert_nothing_is_held();
}

#[tokio::test]
async fn a_capture_without_memory_boots() {
    let bench = Bench::new().await;
    let id = bench.running().await;
    let taken = bench.orchestrator.capture(id, true).await.unwrap();
    assert!(taken.capture.state().is_none());
    let source = Source { capture: Some(taken.capture.clone()), image: None };
    let other = bench.orchestrator.create(NewSandbox { spec: (*taken.spec).clone(), source }).await.unwrap();
    assert_eq!(bench.vmm.spec(&format!("aenv-{}", other.id)).unwrap().memory_image, None);
    assert_eq!(bench.phase(id), Some(Phase::Running));
}

#[tokio::test]
async fn a_guest_that_is_to_answer_before_a_pause_and_does_not_runs_on() {
    let bench = Bench::new().await;
    let id = bench.running().await;
    let if_responsive = HowToPause { if_responsive: true, ..HowToPause::default() };
    bench.guest.healthy.store(false, Ordering::SeqCst);
    let error = bench.orchestrator.pause(id, if_responsive).await.unwrap_err();
    assert!(matches!(error, AskError::Unresponsive { .. }));
    assert!(bench.orchestrator.route(id).is_some());
    bench.guest.healthy.store(true, Ordering::SeqCst);
    assert!(bench.orchestrator.pause(id, if_responsive).await.unwrap());
}

#[tokio::test]
async fn a_capture_of_another_vmm_boots_its_image_or_is_refused() {
    let bench = Bench::new().await;
    let id = bench.running().await;
    let taken = bench.orchestrator.capture(id, false).await.unwrap();
    let path = taken.capture.dir().join("capture.json");
    let capture_id = taken.capture.id();
    let spec = (*taken.spec).clone();
    drop(taken);
    let text = std::fs::read_to_string(&path).unwrap().replace("0.0-fake", "9.9-other");
    std::fs::write(&path, text).unwrap();
    bench.captures.settle().await;
    let capture = bench.captures.find(capture_id).await.unwrap();
    let source = Source { capture: Some(capture.clone()), image: None };
    let error = bench.orchestrator.create(NewSandbox { spec: spec.clone(), source }).await.unwrap_err();
    assert!(error.to_string().contains("9.9-other"), "{error}");
    let source = Source { capture: Some(capture), image: bench.sandbox().source.image };
    let info = bench.orchestrator.create(NewSandbox { spec, source }).await.unwrap();
    assert_eq!(bench.vmm.spec(&format!("aenv-{}", info.id)).unwrap().memory_image, None);
}
