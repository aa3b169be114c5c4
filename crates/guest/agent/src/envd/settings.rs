//! What `/init` sets: token, environment, defaults. Lives in memory only, and so in memory snapshots.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use jiff::Timestamp;

/// The settings, each part readable on its own.
#[derive(Debug)]
pub(super) struct Settings {
    current: Mutex<Current>,
    /// Held for the whole of an `/init`, so that two do not mix.
    pub(super) init: tokio::sync::Mutex<()>,
}

/// One consistent set.
#[derive(Debug, Clone)]
pub(super) struct Current {
    pub(super) access_token: Option<String>,
    /// The user part of the global environment.
    pub(super) env_vars: BTreeMap<String, String>,
    pub(super) default_user: String,
    pub(super) default_workdir: Option<String>,
    pub(super) sandbox_id: Option<String>,
    pub(super) template_id: Option<String>,
    /// The time of the newest `/init` that was applied.
    pub(super) newest_init: Option<Timestamp>,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            current: Mutex::new(Current {
                access_token: None,
                env_vars: BTreeMap::new(),
                default_user: "root".into(),
                default_workdir: None,
                sandbox_id: None,
                template_id: None,
                newest_init: None,
            }),
            init: tokio::sync::Mutex::new(()),
        }
    }
}

impl Settings {
    fn current(&self) -> MutexGuard<'_, Current> {
        // Sections below only read or replace whole fields.
        self.current.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn snapshot(&self) -> Current {
        self.current().clone()
    }

    pub(super) fn replace(&self, settings: Current) {
        *self.current() = settings;
    }

    pub(super) fn access_token(&self) -> Option<String> {
        self.current().access_token.clone()
    }

    pub(super) fn default_user(&self) -> String {
        self.current().default_user.clone()
    }

    pub(super) fn default_workdir(&self) -> Option<String> {
        self.current().default_workdir.clone()
    }

    /// The environment every process starts from: what `/init` gave, then the identity, which cannot be overridden.
    pub(super) fn global_env(&self) -> BTreeMap<String, String> {
        let current = self.current();
        let mut env = current.env_vars.clone();
        env.insert("E2B_SANDBOX".into(), "true".into());
        if let Some(id) = &current.sandbox_id {
            env.insert("E2B_SANDBOX_ID".into(), id.clone());
        }
        if let Some(id) = &current.template_id {
            env.insert("E2B_TEMPLATE_ID".into(), id.clone());
        }
        env
    }
}
