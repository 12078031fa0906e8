//! What follows from which events, as tables of little stories. See [`world::World`] for their words.

mod decisions;
mod merging;
mod properties;
mod sessions;
mod world;
