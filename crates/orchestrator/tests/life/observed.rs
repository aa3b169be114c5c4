//! What is told of sandboxes: what they use, whether they answer, what became of them.

use super::support::*;

/// A bench whose guests are asked what they use every `every`.
async fn sampled(every: Duration) -> Bench {
    let config =
        OrchestratorConfig { sample_interval: every, on_stop: OnStop::Delete, ..OrchestratorConfig::default() };
    Bench::with_config(FakeVmm::in_memory(), config).await
}

#[tokio::test]
async fn a_sandbox_is_sampled_while_it_runs_and_left_alone_while_it_is_paused() {
    let bench = sampled(Duration::from_millis(5)).await;
    let id = bench.running().await;
    let samples = || bench.orchestrator.samples(id).unwrap();
    eventually(|| (samples().len() > 2).then_some(())).await.expect("there are samples");
    let taken = samples();
    assert!(taken.windows(2).all(|pair| pair[0].at <= pair[1].at && pair[0].usage.mem_used < pair[1].usage.mem_used));
    assert_eq!((taken[0].usage.cpu_count, taken[0].usage.cpu_used_pct, taken[0].usage.mem_cache), (2, 12.5, 7));
    bench.orchestrator.pause(id, HowToPause::default()).await.unwrap();
    let (kept, asked) = (samples(), bench.guest.samples.load(Ordering::SeqCst));
    tokio::time::sleep(Duration::from_millis(50)).await; // ten rounds
    assert_eq!((samples(), bench.guest.samples.load(Ordering::SeqCst)), (kept.clone(), asked));
    assert_eq!(bench.phase(id), Some(Phase::Paused));
    bench.orchestrator.resume(id, Duration::from_secs(60)).await.unwrap();
    eventually(|| (samples().len() > kept.len()).then_some(())).await.expect("and more after a resume");
    assert_eq!(samples()[..kept.len()], kept);
}

#[tokio::test]
async fn to_be_sampled_is_no_use_of_a_sandbox() {
    let bench = sampled(Duration::from_millis(5)).await;
    let idle = bench.sandbox_with(|spec| spec.idle_timeout = Some(Duration::from_millis(50)));
    let id = bench.orchestrator.create(idle).await.unwrap().id;
    eventually(|| (bench.phase(id) == Some(Phase::Paused)).then_some(())).await.expect("it is paused");
    assert!(bench.guest.samples.load(Ordering::SeqCst) > 0);
}

#[tokio::test]
async fn a_guest_that_fell_silent_is_told_of_while_its_sandbox_is_paused() {
    let mut bench = sampled(Duration::from_millis(5)).await;
    let id = bench.running().await;
    let unresponsive = |bench: &Bench| bench.orchestrator.get(id).unwrap().unresponsive;
    bench.orchestrator.pause(id, HowToPause::default()).await.unwrap();
    assert!(!unresponsive(&bench));
    bench.orchestrator.resume(id, Duration::from_secs(60)).await.unwrap();
    bench.guest.healthy.store(false, Ordering::SeqCst);
    tokio::time::sleep(Duration::from_millis(20)).await; // it was heard of before
    bench.orchestrator.pause(id, HowToPause::default()).await.unwrap();
    assert!(unresponsive(&bench));
    bench.restart().await;
    assert!(unresponsive(&bench), "the next server knows");
    bench.guest.healthy.store(true, Ordering::SeqCst);
    bench.orchestrator.resume(id, Duration::from_secs(60)).await.unwrap();
    assert!(!unresponsive(&bench));
}

#[tokio::test]
async fn a_journal_tells_a_life_with_its_failures_and_outlives_it() {
    let bench = Bench::new().await;
    let id = bench.running().await;
    let told = async || {
        let entries = bench.orchestrator.journal(id).await.unwrap();
        entries.into_iter().map(|entry| entry.message).collect::<Vec<_>>()
    };
    assert_eq!(told().await, ["created"]);
    bench.orchestrator.pause(id, HowToPause::default()).await.unwrap();
    bench.disks.full.store(true, Ordering::SeqCst);
    bench.orchestrator.resume(id, Duration::from_secs(60)).await.unwrap_err();
    bench.disks.full.store(false, Ordering::SeqCst);
    bench.orchestrator.resume(id, Duration::from_secs(60)).await.unwrap();
    bench.orchestrator.capture(id, false).await.unwrap().capture.doom();
    bench.orchestrator.fork(id, 1, None).await.unwrap();
    bench.orchestrator.note(id, aenv_orchestrator::Level::Info, "noted", &[("by", "others")]);
    bench.orchestrator.delete(id).await.unwrap();
    let life = ["created", "paused", "could not be resumed", "resumed", "snapshot taken", "forked", "noted", "ended"];
    assert_eq!(told().await, life);
    let entries = bench.orchestrator.journal(id).await.unwrap();
    assert!(entries.windows(2).all(|pair| pair[0].at < pair[1].at));
    let failed = &entries[2];
    assert_eq!(failed.level, aenv_orchestrator::Level::Warn);
    assert!(failed.fields.iter().any(|(key, why)| *key == "reason" && why.contains("disk space")), "{failed:?}");
    assert_eq!(entries.last().unwrap().fields, [("reason", "it was deleted".to_owned())]);
    assert!(bench.orchestrator.journal(SandboxId::new()).await.is_err());
}
