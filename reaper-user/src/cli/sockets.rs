//! Finds the sockets of running services.

use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};

use nix::errno::Errno;
use nix::fcntl::{FcntlArg, OFlag, fcntl};
use nix::sys::socket::{AddressFamily, SockFlag, SockType, UnixAddr, connect, socket};
use nix::unistd::geteuid;

use super::{ServiceArgs, user};
use crate::api;
use reaper_host::sys::paths;

/// Environment variable with the socket of the service that commands query.
const VARIABLE: &str = "REAPER_SOCKET";
/// Directory with the runtime directories of all users.
const USERS: &str = "/run/user";
/// Maximum number of sockets in a list.
const LISTED_MAX: usize = 8;

/// Returns the socket that a user has named with `--socket`, or otherwise with `REAPER_SOCKET`.
pub(super) fn named(argument: Option<&Path>) -> Option<PathBuf> {
    let variable = || std::env::var_os(VARIABLE).filter(|path| !path.is_empty());
    argument
        .map(Path::to_owned)
        .or_else(|| Some(variable()?.into()))
}

/// Returns the socket of the service that the arguments select.
pub(super) fn selected(service: &ServiceArgs) -> PathBuf {
    named(service.socket.as_deref()).unwrap_or_else(default)
}

/// Returns the socket of the host's service, or of the user's own service if only that runs.
pub(super) fn default() -> PathBuf {
    let host = Path::new(paths::RUNTIME).join(api::SOCKET);
    let own = user::runtime_dir().map(|directory| directory.join(api::SOCKET));
    match own.filter(|own| own.exists()) {
        Some(own) if !is_live(&host) && is_live(&own) => own,
        _ => host,
    }
}

/// Returns the command that shows what the service on a socket watches.
pub(super) fn tree_command(socket: &Path) -> String {
    match socket == default() {
        true => "reaper tree".into(),
        false => format!("reaper tree --socket {}", socket.display()),
    }
}

/// Returns the sockets of running services to which this user may connect: of the host, of this user, and those beside
/// `asked`. For root also those of other users.
pub(super) fn live(asked: &Path) -> Vec<PathBuf> {
    let mut directories = vec![PathBuf::from(paths::RUNTIME)];
    directories.extend(user::runtime_dir());
    directories.extend(asked.parent().map(Path::to_owned));
    if geteuid().is_root() {
        let users = entries(Path::new(USERS));
        directories.extend(users.map(|directory| directory.join("reaper")));
    }
    live_in(&directories)
}

fn live_in(directories: &[PathBuf]) -> Vec<PathBuf> {
    let all = directories
        .iter()
        .map(|directory| match directory.as_os_str().is_empty() {
            true => Path::new("."),
            false => directory,
        });
    let mut sockets: Vec<_> = all
        .flat_map(entries)
        .filter(|path| has_name(path))
        .collect();
    sockets.sort_unstable();
    sockets.dedup();
    let live = sockets.into_iter().filter(|path| is_live(path));
    live.take(LISTED_MAX).collect()
}

/// Returns the paths in a directory; none if it cannot be listed.
fn entries(directory: &Path) -> impl Iterator<Item = PathBuf> + use<> {
    let entries = directory.read_dir().into_iter().flatten().flatten();
    entries.map(|entry| entry.path())
}

/// Returns whether a file has the name of a service's socket.
fn has_name(path: &Path) -> bool {
    let name = path.file_name().and_then(|name| name.to_str());
    name.is_some_and(|name| name.starts_with("reaper") && name.ends_with(".sock"))
}

/// Returns whether a process listens on a socket and this user may connect to it. Does not wait.
fn is_live(path: &Path) -> bool {
    let connected = || {
        let (kind, flags) = (SockType::Stream, SockFlag::empty());
        let socket = socket(AddressFamily::Unix, kind, flags, None)?;
        fcntl(&socket, FcntlArg::F_SETFL(OFlag::O_NONBLOCK))?;
        connect(socket.as_raw_fd(), &UnixAddr::new(path)?)
    };
    // EAGAIN: it listens, and the queue of connections is full.
    matches!(connected(), Ok(()) | Err(Errno::EAGAIN))
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixListener;

    use super::*;

    #[test]
    fn only_live_sockets_of_services_are_listed() {
        let dir = tempfile::tempdir().unwrap();
        let path = |name: &str| dir.path().join(name);
        let listen = |name: &str| UnixListener::bind(path(name)).unwrap();
        let live = [listen("reaper.sock"), listen("reaper-7-7.sock")];
        drop(listen("reaper-8-8.sock"));
        let _other = listen("other.sock");
        std::fs::write(path("reaper-9.sock"), "a file").unwrap();
        let directories = [dir.path().to_owned(), path("none"), dir.path().to_owned()];
        let expected = ["reaper-7-7.sock", "reaper.sock"].map(path);
        assert_eq!(live_in(&directories), expected);
        drop(live);
        assert!(live_in(&directories).is_empty());
    }

    #[test]
    fn tree_command_names_a_socket_that_is_not_the_default() {
        assert_eq!(tree_command(&default()), "reaper tree");
        let other = tree_command(Path::new("/x/reaper-7-7.sock"));
        assert_eq!(other, "reaper tree --socket /x/reaper-7-7.sock");
    }

    #[test]
    fn argument_precedes_the_variable() {
        let argument = Path::new("/x.sock");
        assert_eq!(named(Some(argument)).as_deref(), Some(argument));
    }
}
