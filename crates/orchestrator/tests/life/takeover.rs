//! One server after another.

use super::support::*;

#[tokio::test]
async fn a_rollback_that_a_killed_server_left_is_undone_or_done() {
    let mut bench = Bench::with(FakeVmm::with_processes()).await;
    let id = bench.running().await;
    let capture = bench.orchestrator.capture(id, false).await.unwrap().capture;
    let first = bench.vmm.live();
    bench.guest.silent.store(true, Ordering::SeqCst);
    let asked = tokio::spawn({
        let orchestrator = bench.orchestrator.clone();
        async move { orchestrator.roll_back(id, capture).await }
    });
    eventually(|| (bench.vmm.live().len() == 2).then_some(())).await.expect("it is under way");
    bench.guest.silent.store(false, Ordering::SeqCst);
    let taken_over = bench.restart().await;
    asked.abort();
    assert_eq!(taken_over, TakenOver { running: 1, ..TakenOver::default() });
    assert_eq!(bench.vmm.live(), first, "the present machine was the one that counted");
    bench.orchestrator.delete(id).await.unwrap();
    assert_eq!(bench.vmm.live(), Vec::<String>::new());
}

#[tokio::test]
async fn sandboxes_of_the_node_itself_end_with_their_server() {
    let mut bench = Bench::with(FakeVmm::with_processes()).await;
    let internal = |bench: &Bench| {
        let NewSandbox { spec, source } = bench.sandbox();
        NewSandbox { spec: SandboxSpec { internal: true, ..spec }, source }
    };
    bench.orchestrator.create(internal(&bench)).await.unwrap();
    let taken_over = bench.restart().await;
    assert_eq!(taken_over, TakenOver { ended: 1, ..TakenOver::default() }, "it was killed");
    bench.orchestrator.create(internal(&bench)).await.unwrap();
    bench.orchestrator.close(Duration::from_secs(30)).await.unwrap();
    assert_eq!((bench.vmm.live(), bench.rows()), (Vec::new(), 0), "it was stopped");
}

#[tokio::test]
async fn what_a_killed_server_left_running_is_taken_over_by_the_next_one() {
    let mut bench = Bench::with(FakeVmm::with_processes()).await;
    let (running, paused) = (bench.running().await, bench.running().await);
    bench.orchestrator.pause(paused, HowToPause::default()).await.unwrap();
    bench.orchestrator.extend(running, Duration::from_secs(1000)).await.unwrap();
    let before = bench.orchestrator.get(running).unwrap();
    // A killed server runs no destructor and closes nothing: its successor sees the same store and processes.
    let taken_over = bench.restart().await;
    assert_eq!(taken_over, TakenOver { running: 1, paused: 1, ..TakenOver::default() });
    let after = bench.orchestrator.get(running).unwrap();
    assert_eq!((after.end_at, after.started_at), (before.end_at, before.started_at));
    assert_eq!(after.access_token, before.access_token);
    eventually(|| bench.orchestrator.route(running)).await.expect("the way in");
    assert!(bench.orchestrator.resume(paused, Duration::from_secs(60)).await.unwrap());
    for id in [running, paused] {
        bench.orchestrator.delete(id).await.unwrap();
    }
    assert_eq!(bench.vmm.live(), Vec::<String>::new());
    assert_eq!(bench.rows(), 0);
    assert_eq!(bench.captures().await, 0);
}

#[tokio::test]
async fn a_machine_that_ended_while_there_was_no_server_is_told_to_have_ended() {
    let mut bench = Bench::with(FakeVmm::with_processes()).await;
    let id = bench.running().await;
    bench.vmm.crash(&format!("aenv-{id}"), "killed");
    eventually(|| bench.orchestrator.get(id).is_err().then_some(())).await.expect("it is noticed");
    let taken_over = bench.restart().await;
    assert_eq!(taken_over.running, 0);
    assert!(bench.orchestrator.get(id).is_err());
}

#[tokio::test]
async fn a_server_that_is_stopped_leaves_its_sandboxes_as_it_is_told() {
    let config = |on_stop| OrchestratorConfig { on_stop, ..OrchestratorConfig::default() };
    let mut bench = Bench::with_config(FakeVmm::with_processes(), config(OnStop::Pause)).await;
    let id = bench.running().await;
    bench.orchestrator.close(PATIENCE).await.unwrap();
    assert_eq!(bench.vmm.live(), Vec::<String>::new());
    assert_eq!(bench.restart().await, TakenOver { paused: 1, ..TakenOver::default() });
    bench.orchestrator.delete(id).await.unwrap();

    let mut bench = Bench::with_config(FakeVmm::with_processes(), config(OnStop::Leave)).await;
    let id = bench.running().await;
    bench.orchestrator.close(PATIENCE).await.unwrap();
    assert_eq!(bench.vmm.live(), [format!("aenv-{id}")]);
    assert_eq!(bench.restart().await, TakenOver { running: 1, ..TakenOver::default() });
    bench.orchestrator.delete(id).await.unwrap();
    assert_eq!(bench.vmm.live(), Vec::<String>::new());
}
