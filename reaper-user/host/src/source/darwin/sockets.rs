//! Whether a socket listens, by a `struct socket_fdinfo` of bsd/sys/proc_info.h: bytes in, answer out.

/// Where in it stand the family and the options.
const FAMILY: usize = 184;
const OPTIONS: usize = 188;

/// `AF_INET` and `AF_INET6` of this system.
const FAMILIES: [i32; 2] = [2, 30];
/// `SO_ACCEPTCONN` of bsd/sys/socket.h: somebody has called listen(2).
const ACCEPTS: u16 = 2;

/// `None` where too little of it is there.
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
        fn any_bytes_are_a_socket_or_too_few(bytes in prop::collection::vec(any::<u8>(), 0..400)) {
            prop_assert_eq!(listens(&bytes).is_some(), bytes.len() >= OPTIONS + 2);
        }
    }

    #[test]
    fn only_of_the_network_and_only_when_it_accepts() {
        for (family, options, expected) in [
            (2_i32, 2_u16, true),
            (30, 6, true),
            (2, 4, false),
            // A local one speaks for nobody.
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
