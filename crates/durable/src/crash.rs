//! Places where a test can have this process end, as `kill -9` would.

/// The environment variable that names the place.
#[cfg(debug_assertions)]
const VARIABLE: &str = "AENV_CRASH_AT";

/// Ends this process at once, without any destructor, if `AENV_CRASH_AT` is `place`. What is tried by it is the next start.
/// In a build without debug assertions this is nothing.
pub fn crash_point(place: &str) {
    #[cfg(debug_assertions)]
    {
        static PLACE: std::sync::OnceLock<Option<String>> = std::sync::OnceLock::new();
        if PLACE.get_or_init(|| std::env::var(VARIABLE).ok()).as_deref() == Some(place) {
            std::process::abort();
        }
    }
    #[cfg(not(debug_assertions))]
    let _ = place;
}
