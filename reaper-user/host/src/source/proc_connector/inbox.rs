//! Queues received messages and counts lost ones.
//!
//! The socket's buffer holds only a short burst, so the messages are moved into memory before they are translated.

use std::collections::VecDeque;

use hashbrown::HashMap;
use hashbrown::hash_map::Entry;
use nix::errno::Errno;

use super::listener::{DATAGRAM_MAX, Listener, QUEUE_MAX};
use super::parse::{ConnectorEvent, Message, messages};
use crate::source::drained::{Drained, Lost, Malformation};

/// Received messages that wait to be translated.
pub struct Inbox {
    pub listener: Listener,
    /// Messages in the order of arrival.
    queue: VecDeque<Message>,
    /// Number of queued exec messages by pid.
    execs: HashMap<u32, u32>,
    count: Count,
    /// Error that ended delivery.
    broken: Option<Errno>,
    /// Malformed messages since the last [`Inbox::take_defects`].
    defects: Drained,
}

/// Counter of lost messages, by gaps in their sequence numbers.
#[derive(Debug, Default)]
struct Count {
    lost: Lost,
    /// Sequence number of the next message, by processor.
    next: HashMap<u32, u32>,
    /// Number of losses that are counted because of an overflow, before a gap in the sequence numbers showed them.
    unconfirmed: u64,
}

impl Inbox {
    /// Creates an inbox with the messages that were received before the subscription was answered.
    pub fn new(listener: Listener, early: Vec<Message>) -> Inbox {
        let mut inbox = Inbox {
            listener,
            queue: VecDeque::new(),
            execs: HashMap::new(),
            count: Count::default(),
            broken: None,
            defects: Drained::default(),
        };
        early.into_iter().for_each(|message| inbox.push(message));
        inbox
    }

    /// Queues a message, and counts the messages that are missing before it.
    fn push(&mut self, message: Message) {
        self.count.on_message(message.cpu, message.number);
        if let ConnectorEvent::Exec { process } = message.what {
            *self.execs.entry(process).or_default() += 1;
        }
        self.queue.push_back(message);
    }

    /// Returns the oldest queued message.
    pub fn first(&self) -> Option<&Message> {
        self.queue.front()
    }

    /// Removes and returns the oldest queued message.
    pub fn pop(&mut self) -> Option<Message> {
        let message = self.queue.pop_front()?;
        if let ConnectorEvent::Exec { process } = message.what
            && let Entry::Occupied(mut execs) = self.execs.entry(process)
        {
            *execs.get_mut() -= 1;
            if *execs.get() == 0 {
                execs.remove();
            }
        }
        Some(message)
    }

    /// Returns whether a process has run another program since the last removed message, as far as the kernel has
    /// reported. Also returns true if messages were lost during this call.
    pub fn may_have_execed(&mut self, pid: u32) -> bool {
        let lost = self.count.lost.total;
        self.receive();
        self.count.lost.total != lost || self.execs.contains_key(&pid)
    }

    /// Moves messages from the socket into the queue until the socket is empty or the queue has [`QUEUE_MAX`].
    ///
    /// Also counts lost and malformed messages. An error other than an overflow is kept for [`Inbox::broken`].
    pub fn receive(&mut self) {
        let mut buffer = [0; DATAGRAM_MAX];
        while self.queue.len() < QUEUE_MAX {
            let datagram = match self.listener.0.receive(&mut buffer) {
                Ok(Some(datagram)) => datagram,
                Ok(None) => return,
                Err(Errno::ENOBUFS) => {
                    self.count.on_overflow();
                    continue;
                }
                Err(error) => {
                    self.broken = Some(error);
                    return;
                }
            };
            for message in messages(datagram) {
                match message {
                    Ok(message) => self.push(message),
                    Err(defect) => {
                        self.defects.records += 1;
                        self.defects.malformed += 1;
                        self.defects.malformation = Some(Malformation::Record(defect));
                    }
                }
            }
        }
    }

    /// Returns the number of malformed messages since the last call, and the last defect. Only these are counted as
    /// records.
    pub fn take_defects(&mut self) -> Drained {
        std::mem::take(&mut self.defects)
    }

    /// Returns the error that ended delivery, if any.
    pub fn broken(&self) -> Option<Errno> {
        self.broken
    }

    /// Adds exits that could not be verified to the number of lost messages.
    pub fn count_as_lost(&mut self, exits: u64) {
        self.count.lost.total += exits;
    }

    /// Returns the total number of messages lost so far, unverified exits included. Their kinds are unknown.
    pub fn lost(&self) -> Lost {
        self.count.lost
    }
}

impl Count {
    /// Counts one loss because the socket's buffer overflowed. The next sequence numbers show the exact number.
    fn on_overflow(&mut self) {
        self.lost.total += 1;
        self.unconfirmed += 1;
    }

    /// Counts the messages that are missing before the one with this sequence number, unless [`Count::on_overflow`] has
    /// counted them. None are missing before a processor's first message.
    ///
    /// The kernel drops a message without notice if it has no memory for it.
    fn on_message(&mut self, cpu: u32, number: u32) {
        let next = self.next.insert(cpu, number.wrapping_add(1));
        let missing = next.map_or(0, |next| u64::from(number.wrapping_sub(next)));
        let counted = missing.min(self.unconfirmed);
        self.unconfirmed -= counted;
        self.lost.total += missing - counted;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn queued_exec_marks_process_until_removed() {
        let message = |number, what| Message {
            cpu: 0,
            number,
            time: 0,
            what,
        };
        let exec = |process| ConnectorEvent::Exec { process };
        let all = [exec(10), ConnectorEvent::Other, exec(10), exec(11)];
        let all = all.into_iter().zip(0..);
        let early = all.map(|(what, number)| message(number, what)).collect();
        let mut inbox = Inbox::new(Listener::broken(), early);
        let mut after = Vec::new();
        while inbox.pop().is_some() {
            after.push([10, 11].map(|pid| inbox.may_have_execed(pid)));
        }
        let expected = [[true, true], [true, true], [false, true], [false, false]];
        assert_eq!(after, expected);
    }

    #[test]
    fn missing_sequence_numbers_are_counted_once() {
        let mut count = Count::default();
        for (cpu, number) in [(0, 5), (1, 100), (0, 6), (1, 101), (0, 7)] {
            count.on_message(cpu, number);
        }
        assert_eq!(count.lost.total, 0);
        count.on_overflow();
        assert_eq!(
            count.lost.total, 1,
            "counted at once, though the exact number is unknown"
        );
        count.on_message(0, 11);
        assert_eq!(count.lost.total, 3);
        // A loss without an overflow.
        count.on_message(1, 104);
        assert_eq!(count.lost.total, 5);
        count.on_message(2, u32::MAX);
        count.on_message(2, 0);
        assert_eq!(count.lost.total, 5);
    }
}
