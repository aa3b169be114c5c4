//! Creates and deletes, and what ends a sandbox.

use super::support::*;

#[tokio::test]
async fn a_created_sandbox_runs_is_initialised_and_leaves_nothing_when_deleted() {
    let bench = Bench::new().await;
    let info = bench.orchestrator.create(bench.sandbox()).await.unwrap();
    assert_eq!(info.phase, Phase::Running);
    assert_eq!(bench.orchestrator.list().len(), 1);
    assert!(bench.orchestrator.route(info.id).is_some());
    let init = bench.guest.inits.lock().unwrap()[0].clone();
    assert_eq!(init["accessToken"], *info.access_token.as_ref().unwrap());
    assert_eq!(init["defaultUser"], "user");
    let spec = bench.vmm.spec(&format!("aenv-{}", info.id)).unwrap();
    assert!(spec.cmdline.starts_with("quiet aenv.root=/dev/vda aenv.ip=169.254.0.21/30"), "{}", spec.cmdline);

    let ended = bench.orchestrator.route(info.id).unwrap().ended;
    bench.orchestrator.delete(info.id).await.unwrap();
    assert!(ended.is_cancelled(), "traffic goes on");
    bench.assert_nothing_is_held();
    assert_eq!(bench.gone(info.id).await, Some(Ended::Deleted));
    assert!(matches!(bench.orchestrator.delete(info.id).await, Err(DeleteError::Ask(AskError::NotFound { .. }))));
}

#[tokio::test]
async fn a_start_that_fails_gives_everything_back_before_it_says_so() {
    let bench = Bench::new().await;
    bench.vmm.plan_next(FakePlan { boot_fails: Some("no".into()), ..FakePlan::default() });
    let error = bench.orchestrator.create(bench.sandbox()).await.unwrap_err();
    assert!(matches!(error, CreateError::Step { step: "start machine", .. }), "{error:?}");
    eventually(|| (bench.rows() == 0).then_some(())).await.expect("the intent row goes");
    bench.assert_nothing_is_held();

    bench.disks.full.store(true, Ordering::SeqCst);
    let error = bench.orchestrator.create(bench.sandbox()).await.unwrap_err();
    assert!(matches!(error, CreateError::NoSpace { .. }), "{error:?}");
    eventually(|| (bench.rows() == 0).then_some(())).await.expect("the intent row goes");
    bench.assert_nothing_is_held();
}

#[tokio::test]
async fn a_sandbox_can_be_deleted_while_its_guest_does_not_answer() {
    let bench = Bench::new().await;
    bench.guest.healthy.store(false, Ordering::SeqCst);
    let (orchestrator, sandbox) = (bench.orchestrator.clone(), bench.sandbox());
    let create = tokio::spawn(async move { orchestrator.create(sandbox).await });
    let id = eventually(|| bench.vmm.live().first().map(|name| name["aenv-".len()..].parse().unwrap())).await.unwrap();
    tokio::time::timeout(PATIENCE, bench.orchestrator.delete(id)).await.unwrap().unwrap();
    assert!(matches!(create.await.unwrap(), Err(CreateError::Deleted { .. })));
    bench.assert_nothing_is_held();
}

#[tokio::test]
async fn a_guest_that_falls_silent_in_its_init_holds_up_neither_its_delete_nor_news_of_its_end() {
    let bench = Bench::new().await;
    bench.guest.silent.store(true, Ordering::SeqCst);
    for crash in [false, true] {
        bench.guest.inits.lock().unwrap().clear();
        let (orchestrator, sandbox) = (bench.orchestrator.clone(), bench.sandbox());
        let create = tokio::spawn(async move { orchestrator.create(sandbox).await });
        eventually(|| (!bench.guest.inits.lock().unwrap().is_empty()).then_some(())).await.expect("init is called");
        let name = bench.vmm.live()[0].clone();
        if crash {
            bench.vmm.crash(&name, "killed");
        } else {
            bench.orchestrator.delete(name["aenv-".len()..].parse().unwrap()).await.unwrap();
        }
        // The deadline of the start is a minute; this ends at once.
        tokio::time::timeout(PATIENCE, create).await.unwrap().unwrap().unwrap_err();
    }
    eventually(|| (bench.rows() == 0).then_some(())).await.expect("the intent rows go");
    bench.assert_nothing_is_held();
}

#[tokio::test]
async fn a_machine_that_dies_while_its_guest_boots_fails_the_create() {
    let bench = Bench::new().await;
    bench.guest.healthy.store(false, Ordering::SeqCst);
    let (orchestrator, sandbox) = (bench.orchestrator.clone(), bench.sandbox());
    let create = tokio::spawn(async move { orchestrator.create(sandbox).await });
    let name = eventually(|| bench.vmm.live().first().cloned()).await.unwrap();
    bench.vmm.crash(&name, "out of memory");
    let error = tokio::time::timeout(PATIENCE, create).await.unwrap().unwrap().unwrap_err();
    assert!(matches!(error, CreateError::Step { step: "wait for the guest agent", .. }), "{error:?}");
}

#[tokio::test]
async fn a_create_whose_client_hangs_up_goes_on() {
    let bench = Bench::new().await;
    bench.vmm.plan_next(FakePlan { boot_takes: Duration::from_millis(50), ..FakePlan::default() });
    let create = bench.orchestrator.create(bench.sandbox());
    assert!(tokio::time::timeout(Duration::from_millis(5), create).await.is_err());
    eventually(|| bench.orchestrator.list().first().filter(|info| info.phase == Phase::Running).map(|_| ()))
        .await
        .expect("it runs");
}

#[tokio::test]
async fn an_expired_sandbox_is_ended_with_its_reason() {
    let bench = Bench::new().await;
    let sandbox = bench.sandbox_with(|spec| spec.timeout = Some(Duration::from_millis(50)));
    let id = bench.orchestrator.create(sandbox).await.unwrap().id;
    assert_eq!(bench.gone(id).await, Some(Ended::Expired));
    bench.assert_nothing_is_held();
}

#[tokio::test]
async fn connect_never_shortens_and_timeout_may() {
    let bench = Bench::new().await;
    let info = bench.orchestrator.create(bench.sandbox()).await.unwrap();
    let kept = bench.orchestrator.extend(info.id, Duration::from_secs(1)).await.unwrap();
    assert_eq!(kept, bench.orchestrator.get(info.id).unwrap().end_at);
    assert!(kept > jiff::Timestamp::now() + jiff::SignedDuration::from_secs(200));
    let longer = bench.orchestrator.extend(info.id, Duration::from_secs(1000)).await.unwrap();
    assert!(longer > kept);
    bench.orchestrator.set_timeout(info.id, Duration::ZERO).await.unwrap();
    assert_eq!(bench.gone(info.id).await, Some(Ended::Expired));
}

#[tokio::test]
async fn a_crashed_machine_is_noticed_and_told() {
    let bench = Bench::new().await;
    let id = bench.orchestrator.create(bench.sandbox()).await.unwrap().id;
    bench.vmm.crash(&format!("aenv-{id}"), "triple fault");
    assert_eq!(bench.gone(id).await, Some(Ended::MachineEnded("triple fault".into())));
    let message = bench.orchestrator.get(id).unwrap_err().to_string();
    assert!(message.contains("triple fault"), "{message}");
    bench.assert_nothing_is_held();
}

#[tokio::test]
async fn a_delete_that_cannot_finish_says_so_and_the_next_one_finishes_it() {
    let bench = Bench::new().await;
    let id = bench.orchestrator.create(bench.sandbox()).await.unwrap().id;
    bench.disks.remove_fails.store(1, Ordering::SeqCst);
    let error = bench.orchestrator.delete(id).await.unwrap_err();
    assert!(matches!(&error, DeleteError::Unfinished { failures, .. } if failures.contains("remove disk")), "{error}");
    assert!(bench.orchestrator.get(id).is_err(), "a sandbox whose end began is not shown");
    bench.orchestrator.delete(id).await.unwrap();
    bench.assert_nothing_is_held();
}

#[tokio::test]
async fn concurrent_deletes_share_one_outcome() {
    let bench = Bench::new().await;
    bench.vmm.plan_next(FakePlan { kill_takes: Duration::from_millis(50), ..FakePlan::default() });
    let id = bench.orchestrator.create(bench.sandbox()).await.unwrap().id;
    let deletes = futures::future::join_all((0..8).map(|_| bench.orchestrator.delete(id))).await;
    assert!(deletes.iter().all(Result::is_ok), "{deletes:?}");
    bench.assert_nothing_is_held();
}

#[tokio::test]
async fn closing_ends_every_sandbox_and_refuses_new_ones() {
    let bench = Bench::new().await;
    for _ in 0..4 {
        bench.orchestrator.create(bench.sandbox()).await.unwrap();
    }
    bench.orchestrator.close(PATIENCE).await.unwrap();
    bench.assert_nothing_is_held();
    assert!(matches!(bench.orchestrator.create(bench.sandbox()).await, Err(CreateError::ShuttingDown)));
}

#[tokio::test]
async fn creates_beyond_the_queue_are_refused() {
    let config = OrchestratorConfig { max_queued_starts: 2, on_stop: OnStop::Delete, ..OrchestratorConfig::default() };
    let bench = Bench::with_config(FakeVmm::in_memory(), config).await;
    bench.guest.healthy.store(false, Ordering::SeqCst);
    let creates: Vec<_> = (0..2)
        .map(|_| {
            let (orchestrator, sandbox) = (bench.orchestrator.clone(), bench.sandbox());
            tokio::spawn(async move { orchestrator.create(sandbox).await })
        })
        .collect();
    eventually(|| bench.orchestrator.admit(1).is_err().then_some(())).await.expect("the queue is full");
    let refused = bench.orchestrator.create(bench.sandbox()).await.unwrap_err();
    assert!(matches!(refused, CreateError::Full { starting: 2, room: 0 }));
    bench.guest.healthy.store(true, Ordering::SeqCst);
    for create in creates {
        create.await.unwrap().unwrap();
    }
    bench.running().await;
}
