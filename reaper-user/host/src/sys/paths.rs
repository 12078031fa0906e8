//! Where a service has its files, unless it is told otherwise.

/// Its lock and its socket.
pub const RUNTIME: &str = "/run/reaper";
/// Its journal.
pub const STATE: &str = "/var/lib/reaper";
/// The variable that names the directory for a user's own sockets.
pub const USER_RUNTIME: &str = "XDG_RUNTIME_DIR";
/// Longest path of a socket, in bytes.
pub const SOCKET_MAX: usize = 107;
