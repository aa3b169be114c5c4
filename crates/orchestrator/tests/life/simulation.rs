//! Random asks, several at once, on parts that fail at random. Whatever comes: every ask is answered, every sandbox comes to
//! rest, each that runs has one machine and no other has any, any can be deleted, and then nothing is left.

use futures::future::{BoxFuture, join_all};
use proptest::prelude::*;

use super::support::*;

/// What is asked, of the sandbox or snapshot that a number picks.
#[derive(Debug, Clone)]
enum Act {
    Create,
    CreateFrom(usize),
    Pause(usize, HowToPause),
    Resume(usize),
    Connect(usize),
    Wake(usize),
    SetTimeout(usize),
    Snapshot(usize, bool),
    Fork(usize, usize),
    RollBack(usize, usize),
    Delete(usize),
    Crash(usize),
}

/// What goes wrong while a round's asks are carried out.
#[derive(Debug, Clone)]
enum Fault {
    None,
    NextMachine(FakePlan),
    DiskFull,
    CopyFails,
    GuestSilentFor(Duration),
    RemovalFails,
}

/// Asks that are made at the same time, each after its pause.
type Round = (Fault, Vec<(u64, Act)>);

fn acts() -> impl Strategy<Value = Act> {
    let one = || 0..8_usize;
    let how =
        (any::<bool>(), any::<bool>()).prop_map(|(disk_only, if_responsive)| HowToPause { disk_only, if_responsive });
    prop_oneof![
        3 => Just(Act::Create),
        2 => one().prop_map(Act::CreateFrom),
        4 => (one(), how).prop_map(|(of, how)| Act::Pause(of, how)),
        4 => one().prop_map(Act::Resume),
        2 => one().prop_map(Act::Connect),
        1 => one().prop_map(Act::Wake),
        1 => one().prop_map(Act::SetTimeout),
        3 => (one(), any::<bool>()).prop_map(|(of, disk_only)| Act::Snapshot(of, disk_only)),
        2 => (one(), 1..3_usize).prop_map(|(of, count)| Act::Fork(of, count)),
        3 => (one(), one()).prop_map(|(of, to)| Act::RollBack(of, to)),
        2 => one().prop_map(Act::Delete),
        2 => one().prop_map(Act::Crash),
    ]
}

fn faults() -> impl Strategy<Value = Fault> {
    let millis = || (0..8_u64).prop_map(Duration::from_millis);
    let plan = (millis(), millis(), 0..4_u8).prop_map(|(boot_takes, kill_takes, which)| FakePlan {
        boot_takes,
        kill_takes,
        boot_fails: (which == 1).then(|| "told to".to_owned()),
        refuses_calls: (which == 2).then(|| "told to".to_owned()),
        ignores_shutdown: which == 3,
        ..FakePlan::default()
    });
    prop_oneof![
        4 => Just(Fault::None),
        4 => plan.prop_map(Fault::NextMachine),
        1 => Just(Fault::DiskFull),
        1 => Just(Fault::CopyFails),
        1 => millis().prop_map(Fault::GuestSilentFor),
        1 => Just(Fault::RemovalFails),
    ]
}

fn rounds() -> impl Strategy<Value = Vec<Round>> {
    let asks = prop::collection::vec((0..6_u64, acts()), 1..5);
    prop::collection::vec((faults(), asks), 4..16)
}

#[derive(Default)]
struct World {
    /// Every sandbox there ever was.
    sandboxes: Vec<SandboxId>,
    snapshots: Vec<aenv_snapshot::Capture>,
}

impl World {
    fn sandbox(&self, number: usize) -> Option<SandboxId> {
        // The latest ones: most of the others are gone.
        self.sandboxes.len().checked_sub(1 + number).map(|at| self.sandboxes[at])
    }

    fn snapshot(&self, number: usize) -> Option<aenv_snapshot::Capture> {
        (!self.snapshots.is_empty()).then(|| self.snapshots[number % self.snapshots.len()].clone())
    }
}

/// What an ask brought into the world.
type Brought = (Vec<SandboxId>, Option<aenv_snapshot::Capture>);

/// The ask as a future; `None` if there is nothing yet that it could be asked of. Refusals are fine, silence is not.
fn ask<'a>(bench: &'a Bench, world: &World, act: &Act) -> Option<BoxFuture<'a, Brought>> {
    let orchestrator = &bench.orchestrator;
    let life = Duration::from_secs(600);
    let made = |created: Result<aenv_orchestrator::SandboxInfo, CreateError>| {
        created.map_or_else(|_| Default::default(), |info| (vec![info.id], None))
    };
    Some(match act {
        Act::Create => Box::pin(async move { made(orchestrator.create(bench.sandbox()).await) }),
        Act::CreateFrom(number) => {
            let source = Source { capture: Some(world.snapshot(*number)?), image: None };
            let NewSandbox { spec, .. } = bench.sandbox();
            Box::pin(async move { made(orchestrator.create(NewSandbox { spec, source }).await) })
        }
        Act::Pause(number, how) => {
            let (id, how) = (world.sandbox(*number)?, *how);
            answered(orchestrator.pause(id, how))
        }
        Act::Resume(number) => answered(orchestrator.resume(world.sandbox(*number)?, life)),
        Act::Connect(number) => answered(orchestrator.connect(world.sandbox(*number)?, life, false)),
        Act::Wake(number) => answered(orchestrator.wake(world.sandbox(*number)?)),
        Act::SetTimeout(number) => answered(orchestrator.set_timeout(world.sandbox(*number)?, life)),
        Act::Snapshot(number, disk_only) => {
            let (id, disk_only) = (world.sandbox(*number)?, *disk_only);
            Box::pin(async move {
                let taken = orchestrator.capture(id, disk_only).await;
                (Vec::new(), taken.ok().map(|taken| taken.capture))
            })
        }
        Act::Fork(number, count) => {
            let (id, count) = (world.sandbox(*number)?, *count);
            Box::pin(async move {
                let children = orchestrator.fork(id, count, None).await.map(|forked| forked.children);
                let made = children.unwrap_or_default().into_iter().filter_map(|child| child.ok().map(|info| info.id));
                (made.collect(), None)
            })
        }
        Act::RollBack(number, to) => {
            let (id, capture) = (world.sandbox(*number)?, world.snapshot(*to)?);
            answered(orchestrator.roll_back(id, capture))
        }
        Act::Delete(number) => answered(orchestrator.delete(world.sandbox(*number)?)),
        Act::Crash(number) => {
            let machines = bench.vmm.live();
            bench.vmm.crash(machines.get(*number)?, "told to");
            return None;
        }
    })
}

fn answered<'a, T: 'a>(asked: impl Future<Output = T> + Send + 'a) -> BoxFuture<'a, Brought> {
    Box::pin(async move {
        let _ = asked.await; // any answer will do
        Brought::default()
    })
}

impl Bench {
    fn inflict(&self, fault: &Fault) {
        match fault {
            Fault::None => {}
            Fault::NextMachine(plan) => self.vmm.plan_next(plan.clone()),
            Fault::DiskFull => self.disks.full.store(true, Ordering::SeqCst),
            Fault::CopyFails => self.backing.fail_with(Some(io::ErrorKind::StorageFull)),
            Fault::GuestSilentFor(_) => self.guest.healthy.store(false, Ordering::SeqCst),
            Fault::RemovalFails => self.disks.remove_fails.store(1, Ordering::SeqCst),
        }
    }

    fn mend(&self) {
        self.disks.full.store(false, Ordering::SeqCst);
        self.backing.fail_with(None);
        self.guest.healthy.store(true, Ordering::SeqCst);
        self.disks.remove_fails.store(0, Ordering::SeqCst);
    }

    async fn round(&self, world: &mut World, (fault, asks): &Round) {
        self.inflict(fault);
        let futures = asks.iter().map(|(after, act)| async {
            tokio::time::sleep(Duration::from_millis(*after)).await;
            match ask(self, world, act) {
                Some(asked) => asked.await,
                None => Brought::default(),
            }
        });
        let mended = async {
            if let Fault::GuestSilentFor(how_long) = fault {
                tokio::time::sleep(*how_long).await;
                self.mend();
            }
        };
        let all = futures::future::join(join_all(futures), mended);
        let (brought, ()) = tokio::time::timeout(PATIENCE, all).await.expect("every ask is answered");
        self.mend();
        for (sandboxes, snapshot) in brought {
            world.sandboxes.extend(sandboxes);
            world.snapshots.extend(snapshot);
        }
    }

    /// Every sandbox comes to rest, and there is a machine for each that runs and no other.
    async fn assert_at_rest(&self) {
        let at_rest = || {
            let sandboxes = self.orchestrator.list();
            let resting = sandboxes.iter().all(|info| matches!(info.phase, Phase::Running | Phase::Paused));
            let running = sandboxes.iter().filter(|info| info.phase == Phase::Running).count();
            (resting && self.vmm.live().len() == running).then_some(())
        };
        if eventually(at_rest).await.is_none() {
            let phases: Vec<_> = self.orchestrator.list().into_iter().map(|info| (info.id, info.phase)).collect();
            panic!("sandboxes {phases:?} with machines {:?}", self.vmm.live());
        }
    }

    /// Everything can be given back, and then nothing is held.
    async fn assert_all_ends(self, world: World) {
        for info in self.orchestrator.list() {
            let deleted = tokio::time::timeout(PATIENCE, self.orchestrator.delete(info.id)).await;
            deleted.expect("a delete is answered").expect("a delete is possible");
        }
        for snapshot in &world.snapshots {
            snapshot.doom();
        }
        drop(world);
        eventually(|| (self.rows() == 0).then_some(())).await.expect("no intent is left");
        self.assert_nothing_is_held();
        assert_eq!(self.captures().await, 0);
        assert_eq!(self.backing.visible(), Vec::<String>::new());
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, max_shrink_iters: 0, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn whatever_is_asked_and_whatever_fails_nothing_is_stuck_or_left(rounds in rounds()) {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let bench = Bench::new().await;
            let mut world = World::default();
            for round in &rounds {
                bench.round(&mut world, round).await;
                bench.assert_at_rest().await;
            }
            bench.assert_all_ends(world).await;
        });
    }
}
