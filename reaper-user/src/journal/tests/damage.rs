//! Unusable journals are renamed and replaced, or reported if that is impossible.

use std::os::unix::fs::{PermissionsExt, symlink};

use super::*;

/// Checks that a journal replaces an unusable file, and that the renamed file is unchanged. Returns its path.
fn check_replaced(world: &World, before: &[u8]) -> PathBuf {
    world.store(&lifecycle(1, 100, 0));
    assert_eq!(world.all().len(), 1);
    let renamed = world.renamed();
    let [renamed] = &renamed[..] else {
        panic!("{renamed:?}")
    };
    assert_eq!(std::fs::read(renamed).unwrap(), before);
    renamed.clone()
}

#[test]
fn file_that_is_not_a_database_is_replaced() {
    for content in [&b"hello"[..], &[0; 5000], b"SQLite format 3\0"] {
        let world = World::new();
        std::fs::create_dir(&world.options.directory).unwrap();
        std::fs::write(world.path(), content).unwrap();
        let journal = world.open();
        assert!(journal.was_replaced());
        journal.close();
        check_replaced(&world, content);
    }
    // An empty file may be left from a service that was killed while it created the journal.
    let world = World::new();
    std::fs::create_dir(&world.options.directory).unwrap();
    std::fs::write(world.path(), "").unwrap();
    world.store(&lifecycle(1, 100, 0));
    assert_eq!((world.all().len(), world.renamed().len()), (1, 0));
    assert!(!world.open().was_replaced());
}

#[test]
fn database_of_other_program_or_unknown_schema_is_replaced() {
    for (name, value) in [
        ("application_id", 1),
        ("user_version", 2),
        ("user_version", 0),
    ] {
        let world = World::new();
        world.store(&lifecycle(1, 50, 0));
        let other = Connection::open(world.path()).unwrap();
        other.pragma_update(None, name, value).unwrap();
        drop(other);
        let before = std::fs::read(world.path()).unwrap();
        check_replaced(&world, &before);
    }
    // Without an application id, but not empty.
    let world = World::new();
    std::fs::create_dir(&world.options.directory).unwrap();
    let other = Connection::open(world.path()).unwrap();
    other.execute_batch("CREATE TABLE precious (x)").unwrap();
    drop(other);
    let before = std::fs::read(world.path()).unwrap();
    check_replaced(&world, &before);
}

#[test]
fn link_is_replaced_and_its_target_is_unchanged() {
    let world = World::new();
    std::fs::create_dir(&world.options.directory).unwrap();
    let precious = world.dir.path().join("precious");
    std::fs::write(&precious, "precious").unwrap();
    std::fs::set_permissions(&precious, PermissionsExt::from_mode(0o644)).unwrap();
    symlink(&precious, world.path()).unwrap();
    let renamed = check_replaced(&world, b"precious");
    assert!(renamed.is_symlink());
    assert_eq!(mode(&precious), 0o644);
    let world = World::new();
    std::fs::create_dir_all(world.path()).unwrap();
    world.store(&lifecycle(1, 100, 0));
    assert!(world.renamed()[0].is_dir(), "the directory was not renamed");
}

/// Writes many rows, so that opening the journal does not read all pages. Returns the content of the file.
fn large(world: &World) -> Vec<u8> {
    let records: Vec<_> = (1..500).flat_map(|n| lifecycle(1, n * 10, 0)).collect();
    world.store(&records);
    std::fs::read(world.path()).unwrap()
}

#[test]
fn damaged_journal_is_replaced_and_readable_keeps_are_copied() {
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
    journal.keep_writer().keep(&[keep]).unwrap();
    journal.close();
    damaged.clone_from(&std::fs::read(world.path()).unwrap());
    let page = 4096;
    let inner = damaged.len() / page / 2 * page;
    damaged[inner..inner + 3 * page].fill(0xa5);
    std::fs::write(world.path(), &damaged).unwrap();
    check_replaced(&world, &damaged);
    assert_eq!(world.open().keeps(), [keep]);
}

#[test]
fn truncated_journal_is_replaced() {
    for pages in [1, 3, 20] {
        let world = World::new();
        let mut damaged = large(&world);
        damaged.truncate(pages * 4096);
        std::fs::write(world.path(), &damaged).unwrap();
        check_replaced(&world, &damaged);
    }
}

#[test]
fn renamed_journals_of_one_second_have_distinct_names() {
    let world = World::new();
    std::fs::create_dir(&world.options.directory).unwrap();
    for n in 0..3 {
        std::fs::write(world.path(), format!("garbage {n}")).unwrap();
        files::set_aside(&world.path()).unwrap();
    }
    assert_eq!(world.renamed().len(), 3);
}

#[test]
fn removed_journal_is_created_again() {
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
    journal.keep_writer().keep(&[keep]).unwrap();
    std::fs::remove_dir_all(&world.options.directory).unwrap();
    journal.feed().on_records(&lifecycle(1, 100, 0));
    journal.close();
    assert_eq!(world.all().len(), 1);
    assert_eq!(world.open().keeps(), [keep]);
}

#[test]
fn directory_writable_by_others_is_refused() {
    let world = World::new();
    std::fs::create_dir(&world.options.directory).unwrap();
    std::fs::set_permissions(&world.options.directory, PermissionsExt::from_mode(0o1777)).unwrap();
    let refused = Journal::open(world.options.clone(), BOOT.into());
    let refused = refused.err().expect("refused").to_string();
    assert!(refused.contains("other users can write to"), "{refused}");
    assert!(!world.path().exists());
}

#[test]
fn error_names_directory_that_cannot_be_created() {
    let mut world = World::new();
    let file = world.dir.path().join("file");
    std::fs::write(&file, "").unwrap();
    world.options.directory = file.join("state");
    let refused = Journal::open(world.options.clone(), BOOT.into());
    let refused = refused.err().expect("refused").to_string();
    assert!(
        refused.contains("file/state for the journal: Not a directory"),
        "{refused}"
    );
}
