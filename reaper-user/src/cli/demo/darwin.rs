//! macOS parts of the demo.

/// Starts a shell in a new session.
pub const OWN_SESSION: &str =
    "exec perl -e 'use POSIX; setsid; exec @ARGV' sh -c 'echo $$; exec sleep 61'";
/// More settings for the demo's config. macOS shows no environment of the system's programs, so `honor_keep` would
/// keep them all.
pub const CONFIG: &str = "honor_keep = false\n";
