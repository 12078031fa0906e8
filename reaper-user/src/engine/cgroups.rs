//! Cgroups that are made while the engine runs, below those in scope.

use std::path::PathBuf;

use hashbrown::HashSet;

use reaper_host::kernel::ProcessTable;
use reaper_model::event::{Event, EventKind};
use reaper_model::{Model, Scope};

/// The cgroups of the scope, and which others have been met.
pub struct Cgroups {
    directories: Vec<PathBuf>,
    /// Ids about which nothing needs to be asked: in scope, or known to be elsewhere.
    settled: HashSet<u64>,
}

impl Cgroups {
    pub fn new(directories: Vec<PathBuf>, scope: &Scope) -> Cgroups {
        let settled = scope.cgroups.iter().copied().collect();
        Cgroups {
            directories,
            settled,
        }
    }

    /// Before an event is applied: if it is the first that tells of a cgroup, looks whether that lies below
    /// one in scope. Before, since whoever is in scope hands that on to its children.
    pub fn meet(&mut self, processes: &dyn ProcessTable, model: &mut Model, event: &Event) {
        if self.directories.is_empty() {
            return;
        }
        let image = match &event.kind {
            EventKind::Exec { image, .. } => image,
            EventKind::Discovered(row) => &row.image,
            _ => return,
        };
        if !self.settled.insert(image.cgroup_id) {
            return;
        }
        // One that has gone meanwhile has no processes left to consider.
        let below = |directory| processes.cgroups_below(directory).unwrap_or_default();
        let directories = self.directories.iter().map(PathBuf::as_path);
        if directories.flat_map(below).any(|id| id == image.cgroup_id) {
            model.add_cgroup(image.cgroup_id);
        }
    }
}
