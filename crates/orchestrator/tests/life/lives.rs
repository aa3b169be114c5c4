//! How long a sandbox lives, and what it refuses meanwhile.

use super::support::*;

#[tokio::test]
async fn a_lease_that_is_not_renewed_ends_its_sandboxes_and_their_children() {
    let bench = Bench::new().await;
    let lease = bench.orchestrator.grant_lease(Duration::from_secs(60)).await.unwrap();
    let under = |bench: &Bench| bench.sandbox_with(|spec| spec.lease = Some(lease.id));
    let one = bench.orchestrator.create(under(&bench)).await.unwrap().id;
    let two = bench.orchestrator.create(under(&bench)).await.unwrap().id;
    let children = bench.orchestrator.fork(one, 1, None).await.unwrap().children;
    let child = children.into_iter().next().unwrap().unwrap().id;
    bench.orchestrator.pause(two, HowToPause::default()).await.unwrap();
    let other = bench.running().await;
    let renewed = bench.orchestrator.renew_lease(lease.id, None).await.unwrap().unwrap();
    assert!(renewed.end_at >= lease.end_at);
    bench.orchestrator.renew_lease(lease.id, Some(Duration::from_millis(20))).await.unwrap();
    for id in [one, two, child] {
        assert_eq!(bench.gone(id).await, Some(Ended::LeaseEnded));
    }
    assert_eq!(bench.phase(other), Some(Phase::Running));
    assert_eq!(bench.orchestrator.renew_lease(lease.id, None).await.unwrap(), None);
    assert!(!bench.orchestrator.end_lease(lease.id).await.unwrap());
    let late = bench.orchestrator.create(under(&bench)).await.unwrap_err();
    assert!(matches!(late, CreateError::NoLease(id) if id == lease.id));
    bench.orchestrator.delete(other).await.unwrap();
    eventually(|| (bench.rows() == 0).then_some(())).await.expect("nothing is left");
    bench.assert_nothing_is_held();
}

#[tokio::test]
async fn a_lease_outlives_its_server() {
    let mut bench = Bench::with(FakeVmm::with_processes()).await;
    let lease = bench.orchestrator.grant_lease(Duration::from_secs(60)).await.unwrap().id;
    let id = bench.orchestrator.create(bench.sandbox_with(|spec| spec.lease = Some(lease))).await.unwrap().id;
    bench.restart().await;
    assert!(bench.orchestrator.renew_lease(lease, None).await.unwrap().is_some());
    assert!(bench.orchestrator.end_lease(lease).await.unwrap());
    assert_eq!(bench.gone(id).await, Some(Ended::LeaseEnded));
    assert_eq!(bench.vmm.live(), Vec::<String>::new());
}

#[tokio::test]
async fn a_sandbox_that_nobody_uses_is_paused_and_one_in_use_is_not() {
    let bench = Bench::new().await;
    let idle = |bench: &Bench| bench.sandbox_with(|spec| spec.idle_timeout = Some(Duration::from_millis(50)));
    let id = bench.orchestrator.create(idle(&bench)).await.unwrap().id;
    let route = bench.orchestrator.route(id).unwrap();
    let used = bench.orchestrator.create(idle(&bench)).await.unwrap().id;
    let in_use = bench.orchestrator.route(used).unwrap();
    drop(route);
    eventually(|| (bench.phase(id) == Some(Phase::Paused)).then_some(())).await.expect("it is paused");
    assert_eq!(bench.phase(used), Some(Phase::Running), "a connection holds it off");
    bench.guest.commands.store(1, Ordering::SeqCst);
    drop(in_use);
    tokio::time::sleep(Duration::from_millis(200)).await; // several times over
    assert_eq!(bench.phase(used), Some(Phase::Running), "a command holds it off");
    bench.guest.commands.store(0, Ordering::SeqCst);
    eventually(|| (bench.phase(used) == Some(Phase::Paused)).then_some(())).await.expect("it is paused");
    assert!(bench.orchestrator.resume(id, Duration::from_secs(60)).await.unwrap());
    eventually(|| (bench.phase(id) == Some(Phase::Paused)).then_some(())).await.expect("and again after a resume");
}

#[tokio::test]
async fn a_deadline_pauses_what_is_to_be_paused() {
    let bench = Bench::new().await;
    let sandbox = bench.sandbox_with(|spec| {
        (spec.timeout, spec.on_expiry, spec.auto_resume) = (Some(Duration::from_millis(30)), OnExpiry::Pause, true);
    });
    let id = bench.orchestrator.create(sandbox).await.unwrap().id;
    eventually(|| (bench.phase(id) == Some(Phase::Paused)).then_some(())).await.expect("it is paused");
    assert!(bench.orchestrator.wake(id).await.unwrap());
    let least = jiff::Timestamp::now() + jiff::SignedDuration::from_secs(290);
    assert!(bench.orchestrator.get(id).unwrap().end_at > least, "traffic gives it time");
    assert!(!bench.orchestrator.wake(id).await.unwrap(), "it runs");
    bench.orchestrator.pause(id, DISK_ONLY).await.unwrap();
    assert!(!bench.orchestrator.wake(id).await.unwrap(), "traffic does not boot");
}

#[tokio::test]
async fn what_cannot_be_done_in_a_phase_is_refused_with_its_name() {
    let bench = Bench::new().await;
    let id = bench.running().await;
    bench.orchestrator.pause(id, HowToPause::default()).await.unwrap();
    let error = bench.orchestrator.fork(id, 1, None).await.unwrap_err();
    assert!(error.to_string().contains("is paused: cannot fork it now"), "{error}");
    let error = bench.orchestrator.set_timeout(id, Duration::from_secs(1)).await.unwrap_err();
    assert!(matches!(error, AskError::Busy { phase: Phase::Paused, .. }), "{error:?}");
}
