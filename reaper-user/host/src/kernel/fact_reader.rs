//! The reader of facts.

use std::pin::Pin;
use std::sync::Arc;

use crate::facts::{FactAnswer, FactPool, Urgency};
use reaper_model::event::{Image, ProcessKey};
use reaper_model::facts::FactSet;

/// See [`FactReader::ready`].
pub type ReadyFuture<'a> = Pin<Box<dyn Future<Output = ()> + 'a>>;

/// Reads facts about processes without keeping its caller waiting. Each request is answered, in any order and in bounded
/// time.
pub trait FactReader {
    /// Requests facts about a process of this real uid. `image` is the program that it is known to run;
    /// [`FactSet::ARGUMENTS`] and [`FactSet::SCRIPT`] need it.
    fn request(
        &mut self,
        key: ProcessKey,
        image: Option<&Arc<Image>>,
        uid: u32,
        needs: FactSet,
        urgency: Urgency,
    );

    /// Waits for an answer that a decision waits for. May be dropped and called again at any time.
    fn ready(&mut self) -> ReadyFuture<'_>;

    /// Returns all answers since the last call.
    fn take(&mut self) -> Vec<FactAnswer>;
}

impl FactReader for FactPool {
    fn request(
        &mut self,
        key: ProcessKey,
        image: Option<&Arc<Image>>,
        uid: u32,
        needs: FactSet,
        urgency: Urgency,
    ) {
        FactPool::request(self, key, image, uid, needs, urgency);
    }

    fn ready(&mut self) -> ReadyFuture<'_> {
        Box::pin(FactPool::ready(self))
    }

    fn take(&mut self) -> Vec<FactAnswer> {
        FactPool::take(self)
    }
}
