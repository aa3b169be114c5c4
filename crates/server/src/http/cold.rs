//! Sandboxes booted from an image, without a template.

use std::sync::Arc;
use std::time::Duration;

use aenv_api::NewColdSandbox;
use aenv_image::ImageReference;
use aenv_model::{Bytes, TemplateId};
use aenv_orchestrator::{Image, Keep, NewSandbox, OperationStage, SandboxSpec, Source};
use aenv_template::ImageRequest;
use axum::extract::State;
use axum::response::Response;

use super::App;
use super::body::JsonBody;
use super::error::ApiError;
use super::sandboxes::{created, egress, guest_defaults, on_expiry};

/// A root disk's size is a multiple of this many MiB, and no less.
const DISK_STEP_MIB: u32 = 1024;

/// `POST /sandboxes-cold`: answers when the guest is up, which takes as long as the image takes to get here.
pub(super) async fn create(
    State(app): State<App>,
    JsonBody(request): JsonBody<NewColdSandbox>,
) -> Result<Response, ApiError> {
    let network = request.network.clone().unwrap_or_default();
    let egress = egress("network.", &network, request.allow_internet_access)?;
    let checks = [
        ("attachedDrives", !request.attached_drives.is_empty()),
        ("volumeMounts", !request.volume_mounts.is_empty()),
        ("customExtensionParams", !request.custom_extension_params.is_empty()),
    ];
    if let Some((field, _)) = checks.iter().find(|(_, used)| *used) {
        return Err(ApiError::unsupported_field(field));
    }
    let shape = app.shape(request.cpu_count, request.memory_mb)?;
    if let Some(mib) = request.disk_size_mb.filter(|mib| *mib == 0 || !mib.is_multiple_of(DISK_STEP_MIB)) {
        let message = format!("invalid field diskSizeMB: {mib}, expected a multiple of {DISK_STEP_MIB}, and no less");
        return Err(ApiError::bad_request(message));
    }
    let reference: ImageReference =
        request.image.parse().map_err(|error| ApiError::bad_request(format!("invalid field image: {error}")))?;
    let build = ImageRequest { image: request.image, reference, credentials: None };
    let importing = Box::pin(app.templates.import(&build));
    let image = app.orchestrator.stages().time(OperationStage::RESOLVE_ROOTFS, importing).await?;
    let spec = SandboxSpec {
        template: TemplateId::new(), // of its own: no other sandbox comes from it
        alias: Some(build.image),
        shape,
        defaults: guest_defaults(&image.config, request.env_vars),
        metadata: request.metadata,
        timeout: request.timeout.map(|secs| Duration::from_secs(secs.into())),
        secure: request.secure.unwrap_or(false),
        private_traffic: network.allow_public_traffic == Some(false),
        egress,
        on_expiry: on_expiry(request.auto_pause, None, request.auto_resume)?,
        auto_resume: request.auto_resume.is_some_and(|auto| auto.enabled),
        idle_timeout: None,
        lease: None,
        internal: false,
    };
    let keep: Keep = Box::new(image.lease);
    let image = Image {
        rootfs: image.rootfs,
        disk_size: request.disk_size_mb.map(|mib| Bytes::mib(mib.into())),
        keep: Arc::new(keep),
    };
    let source = Source { capture: None, image: Some(image) };
    let info = app.orchestrator.create(NewSandbox { spec, source }).await?;
    Ok(created(&app, info))
}
