//! Where a service has its files, unless it is told otherwise.

/// Its lock and its socket.
pub const RUNTIME: &str = "/var/run/reaper";
/// Its journal.
pub const STATE: &str = "/var/db/reaper";
/// The variable that names the directory for a user's own sockets: nobody else may enter that one.
pub const USER_RUNTIME: &str = "TMPDIR";
/// Longest path of a socket, in bytes.
pub const SOCKET_MAX: usize = 103;
