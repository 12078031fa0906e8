//! Queue of the decisions that are made once the source is drained.

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

/// Queue of decisions without duplicates, in the order of arrival.
#[derive(Default)]
pub struct Queue {
    waiting: HashSet<Queued>,
    /// Items in order of arrival. An item that is not in `waiting` was removed.
    order: Vec<Queued>,
}

impl Queue {
    /// Adds an item if it is not queued yet.
    pub fn push(&mut self, queued: Queued) {
        if self.waiting.insert(queued) {
            self.order.push(queued);
        }
    }

    pub fn remove(&mut self, queued: Queued) {
        self.waiting.remove(&queued);
    }

    pub fn contains(&self, queued: Queued) -> bool {
        self.waiting.contains(&queued)
    }

    pub fn is_empty(&self) -> bool {
        self.waiting.is_empty()
    }

    /// Removes and returns all items.
    pub fn take(&mut self) -> Vec<Queued> {
        let mut order = std::mem::take(&mut self.order);
        order.retain(|queued| self.waiting.remove(queued));
        order
    }
}

impl Extend<Queued> for Queue {
    fn extend<T: IntoIterator<Item = Queued>>(&mut self, all: T) {
        all.into_iter().for_each(|queued| self.push(queued));
    }
}
