//! Types of requests and responses, which clients and server exchange as JSON.

pub mod agents;
pub mod explanation;
pub mod keeps;
pub mod process;
pub mod scan;
pub mod status;
pub mod tree;
