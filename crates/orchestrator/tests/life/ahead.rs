//! Machines and VMMs that were there before somebody asked for them.

use super::support::*;

#[tokio::test]
async fn a_machine_goes_on_in_a_vmm_that_waited() {
    let bench = Bench::with(FakeVmm::in_memory().with_blanks()).await;
    let id = bench.running().await;
    let waiting = || eventually(|| (bench.orchestrator.waiting() == 2).then_some(()));
    bench.orchestrator.pause(id, HowToPause::default()).await.unwrap();
    assert_eq!(bench.vmm.waiting(), 0, "none before the first restore");
    for _ in 0..3 {
        assert!(bench.orchestrator.resume(id, Duration::from_secs(60)).await.unwrap());
        waiting().await.expect("there will be others");
        assert_eq!((bench.vmm.waiting(), bench.rows()), (2, 3));
        bench.orchestrator.pause(id, HowToPause::default()).await.unwrap();
    }
    let own = format!("run/{id}");
    assert!(bench.orchestrator.resume(id, Duration::from_secs(60)).await.unwrap());
    let spec = bench.vmm.spec(&format!("aenv-{id}")).unwrap();
    assert!(!spec.work_dir.ends_with(own), "it is in the directory of a VMM that waited");
    // One that cannot restore is no obstacle.
    bench.orchestrator.pause(id, HowToPause::default()).await.unwrap();
    waiting().await.expect("there are others");
    bench.vmm.plan_next(FakePlan { boot_fails: Some("told to".into()), ..FakePlan::default() });
    assert!(bench.orchestrator.resume(id, Duration::from_secs(60)).await.unwrap());
    bench.orchestrator.close(PATIENCE).await.unwrap();
    assert_eq!(bench.vmm.waiting(), 0);
    bench.assert_nothing_is_held();
}

/// A sandbox of the template that machines stand ready for, from a capture made for it.
async fn standing(bench: &Bench) -> NewSandbox {
    let id = bench.running().await;
    let capture = bench.orchestrator.capture(id, false).await.unwrap().capture;
    bench.orchestrator.delete(id).await.unwrap();
    let NewSandbox { spec, .. } = bench.sandbox_with(|spec| spec.alias = Some(STANDING.into()));
    NewSandbox { spec, source: Source { capture: Some(capture), image: None } }
}

#[tokio::test]
async fn a_create_takes_a_machine_that_stands_ready() {
    let bench = Bench::new().await;
    let sandbox = standing(&bench).await;
    let stocked = || eventually(|| (bench.orchestrator.standing() == 2).then_some(()));
    let first = bench.orchestrator.create(sandbox.clone()).await.unwrap();
    assert!(first.start_times.prepare > Duration::ZERO);
    stocked().await.expect("there will be others");
    assert_eq!(bench.orchestrator.list().len(), 1, "nobody sees them");
    let ready = bench.vmm.live();
    let mut created = vec![first];
    for _ in 0..2 {
        let info = bench.orchestrator.create(sandbox.clone()).await.unwrap();
        assert!(ready.contains(&format!("aenv-{}", info.id)), "{ready:?}");
        assert_eq!(info.start_times.prepare, Duration::ZERO);
        let init = bench.guest.inits.lock().unwrap().iter().rev().find(|init| !init["accessToken"].is_null()).cloned();
        assert_eq!(init.unwrap()["accessToken"].as_str(), info.access_token.as_deref(), "it has its own token");
        assert!(bench.orchestrator.route(info.id).is_some());
        created.push(info);
    }
    stocked().await.expect("the stock is filled up");
    let capture = sandbox.source.capture.unwrap();
    capture.doom();
    drop(capture);
    eventually(|| (bench.orchestrator.standing() == 0).then_some(())).await.expect("they go with their capture");
    for info in created {
        bench.orchestrator.delete(info.id).await.unwrap();
    }
    eventually(|| (bench.rows() == 0).then_some(())).await.expect("they are gone");
    bench.assert_nothing_is_held();
    assert_eq!(bench.captures().await, 0);
}

#[tokio::test]
async fn a_machine_that_stood_ready_and_died_is_replaced() {
    let bench = Bench::new().await;
    let sandbox = standing(&bench).await;
    let first = bench.orchestrator.create(sandbox.clone()).await.unwrap();
    eventually(|| (bench.orchestrator.standing() == 2).then_some(())).await.expect("others stand ready");
    for name in bench.vmm.live().iter().filter(|name| **name != format!("aenv-{}", first.id)) {
        bench.vmm.crash(name, "out of memory");
    }
    let info = bench.orchestrator.create(sandbox).await.unwrap();
    assert!(info.start_times.prepare > Duration::ZERO);
    assert_eq!(bench.phase(info.id), Some(Phase::Running));
    bench.orchestrator.close(PATIENCE).await.unwrap();
    bench.assert_nothing_is_held();
}

#[tokio::test]
async fn machines_that_stood_ready_end_with_a_killed_server() {
    let mut bench = Bench::with(FakeVmm::with_processes()).await;
    let sandbox = standing(&bench).await;
    let first = bench.orchestrator.create(sandbox).await.unwrap();
    eventually(|| (bench.orchestrator.standing() == 2).then_some(())).await.expect("others stand ready");
    let taken_over = bench.restart().await;
    assert_eq!(taken_over, TakenOver { running: 1, ended: 2, ..TakenOver::default() });
    assert_eq!(bench.vmm.live(), [format!("aenv-{}", first.id)]);
}
