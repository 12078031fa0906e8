//! Unix sockets of the service's network namespace: which listen, and which are connected to a display server.
//!
//! The socket that a display server has accepted has the name of its listening socket, and `sock_diag(7)` reports the
//! socket at its other end. The accepted socket is in the network namespace of the client, so those of other namespaces
//! are missing.

use std::collections::{HashMap, HashSet};
use std::io;
use std::path::Path;
use std::sync::{Arc, Mutex};

use super::netlink::{ESTABLISHED, LISTEN, dump, number};
use super::sockets::rows;
use crate::source::procfs::parse::{self, words};
use crate::sys;

/// Time in ns for which the sockets are reused.
const ROUND: u64 = 10_000_000;
/// Flags of `unix_diag_req` (include/uapi/linux/unix_diag.h): report the name, and the socket at the other end.
const SHOW: u32 = 1 | 4;
/// Attributes of an answer.
const NAME: u16 = 0;
const PEER: u16 = 2;
/// Offset of `udiag_state` and `udiag_ino` in a `unix_diag_msg`, and its length.
const STATE: usize = 2;
const INODE: usize = 4;
const MESSAGE: usize = 16;
/// `TCP_LISTEN`.
const LISTENS: u8 = 10;

/// Unix sockets, by their inode numbers.
#[derive(Debug, Default)]
pub(super) struct LocalTable {
    /// Listening sockets.
    pub(super) listening: HashSet<u64>,
    /// Sockets of clients of a display server, with the name of the display such as `X0` or `wayland-1`. `None` if the
    /// kernel does not report the other end of a socket.
    pub(super) windows: Option<HashMap<u64, Box<[u8]>>>,
    /// Whether a display server listens.
    pub(super) has_display: bool,
}

/// Last result, and the start of its read (ns since boot).
static LAST: Mutex<Option<(u64, Arc<LocalTable>)>> = Mutex::new(None);

/// Reads the sockets, or reuses the last result if it is from after `requested` (ns since boot) and at most 10 ms old.
///
/// # Errors
/// They cannot be read.
pub(super) fn table(requested: u64) -> io::Result<Arc<LocalTable>> {
    // Waiting for the lock would look like a stuck read, because its holder may wait for a processor.
    let Ok(mut last) = LAST.try_lock() else {
        return read().map(Arc::new);
    };
    let now = sys::boot_time();
    let oldest = requested.max(now.saturating_sub(ROUND));
    if let Some((at, table)) = &*last
        && *at >= oldest
    {
        return Ok(Arc::clone(table));
    }
    let table = Arc::new(read()?);
    *last = Some((now, Arc::clone(&table)));
    Ok(table)
}

/// Reads the sockets from `sock_diag(7)`. A kernel may lack its module for Unix sockets; then only the listening ones
/// are read, from /proc.
fn read() -> io::Result<LocalTable> {
    read_ends().or_else(|_| read_listening())
}

/// Reads the listening sockets from `net/unix` in /proc.
fn read_listening() -> io::Result<LocalTable> {
    let mut table = LocalTable::default();
    for row in rows(Path::new("/proc/self/net/unix"))? {
        let words: Vec<&[u8]> = words(&row).collect();
        // Columns: number, references, protocol, flags, type, state, inode, and a path if bound. The flag is
        // `__SO_ACCEPTCON` of include/linux/net.h.
        if let [_, _, _, b"00010000", _, _, inode, path @ ..] = &words[..] {
            table.listening.extend(parse::number::<u64>(inode));
            table.has_display |= path.first().is_some_and(|path| display_of(path).is_some());
        }
    }
    Ok(table)
}

/// Returns whether a connection to a display server is in a table in the format of `net/unix`.
///
/// # Errors
/// The table cannot be read.
pub(super) fn has_window(table: &Path) -> io::Result<bool> {
    let is_window = |row: &Vec<u8>| {
        let words: Vec<&[u8]> = words(row).collect();
        // Columns as above, with the state of a connected socket.
        matches!(&words[..], [_, _, _, _, _, b"03", _, path, ..] if display_of(path).is_some())
    };
    Ok(rows(table)?.iter().any(is_window))
}

/// Reads the sockets from `sock_diag(7)`, with the clients of a display server.
fn read_ends() -> nix::Result<LocalTable> {
    let mut request = vec![libc::AF_UNIX as u8, 0, 0, 0];
    for word in [ESTABLISHED | LISTEN, 0, SHOW, u32::MAX, u32::MAX] {
        request.extend(word.to_ne_bytes());
    }
    let mut table = LocalTable {
        windows: Some(HashMap::new()),
        ..LocalTable::default()
    };
    dump(&[request], |message| add(&mut table, message))?;
    Ok(table)
}

/// Adds one socket to the table.
fn add(table: &mut LocalTable, message: &[u8]) -> nix::Result<()> {
    let inode = number(message, INODE)?;
    let listens = message.get(STATE) == Some(&LISTENS);
    let (mut display, mut peer) = (None, None);
    let mut rest = message.get(MESSAGE..).unwrap_or_default();
    // `nlattr`: length with this header, type, data, padding to 4 bytes.
    while let Some(([a, b, c, d], data)) = rest.split_first_chunk::<4>() {
        let len = usize::from(u16::from_ne_bytes([*a, *b])).max(4);
        match u16::from_ne_bytes([*c, *d]) {
            NAME => display = display_of(&data[..data.len().min(len - 4)]),
            PEER => peer = Some(number(data, 0)?),
            _ => {}
        }
        rest = rest.get(len.next_multiple_of(4)..).unwrap_or_default();
    }
    if listens {
        table.listening.insert(inode.into());
        table.has_display |= display.is_some();
    } else if let (Some(display), Some(peer)) = (display, peer) {
        let windows = table.windows.get_or_insert_default();
        windows.insert(peer.into(), display.into());
    }
    Ok(())
}

/// Returns the name of the display that a socket of this name serves: `X0` of `/tmp/.X11-unix/X0`, which may be abstract
/// and so begin with NUL, or `wayland-0` in any directory. `None` for any other socket.
fn display_of(name: &[u8]) -> Option<&[u8]> {
    let end = name.iter().rposition(|byte| *byte != 0)?;
    let mut parts = name[..=end].rsplit(|byte| *byte == b'/');
    let (file, directory) = (parts.next()?, parts.next()?);
    let is_number = |rest: &[u8]| !rest.is_empty() && rest.iter().all(u8::is_ascii_digit);
    let is_x11 = directory == b".X11-unix" && file.strip_prefix(b"X").is_some_and(is_number);
    let is_wayland = file.strip_prefix(b"wayland-").is_some_and(is_number);
    (is_x11 || is_wayland).then_some(file)
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;
    use std::os::unix::net::{UnixListener, UnixStream};

    use proptest::prelude::*;

    use super::*;
    use crate::damage::arbitrary_bytes;

    #[test]
    fn clients_of_displays_are_found_by_inode() {
        let inode = |socket: &dyn AsFd| nix::sys::stat::fstat(socket.as_fd()).unwrap().st_ino;
        let dir = tempfile::tempdir().unwrap();
        std::fs::create_dir(dir.path().join(".X11-unix")).unwrap();
        for (path, display) in [
            (".X11-unix/X7", Some("X7")),
            ("wayland-3", Some("wayland-3")),
            (".X11-unix/other", None),
            ("bus", None),
        ] {
            let listener = UnixListener::bind(dir.path().join(path)).unwrap();
            let client = UnixStream::connect(dir.path().join(path)).unwrap();
            let (server, _) = listener.accept().unwrap();
            let table = table(sys::boot_time()).unwrap();
            let windows = table.windows.as_ref().expect("sock_diag of Unix sockets");
            let found = windows.get(&inode(&client)).map(|name| &name[..]);
            assert_eq!(found, display.map(str::as_bytes), "{path}");
            assert!(table.listening.contains(&inode(&listener)));
            assert!(table.has_display || display.is_none());
            assert!(!table.listening.contains(&inode(&client)));
            assert!(!windows.contains_key(&inode(&server)));
            assert!(display.is_none() || has_window(Path::new("/proc/self/net/unix")).unwrap());
            let from_proc = read_listening().unwrap();
            assert!(from_proc.listening.contains(&inode(&listener)));
            assert!(!from_proc.listening.contains(&inode(&client)));
            assert!(from_proc.has_display || display.is_none());
        }
    }

    #[test]
    fn display_has_the_name_of_its_socket() {
        for (name, display) in [
            (&b"/tmp/.X11-unix/X0"[..], Some(&b"X0"[..])),
            (b"\0/tmp/.X11-unix/X12", Some(b"X12")),
            (b"/run/user/1000/wayland-0\0", Some(b"wayland-0")),
            (b"/run/user/1000/wayland-0.lock", None),
            (b"/run/user/1000/bus", None),
            (b"/tmp/X0", None),
            (b"wayland-0", None),
            (b"", None),
        ] {
            assert_eq!(display_of(name), display);
        }
    }

    proptest! {
        #[test]
        fn any_message_can_be_read(bytes in arbitrary_bytes([1, 0, 1, 0, 7, 0, 0, 0])) {
            let mut table = LocalTable::default();
            let _ = add(&mut table, &bytes);
            prop_assert!(table.windows.map_or(0, |all| all.len()) + table.listening.len() <= 1);
        }
    }
}
