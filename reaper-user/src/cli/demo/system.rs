//! Linux parts of the demo.

/// Starts a shell in a new session.
pub const OWN_SESSION: &str = "exec setsid sh -c 'echo $$; exec sleep 61'";
/// More settings for the demo's config.
pub const CONFIG: &str = "";
