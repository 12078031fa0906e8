//! Indexed lookups of sessions. [`assert_consistent`] compares each of them with a scan of all sessions.

use proptest::prelude::*;

use super::world::{INIT, World, assert_consistent};
use crate::event::ProcessKey;
use crate::session::{SessionId, Succession};

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn session_lookups_agree_with_a_full_scan(
        steps in prop::collection::vec((0..12_u8, any::<[prop::sample::Index; 2]>()), 0..120),
    ) {
        let mut w = World::new();
        w.tty = 1;
        for (step, [one, other]) in steps {
            let living: Vec<ProcessKey> = w.model.tree.iter().map(|node| node.key).collect();
            let key = *one.get(&living);
            let sessions: Vec<SessionId> = w.model.sessions.iter().map(|s| s.id).collect();
            match step {
                0..3 => drop(w.fork(key)),
                3..6 if key != INIT => w.exec(key, ["claude", "claude", "codex"][usize::from(step - 3)]),
                6 if key != INIT => w.exec(key, "app-server"),
                7 if key != INIT => w.exec(key, "tmux"),
                8 if key != INIT => w.exit(key),
                9 if key != INIT => w.kill(key),
                10 if !sessions.is_empty() => {
                    let states = [Succession::Awaited, Succession::Unknown, Succession::Excluded];
                    w.model.set_succession(*one.get(&sessions), *other.get(&states));
                }
                11 if !sessions.is_empty() => {
                    let root = w.model.sessions.get(*one.get(&sessions)).unwrap().root;
                    if w.model.tree.get(root).is_some() {
                        w.model.set_successor(*other.get(&sessions), root);
                    }
                }
                _ => {}
            }
            assert_consistent(&w.model);
        }
    }
}
