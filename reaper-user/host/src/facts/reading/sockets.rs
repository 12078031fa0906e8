//! Reads the socket tables in `/proc/PID/net`: listening and connected sockets.

use std::collections::{HashMap, HashSet};
use std::fs::File;
use std::io::{self, BufRead, BufReader, Read};
use std::path::Path;

use crate::source::procfs::parse::{number, words};

/// Maximum number of bytes read from a table.
const SOCKETS_MAX: u64 = 16 << 20;
/// State of a listening socket in the tables.
const LISTEN: &[u8] = b"0A";
/// State of a connected socket.
const ESTABLISHED: &[u8] = b"01";
/// State of a socket whose peer sends nothing more, but may wait for an answer.
const CLOSE_WAIT: &[u8] = b"08";

/// Returns the connections of a process with the sockets `own` (inode numbers), as two lists of inode numbers.
///
/// - The client's socket of each accepted connection; 0 if unknown, as for all Unix sockets. A TCP connection counts as
///   accepted if a socket listens on its local port.
/// - Each other connected socket of the process.
///
/// `net` is the directory of the socket tables.
///
/// # Errors
/// A table cannot be read, or is too long.
pub(super) fn connections(net: &Path, own: &HashSet<u64>) -> io::Result<(Vec<u64>, Vec<u64>)> {
    let (mut clients, mut others) = (Vec::new(), Vec::new());
    for row in rows(&net.join("unix"))? {
        let words: Vec<&[u8]> = words(&row).collect();
        // Columns: number, references, protocol, flags, type, state, inode, and a path if bound.
        let [_, _, _, _, _, b"03", inode, path @ ..] = &words[..] else {
            continue;
        };
        let Some(inode) = number::<u64>(inode).filter(|inode| own.contains(inode)) else {
            continue;
        };
        // An accepted socket has the path of the listening one; a client's socket has none.
        match path.is_empty() {
            true => others.push(inode),
            false => clients.push(0),
        }
    }
    let mut listening: HashSet<Vec<u8>> = HashSet::new();
    let mut connected: HashMap<(Vec<u8>, Vec<u8>), u64> = HashMap::new();
    for row in rows(&net.join("tcp"))?
        .into_iter()
        .chain(rows(&net.join("tcp6"))?)
    {
        let words: Vec<&[u8]> = words(&row).collect();
        let [_, local, remote, state, _, _, _, _, _, inode, ..] = &words[..] else {
            continue;
        };
        match *state {
            LISTEN => drop(listening.insert(port(local).to_vec())),
            ESTABLISHED | CLOSE_WAIT => {
                let ends = (as_v4(local).to_vec(), as_v4(remote).to_vec());
                connected.insert(ends, number(inode).unwrap_or(0));
            }
            _ => {}
        }
    }
    for ((local, remote), inode) in connected.iter().filter(|(_, inode)| own.contains(*inode)) {
        if listening.contains(port(local)) {
            let other_end = connected.get(&(remote.clone(), local.clone()));
            clients.push(other_end.copied().unwrap_or(0));
        } else {
            others.push(*inode);
        }
    }
    Ok((clients, others))
}

/// Returns the rows of a socket table without its heading; empty if the kernel has no such table.
///
/// # Errors
/// The table cannot be read, or is too long. The rest could contain any connection.
pub(super) fn rows(table: &Path) -> io::Result<Vec<Vec<u8>>> {
    let file = match File::open(table) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        file => file?,
    };
    let mut bytes = Vec::new();
    file.take(SOCKETS_MAX + 1).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > SOCKETS_MAX {
        return Err(io::ErrorKind::FileTooLarge.into());
    }
    let lines = bytes.split(|byte| *byte == b'\n').skip(1);
    Ok(lines.map(<[u8]>::to_vec).collect())
}

/// Returns the port in an address like `0100007F:1F90`.
fn port(address: &[u8]) -> &[u8] {
    address
        .rsplit(|byte| *byte == b':')
        .next()
        .unwrap_or_default()
}

/// Converts an IPv4-mapped IPv6 address to the format of the IPv4 table. Returns any other address as it is.
fn as_v4(address: &[u8]) -> &[u8] {
    address
        .strip_prefix(b"0000000000000000FFFF0000")
        .unwrap_or(address)
}

/// Returns whether one of the sockets (inode numbers) is listening, by a table in the format of `net/tcp`.
///
/// # Errors
/// The table cannot be read.
pub(super) fn listens(table: &Path, sockets: &HashSet<u64>) -> io::Result<bool> {
    Ok(listening_ports(table, sockets)?
        .next()
        .transpose()?
        .is_some())
}

/// Returns the ports of those of the sockets (inode numbers) that listen, by a table in the format of `net/tcp`.
///
/// # Errors
/// The table cannot be read.
pub(super) fn listening_ports<'a>(
    table: &Path,
    sockets: &'a HashSet<u64>,
) -> io::Result<impl Iterator<Item = io::Result<u16>> + use<'a>> {
    let table = BufReader::new(File::open(table)?.take(SOCKETS_MAX));
    // The kernel lists listening sockets first. The many others need not be read.
    let rows = table.split(b'\n').skip(1).map_while(|line| match line {
        Ok(line) => {
            let mut words = words(&line).skip(1);
            let local = port(words.next()?).to_vec();
            (words.nth(1)? == LISTEN).then(|| Ok((local, words.nth(5).and_then(number::<u64>))))
        }
        Err(error) => Some(Err(error)),
    });
    Ok(rows.filter_map(|row| match row {
        Ok((port, inode)) => {
            let port = u16::from_str_radix(str::from_utf8(&port).ok()?, 16).ok()?;
            sockets.contains(&inode?).then_some(Ok(port))
        }
        Err(error) => Some(Err(error)),
    }))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::damage::arbitrary_bytes;

    const TCP: &[u8] = b"  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n   \
        0: 0100007F:1F90 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 4242 1 0 100 0 0 10 0\n   \
        1: 0100007F:1F90 0100007F:A1B2 01 00000000:00000000 00:00000000 00000000     0        0 4243 1 0 20 4 30 10 -1\n";

    proptest! {
        // Each case creates a file.
        #![proptest_config(ProptestConfig::with_cases(64))]

        #[test]
        fn any_table_of_sockets_can_be_read(bytes in arbitrary_bytes(TCP)) {
            let file = tempfile::NamedTempFile::new().unwrap();
            std::fs::write(file.path(), &bytes).unwrap();
            let listens = listens(file.path(), &HashSet::from([4242])).unwrap();
            prop_assert!(!listens || bytes.windows(4).any(|word| word == b"4242"));
        }
    }

    #[test]
    fn listening_sockets_are_found_in_the_table() {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), TCP).unwrap();
        for (inode, expected) in [(4242, true), (4243, false), (0, false)] {
            let sockets = HashSet::from([inode]);
            let found = listens(file.path(), &sockets).unwrap();
            assert_eq!(found, expected, "{inode}");
            let ports: io::Result<Vec<u16>> =
                listening_ports(file.path(), &sockets).unwrap().collect();
            assert_eq!(ports.unwrap().first() == Some(&8080), expected, "{inode}");
        }
    }
}
