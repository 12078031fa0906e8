//! What the kernel's connector writes, as bytes: none of it is trusted to be whole.
//!
//! Netlink messages, each with one of the connector in it, and in that a `struct proc_event` of
//! include/uapi/linux/cn_proc.h; all in the byte order of this machine.

use reaper_common::DecodeError;

use reaper_model::event::Uids;

/// Type of the netlink messages that the connector sends.
const DONE: u16 = libc::NLMSG_DONE as u16;
/// Length of `struct nlmsghdr` and of `struct cn_msg`.
const NETLINK_HEADER: usize = 16;
const CONNECTOR_HEADER: usize = 20;
/// Index and value by which the connector knows its users.
const PROCESSES: [u32; 2] = [libc::CN_IDX_PROC, libc::CN_VAL_PROC];

/// One message of the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Message {
    /// Each processor counts what it sends.
    pub cpu: u32,
    pub number: u32,
    /// Nanoseconds on the monotonic clock.
    pub time: u64,
    pub what: ConnectorEvent,
}

/// What it tells. Processes are named by their pids, threads of them by their own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ConnectorEvent {
    /// The answer to a listener, by the number that it gave with its wish.
    Answer {
        to: u32,
        errno: u32,
    },
    /// A process, not merely a thread, was made.
    Fork {
        parent: u32,
        child: u32,
    },
    Exec {
        process: u32,
    },
    /// A thread has other user ids.
    Uids {
        thread: u32,
        process: u32,
        uids: Uids,
    },
    /// A thread is gone.
    Exit {
        thread: u32,
        process: u32,
        /// As `wait(2)` has it.
        status: u32,
        /// 0 where the kernel does not tell.
        parent: u32,
    },
    /// Nothing that matters here.
    Other,
}

/// The messages of a datagram, up to the first that is none.
pub fn messages(mut datagram: &[u8]) -> impl Iterator<Item = Result<Message, DecodeError>> {
    std::iter::from_fn(move || {
        while !datagram.is_empty() {
            let message = take_message(&mut datagram).transpose();
            if matches!(message, Some(Err(_))) {
                // Where the next one would begin is not known.
                datagram = &[];
            }
            if message.is_some() {
                return message;
            }
        }
        None
    })
}

/// Takes one from the front; `None` if it is another's than the process connector's.
fn take_message(datagram: &mut &[u8]) -> Result<Option<Message>, DecodeError> {
    let mut header = *datagram;
    let len = number(&mut header)? as usize;
    let kind = u16::from_ne_bytes(bytes(&mut header)?);
    if len < NETLINK_HEADER {
        return Err(DecodeError::Length(len as u32));
    }
    let message = datagram.get(..len).ok_or(DecodeError::Short {
        have: datagram.len(),
        need: len,
    })?;
    // Padded to four bytes, but for the last.
    let next = len.checked_next_multiple_of(4).unwrap_or(len);
    *datagram = datagram.get(next..).unwrap_or_default();
    if kind != DONE {
        return Ok(None);
    }
    let mut rest = &message[NETLINK_HEADER..];
    let have = rest.len();
    let user = [number(&mut rest)?, number(&mut rest)?];
    let (sequence, after) = (number(&mut rest)?, number(&mut rest)?);
    let len = u16::from_ne_bytes(bytes(&mut rest)?);
    let _flags: [u8; 2] = bytes(&mut rest)?;
    if user != PROCESSES {
        return Ok(None);
    }
    let event = rest.get(..usize::from(len)).ok_or(DecodeError::Short {
        have,
        need: CONNECTOR_HEADER + usize::from(len),
    })?;
    event_of(sequence, after, event).map(Some)
}

fn event_of(sequence: u32, after: u32, mut bytes_of_it: &[u8]) -> Result<Message, DecodeError> {
    let rest = &mut bytes_of_it;
    let (kind, cpu) = (number(rest)?, number(rest)?);
    let time = u64::from_ne_bytes(bytes(rest)?);
    let what = match kind {
        libc::PROC_EVENT_NONE => ConnectorEvent::Answer {
            to: after.wrapping_sub(1),
            errno: number(rest)?,
        },
        libc::PROC_EVENT_FORK => {
            let [_, parent, child_thread, child] = pids(rest)?;
            if child_thread == child {
                somebody(child)?;
                ConnectorEvent::Fork { parent, child }
            } else {
                ConnectorEvent::Other
            }
        }
        libc::PROC_EVENT_EXEC => {
            let [_, process] = pids(rest)?;
            somebody(process)?;
            ConnectorEvent::Exec { process }
        }
        libc::PROC_EVENT_UID => {
            let [thread, process, real, effective] = pids(rest)?;
            somebody(process)?;
            let uids = Uids { real, effective };
            ConnectorEvent::Uids {
                thread,
                process,
                uids,
            }
        }
        libc::PROC_EVENT_EXIT => {
            let [thread, process, status, _signal] = pids(rest)?;
            somebody(process)?;
            // Before 4.18 it ends here.
            let parent = pids(rest).map_or(0, |[_, parent]| parent);
            ConnectorEvent::Exit {
                thread,
                process,
                status,
                parent,
            }
        }
        _ => ConnectorEvent::Other,
    };
    Ok(Message {
        cpu,
        number: sequence,
        time,
        what,
    })
}

fn somebody(pid: u32) -> Result<(), DecodeError> {
    if pid == 0 {
        return Err(DecodeError::Nobody);
    }
    Ok(())
}

/// The next numbers.
fn pids<const N: usize>(rest: &mut &[u8]) -> Result<[u32; N], DecodeError> {
    let mut pids = [0; N];
    for pid in &mut pids {
        *pid = number(rest)?;
    }
    Ok(pids)
}

fn number(rest: &mut &[u8]) -> Result<u32, DecodeError> {
    bytes(rest).map(u32::from_ne_bytes)
}

fn bytes<const N: usize>(rest: &mut &[u8]) -> Result<[u8; N], DecodeError> {
    let short = DecodeError::Short {
        have: rest.len(),
        need: N,
    };
    let (bytes, tail) = rest.split_first_chunk().ok_or(short)?;
    *rest = tail;
    Ok(*bytes)
}

/// The message by which a listener begins or ends listening, under a number of its own.
pub fn subscription(begin: bool, own: u32) -> Vec<u8> {
    let wish = if begin {
        libc::PROC_CN_MCAST_LISTEN
    } else {
        libc::PROC_CN_MCAST_IGNORE
    };
    let len = CONNECTOR_HEADER + size_of_val(&wish);
    let mut message = Vec::with_capacity(NETLINK_HEADER + len);
    let mut add = |bytes: &[u8]| message.extend_from_slice(bytes);
    add(&((NETLINK_HEADER + len) as u32).to_ne_bytes());
    add(&DONE.to_ne_bytes());
    // Flags, number and sender, which the connector does not ask for.
    add(&[0; 10]);
    // What it takes for a sequence it replaces by its own count, and gives the other back with one added.
    for number in [PROCESSES[0], PROCESSES[1], 0, own] {
        add(&number.to_ne_bytes());
    }
    add(&(size_of_val(&wish) as u16).to_ne_bytes());
    add(&[0; 2]);
    add(&wish.to_ne_bytes());
    message
}
