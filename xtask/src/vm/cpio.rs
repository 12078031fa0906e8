//! Archives for the kernel's initramfs: `cpio -H newc`.

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::io::{self, BufWriter, Write};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

const DIRECTORY: u32 = 0o040_755;
const FILE: u32 = 0o100_000;

/// Archive that is being written. Root owns all files in it.
pub struct Archive {
    out: BufWriter<File>,
    path: PathBuf,
    entries: u32,
    known: BTreeSet<PathBuf>,
}

impl Archive {
    pub fn create(path: &Path) -> Result<Archive> {
        if let Some(dir) = path.parent() {
            fs::create_dir_all(dir).with_context(|| dir.display().to_string())?;
        }
        let out = File::create(path).with_context(|| path.display().to_string())?;
        Ok(Archive {
            out: BufWriter::new(out),
            path: path.to_owned(),
            entries: 0,
            known: BTreeSet::new(),
        })
    }

    /// Adds a file of this host at `place`, unless the archive already has one there.
    pub fn copy(&mut self, file: &Path, place: &Path) -> Result<()> {
        let name = || format!("cannot read {}", file.display());
        let mode = fs::metadata(file).with_context(name)?.mode() & 0o7777;
        let bytes = fs::read(file).with_context(name)?;
        self.file(place, mode, &bytes)
    }

    /// Adds a file, unless the archive already has one at `place`.
    pub fn file(&mut self, place: &Path, mode: u32, bytes: &[u8]) -> Result<()> {
        self.directory(place.parent().unwrap_or(Path::new("/")))?;
        self.entry(place, FILE | mode, bytes)
    }

    /// Adds a directory and its parents.
    pub fn directory(&mut self, place: &Path) -> Result<()> {
        let above: Vec<&Path> = place.ancestors().filter(|a| a.parent().is_some()).collect();
        above
            .into_iter()
            .rev()
            .try_for_each(|dir| self.entry(dir, DIRECTORY, &[]))
    }

    pub fn finish(mut self) -> Result<()> {
        self.write("TRAILER!!!", 0, &[])
            .and_then(|()| self.out.flush())
            .with_context(|| self.path.display().to_string())
    }

    fn entry(&mut self, place: &Path, mode: u32, bytes: &[u8]) -> Result<()> {
        let place = place.strip_prefix("/").unwrap_or(place);
        if !self.known.insert(place.to_owned()) {
            return Ok(());
        }
        let name = place
            .to_str()
            .with_context(|| format!("{} is not in UTF-8", place.display()))?;
        self.write(name, mode, bytes)
            .with_context(|| self.path.display().to_string())
    }

    fn write(&mut self, name: &str, mode: u32, bytes: &[u8]) -> io::Result<()> {
        self.entries += 1;
        let size = u32::try_from(bytes.len()).map_err(io::Error::other)?;
        let name_size = u32::try_from(name.len() + 1).map_err(io::Error::other)?;
        // Inode, mode, uid, gid, links, time, size, four device numbers, length of the name, no checksum.
        let fields = [
            self.entries,
            mode,
            0,
            0,
            1,
            0,
            size,
            0,
            0,
            0,
            0,
            name_size,
            0,
        ];
        let mut header = String::from("070701");
        fields
            .iter()
            .for_each(|field| header.push_str(&format!("{field:08x}")));
        self.out.write_all(header.as_bytes())?;
        self.out.write_all(name.as_bytes())?;
        self.out.write_all(&[0])?;
        self.pad(header.len() + name.len() + 1)?;
        self.out.write_all(bytes)?;
        self.pad(bytes.len())
    }

    /// Pads a part of this length to a multiple of four bytes.
    fn pad(&mut self, length: usize) -> io::Result<()> {
        self.out
            .write_all(&[0; 3][..length.next_multiple_of(4) - length])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn archive_has_each_directory_once_before_its_content() {
        let path = std::env::temp_dir().join(format!("xtask-cpio-{}", std::process::id()));
        let mut archive = Archive::create(&path).unwrap();
        for place in ["/a/b/one", "/a/two", "/a/two"] {
            archive.file(Path::new(place), 0o644, b"12345").unwrap();
        }
        archive.finish().unwrap();
        let bytes = fs::read(&path).unwrap();
        fs::remove_file(&path).unwrap();
        assert_eq!(bytes.len() % 4, 0);
        let text = String::from_utf8_lossy(&bytes);
        let names: Vec<&str> = text
            .split("070701")
            .skip(1)
            .map(|entry| entry[104..].split('\0').next().unwrap_or_default())
            .collect();
        assert_eq!(names, ["a", "a/b", "a/b/one", "a/two", "TRAILER!!!"]);
    }
}
