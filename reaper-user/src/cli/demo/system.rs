//! What of the demo depends on the system.

/// Starts a shell in a session of its own.
pub const OWN_SESSION: &str = "exec setsid sh -c 'echo $$; exec sleep 61'";
/// What the demo's config has besides.
pub const CONFIG: &str = "";
