//! Default paths of the service.

/// Config file of the service that root runs.
pub const CONFIG: &str = "/etc/reaper/config.toml";
/// Directory of the lock and the socket.
pub const RUNTIME: &str = "/run/reaper";
/// Directory of the journal.
pub const STATE: &str = "/var/lib/reaper";
/// Environment variable with the directory for a user's own sockets.
pub const USER_RUNTIME: &str = "XDG_RUNTIME_DIR";
/// Maximum length of a socket path in bytes.
pub const SOCKET_MAX: usize = 107;
