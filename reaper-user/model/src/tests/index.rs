//! Indexed lookups of sessions. [`assert_consistent`] compares each of them with a scan of all sessions.

use std::collections::BTreeSet;
use std::path::Path;
use std::sync::Arc;

use proptest::prelude::*;

use super::world::{INIT, World, assert_consistent, image};
use crate::event::{Image, ProcessKey};
use crate::facts::{Fact, FactSet, Facts, InheritedFacts};
use crate::session::{Session, SessionId, Succession};

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

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn descendants_of_several_processes_are_those_of_each(
        parents in prop::collection::vec(any::<prop::sample::Index>(), 0..30),
        tops in prop::collection::vec(any::<prop::sample::Index>(), 0..5),
    ) {
        let mut w = World::new();
        let mut keys = vec![INIT];
        for parent in parents {
            keys.push(w.fork(*parent.get(&keys)));
        }
        let tops: Vec<ProcessKey> = tops.iter().map(|top| *top.get(&keys)).collect();
        let tree = &w.model.tree;
        let each = tops.iter().flat_map(|top| tree.descendants(*top));
        let each: BTreeSet<ProcessKey> = each.map(|node| node.key).collect();
        let mut all = tree.descendants_of_all(tops.clone());
        all.sort_unstable();
        prop_assert_eq!(all, each.into_iter().collect::<Vec<_>>());
    }

    /// Facts are also read of processes that are no roots, and of roots that have exited since.
    #[test]
    fn facts_reach_the_sessions_that_a_full_scan_finds(
        steps in prop::collection::vec((0..7_u8, any::<[prop::sample::Index; 3]>()), 0..80),
    ) {
        let mut w = World::new();
        let mut starts: Vec<(Arc<Path>, u64)> = vec![];
        for (step, [one, two, three]) in steps {
            let mut keys: Vec<ProcessKey> = w.model.tree.iter().map(|node| node.key).collect();
            keys.extend(w.model.sessions.iter().map(|session| session.root));
            let key = *one.get(&keys);
            let living = key != INIT && w.model.tree.get(key).is_some();
            match step {
                0 if w.model.tree.get(key).is_some() => drop(w.fork(key)),
                1..3 if living => {
                    let cgroup_id = *two.get(&[0, 7, 8]);
                    w.exec_image(key, Image { cgroup_id, ..Image::clone(&image("claude", 0)) });
                }
                3 if living => w.exit(key),
                4..7 => {
                    let units = [Fact::Known("a".into()), Fact::Known("b".into()), Fact::Unreadable];
                    let directory = three.get(&[None, Some("/w/a"), Some("/w/b")]).map(|path| Path::new(path).into());
                    read_facts(&mut w, key, two.get(&units), directory, &mut starts);
                }
                _ => {}
            }
            assert_consistent(&w.model);
        }
    }
}

/// Reports the unit and the directory of a process, and compares the sessions with a scan of all of them. `starts` has
/// the starts of the agents that may follow one in each directory so far.
fn read_facts(
    w: &mut World,
    key: ProcessKey,
    unit: &Fact<Arc<str>>,
    directory: Option<Arc<Path>>,
    starts: &mut Vec<(Arc<Path>, u64)>,
) {
    let before: Vec<Session> = w.model.sessions.iter().cloned().collect();
    let followed_at = |w: &World| -> Vec<u64> {
        let all = w.model.sessions.iter();
        all.map(|one| w.model.sessions.followed_at(one)).collect()
    };
    let followed_before = followed_at(w);
    let inherited = Fact::Known(Arc::new(InheritedFacts {
        directory,
        ..InheritedFacts::default()
    }));
    let facts = Facts {
        unit: unit.clone(),
        inherited,
        ..Facts::default()
    };
    let requested = FactSet::UNIT | FactSet::INHERITED;
    w.model.set_facts(key, requested, facts, w.now);

    let sessions = &w.model.sessions;
    let node = w.model.tree.get(key);
    let directory_of = |session: &Session| match &session.inherited {
        Fact::Known(inherited) => inherited.directory.clone(),
        _ => None,
    };
    let mut new = vec![];
    for own in sessions.iter().filter(|one| one.root == key) {
        let place = directory_of(own).filter(|_| own.outer.is_none());
        new.extend(place.map(|place| (place, own.opened_at)));
    }
    starts.extend(new.iter().cloned());
    for ((was, now), (old, followed)) in
        (before.iter().zip(sessions.iter())).zip(followed_before.into_iter().zip(followed_at(w)))
    {
        let in_cgroup =
            node.is_some_and(|node| was.cgroup_id != 0 && was.cgroup_id == node.image.cgroup_id);
        let is_root = was.root == key && was.root_exit.is_none() == node.is_some();
        let is_told = is_root || in_cgroup && !matches!(was.unit, Fact::Known(_));
        let replaces = matches!(unit, Fact::Known(_)) || was.unit == Fact::Unread;
        let expected = if is_told && replaces { unit } else { &was.unit };
        assert_eq!(&now.unit, expected, "unit of {:?}", now.id);

        let follows = |(place, start): &&(Arc<Path>, u64)| {
            let exit = now.root_exit.map_or(u64::MAX, |exit| exit.at);
            directory_of(now).as_ref() == Some(place) && exit < *start
        };
        let last = new.iter().filter(follows).map(|(_, start)| *start).max();
        assert!(followed >= old.max(last.unwrap_or(0)), "{:?}", now.id);
        let is_start = || starts.iter().filter(follows).any(|(_, at)| *at == followed);
        assert!(followed == old || is_start(), "{followed} of {:?}", now.id);
    }
}
