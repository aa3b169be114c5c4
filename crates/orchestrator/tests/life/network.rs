//! What a sandbox may reach: set before its machine goes, changed while it runs, and kept.

use super::support::*;

fn allowing(address: &str) -> EgressPolicy {
    EgressPolicy::new(&[address.to_owned()], &[], Some(false)).unwrap()
}

fn set(bench: &Bench) -> Vec<EgressPolicy> {
    bench.guest.policies.lock().unwrap().clone()
}

#[tokio::test]
async fn a_policy_is_set_at_each_start_changed_live_and_inherited_by_forks() {
    let bench = Bench::new().await;
    let (first, second) = (allowing("192.0.2.1"), allowing("192.0.2.2"));
    let sandbox = bench.sandbox_with(|spec| spec.egress = first.clone());
    let id = bench.orchestrator.create(sandbox).await.unwrap().id;
    assert_eq!(set(&bench), std::slice::from_ref(&first));
    assert_eq!(*bench.orchestrator.get(id).unwrap().egress, first);

    bench.orchestrator.set_network(id, second.clone()).await.unwrap();
    assert_eq!(set(&bench), [first.clone(), second.clone()]);
    assert_eq!(*bench.orchestrator.get(id).unwrap().egress, second);

    let child = bench.orchestrator.fork(id, 1, None).await.unwrap().children.remove(0).unwrap();
    assert_eq!(*child.egress, second);
    assert_eq!(set(&bench).last(), Some(&second));

    bench.orchestrator.pause(id, HowToPause::default()).await.unwrap();
    let error = bench.orchestrator.set_network(id, first.clone()).await.unwrap_err();
    assert!(matches!(error, AskError::Busy { phase: Phase::Paused, .. }), "{error}");
    bench.orchestrator.resume(id, PATIENCE).await.unwrap();
    assert_eq!(set(&bench)[2..], [second.clone(), second.clone()]);
    assert_eq!(*bench.orchestrator.get(id).unwrap().egress, second);

    for id in [id, child.id] {
        bench.orchestrator.delete(id).await.unwrap();
    }
    bench.assert_nothing_is_held();
}

#[tokio::test]
async fn a_policy_that_was_changed_outlives_the_server() {
    let config = OrchestratorConfig { on_stop: OnStop::Leave, ..OrchestratorConfig::default() };
    let mut bench = Bench::with_config(FakeVmm::with_processes(), config).await;
    let id = bench.running().await;
    let policy = allowing("192.0.2.1");
    bench.orchestrator.set_network(id, policy.clone()).await.unwrap();
    bench.orchestrator.close(PATIENCE).await.unwrap();
    assert_eq!(bench.restart().await, TakenOver { running: 1, ..TakenOver::default() });
    assert_eq!(*bench.orchestrator.get(id).unwrap().egress, policy);
    assert_eq!(set(&bench), [EgressPolicy::default(), policy.clone(), policy]);
    bench.orchestrator.delete(id).await.unwrap();
    bench.assert_nothing_is_held();
}
