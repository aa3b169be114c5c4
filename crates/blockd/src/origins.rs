//! Where remote layers are: repositories of registries and folders of an object store. Each with its connections and
//! credentials, shared by all devices that read from it.

use std::collections::HashMap;
use std::io;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use aenv_block_client::{ErrorKind, ObjectAddressing, ObjectStoreSettings, RegistrySettings};
use aenv_block_source::{
    CredentialSource, Credentials, DockerConfig, FindBlobError, Network, ObjectBlob, Registry, RegistryOptions,
    RegistryUrlError, Source,
};
use aenv_objects::{
    Addressing, Key, ObjectUrl, OpenS3Error, ParseKeyError, ParseObjectUrlError, S3Config, S3Credentials, S3Store,
};

use crate::error::Refusal;

/// All places that were asked for so far.
#[derive(Debug)]
pub(crate) struct Origins {
    network: Arc<Network>,
    options: RegistryOptions,
    plain_http: Vec<String>,
    credentials: Arc<dyn CredentialSource>,
    objects: ObjectStoreSettings,
    /// By the URL as it is used.
    registries: Mutex<HashMap<String, Arc<Registry>>>,
    buckets: Mutex<HashMap<String, Arc<S3Store>>>,
}

/// A blob cannot be where it is said to be, or is not found there.
#[derive(Debug, thiserror::Error)]
pub(crate) enum OriginError {
    /// A registry cannot be asked.
    #[error(transparent)]
    Registry(#[from] RegistryUrlError),
    /// A registry does not tell how long it is.
    #[error("find it in its registry")]
    Find(#[source] FindBlobError),
    /// The place makes no sense.
    #[error(transparent)]
    ObjectUrl(#[from] ParseObjectUrlError),
    /// The digest makes no sense there.
    #[error(transparent)]
    Key(#[from] ParseKeyError),
    /// No object store is configured.
    #[error("{0} is in an object store, and none is configured")]
    NoStore(String),
    /// The object store's settings make no sense.
    #[error("use the object store")]
    Store(#[from] OpenS3Error),
    /// The object store does not tell how long it is.
    #[error("find it in its object store")]
    Object(#[source] io::Error),
}

impl Refusal for OriginError {
    fn kind(&self) -> ErrorKind {
        match self {
            Self::Find(_) | Self::Object(_) => ErrorKind::Remote,
            _ => ErrorKind::Invalid,
        }
    }
}

impl Origins {
    pub(crate) fn new(registry: &RegistrySettings, objects: &ObjectStoreSettings) -> io::Result<Self> {
        let options =
            RegistryOptions { patience: Duration::from_secs(registry.patience_secs), ..RegistryOptions::default() };
        Ok(Self {
            network: Network::start()?,
            options,
            plain_http: registry.plain_http.clone(),
            credentials: credentials(registry.docker_config.as_deref()),
            objects: objects.clone(),
            registries: Mutex::default(),
            buckets: Mutex::default(),
        })
    }

    /// The blob `digest` below `url`. Only if its `size` is not known, it is asked for.
    pub(crate) fn blob(&self, url: &str, digest: &str, size: Option<u64>) -> Result<Arc<dyn Source>, OriginError> {
        if ObjectUrl::is_meant_by(url) {
            return self.object(url, digest, size);
        }
        let registry = self.registry(url)?;
        let blob = match size {
            Some(size) => registry.blob(digest, size)?,
            None => registry.find_blob(digest).map_err(|error| match error {
                FindBlobError::Url(error) => error.into(),
                error => OriginError::Find(error),
            })?,
        };
        Ok(Arc::new(blob))
    }

    fn registry(&self, url: &str) -> Result<Arc<Registry>, RegistryUrlError> {
        let url = self.scheme(url.trim_end_matches('/'));
        let mut known = self.registries.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(registry) = known.get(&url) {
            return Ok(Arc::clone(registry));
        }
        let (network, credentials) = (Arc::clone(&self.network), Arc::clone(&self.credentials));
        let registry = Arc::new(Registry::new(network, &url, credentials, self.options.clone())?);
        known.insert(url, Arc::clone(&registry));
        Ok(registry)
    }

    /// URLs are made with https; some hosts do without.
    fn scheme(&self, url: &str) -> String {
        match url.strip_prefix("https://") {
            Some(rest) if self.plain_http.iter().any(|host| rest.split('/').next() == Some(host)) => {
                format!("http://{rest}")
            }
            _ => url.to_owned(),
        }
    }

    fn object(&self, url: &str, digest: &str, size: Option<u64>) -> Result<Arc<dyn Source>, OriginError> {
        let place: ObjectUrl = url.parse()?;
        let key: Key = match &place.key {
            Some(folder) => folder.join(digest)?,
            None => digest.parse()?,
        };
        let store = self.bucket(&place)?;
        let network = Arc::clone(&self.network);
        let blob = match size {
            Some(size) => ObjectBlob::new(network, store, key, size),
            None => ObjectBlob::find(network, store, key).map_err(OriginError::Object)?,
        };
        Ok(Arc::new(blob))
    }

    fn bucket(&self, place: &ObjectUrl) -> Result<Arc<S3Store>, OriginError> {
        if self.objects.endpoint.trim().is_empty() {
            return Err(OriginError::NoStore(place.to_string()));
        }
        let mut known = self.buckets.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(store) = known.get(&place.bucket) {
            return Ok(Arc::clone(store));
        }
        let store = Arc::new(S3Store::open(&self.s3_config(&place.bucket))?);
        known.insert(place.bucket.clone(), Arc::clone(&store));
        Ok(store)
    }

    fn s3_config(&self, bucket: &str) -> S3Config {
        let settings = &self.objects;
        let credentials = match (&settings.credential_process, &settings.access_key_id, &settings.access_key_secret) {
            (Some(command), _, _) => S3Credentials::Process(command.0.clone()),
            (None, Some(id), Some(secret)) => S3Credentials::Static {
                access_key_id: id.clone(),
                secret_access_key: secret.0.clone(),
                security_token: settings.security_token.as_ref().map(|token| token.0.clone()),
            },
            _ => S3Credentials::Anonymous,
        };
        let addressing = match settings.addressing_style {
            ObjectAddressing::Auto => Addressing::Auto,
            ObjectAddressing::Virtual => Addressing::Virtual,
            ObjectAddressing::Path => Addressing::Path,
        };
        S3Config {
            credentials,
            addressing,
            patience: self.options.patience,
            ..S3Config::new(&settings.endpoint, &settings.region, bucket)
        }
    }
}

/// Docker's `config.json`: the given file or directory, else where Docker itself has it.
fn credentials(given: Option<&Path>) -> Arc<dyn CredentialSource> {
    let path = match given {
        Some(path) if path.is_dir() => Some(path.join("config.json")),
        Some(path) => Some(path.to_owned()),
        None => DockerConfig::default_path(),
    };
    match path {
        Some(path) => Arc::new(DockerConfig::new(path)),
        None => Arc::new(Credentials::Anonymous),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_named_hosts_do_without_tls() {
        let settings = RegistrySettings { plain_http: vec!["localhost:5000".into()], ..RegistrySettings::default() };
        let origins = Origins::new(&settings, &ObjectStoreSettings::default()).unwrap();
        assert_eq!(origins.scheme("https://localhost:5000/v2/a/blobs"), "http://localhost:5000/v2/a/blobs");
        assert_eq!(origins.scheme("https://localhost:50001/v2/a/blobs"), "https://localhost:50001/v2/a/blobs");
        let first = origins.registry("https://localhost:5000/v2/a/blobs/").unwrap();
        assert!(Arc::ptr_eq(&first, &origins.registry("http://localhost:5000/v2/a/blobs").unwrap()));
        origins.registry("ftp://x").unwrap_err();
    }

    #[test]
    fn object_stores_need_to_be_configured() {
        let digest = format!("sha256:{}", "0".repeat(64));
        let refused = |settings: &ObjectStoreSettings, url: &str| {
            let origins = Origins::new(&RegistrySettings::default(), settings).unwrap();
            origins.blob(url, &digest, Some(4096)).map(|blob| blob.name().to_owned())
        };
        let none = ObjectStoreSettings::default();
        let error = refused(&none, "s3://bucket/layers").unwrap_err();
        assert_eq!(error.to_string(), "s3://bucket/layers is in an object store, and none is configured");
        let some = ObjectStoreSettings { endpoint: "http://localhost:9000".into(), region: "r".into(), ..none };
        assert_eq!(refused(&some, "s3://bucket/layers").unwrap(), format!("s3://bucket/layers/{digest}"));
        assert!(matches!(refused(&some, "s3:///x").unwrap_err(), OriginError::ObjectUrl(_)));
    }
}
