//! What all devices share.

use std::fmt;
use std::sync::Arc;

use aenv_block_client::BlockdConfig;
use aenv_block_export::Exporter;

use crate::background::Background;
use crate::layers::Layers;
use crate::rows::Rows;

/// The parts of a daemon that devices are made of.
#[derive(Debug)]
pub(crate) struct Context {
    pub(crate) config: BlockdConfig,
    pub(crate) layers: Layers,
    pub(crate) exporter: Arc<dyn Exporter>,
    pub(crate) rows: Rows,
    pub(crate) background: Background,
    pub(crate) steps: Steps,
}

/// Who is told of each step that a crash may follow: tests, which crash there.
#[derive(Clone, Default)]
pub struct Steps(Option<Arc<dyn Fn(&'static str) + Send + Sync>>);

impl Steps {
    /// Tells `observe` of each step.
    pub fn observed(observe: impl Fn(&'static str) + Send + Sync + 'static) -> Self {
        Self(Some(Arc::new(observe)))
    }

    pub(crate) fn at(&self, step: &'static str) {
        if let Some(observe) = &self.0 {
            observe(step);
        }
    }
}

impl fmt::Debug for Steps {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Steps").field(&self.0.is_some()).finish()
    }
}
