use super::*;

/// Returns a file in a new directory, with the directory.
fn line_file() -> (tempfile::TempDir, PathBuf, LineFile) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("events.jsonl");
    let file = LineFile::open(&path).unwrap();
    (dir, path, file)
}

fn write(file: &mut LineFile, lines: &str) {
    file.write_all(lines.as_bytes()).unwrap();
    file.flush().unwrap();
}

/// A full disk (ENOSPC), and a device that fails (EIO): a terminal whose other end is closed.
#[test]
fn lines_that_cannot_be_written_are_dropped_and_counted() {
    let full = File::options().write(true).open("/dev/full").unwrap();
    let hung_up = File::from(nix::pty::openpty(None, None).unwrap().slave);
    for (device, reason) in [
        (full, "No space left on device"),
        (hung_up, "Input/output error"),
    ] {
        let (_dir, path, mut file) = line_file();
        write(&mut file, "1\n");
        let disk = std::mem::replace(&mut file.file, device);
        file.path = None;
        write(&mut file, "2\n3\n");
        let state = file.state();
        let error = state.error().unwrap();
        assert!(error.contains(reason), "{error}");
        assert_eq!((state.lost(), state.unreported()), (2, 0));
        file.file = disk;
        write(&mut file, "4\n");
        assert_eq!((state.error(), state.unreported()), (None, 2));
        state.on_reported(2);
        assert_eq!((state.lost(), state.unreported()), (2, 0));
        assert_eq!(fs::read_to_string(path).unwrap(), "1\n4\n");
    }
}

/// A full disk takes a part of the buffer, which may end within a line.
#[test]
fn line_that_was_written_in_part_is_completed_later() {
    for (written, kept, lost) in [
        (0, "", 3),
        (1, "ne\n", 2),
        (3, "\n", 2),
        (4, "", 2),
        (6, "o\n", 1),
        (14, "", 0),
    ] {
        let (_dir, _, mut file) = line_file();
        file.write_all(b"one\ntwo\nthree\n").unwrap();
        file.drop_unwritten(written);
        let buffer = String::from_utf8(file.buffer.clone()).unwrap();
        assert_eq!(
            (buffer.as_str(), file.state.lost()),
            (kept, lost),
            "{written}"
        );
        // The disk is still full.
        file.write_all(b"four\n").unwrap();
        file.drop_unwritten(0);
        assert_eq!(file.buffer, kept.as_bytes(), "{written}");
        assert_eq!(file.state.lost(), lost + 1, "{written}");
    }
}

#[test]
fn renamed_or_removed_file_is_created_again() {
    let (dir, path, mut file) = line_file();
    let old = dir.path().join("events.jsonl.1");
    write(&mut file, "1\n");
    fs::rename(&path, &old).unwrap();
    write(&mut file, "2\n");
    assert_eq!(fs::read_to_string(&old).unwrap(), "1\n");
    assert_eq!(fs::read_to_string(&path).unwrap(), "2\n");
    assert_eq!(fs::metadata(&path).unwrap().mode() & 0o777, 0o600);
    fs::remove_file(&path).unwrap();
    write(&mut file, "3\n");
    assert_eq!(fs::read_to_string(&path).unwrap(), "3\n");
    // Truncated in place.
    File::create(&path).unwrap();
    write(&mut file, "4\n");
    assert_eq!(fs::read_to_string(&path).unwrap(), "4\n");
    // The rest of a line whose beginning is in the old file.
    file.write_all(b"five\nsix\n").unwrap();
    file.drop_unwritten(2);
    fs::rename(&path, &old).unwrap();
    write(&mut file, "7\n");
    assert_eq!(fs::read_to_string(&path).unwrap(), "7\n");
    assert_eq!(file.state().lost(), 2);
}

#[test]
fn file_that_another_user_may_have_put_there_is_not_written() {
    use std::os::unix::fs::{PermissionsExt, symlink};
    let (dir, path, mut file) = line_file();
    let target = dir.path().join("target");
    fs::write(&target, "").unwrap();
    let public = fs::Permissions::from_mode(0o666);
    fs::set_permissions(&target, public).unwrap();
    fs::remove_file(&path).unwrap();
    symlink(&target, &path).unwrap();
    write(&mut file, "1\n");
    fs::remove_file(&path).unwrap();
    fs::hard_link(&target, &path).unwrap();
    write(&mut file, "2\n");
    assert!(file.state().error().unwrap().contains("another user"));
    assert_eq!(fs::read_to_string(&target).unwrap(), "");
    fs::remove_file(&path).unwrap();
    write(&mut file, "3\n");
    assert_eq!(fs::read_to_string(&path).unwrap(), "3\n");
    assert_eq!((file.state().error(), file.state().unreported()), (None, 2));
    // A directory in which other users can replace files.
    fs::set_permissions(dir.path(), fs::Permissions::from_mode(0o777)).unwrap();
    assert_eq!(LineFile::open(&path).unwrap().path, None);
}
