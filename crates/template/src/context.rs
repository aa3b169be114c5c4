//! What the commands of a build find around them.

use std::collections::BTreeMap;

use aenv_image::ImageConfig;
use serde::{Deserialize, Serialize};

use crate::expand::{ExpandError, expand};
use crate::record::Recipe;

/// Whom every image gets that steps are done on, as E2B's templates have it: the build's user, if the image names none.
pub(crate) const PROVISIONED_USER: &str = "user";

/// Whom the agent takes where nobody is named.
pub(crate) const NOBODY_NAMED: &str = "root";

/// Where commands are looked up if nothing else says so.
const DEFAULT_PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// Most bytes of what builds add to the environment: a program has 2 MiB for its arguments and all of it.
const LARGEST: usize = 1 << 20;

/// Environment, user and directory, as the steps so far have left them.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Context {
    /// What sandboxes give their processes: of the image.
    base: BTreeMap<String, String>,
    /// What builds have added. Sandboxes do not give it to what users run.
    pub(crate) env: BTreeMap<String, String>,
    pub(crate) user: String,
    pub(crate) workdir: Option<String>,
}

impl Context {
    /// Before the first step on a base; `user` is its user if it names none.
    pub(crate) fn new(config: &ImageConfig, recipe: Option<&Recipe>, user: &str) -> Self {
        let mut base = BTreeMap::from([("PATH".to_owned(), DEFAULT_PATH.to_owned())]);
        base.extend(config.env.iter().filter_map(|pair| {
            let (name, value) = pair.split_once('=')?;
            Some((name.to_owned(), value.to_owned()))
        }));
        let given = |text: &Option<String>| text.clone().filter(|text| !text.is_empty());
        Self {
            base,
            env: recipe.map(|recipe| recipe.env.clone()).unwrap_or_default(),
            user: given(&config.user).unwrap_or_else(|| user.to_owned()),
            workdir: given(&config.working_dir),
        }
    }

    /// The values of variables in the place of their names in `text`.
    pub(crate) fn expanded(&self, text: &str) -> Result<String, ExpandError> {
        expand(text, &|name| self.env.get(name).or_else(|| self.base.get(name)).map(String::as_str))
    }

    /// `ENV`: of one step, later values see earlier ones.
    pub(crate) fn set(&mut self, pairs: &[(String, String)]) -> Result<(), String> {
        let size = |(name, value): (&String, &String)| name.len() + value.len();
        let mut total: usize = self.env.iter().map(size).sum();
        for (name, value) in pairs {
            let value = self.expanded(value).map_err(|error| format!("failed to set '{name}': {error}"))?;
            total += name.len() + value.len();
            if total > LARGEST {
                return Err(format!("failed to set '{name}': the environment is larger than {LARGEST} bytes"));
            }
            if let Some(former) = self.env.insert(name.clone(), value) {
                total -= name.len() + former.len();
            }
        }
        Ok(())
    }

    /// `WORKDIR`: relative to the one before.
    pub(crate) fn enter(&mut self, path: &str) -> Result<String, ExpandError> {
        let path = self.expanded(path)?;
        let path = match path.starts_with('/') {
            true => path,
            false => format!("{}/{path}", self.workdir.as_deref().unwrap_or("").trim_end_matches('/')),
        };
        let path = if path.len() > 1 { path.trim_end_matches('/').to_owned() } else { path };
        self.workdir = Some(path.clone());
        Ok(path)
    }

    /// What sandboxes of the template give their processes.
    pub(crate) fn config(&self, base: ImageConfig) -> ImageConfig {
        ImageConfig { user: Some(self.user.clone()), working_dir: self.workdir.clone(), ..base }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn context() -> Context {
        let config = ImageConfig { env: vec!["PATH=/bin".to_owned()], ..ImageConfig::default() };
        Context::new(&config, None, PROVISIONED_USER)
    }

    #[test]
    fn later_values_see_earlier_ones_and_the_image() {
        let mut context = context();
        let pairs = [("A", "1"), ("B", "$A/2"), ("PATH", "/opt:$PATH")];
        context.set(&pairs.map(|(name, value)| (name.to_owned(), value.to_owned()))).unwrap();
        assert_eq!((&*context.env["B"], &*context.env["PATH"]), ("1/2", "/opt:/bin"));
        assert_eq!(
            context.config(ImageConfig::default()).env,
            Vec::<String>::new(),
            "sandboxes have the image's alone"
        );
    }

    #[test]
    fn a_relative_workdir_continues_the_one_before() {
        let mut context = context();
        assert_eq!(context.enter("app").unwrap(), "/app");
        assert_eq!(context.enter("$NONE/src/").unwrap(), "/src");
        assert_eq!(context.enter("lib").unwrap(), "/src/lib");
        assert_eq!(context.enter("/").unwrap(), "/");
        assert_eq!(context.enter("x").unwrap(), "/x");
    }

    #[test]
    fn an_environment_does_not_grow_without_bound() {
        let mut context = context();
        let pair = |name: &str, value: &str| (name.to_owned(), value.to_owned());
        context.set(&[pair("A", &"x".repeat(1 << 16))]).unwrap();
        context.set(&[pair("A", "$A$A")]).unwrap();
        let error = context.set(&[pair("A", "$A$A")]).unwrap_err();
        assert!(error.contains("failed to set 'A'") && error.contains("longer than 131072 bytes"), "{error}");
        let many: Vec<_> = (0..60_000).map(|number| pair(&format!("v{number}"), "twenty bytes of text")).collect();
        let error = context.set(&many).unwrap_err();
        assert!(error.contains("larger than 1048576 bytes"), "{error}");
    }
}
