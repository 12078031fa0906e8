//! Detects listening sockets in a `struct socket_fdinfo` of bsd/sys/proc_info.h.

/// Byte offset of the address family.
const FAMILY: usize = 184;
/// Byte offset of the socket options.
const OPTIONS: usize = 188;

/// `AF_INET` and `AF_INET6` of macOS.
const FAMILIES: [i32; 2] = [2, 30];
/// `SO_ACCEPTCONN` of bsd/sys/socket.h: listen(2) was called.
const ACCEPTS: u16 = 2;

/// Returns whether the structure is of a listening IPv4 or IPv6 socket; `None` if it is incomplete.
pub fn listens(info: &[u8]) -> Option<bool> {
    let family = i32::from_ne_bytes(*info.get(FAMILY..)?.first_chunk()?);
    let options = u16::from_ne_bytes(*info.get(OPTIONS..)?.first_chunk()?);
    Some(FAMILIES.contains(&family) && options & ACCEPTS != 0)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn any_bytes_are_a_socket_or_incomplete(bytes in prop::collection::vec(any::<u8>(), 0..400)) {
            prop_assert_eq!(listens(&bytes).is_some(), bytes.len() >= OPTIONS + 2);
        }
    }

    #[test]
    fn only_listening_network_sockets_are_detected() {
        for (family, options, expected) in [
            (2_i32, 2_u16, true),
            (30, 6, true),
            (2, 4, false),
            // Unix sockets do not count.
            (1, 2, false),
        ] {
            let mut info = vec![0; 792];
            info[FAMILY..FAMILY + 4].copy_from_slice(&family.to_ne_bytes());
            info[OPTIONS..OPTIONS + 2].copy_from_slice(&options.to_ne_bytes());
            assert_eq!(listens(&info), Some(expected), "{family} {options}");
            assert_eq!(listens(&info[..OPTIONS + 1]), None);
        }
    }
}
