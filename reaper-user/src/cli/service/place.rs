//! Service managers, and where they expect their files.

use std::fs;
use std::path::{Path, PathBuf};

use nix::unistd::geteuid;

use super::files::{self, NewFile, Seal};
use super::{Failure, root};
use crate::config::Mode;
use reaper_host::sys::xdg::{absolute, config_home};

/// Unit of the host and of a user, and the job of launchd.
const HOST_UNIT: &str = include_str!("../../../packaging/reaper.service");
const USER_UNIT: &str = include_str!("../../../packaging/reaper-user.service");
const JOB: &str = include_str!("../../../packaging/reaper.plist");
/// Program and log in the files above.
const PROGRAM: &str = "/usr/bin/reaper";
const LOG: &str = "/var/log/reaper.log";
/// Name of the unit.
pub(super) const UNIT: &str = "reaper.service";
/// Label of the job.
pub(super) const LABEL: &str = "dev.reaper.daemon";
/// Name of the drop-in with the mode.
const MODE_FILE: &str = "10-mode.conf";
/// Directories where packages put units.
const PACKAGED: [&str; 2] = ["/usr/lib/systemd", "/lib/systemd"];

/// Service manager.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Manager {
    #[default]
    Systemd,
    Launchd,
}

impl Manager {
    /// Returns the one of this operating system.
    pub(super) fn native() -> Manager {
        match cfg!(target_os = "macos") {
            true => Manager::Launchd,
            false => Manager::Systemd,
        }
    }
}

/// Files of one service.
#[derive(Clone, Debug, Default)]
pub(super) struct Place {
    pub manager: Manager,
    /// Root directory of the host.
    pub root: PathBuf,
    /// Whether it is a user's own service.
    pub is_own: bool,
    /// Home directory of the user.
    home: PathBuf,
    /// Directory for the config of programs, of the user.
    config: PathBuf,
    /// Directory of units or jobs, and those below it for drop-ins and for links, as this process reaches them.
    directory: PathBuf,
    drop_ins: PathBuf,
    wants: PathBuf,
    /// Unit of a package, if one is installed.
    packaged: Option<PathBuf>,
    /// Place of the program, as this process reaches it.
    program_file: PathBuf,
}

impl Place {
    /// Returns the place below `root`, of the host or of this user.
    ///
    /// # Errors
    /// A user's directories are unknown, or a directory below `root` cannot be resolved.
    pub(super) fn new(manager: Manager, root: &Path, is_own: bool) -> Result<Place, Failure> {
        let unknown = || {
            let what = "--user: the home directory is unknown, as HOME is not set; set it to an absolute path";
            Failure::Usage(what.into())
        };
        let (home, config) = match is_own {
            true => (
                absolute("HOME").ok_or_else(unknown)?,
                config_home().ok_or_else(unknown)?,
            ),
            false => (PathBuf::new(), PathBuf::new()),
        };
        let mut place = Place {
            manager,
            root: root.to_owned(),
            is_own,
            home,
            config,
            ..Place::default()
        };
        let directory = place.unit_directory();
        let (target, scope) = match is_own {
            true => ("default", "user"),
            false => ("multi-user", "system"),
        };
        // A file in each directory, because the last component is not resolved.
        let parent = |path: PathBuf| path.parent().unwrap_or(root).to_owned();
        place.directory = parent(place.at(directory.join(UNIT))?);
        place.drop_ins = parent(place.at(directory.join(format!("{UNIT}.d/{MODE_FILE}")))?);
        place.wants = parent(place.at(directory.join(format!("{target}.target.wants/{UNIT}")))?);
        place.program_file = place.at(place.program())?;
        if manager == Manager::Systemd {
            for packages in PACKAGED {
                let path = place.at(Path::new(packages).join(scope).join(UNIT))?;
                if place.packaged.is_none() && fs::symlink_metadata(&path).is_ok() {
                    place.packaged = Some(path);
                }
            }
        }
        Ok(place)
    }

    /// Returns whether it is on the host that runs, and not below another root directory.
    pub(super) fn is_live(&self) -> bool {
        self.root == Path::new("/")
    }

    /// Returns a path as this process reaches it. Symbolic links do not lead out of the root directory.
    ///
    /// # Errors
    /// It cannot be resolved.
    pub(super) fn at(&self, path: impl AsRef<Path>) -> Result<PathBuf, Failure> {
        let path = path.as_ref();
        match self.is_live() {
            true => Ok(self.root.join(path)),
            false => root::resolve(&self.root, path)
                .map_err(|error| files::failed("cannot resolve", path, &error)),
        }
    }

    /// Returns the directory of units or jobs, inside the root.
    fn unit_directory(&self) -> PathBuf {
        match (self.manager, self.is_own) {
            (Manager::Systemd, false) => "/etc/systemd/system".into(),
            (Manager::Systemd, true) => self.config.join("systemd/user"),
            (Manager::Launchd, false) => "/Library/LaunchDaemons".into(),
            (Manager::Launchd, true) => self.home.join("Library/LaunchAgents"),
        }
    }

    /// Returns the unit or job.
    pub(super) fn unit(&self) -> PathBuf {
        self.directory.join(match self.manager {
            Manager::Systemd => UNIT.to_owned(),
            Manager::Launchd => format!("{LABEL}.plist"),
        })
    }

    /// Returns the unit of a package, if one is installed.
    pub(super) fn packaged_unit(&self) -> Option<PathBuf> {
        self.packaged.clone()
    }

    /// Returns the drop-in with the mode.
    pub(super) fn mode_file(&self) -> PathBuf {
        self.drop_ins.join(MODE_FILE)
    }

    /// Returns the link by which systemd starts the unit at boot or login.
    pub(super) fn link(&self) -> PathBuf {
        self.wants.join(UNIT)
    }

    /// Returns the place of the program, inside the root.
    pub(super) fn program(&self) -> PathBuf {
        match self.is_own {
            true => self.home.join(".local/bin/reaper"),
            false => "/usr/local/bin/reaper".into(),
        }
    }

    /// Returns the place of the program, as this process reaches it.
    pub(super) fn program_file(&self) -> &Path {
        &self.program_file
    }

    /// Returns the unit or job that starts `program`, sealed. `installed` is whether the program belongs to it.
    pub(super) fn unit_file(&self, program: &Path, installed: bool, mode: Mode) -> NewFile {
        let text = match (self.manager, self.is_own) {
            (Manager::Systemd, false) => HOST_UNIT.to_owned(),
            (Manager::Systemd, true) => USER_UNIT.to_owned(),
            (Manager::Launchd, _) => self.job(mode),
        };
        let text = text.replace(PROGRAM, &program.display().to_string());
        self.sealed(self.unit(), &text, installed.then(|| program.to_owned()))
    }

    /// Returns the drop-in with a mode, sealed.
    pub(super) fn mode_drop_in(&self, mode: Mode) -> NewFile {
        let text = format!("[Service]\nEnvironment=REAPER_MODE=--{}\n", mode.name());
        self.sealed(self.mode_file(), &text, None)
    }

    fn sealed(&self, path: PathBuf, text: &str, program: Option<PathBuf>) -> NewFile {
        let comment = match self.manager {
            Manager::Systemd => ("# ", ""),
            Manager::Launchd => ("<!-- ", " -->"),
        };
        let seal = Seal {
            version: env!("CARGO_PKG_VERSION").into(),
            program,
        };
        NewFile {
            path,
            content: files::sealed(text, comment, &seal).into(),
            mode: 0o644,
        }
    }

    fn job(&self, mode: Mode) -> String {
        let job = JOB.replace("--observe", &format!("--{}", mode.name()));
        match self.is_own {
            false => job,
            true => job.replace(LOG, &self.log().display().to_string()).replace(
                "<string>daemon<",
                "<string>daemon</string>\n    <string>--user<",
            ),
        }
    }

    /// Returns the file with the log of a job of launchd.
    pub(super) fn log(&self) -> PathBuf {
        match self.is_own {
            true => self.home.join("Library/Logs/reaper.log"),
            false => LOG.into(),
        }
    }

    /// Returns the mode that is installed now; `None` if nothing is.
    pub(super) fn installed_mode(&self) -> Option<Mode> {
        let file = match self.manager {
            Manager::Systemd => self.mode_file(),
            Manager::Launchd => self.unit(),
        };
        let text = files::read(&file).ok();
        let text = text.map(|text| String::from_utf8_lossy(&text).into_owned());
        match text.is_some_and(|text| text.contains("--enforce")) {
            true => Some(Mode::Enforce),
            false => {
                (self.unit().exists() || self.packaged_unit().is_some()).then_some(Mode::Observe)
            }
        }
    }

    /// Returns a command of the service manager as a user would type it.
    pub(super) fn control(&self, words: &[&str]) -> Vec<String> {
        let program: &[&str] = match (self.manager, self.is_own) {
            (Manager::Systemd, false) => &["systemctl"],
            (Manager::Systemd, true) => &["systemctl", "--user"],
            (Manager::Launchd, _) => &["launchctl"],
        };
        program
            .iter()
            .chain(words)
            .map(|word| word.to_string())
            .collect()
    }

    /// Returns the domain of launchd that runs the job.
    pub(super) fn domain(&self) -> String {
        match self.is_own {
            true => format!("gui/{}", geteuid()),
            false => "system".into(),
        }
    }

    /// Returns the start of a command that changes the service: `sudo` for that of the host.
    pub(super) fn command(&self, words: &str) -> String {
        match self.is_own {
            true => format!("reaper service {words} --user"),
            false => format!("sudo reaper service {words}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(file: &NewFile) -> &str {
        str::from_utf8(&file.content).unwrap()
    }

    #[test]
    fn unit_starts_the_installed_program() {
        let root = Path::new("/r");
        let place = Place::new(Manager::Systemd, root, false).unwrap();
        let file = place.unit_file(Path::new("/opt/reaper"), true, Mode::Observe);
        assert_eq!(file.path, Path::new("/r/etc/systemd/system/reaper.service"));
        let unit = text(&file);
        assert!(unit.contains("\nExecStart=/opt/reaper daemon --source ebpf $REAPER_MODE\n"));
        assert!(unit.contains("\nExecReload=/opt/reaper config reload\n"));
        assert!(unit.contains("\nEnvironment=REAPER_MODE=--observe\n"));
        assert!(!unit.contains(PROGRAM), "{unit}");
        let mode = place.mode_drop_in(Mode::Enforce);
        assert!(text(&mode).contains("\nEnvironment=REAPER_MODE=--enforce\n"));
    }

    #[test]
    fn job_of_launchd_has_the_mode_and_the_program() {
        let place = Place {
            manager: Manager::Launchd,
            root: "/".into(),
            is_own: true,
            home: "/Users/a".into(),
            directory: "/Users/a/Library/LaunchAgents".into(),
            ..Place::default()
        };
        let file = place.unit_file(Path::new("/opt/reaper"), false, Mode::Enforce);
        let expected = "/Users/a/Library/LaunchAgents/dev.reaper.daemon.plist";
        assert_eq!(file.path, Path::new(expected));
        let words = ["/opt/reaper", "daemon", "--user", "--enforce"];
        let words = words
            .map(|word| format!("    <string>{word}</string>\n"))
            .concat();
        assert!(text(&file).contains(&words), "{}", text(&file));
    }
}
