//! Tests of parsing the kernel's datagrams.

use proptest::prelude::*;
use reaper_common::DecodeError;

use crate::damage::mutated;
use crate::source::proc_connector::parse::{ConnectorEvent, Message, messages, subscription};
use reaper_model::event::Uids;

/// Returns a message as the kernel sends it. Its `struct proc_event` has the same length for all kinds.
fn written(message: &Message) -> Vec<u8> {
    let (kind, fields): (u32, Vec<u32>) = match message.what {
        ConnectorEvent::Answer { errno, .. } => (libc::PROC_EVENT_NONE, vec![errno]),
        ConnectorEvent::Fork { parent, child } => {
            (libc::PROC_EVENT_FORK, vec![parent, parent, child, child])
        }
        ConnectorEvent::Exec { process } => (libc::PROC_EVENT_EXEC, vec![process, process]),
        ConnectorEvent::Uids {
            thread,
            process,
            uids,
        } => (
            libc::PROC_EVENT_UID,
            vec![thread, process, uids.real, uids.effective],
        ),
        ConnectorEvent::Exit {
            thread,
            process,
            status,
            parent,
        } => (
            libc::PROC_EVENT_EXIT,
            vec![thread, process, status, 17, parent, parent],
        ),
        ConnectorEvent::Other => (libc::PROC_EVENT_SID, vec![1, 1]),
    };
    event(message, kind, &fields, 40)
}

/// Builds a message with an event that has the given fields, cut or padded to `len` bytes.
fn event(message: &Message, kind: u32, fields: &[u32], len: u16) -> Vec<u8> {
    let mut event = Vec::new();
    event.extend([kind, message.cpu].map(u32::to_ne_bytes).concat());
    event.extend(message.time.to_ne_bytes());
    event.extend(fields.iter().flat_map(|field| field.to_ne_bytes()));
    event.resize(usize::from(len), 0);
    let mut bytes = (36 + u32::from(len)).to_ne_bytes().to_vec();
    bytes.extend((libc::NLMSG_DONE as u16).to_ne_bytes());
    bytes.extend([0; 10]);
    let after = match message.what {
        ConnectorEvent::Answer { to, .. } => to.wrapping_add(1),
        _ => 0,
    };
    let head = [libc::CN_IDX_PROC, libc::CN_VAL_PROC, message.number, after];
    bytes.extend(head.map(u32::to_ne_bytes).concat());
    bytes.extend(len.to_ne_bytes());
    bytes.extend([0; 2]);
    bytes.extend(event);
    bytes
}

fn any_message() -> impl Strategy<Value = Message> {
    let pid = 1_u32..5_000_000;
    let what = (0_u8..6, pid.clone(), pid, any::<u32>(), any::<u32>());
    let what = what.prop_map(|(kind, thread, process, a, b)| match kind {
        0 => ConnectorEvent::Answer { to: b, errno: a },
        1 => ConnectorEvent::Fork {
            parent: thread,
            child: process,
        },
        2 => ConnectorEvent::Exec { process },
        3 => ConnectorEvent::Uids {
            thread,
            process,
            uids: Uids {
                real: a,
                effective: b,
            },
        },
        4 => ConnectorEvent::Exit {
            thread,
            process,
            status: a,
            parent: b,
        },
        _ => ConnectorEvent::Other,
    });
    (any::<u32>(), any::<u32>(), any::<u64>(), what).prop_map(|(cpu, number, time, what)| Message {
        cpu,
        number,
        time,
        what,
    })
}

proptest! {
    #[test]
    fn written_messages_are_read(all in prop::collection::vec(any_message(), 0..5)) {
        let bytes: Vec<u8> = all.iter().flat_map(written).collect();
        let read: Result<Vec<Message>, DecodeError> = messages(&bytes).collect();
        prop_assert_eq!(read, Ok(all));
    }

    #[test]
    fn parsing_arbitrary_bytes_ends(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
        prop_assert!(messages(&bytes).count() <= bytes.len());
    }

    #[test]
    fn parsing_damaged_messages_ends(
        (message, bytes) in any_message().prop_flat_map(|message| {
            let twice = [written(&message), written(&message)].concat();
            (Just(message), mutated(twice))
        }),
    ) {
        let read: Vec<_> = messages(&bytes).collect();
        prop_assert!(read.len() <= bytes.len() / 16 + 1);
        // Nothing is read after a defect.
        let whole = read.iter().take_while(|read| read.is_ok()).count();
        prop_assert!(read.len() - whole <= 1);
        if bytes == [written(&message), written(&message)].concat() {
            prop_assert_eq!(read, vec![Ok(message), Ok(message)]);
        }
    }

    #[test]
    fn damage_is_reported_or_changes_values(
        message in any_message(),
        at in 0_usize..76,
        byte in any::<u8>(),
        len in 0_usize..=76,
    ) {
        let mut bytes = written(&message);
        bytes[at] = byte;
        prop_assert!(messages(&bytes).count() <= 20);
        bytes[at] = written(&message)[at];
        let cut = messages(&bytes[..len]).next();
        match len {
            0 => prop_assert_eq!(cut, None),
            76 => prop_assert_eq!(cut, Some(Ok(message))),
            _ => {
                let short = matches!(cut, Some(Err(DecodeError::Short { .. })));
                prop_assert!(short, "{:?}", cut);
            }
        }
    }
}

const MESSAGE: Message = Message {
    cpu: 1,
    number: 2,
    time: 3,
    what: ConnectorEvent::Other,
};

#[test]
fn threads_are_not_processes() {
    let fork = event(&MESSAGE, libc::PROC_EVENT_FORK, &[5, 5, 8, 7], 40);
    assert_eq!(messages(&fork).next(), Some(Ok(MESSAGE)));
    // The thread that called fork does not matter.
    let fork = event(&MESSAGE, libc::PROC_EVENT_FORK, &[6, 5, 8, 8], 40);
    let what = ConnectorEvent::Fork {
        parent: 5,
        child: 8,
    };
    assert_eq!(
        messages(&fork).next(),
        Some(Ok(Message { what, ..MESSAGE }))
    );
}

#[test]
fn exit_of_older_kernels_has_no_parent() {
    let exit = event(&MESSAGE, libc::PROC_EVENT_EXIT, &[8, 7, 9, 17], 32);
    let what = ConnectorEvent::Exit {
        thread: 8,
        process: 7,
        status: 9,
        parent: 0,
    };
    assert_eq!(
        messages(&exit).next(),
        Some(Ok(Message { what, ..MESSAGE }))
    );
}

#[test]
fn pid_zero_is_an_error_and_other_messages_are_skipped() {
    let exec = event(&MESSAGE, libc::PROC_EVENT_EXEC, &[0, 0], 40);
    assert_eq!(messages(&exec).next(), Some(Err(DecodeError::NoPid)));
    let mut other = written(&MESSAGE);
    other[16] = 9;
    assert_eq!(messages(&other).next(), None, "another connector");
    let mut other = written(&MESSAGE);
    other[4] = libc::NLMSG_NOOP as u8;
    assert_eq!(messages(&other).next(), None, "another type");
    let mut endless = written(&MESSAGE);
    endless[..4].fill(0);
    assert_eq!(messages(&endless).next(), Some(Err(DecodeError::Length(0))));
}

#[test]
fn subscription_has_the_layout_of_cn_msg() {
    let request = subscription(true, 77);
    assert_eq!(request.len(), 40);
    assert_eq!(request[0], 40);
    assert_eq!(request[36..], libc::PROC_CN_MCAST_LISTEN.to_ne_bytes());
    // Its payload is too short for an event of the kernel.
    assert!(matches!(
        messages(&request).next(),
        Some(Err(DecodeError::Short { .. }))
    ));
}
