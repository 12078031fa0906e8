//! Tests that a held path keeps its meaning, whatever replaces its components.

use std::os::unix::fs::{PermissionsExt, symlink};

use super::*;

struct World(tempfile::TempDir);

impl World {
    /// Creates a directory `ws/tree` and a directory `victim`, both with files.
    fn new() -> World {
        let world = World(tempfile::tempdir().unwrap());
        for directory in ["ws/tree/inner", "victim/tree"] {
            fs::create_dir_all(world.path(directory)).unwrap();
        }
        for file in ["ws/tree/inner/a", "victim/a", "victim/tree/a"] {
            fs::write(world.path(file), "old").unwrap();
        }
        world
    }

    fn path(&self, path: &str) -> PathBuf {
        self.0.path().join(path)
    }

    fn hold(&self, path: &str) -> HeldPath {
        HeldPath::resolve(&self.path(path)).unwrap()
    }

    fn assert_victim_lives(&self) {
        for file in ["victim/a", "victim/tree/a"] {
            assert_eq!(
                fs::read_to_string(self.path(file)).unwrap(),
                "old",
                "{file}"
            );
        }
    }
}

#[test]
fn directory_is_removed_with_its_content() {
    let world = World::new();
    let held = world.hold("ws/tree/");
    symlink(world.path("victim"), world.path("ws/tree/link")).unwrap();
    assert_eq!(held.remove().unwrap(), Vec::<PathBuf>::new());
    assert!(!world.path("ws/tree").exists() && world.path("ws").exists());
    world.assert_victim_lives();
    assert!(held.remove().unwrap().is_empty(), "already removed");
}

#[test]
fn link_in_place_of_the_directory_is_removed_alone() {
    let world = World::new();
    let held = world.hold("ws/tree");
    fs::rename(world.path("ws/tree"), world.path("ws/moved")).unwrap();
    symlink(world.path("victim"), world.path("ws/tree")).unwrap();
    held.remove().unwrap();
    assert!(fs::symlink_metadata(world.path("ws/tree")).is_err());
    world.assert_victim_lives();
}

#[test]
fn replaced_parent_does_not_redirect() {
    let world = World::new();
    let (tree, report) = (world.hold("ws/tree"), world.hold("ws/a"));
    fs::rename(world.path("ws"), world.path("moved")).unwrap();
    symlink(world.path("victim"), world.path("ws")).unwrap();
    tree.remove().unwrap();
    report.replace(b"new").unwrap();
    assert!(!world.path("moved/tree").exists());
    assert_eq!(fs::read(world.path("moved/a")).unwrap(), b"new");
    world.assert_victim_lives();
}

#[test]
fn missing_directory_replaced_by_link_is_refused() {
    let world = World::new();
    let held = world.hold("new/tree");
    assert!(held.remove().unwrap().is_empty());
    symlink(world.path("victim"), world.path("new")).unwrap();
    assert!(held.remove().is_err());
    assert!(held.replace(b"new").is_err());
    world.assert_victim_lives();
}

#[test]
fn link_is_replaced_and_its_target_is_kept() {
    let world = World::new();
    let held = world.hold("ws/report");
    symlink(world.path("victim/a"), world.path("ws/report")).unwrap();
    held.replace(b"new").unwrap();
    let meta = fs::symlink_metadata(world.path("ws/report")).unwrap();
    assert!(meta.is_file());
    assert_eq!(fs::read(world.path("ws/report")).unwrap(), b"new");
    assert_eq!(
        fs::read_dir(world.path("ws")).unwrap().count(),
        2,
        "no temporary file is left"
    );
    world.assert_victim_lives();
}

#[test]
fn walk_without_openat2_follows_no_link() {
    let world = World::new();
    let directory = rfs::open(world.0.path(), PLACE, Mode::empty()).unwrap();
    let open = |path: &str| walk_beneath(directory.as_fd(), Path::new(path), PLACE);
    assert!(open("ws/tree/inner").is_ok());
    symlink("victim", world.path("link")).unwrap();
    for path in ["link", "link/tree", "ws/../victim", "absent"] {
        assert!(open(path).is_err(), "{path}");
    }
}

#[test]
fn parent_components_are_refused() {
    for path in ["..", "a/..", "new/../b", "/a/../b"] {
        let error = HeldPath::resolve(Path::new(path)).unwrap_err();
        assert!(matches!(error, HeldPathError::ParentComponent), "{path}");
    }
    let error = HeldPath::resolve(Path::new("/")).unwrap_err();
    assert!(matches!(error, HeldPathError::NoName));
}

#[test]
fn root_refuses_directories_that_others_may_write_to() {
    if !rustix::process::geteuid().is_root() {
        return;
    }
    let world = World::new();
    let refused = |path: &str| {
        let held = HeldPath::resolve(&world.path(path));
        matches!(held, Err(HeldPathError::Writable(_)))
    };
    let set = |path: &str, mode| {
        fs::set_permissions(world.path(path), fs::Permissions::from_mode(mode)).unwrap();
    };
    assert!(!refused("ws/tree"));
    set("ws", 0o777);
    assert!(refused("ws/tree") && refused("ws/new/tree"));
    set("ws", 0o1777);
    assert!(!refused("ws/tree"));
    std::os::unix::fs::chown(world.path("ws/tree"), Some(65534), None).unwrap();
    assert!(
        refused("ws/tree"),
        "sticky, but the entry belongs to another user"
    );
    set("ws", 0o755);
    assert!(!refused("ws/tree"));
    symlink("ws", world.path("link")).unwrap();
    assert!(!refused("link/tree"));
    std::os::unix::fs::lchown(world.path("link"), Some(65534), None).unwrap();
    assert!(refused("link/tree"), "through a link of another user");
    assert!(
        refused("ws/tree/inner"),
        "below a directory of another user"
    );
}
