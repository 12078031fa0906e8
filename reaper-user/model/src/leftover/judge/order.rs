//! Order in which processes are visited.

use hashbrown::HashMap;

use super::Judge;
use crate::leftover::LeftoverRow;

impl<'a> Judge<'a> {
    /// Returns all processes by start, and parents before their children if both started in the same tick. The order
    /// within a loop, which only corrupt input could create, is undefined.
    pub(super) fn in_order(&self) -> Vec<&'a LeftoverRow> {
        let mut children: HashMap<u32, Vec<&'a LeftoverRow>> = HashMap::new();
        let mut depths: HashMap<u32, usize> = HashMap::with_capacity(self.table.rows.len());
        let mut next = Vec::new();
        for row in self.table.rows.values() {
            match self.parent(row) {
                Some(parent) => children.entry(parent.entry.key.pid).or_default().push(row),
                None => next.push((row, 0)),
            }
        }
        while let Some((row, depth)) = next.pop() {
            depths.insert(row.entry.key.pid, depth);
            let below = children.remove(&row.entry.key.pid).unwrap_or_default();
            next.extend(below.into_iter().map(|row| (row, depth + 1)));
        }
        let mut rows: Vec<_> = self.table.rows.values().collect();
        rows.sort_by_key(|row| {
            let key = row.entry.key;
            (key.start, depths.get(&key.pid).copied(), key.pid)
        });
        rows
    }
}
