//! What of the demo depends on the system.

/// Starts a shell in a session of its own.
pub const OWN_SESSION: &str =
    "exec perl -e 'use POSIX; setsid; exec @ARGV' sh -c 'echo $$; exec sleep 61'";
/// What the demo's config has besides: of the system's own programs no environment is shown, in which they could be said
/// to be kept.
pub const CONFIG: &str = "honor_keep = false\n";
