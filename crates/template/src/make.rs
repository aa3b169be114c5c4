//! A build from its start to its end.
//!
//! ```text
//!   base ── image: imported ──────────▶ machine ── step · step · step ──▶ disk ──▶ machine ── start, ready ──▶ capture
//!      └─── template: its capture          ▲          │ after each that costs      (booted afresh)
//!                                          └─ point ◀─┘
//! ```
//!
//! Steps run on one machine, whose disk is captured after each that is worth it: a *point*, which a later build with the same
//! steps goes on from. What sandboxes go on from is another machine, booted on the disk after the last step: its memory has
//! nothing of the build in it, and is the same whether steps were done or found. An image without steps needs that one only.

use std::time::{Duration, Instant};

use aenv_image::ImageConfig;
use aenv_model::{BuildId, Bytes, MachineShape, TemplateId};
use aenv_snapshot::Capture;
use tokio_util::sync::CancellationToken;
use tracing::warn;

use crate::build::{Base, BuildLog, BuildRequest, Failure, LogLevel, import};
use crate::context::{Context, NOBODY_NAMED, PROVISIONED_USER};
use crate::execute::Work;
use crate::files::rootfs;
use crate::record::{BuildStage, BuildState, Recipe};
use crate::seams::{Bench, Workshop};
use crate::templates::{AtWork, ReadyImageFiles, ReadyTemplate, Templates};

/// Version of what is done to an image before its first step, which points are made of too.
const PROVISION: &str = "1";

/// The shell's first start, whatever it comes to, with all that it brings into memory, is not a sandbox's to wait for.
const EXERCISE: Duration = Duration::from_secs(20);

/// What a build begins with, here.
struct Begin {
    template: ReadyTemplate,
    /// The image's name and digest, if it is one.
    image: Option<(String, String)>,
    /// What its points are kept by.
    key: String,
}

/// A disk with all steps done.
struct Done {
    template: ReadyTemplate,
    context: Context,
}

/// A capture that goes, unless somebody keeps it.
struct Fresh(Option<Capture>);

impl Fresh {
    fn keep(mut self) -> Option<Capture> {
        self.0.take()
    }
}

impl Drop for Fresh {
    fn drop(&mut self) {
        if let Some(capture) = &self.0 {
            capture.doom();
        }
    }
}

impl Templates {
    pub(crate) async fn build_to_end(
        &self,
        template: TemplateId,
        build: BuildId,
        request: &BuildRequest,
        work: &AtWork,
    ) {
        let began = Instant::now();
        let within = self.inner.parts.config.timeout;
        let made = tokio::select! {
            permit = self.inner.permits.acquire() => {
                let _permit = permit;
                // The token ends the work in its own time: machines are closed, not dropped.
                let timer = tokio::time::sleep(within);
                let make = self.make(template, build, request, work);
                tokio::pin!(make, timer);
                tokio::select! {
                    made = &mut make => made,
                    () = timer => {
                        work.cancel.cancel();
                        let late = Failure::of(work.log.stage())(format!("the build took longer than {within:?}"));
                        make.await.map_err(|_| late)
                    }
                }
            }
            () = work.cancel.cancelled() => Err(cancelled()),
        };
        let stopped = self.inner.scope.token().is_cancelled();
        let state = match made {
            Ok(state) => {
                let line = format!("Build finished, took {:.1}s", began.elapsed().as_secs_f64());
                work.log.end(BuildStage::Finalize, LogLevel::Info, line);
                state
            }
            Err(Failure { stage, message }) => {
                let message = if stopped {
                    "the server was stopped during the build; start it again".to_owned()
                } else {
                    message
                };
                work.log.end(stage, LogLevel::Error, format!("Build failed: {message}"));
                BuildState::Error { message, step: stage }
            }
        };
        if let Err(error) = self.finish(template, build, state, work.log.entries()).await {
            warn!(build_id = %build, %error, "could not record the end of a build");
        }
    }

    async fn make(
        &self,
        template: TemplateId,
        build: BuildId,
        request: &BuildRequest,
        work: &AtWork,
    ) -> Result<BuildState, Failure> {
        let known = self.state().records.get(&template).and_then(|record| record.build(build).cloned());
        let shape = known.ok_or_else(cancelled)?.shape; // deleted meanwhile
        let begin = self.begin(template, build, request, work).await?;
        let inherited = begin.template.recipe.clone();
        let recipe = Recipe {
            env: inherited.as_ref().map(|recipe| recipe.env.clone()).unwrap_or_default(),
            start: request.start.clone().or_else(|| inherited.as_ref()?.start.clone()),
            ready: request.ready.clone().or_else(|| inherited.as_ref()?.ready.clone()),
        };
        // An image without steps stays as it is.
        let provisions = begin.image.is_some() && !request.steps.is_empty();
        let user = if provisions { PROVISIONED_USER } else { NOBODY_NAMED };
        let context = Context::new(&begin.template.config, inherited.as_ref(), user);
        let plain = begin.image.is_some() && request.steps.is_empty() && recipe == Recipe::default();
        let Some(workshop) = &self.inner.parts.workshop else {
            return match begin.image {
                Some((image, digest)) if plain => Ok(ready(image, digest, &begin.template, None, None)),
                _ => Err(Failure::of(BuildStage::Base)("this node has no machines to build in")),
            };
        };
        let (image, digest) = begin.image.clone().unwrap_or_default();
        if request.steps.is_empty() && begin.image.is_some() {
            let template = ReadyTemplate { shape, ..begin.template };
            let recipe = (!plain).then_some(recipe);
            let capture = self.finalize(workshop.as_ref(), &template, recipe.as_ref(), &context, work).await?;
            let capture = self.share(build, &template, recipe.as_ref(), capture, work).await?;
            return Ok(ready(image, digest, &template, Some(capture), recipe));
        }
        let done = self.run_steps(workshop.as_ref(), begin, context, request, shape, work).await?;
        let recipe = Recipe { env: done.context.env.clone(), ..recipe };
        let capture = self.finalize(workshop.as_ref(), &done.template, Some(&recipe), &done.context, work).await?;
        let capture = self.share(build, &done.template, Some(&recipe), capture, work).await?;
        Ok(ready(image, digest, &done.template, Some(capture), Some(recipe)))
    }

    /// Gets the image here, or the template.
    async fn begin(
        &self,
        template: TemplateId,
        build: BuildId,
        request: &BuildRequest,
        work: &AtWork,
    ) -> Result<Begin, Failure> {
        let failed = Failure::of(BuildStage::Base);
        match &request.base {
            Base::Image(image) => {
                let dir = self.build_dir(template, build);
                let made = std::fs::create_dir_all(&dir);
                made.map_err(|error| failed(format!("the node cannot keep the template: {error}")))?;
                let (importer, target) = (self.inner.parts.importer.as_ref(), (&*rootfs(&dir), &*build.to_string()));
                let imported = import(importer, image, target, &work.log, work.cancel.clone()).await?;
                let lease = self.lease(template, build);
                let files = ReadyImageFiles { rootfs: lease.rootfs(), lease, disk_size: imported.size };
                Ok(Begin {
                    key: format!("image {} {PROVISION}", imported.digest),
                    image: Some((image.image.clone(), imported.digest)),
                    template: ReadyTemplate {
                        id: template,
                        name: None,
                        capture: None,
                        image: Some(files),
                        shape: MachineShape { vcpus: 1, memory: Bytes(0) }, // its builder's to say
                        config: imported.config,
                        recipe: None,
                    },
                })
            }
            Base::Template(reference) => {
                work.log.add(BuildStage::Base, LogLevel::Info, format!("[base] FROM TEMPLATE {reference}"));
                let resolved = tokio::select! {
                    resolved = self.resolve(reference) => resolved,
                    () = work.cancel.cancelled() => return Err(cancelled()),
                };
                let base = resolved.map_err(|error| failed(error.to_string()))?;
                let capture =
                    base.capture.as_ref().ok_or_else(|| failed(format!("template '{reference}' has no machine")))?;
                let key = format!("capture {}", capture.id());
                Ok(Begin { key, image: None, template: ReadyTemplate { id: template, name: None, ..base } })
            }
        }
    }

    /// Does all steps, from the last point that there is.
    async fn run_steps(
        &self,
        workshop: &dyn Workshop,
        begin: Begin,
        context: Context,
        request: &BuildRequest,
        shape: MachineShape,
        work: &AtWork,
    ) -> Result<Done, Failure> {
        let steps = &request.steps;
        // The key before each step, and that after the last.
        let mut keys = vec![begin.key.clone()];
        for step in steps {
            keys.push(step.key(&keys[keys.len() - 1]));
        }
        let usable = match steps.iter().position(|step| step.force) {
            _ if request.force => 0,
            Some(first_forced) => first_forced,
            None => steps.len(),
        };
        let mut found = None;
        for at in (0..=usable).rev() {
            if let Some(point) = self.inner.points.find(&keys[at]).await {
                found = Some((at, point));
                break;
            }
        }
        let is_image = begin.image.is_some();
        let config = begin.template.config.clone();
        let (at, base, mut context) = match found {
            Some((at, (capture, context))) => {
                for (number, step) in (1..).zip(&steps[..at]) {
                    let line = format!("CACHED [builder {number}/{}] {}", steps.len(), step.line);
                    work.log.add(BuildStage::Step(number), LogLevel::Info, line);
                }
                (at, on_disk(&begin.template, capture, shape), context)
            }
            None => (0, begin.template.clone(), context),
        };
        let goes_on = base.capture.as_ref().is_some_and(|capture| capture.state().is_some());
        // A machine that goes on has the shape that it had.
        let base = if goes_on { base } else { ReadyTemplate { shape, ..base } };
        let found_all = at == steps.len() && base.capture.is_some() && !goes_on;
        let base = if found_all {
            base
        } else {
            let provision = is_image && base.capture.is_none();
            let stage = if at == 0 { BuildStage::Base } else { BuildStage::Step(at as u32 + 1) };
            work.log.add(stage, LogLevel::Debug, "Starting the machine of the build");
            let bench = workshop.open(&base).await.map_err(Failure::of(stage))?;
            let doing = Doing { templates: self, bench: bench.as_ref(), log: &work.log, keys: &keys };
            let done = tokio::select! {
                done = doing.steps(steps, at, provision, &mut context) => done,
                () = work.cancel.cancelled() => Err(cancelled()),
            };
            bench.close().await;
            on_disk(&begin.template, done?, shape)
        };
        let template = ReadyTemplate { config: context.config(config), ..base };
        Ok(Done { template, context })
    }

    /// Boots what sandboxes go on from, starts what is to run in it, and captures it.
    async fn finalize(
        &self,
        workshop: &dyn Workshop,
        template: &ReadyTemplate,
        recipe: Option<&Recipe>,
        context: &Context,
        work: &AtWork,
    ) -> Result<Fresh, Failure> {
        let failed = Failure::of::<String>(BuildStage::Finalize);
        work.log.add(BuildStage::Finalize, LogLevel::Info, "[finalize] Booting the machine that sandboxes go on from");
        if work.cancel.is_cancelled() {
            return Err(cancelled());
        }
        let bench = workshop.open(template).await.map_err(&failed)?;
        let worked = async {
            let exercise = aenv_model::Command {
                program: "/bin/bash".to_owned(),
                arguments: ["-l", "-c", "true"].map(str::to_owned).into(),
                user: template.config.user.clone().unwrap_or_else(|| NOBODY_NAMED.to_owned()),
                ..Default::default()
            };
            // An image may have no shell, and no such user.
            _ = tokio::time::timeout(EXERCISE, bench.run(&exercise, &|_| ())).await;
            if let Some(recipe) = recipe {
                let work = Work { bench: bench.as_ref(), uploads: &self.inner.uploads, log: &work.log };
                work.start(recipe, context).await?;
            }
            work.log.add(BuildStage::Finalize, LogLevel::Info, "[finalize] Capturing it");
            bench.capture(true).await.map(|capture| Fresh(Some(capture)))
        };
        let captured = tokio::select! {
            captured = worked => captured.map_err(failed),
            () = work.cancel.cancelled() => Err(cancelled()),
        };
        bench.close().await;
        captured
    }

    /// Shows what a build has made to other nodes, if it is theirs too.
    async fn share(
        &self,
        build: BuildId,
        template: &ReadyTemplate,
        recipe: Option<&Recipe>,
        capture: Fresh,
        work: &AtWork,
    ) -> Result<Capture, Failure> {
        let is_shared = self.state().records.get(&template.id).is_some_and(|record| record.shared);
        if is_shared && let (Some(shared), Some(capture)) = (self.shared(), &capture.0) {
            work.log.add(BuildStage::Finalize, LogLevel::Info, "Publishing it to other nodes");
            let published = tokio::select! {
                published = self.publish_build(template.id, build, capture, &template.config, recipe) => published,
                () = work.cancel.cancelled() => return Err(cancelled()),
            };
            published.map_err(|problem| {
                warn!(template_id = %template.id, build_id = %build, error = ?problem, "a build could not be published");
                Failure::of(BuildStage::Finalize)(problem.told(shared.repository.name()))
            })?;
        }
        let capture = capture.keep().ok_or_else(cancelled)?;
        self.state().captures.insert(build, capture.clone());
        Ok(capture)
    }
}

/// Steps that are being done on a machine.
struct Doing<'a> {
    templates: &'a Templates,
    bench: &'a dyn Bench,
    log: &'a BuildLog,
    keys: &'a [String],
}

impl Doing<'_> {
    /// Does the steps from `at` on. Gives the disk after the last.
    async fn steps(
        &self,
        steps: &[crate::step::Step],
        at: usize,
        provision: bool,
        context: &mut Context,
    ) -> Result<Capture, Failure> {
        let work = Work { bench: self.bench, uploads: &self.templates.inner.uploads, log: self.log };
        if provision {
            work.provision().await.map_err(Failure::of(BuildStage::Base))?;
        }
        let mut point = None;
        for (number, step) in (1..).zip(steps).skip(at) {
            let stage = BuildStage::Step(number);
            let failed = Failure::of::<String>(stage);
            let began = Instant::now();
            self.log.add(stage, LogLevel::Info, format!("[builder {number}/{}] {}", steps.len(), step.line));
            work.step(step, (number, steps.len()), context).await.map_err(&failed)?;
            let took = began.elapsed().as_secs_f64();
            self.log.add(stage, LogLevel::Debug, format!("[builder {number}/{}] done in {took:.1}s", steps.len()));
            point = None;
            if step.is_expensive() || number as usize == steps.len() {
                point = Some(self.point(number as usize, context).await.map_err(failed)?);
            }
        }
        match point {
            Some(point) => Ok(point),
            None => self.point(steps.len(), context).await.map_err(Failure::of(BuildStage::Base)),
        }
    }

    /// The disk as it is now, kept as what `done` steps have made of it.
    async fn point(&self, done: usize, context: &Context) -> Result<Capture, String> {
        let fresh = Fresh(Some(self.bench.capture(false).await?));
        if let Some(capture) = &fresh.0 {
            self.templates.inner.points.keep(&self.keys[done], capture, context).await;
        }
        fresh.keep().ok_or_else(|| "there is no such point".to_owned())
    }
}

fn cancelled() -> Failure {
    Failure::of(BuildStage::Base)("the build was cancelled")
}

/// What is booted from the disk of a point.
fn on_disk(of: &ReadyTemplate, capture: Capture, shape: MachineShape) -> ReadyTemplate {
    ReadyTemplate { capture: Some(capture), image: None, shape, ..of.clone() }
}

fn ready(
    image: String,
    digest: String,
    template: &ReadyTemplate,
    capture: Option<Capture>,
    recipe: Option<Recipe>,
) -> BuildState {
    let disk_size = match (&capture, &template.image) {
        (Some(capture), _) => capture.manifest().disk_size,
        (None, image) => image.as_ref().map_or(Bytes(0), |image| image.disk_size),
    };
    let config: ImageConfig = template.config.clone();
    BuildState::Ready { image, digest, config, disk_size, capture: capture.map(|capture| capture.id()), recipe }
}

/// Ends with the build that it is of.
pub(crate) fn at_work(parent: &CancellationToken) -> AtWork {
    AtWork { log: std::sync::Arc::default(), cancel: parent.child_token(), ended: CancellationToken::new() }
}
