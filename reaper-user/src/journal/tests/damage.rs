//! What is no journal is set aside; where none can be, that is said.

use std::os::unix::fs::{PermissionsExt, symlink};

use super::*;

/// Opens a journal where there is something else, which must be found again as it was, and checks that
/// a new one works. Gives where it is by now.
fn sets_aside(world: &World, before: &[u8]) -> PathBuf {
    world.tell(&whole(1, 100, 0));
    assert_eq!(world.all().len(), 1);
    let aside = world.aside();
    let [aside] = &aside[..] else {
        panic!("{aside:?}")
    };
    assert_eq!(std::fs::read(aside).unwrap(), before);
    aside.clone()
}

#[test]
fn what_is_no_database_is_set_aside() {
    for content in [&b"hello"[..], &[0; 5000], b"SQLite format 3\0"] {
        let world = World::new();
        std::fs::create_dir(&world.options.directory).unwrap();
        std::fs::write(world.path(), content).unwrap();
        let journal = world.open();
        assert!(journal.was_replaced());
        journal.close();
        sets_aside(&world, content);
    }
    // But one of no length may be one that was killed at its first breath.
    let world = World::new();
    std::fs::create_dir(&world.options.directory).unwrap();
    std::fs::write(world.path(), "").unwrap();
    world.tell(&whole(1, 100, 0));
    assert_eq!((world.all().len(), world.aside().len()), (1, 0));
    assert!(!world.open().was_replaced());
}

#[test]
fn database_of_another_program_or_unknown_older_schema_is_set_aside() {
    for (name, value) in [
        ("application_id", 1),
        ("user_version", 2),
        ("user_version", 0),
    ] {
        let world = World::new();
        world.tell(&whole(1, 50, 0));
        let other = Connection::open(world.path()).unwrap();
        other.pragma_update(None, name, value).unwrap();
        drop(other);
        let before = std::fs::read(world.path()).unwrap();
        sets_aside(&world, &before);
    }
    // Without any mark, but not empty.
    let world = World::new();
    std::fs::create_dir(&world.options.directory).unwrap();
    let other = Connection::open(world.path()).unwrap();
    other.execute_batch("CREATE TABLE precious (x)").unwrap();
    drop(other);
    let before = std::fs::read(world.path()).unwrap();
    sets_aside(&world, &before);
}

#[test]
fn a_link_is_set_aside_and_what_it_leads_to_is_left_alone() {
    let world = World::new();
    std::fs::create_dir(&world.options.directory).unwrap();
    let precious = world.dir.path().join("precious");
    std::fs::write(&precious, "precious").unwrap();
    std::fs::set_permissions(&precious, PermissionsExt::from_mode(0o644)).unwrap();
    symlink(&precious, world.path()).unwrap();
    let aside = sets_aside(&world, b"precious");
    assert!(aside.is_symlink());
    assert_eq!(mode(&precious), 0o644);
    let world = World::new();
    std::fs::create_dir_all(world.path()).unwrap();
    world.tell(&whole(1, 100, 0));
    assert!(world.aside()[0].is_dir(), "a directory of that name");
}

/// Many rows, so that there are pages which opening does not read.
fn large(world: &World) -> Vec<u8> {
    let records: Vec<_> = (1..500).flat_map(|n| whole(1, n * 10, 0)).collect();
    world.tell(&records);
    std::fs::read(world.path()).unwrap()
}

#[test]
fn one_that_is_damaged_is_set_aside_and_the_keeps_in_it_that_could_be_read_are_taken_along() {
    let world = World::new();
    let mut damaged = large(&world);
    let journal = world.open();
    let keep = JournalKeep {
        key: key(7),
        session: key(100),
        is_explicit: true,
        tree: true,
        by_uid: 3,
        made_at: 1,
        until: None,
    };
    journal.keeper().keep(&[keep]).unwrap();
    journal.close();
    damaged.clone_from(&std::fs::read(world.path()).unwrap());
    let page = 4096;
    let inner = damaged.len() / page / 2 * page;
    damaged[inner..inner + 3 * page].fill(0xa5);
    std::fs::write(world.path(), &damaged).unwrap();
    sets_aside(&world, &damaged);
    assert_eq!(world.open().keeps(), [keep]);
}

#[test]
fn one_that_was_cut_short_is_set_aside() {
    for pages in [1, 3, 20] {
        let world = World::new();
        let mut damaged = large(&world);
        damaged.truncate(pages * 4096);
        std::fs::write(world.path(), &damaged).unwrap();
        sets_aside(&world, &damaged);
    }
}

#[test]
fn asides_of_one_second_do_not_replace_each_other() {
    let world = World::new();
    std::fs::create_dir(&world.options.directory).unwrap();
    for n in 0..3 {
        std::fs::write(world.path(), format!("garbage {n}")).unwrap();
        files::set_aside(&world.path()).unwrap();
    }
    assert_eq!(world.aside().len(), 3);
}

#[test]
fn one_that_is_removed_while_it_is_written_is_begun_anew() {
    let world = World::new();
    let journal = world.open();
    let keep = JournalKeep {
        key: key(7),
        session: key(100),
        is_explicit: true,
        tree: false,
        by_uid: 3,
        made_at: 1,
        until: None,
    };
    journal.keeper().keep(&[keep]).unwrap();
    std::fs::remove_dir_all(&world.options.directory).unwrap();
    journal.feed().on_records(&whole(1, 100, 0));
    journal.close();
    assert_eq!(world.all().len(), 1);
    assert_eq!(world.open().keeps(), [keep]);
}

#[test]
fn where_others_may_write_no_journal_is_kept() {
    let world = World::new();
    std::fs::create_dir(&world.options.directory).unwrap();
    std::fs::set_permissions(&world.options.directory, PermissionsExt::from_mode(0o1777)).unwrap();
    let refused = Journal::open(world.options.clone(), BOOT.into());
    let refused = refused.err().expect("refused").to_string();
    assert!(refused.contains("other users may write to"), "{refused}");
    assert!(!world.path().exists());
}

#[test]
fn a_directory_that_cannot_be_made_is_named() {
    let mut world = World::new();
    let file = world.dir.path().join("file");
    std::fs::write(&file, "").unwrap();
    world.options.directory = file.join("state");
    let refused = Journal::open(world.options.clone(), BOOT.into());
    let refused = refused.err().expect("refused").to_string();
    assert!(refused.contains("file/state: Not a directory"), "{refused}");
}
