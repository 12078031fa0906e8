//! What has come from the kernel and is still to be taken in, and the count of what has not come.

use std::collections::VecDeque;

use hashbrown::HashMap;
use hashbrown::hash_map::Entry;
use nix::errno::Errno;

use super::listening::{DATAGRAM_MAX, Listening, WAITING_MAX};
use super::parse::{ConnectorEvent, Message, messages};
use crate::source::drained::{Drained, Lost, Malformation};

/// See the module.
pub struct Inbox {
    pub listening: Listening,
    /// In the order in which it came.
    waiting: VecDeque<Message>,
    /// How many of these tell that a process, of this pid, has run a program.
    execs: HashMap<u32, u32>,
    count: Count,
    /// Why nothing is told any more.
    broken: Option<Errno>,
    /// What was read since this was last asked, and not understood.
    read: Drained,
}

/// Tells how many messages have not come.
#[derive(Debug, Default)]
struct Count {
    lost: Lost,
    /// The number that each processor's next message has.
    next: HashMap<u32, u32>,
    /// Of those that are counted as lost, for how many no number has been found missing so far.
    presumed: u64,
}

impl Inbox {
    /// Some has come already.
    pub fn new(listening: Listening, early: Vec<Message>) -> Inbox {
        let mut inbox = Inbox {
            listening,
            waiting: VecDeque::new(),
            execs: HashMap::new(),
            count: Count::default(),
            broken: None,
            read: Drained::default(),
        };
        early.into_iter().for_each(|message| inbox.put(message));
        inbox
    }

    fn put(&mut self, message: Message) {
        self.count.meet(message.cpu, message.number);
        if let ConnectorEvent::Exec { process } = message.what {
            *self.execs.entry(process).or_default() += 1;
        }
        self.waiting.push_back(message);
    }

    /// The oldest that waits.
    pub fn first(&self) -> Option<&Message> {
        self.waiting.front()
    }

    /// Takes it out.
    pub fn take(&mut self) -> Option<Message> {
        let message = self.waiting.pop_front()?;
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

    /// Whether a process has run another program since what was taken out last, as far as the kernel has told by now; or may
    /// have, where something was lost just now.
    pub fn has_moved_on(&mut self, pid: u32) -> bool {
        let lost = self.count.lost.total;
        self.receive();
        self.count.lost.total != lost || self.execs.contains_key(&pid)
    }

    /// Takes what there is out of the socket, which has room for a burst alone.
    pub fn receive(&mut self) {
        let mut buffer = [0; DATAGRAM_MAX];
        while self.waiting.len() < WAITING_MAX {
            let datagram = match self.listening.0.receive(&mut buffer) {
                Ok(Some(datagram)) => datagram,
                Ok(None) => return,
                Err(Errno::ENOBUFS) => {
                    self.count.overran();
                    continue;
                }
                Err(error) => {
                    self.broken = Some(error);
                    return;
                }
            };
            for message in messages(datagram) {
                match message {
                    Ok(message) => self.put(message),
                    Err(defect) => {
                        self.read.records += 1;
                        self.read.malformed += 1;
                        self.read.malformation = Some(Malformation::Record(defect));
                    }
                }
            }
        }
    }

    /// What could not be understood since this was last called.
    pub fn take_defects(&mut self) -> Drained {
        std::mem::take(&mut self.read)
    }

    /// Why nothing comes any more, if nothing does.
    pub fn broken(&self) -> Option<Errno> {
        self.broken
    }

    /// So many ends could not be told.
    pub fn count_as_lost(&mut self, ends: u64) {
        self.count.lost.total += ends;
    }

    /// What has been lost on its way. Of which kinds nobody knows.
    pub fn lost(&self) -> Lost {
        self.count.lost
    }
}

impl Count {
    /// There was no room for some: for how many, the next numbers tell.
    fn overran(&mut self) {
        self.lost.total += 1;
        self.presumed += 1;
    }

    /// A processor's message with this number has come. Some can be missing without a word, where the kernel had no
    /// memory for them.
    fn meet(&mut self, cpu: u32, number: u32) {
        let next = self.next.insert(cpu, number.wrapping_add(1));
        let missing = next.map_or(0, |next| u64::from(number.wrapping_sub(next)));
        let counted = missing.min(self.presumed);
        self.presumed -= counted;
        self.lost.total += missing - counted;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_has_run_another_program_is_known_while_that_waits() {
        let told = |number, what| Message {
            cpu: 0,
            number,
            time: 0,
            what,
        };
        let exec = |process| ConnectorEvent::Exec { process };
        let all = [exec(10), ConnectorEvent::Other, exec(10), exec(11)];
        let all = all.into_iter().zip(0..);
        let early = all.map(|(what, number)| told(number, what)).collect();
        let mut inbox = Inbox::new(Listening::deaf(), early);
        let mut after = Vec::new();
        while inbox.take().is_some() {
            after.push([10, 11].map(|pid| inbox.has_moved_on(pid)));
        }
        let expected = [[true, true], [true, true], [false, true], [false, false]];
        assert_eq!(after, expected);
    }

    #[test]
    fn numbers_that_are_missing_are_counted_once() {
        let mut count = Count::default();
        for (cpu, number) in [(0, 5), (1, 100), (0, 6), (1, 101), (0, 7)] {
            count.meet(cpu, number);
        }
        assert_eq!(count.lost.total, 0);
        count.overran();
        assert_eq!(
            count.lost.total, 1,
            "at once, though the number is not known"
        );
        count.meet(0, 11);
        assert_eq!(count.lost.total, 3);
        // Without a word.
        count.meet(1, 104);
        assert_eq!(count.lost.total, 5);
        count.meet(2, u32::MAX);
        count.meet(2, 0);
        assert_eq!(count.lost.total, 5);
    }
}
