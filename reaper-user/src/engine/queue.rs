//! Queue of work without duplicates, such as the decisions that are made once the source is drained.

use std::hash::Hash;

use hashbrown::HashSet;

use reaper_model::event::ProcessKey;
use reaper_model::session::SessionId;

/// Decision that is made once the source is drained.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub enum Queued {
    Process(ProcessKey),
    /// All members of a session and of the sessions nested in it.
    Session(SessionId),
}

/// Queue without duplicates, in the order of arrival.
pub struct Queue<T> {
    waiting: HashSet<T>,
    /// Items in order of arrival. An item that is not in `waiting` was removed.
    order: Vec<T>,
}

impl<T> Default for Queue<T> {
    fn default() -> Queue<T> {
        Queue {
            waiting: HashSet::new(),
            order: Vec::new(),
        }
    }
}

impl<T: Copy + Eq + Hash> Queue<T> {
    /// Adds an item if it is not queued yet.
    pub fn push(&mut self, queued: T) {
        if self.waiting.insert(queued) {
            self.order.push(queued);
        }
    }

    pub fn remove(&mut self, queued: T) {
        self.waiting.remove(&queued);
    }

    pub fn contains(&self, queued: T) -> bool {
        self.waiting.contains(&queued)
    }

    pub fn is_empty(&self) -> bool {
        self.waiting.is_empty()
    }

    /// Removes and returns all items.
    pub fn take(&mut self) -> Vec<T> {
        let mut order = std::mem::take(&mut self.order);
        order.retain(|queued| self.waiting.remove(queued));
        order
    }
}

impl<T: Copy + Eq + Hash> Extend<T> for Queue<T> {
    fn extend<I: IntoIterator<Item = T>>(&mut self, all: I) {
        all.into_iter().for_each(|queued| self.push(queued));
    }
}
