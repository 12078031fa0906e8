//! What follows from which events, as tables of little stories. See [`world::World`] for their words.

mod arguments;
mod commands;
mod decisions;
mod idle;
mod inferred;
mod keeps;
mod kin;
mod late_program;
mod looks;
mod marks;
mod merging;
mod moves;
mod properties;
mod restart;
mod restored;
mod rule_properties;
mod rules;
mod scripts;
mod servers;
mod sessions;
mod successors;
mod survival;
mod traces;
mod truth;
mod units;
mod world;
