//! Default paths of the service.

/// Config file of the service that root runs.
pub const CONFIG: &str = "/etc/reaper/config.toml";
/// Directory of the lock and the socket.
pub const RUNTIME: &str = "/var/run/reaper";
/// Directory of the journal.
pub const STATE: &str = "/var/db/reaper";
/// Environment variable with the directory for a user's own sockets, which other users cannot enter.
pub const USER_RUNTIME: &str = "TMPDIR";
/// Maximum length of a socket path in bytes.
pub const SOCKET_MAX: usize = 103;
