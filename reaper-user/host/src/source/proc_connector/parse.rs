//! Parses the datagrams of the proc connector, without trusting them to be complete.
//!
//! A netlink message holds a connector message, which holds a `struct proc_event` of include/uapi/linux/cn_proc.h. All
//! numbers are in the machine's byte order.

use reaper_common::DecodeError;

use reaper_model::event::Uids;

/// Type of the netlink messages that the connector sends.
const DONE: u16 = libc::NLMSG_DONE as u16;
/// Length of `struct nlmsghdr` and of `struct cn_msg`.
const NETLINK_HEADER: usize = 16;
const CONNECTOR_HEADER: usize = 20;
/// Index and value of the proc connector in `struct cn_msg`.
const PROCESSES: [u32; 2] = [libc::CN_IDX_PROC, libc::CN_VAL_PROC];

/// A message of the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Message {
    /// Processor that sent it.
    pub cpu: u32,
    /// Sequence number. Each processor has its own sequence.
    pub number: u32,
    /// Nanoseconds of CLOCK_MONOTONIC.
    pub time: u64,
    pub what: ConnectorEvent,
}

/// Event in a message. Processes are named by their pids, threads by their thread ids.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ConnectorEvent {
    /// The answer to a subscription: the number `to` of its request, and `errno`, which is 0 for success.
    Answer {
        to: u32,
        errno: u32,
    },
    /// A process was forked. New threads are [`ConnectorEvent::Other`].
    Fork {
        parent: u32,
        child: u32,
    },
    Exec {
        process: u32,
    },
    /// The user ids of a thread have changed.
    Uids {
        thread: u32,
        process: u32,
        uids: Uids,
    },
    /// A thread has exited.
    Exit {
        thread: u32,
        process: u32,
        /// Wait status as in `wait(2)`.
        status: u32,
        /// Pid of the parent; 0 before Linux 4.18.
        parent: u32,
    },
    /// An event that this source ignores.
    Other,
}

/// Returns the messages of a datagram, up to the first malformed one, for which it returns an error. Skips messages
/// that are not of the proc connector.
pub fn messages(mut datagram: &[u8]) -> impl Iterator<Item = Result<Message, DecodeError>> {
    std::iter::from_fn(move || {
        while !datagram.is_empty() {
            let message = take_message(&mut datagram).transpose();
            if matches!(message, Some(Err(_))) {
                // The start of the next message is unknown.
                datagram = &[];
            }
            if message.is_some() {
                return message;
            }
        }
        None
    })
}

/// Removes the first message and parses it. Returns `None` if it is not one of the proc connector.
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
    // All but the last are padded to four bytes.
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

/// Parses a `struct proc_event`. `sequence` and `after` are the fields `seq` and `ack` of its connector message.
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
                check_pid(child)?;
                ConnectorEvent::Fork { parent, child }
            } else {
                ConnectorEvent::Other
            }
        }
        libc::PROC_EVENT_EXEC => {
            let [_, process] = pids(rest)?;
            check_pid(process)?;
            ConnectorEvent::Exec { process }
        }
        libc::PROC_EVENT_UID => {
            let [thread, process, real, effective] = pids(rest)?;
            check_pid(process)?;
            let uids = Uids { real, effective };
            ConnectorEvent::Uids {
                thread,
                process,
                uids,
            }
        }
        libc::PROC_EVENT_EXIT => {
            let [thread, process, status, _signal] = pids(rest)?;
            check_pid(process)?;
            // Before Linux 4.18 the event ends here.
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

fn check_pid(pid: u32) -> Result<(), DecodeError> {
    if pid == 0 {
        return Err(DecodeError::NoPid);
    }
    Ok(())
}

/// Takes `N` numbers from the front of the bytes.
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

/// Returns the message that subscribes (`true`) or unsubscribes. The kernel's answer repeats the number `own`.
pub fn subscription(subscribe: bool, own: u32) -> Vec<u8> {
    let operation = if subscribe {
        libc::PROC_CN_MCAST_LISTEN
    } else {
        libc::PROC_CN_MCAST_IGNORE
    };
    let len = CONNECTOR_HEADER + size_of_val(&operation);
    let mut message = Vec::with_capacity(NETLINK_HEADER + len);
    let mut add = |bytes: &[u8]| message.extend_from_slice(bytes);
    add(&((NETLINK_HEADER + len) as u32).to_ne_bytes());
    add(&DONE.to_ne_bytes());
    // Flags, sequence number and sender, which the connector ignores.
    add(&[0; 10]);
    // Index, value, seq and ack of `struct cn_msg`. The answer has the connector's own seq, and this ack plus one.
    for number in [PROCESSES[0], PROCESSES[1], 0, own] {
        add(&number.to_ne_bytes());
    }
    add(&(size_of_val(&operation) as u16).to_ne_bytes());
    add(&[0; 2]);
    add(&operation.to_ne_bytes());
    message
}
