//! Recognises cgroups that are created below those in the scope while the engine runs.

use std::path::PathBuf;

use hashbrown::HashSet;

use reaper_host::kernel::ProcessTable;
use reaper_model::event::{Event, EventKind};
use reaper_model::{Model, Scope};

/// Cgroups of the scope, and cgroups that have been checked.
pub struct Cgroups {
    directories: Vec<PathBuf>,
    /// Ids that need no further check.
    checked: HashSet<u64>,
}

impl Cgroups {
    pub fn new(directories: Vec<PathBuf>, scope: &Scope) -> Cgroups {
        let checked = scope.cgroups.iter().copied().collect();
        Cgroups {
            directories,
            checked,
        }
    }

    /// Checks a cgroup when an exec or a discovery first names it, and adds it to the scope if it is below one in
    /// scope. Must run before the event is applied, since children inherit from their parent that it is in scope.
    pub fn on_event(&mut self, processes: &dyn ProcessTable, model: &mut Model, event: &Event) {
        if self.directories.is_empty() {
            return;
        }
        let image = match &event.kind {
            EventKind::Exec { image, .. } => image,
            EventKind::Discovered(row) => &row.image,
            _ => return,
        };
        if !self.checked.insert(image.cgroup_id) {
            return;
        }
        // A cgroup that was removed meanwhile has no processes.
        let below = |directory| processes.cgroups_below(directory).unwrap_or_default();
        let directories = self.directories.iter().map(PathBuf::as_path);
        if directories.flat_map(below).any(|id| id == image.cgroup_id) {
            model.add_cgroup(image.cgroup_id);
        }
    }
}
