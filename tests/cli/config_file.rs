//! Tests of the default config file. Each runs in a mount namespace in which `/etc` is a directory of the test.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Command;

use libtest_mimic::Trial;

use super::{CommandOutput, run};
use crate::daemon::REAPER;
use crate::trees::trial;
use crate::world::{TempDir, link};

/// Returns the tests that need root.
pub fn privileged() -> Vec<Trial> {
    vec![
        trial("cli", "config-of-the-host", config_of_the_host),
        trial("cli", "config-that-is-refused", config_that_is_refused),
        trial("cli", "config-of-a-user", config_of_a_user),
        trial(
            "cli",
            "config-of-others-is-refused",
            config_of_others_is_refused,
        ),
        trial("cli", "config-example-is-written-once", config_example),
        trial("cli", "home-of-another-user", home_of_another_user),
    ]
}

/// Start of each script. `watch` runs a daemon that only observes, on the descendants of the script.
const BEGIN: &str = r#"
mount --bind etc /etc || exit 99
export HOME=$PWD XDG_CONFIG_HOME=$PWD/user XDG_RUNTIME_DIR=$PWD/run
file=/etc/reaper/config.toml
await() {
    n=0
    until eval "$1"; do
        n=$((n + 1))
        [ $n -lt 150 ] || { echo "timed out: $1"; cat stdout; exit 9; }
        sleep 0.1
    done
}
watch() {
    "$@" ./reaper daemon --observe --scope $$ --source procfs --no-journal $where > stdout 2>&1 &
    echo $! > daemon
    await 'grep -q " next: " stdout'
    export REAPER_SOCKET=$(echo run/*/*.sock)
}
trap 'kill -KILL $(cat daemon) 2> /dev/null' EXIT
where="--runtime-dir $PWD/run/reaper"
"#;

/// Runs a script after [`BEGIN`]. Root owns the directory of the test, and all users can enter it.
fn script(script: &str) -> (TempDir, CommandOutput) {
    let dir = TempDir::new();
    let place = dir.path();
    fs::set_permissions(place, fs::Permissions::from_mode(0o755)).expect("change the mode");
    link(Path::new(REAPER), &place.join("reaper"));
    for directory in ["etc/reaper", "user/reaper", "run"] {
        fs::create_dir_all(place.join(directory)).expect("create a directory");
    }
    fs::write(place.join("script"), [BEGIN, script].concat()).expect("write the script");
    let mut command = Command::new("unshare");
    command.args(["--mount", "--propagation", "private", "sh", "script"]);
    let said = run(place, command.current_dir(place));
    assert_eq!(said.code, Some(0), "{}{}", said.out, said.err);
    (dir, said)
}

#[track_caller]
fn assert_lines(said: &CommandOutput, lines: &[&str]) {
    for line in lines {
        let found = said.out.lines().any(|printed| printed.trim() == *line);
        assert!(found, "no line '{line}':\n{}{}", said.out, said.err);
    }
}

/// The service of root reads /etc/reaper/config.toml and no config of a user. It names the file, and `config show` prints
/// what it uses, also after a reload. A reload of a file that others can change, or of none, changes nothing.
fn config_of_the_host() {
    let (_dir, said) = script(
        r#"
echo 'grace = "41s"' > $file
echo 'grace = "99s"' > user/reaper/config.toml
watch
sed -n 's/.* ready  //p' stdout
./reaper status | grep ^config
./reaper doctor | grep "config "
./reaper config show | sed -n "s|^runtime_dir = .$PWD|runtime directory |p"
show() { ./reaper config show | grep -E "^(# Config|(grace = .[0-9]+s|ring_size))" | tr '\n' ' '; echo "$1"; }
reload() { ./reaper config reload > reply 2>&1; echo "reload: $?"; cat reply; }
show first
echo 'grace = "42s"' > $file
echo 'ring_size = "16 MiB"' >> $file
reload
show reloaded
echo 'grace = "43s"' > $file
chmod 666 $file
reload
chmod 644 $file; chmod 777 /etc/reaper
reload
chmod 755 /etc/reaper; rm $file
reload
show kept
"#,
    );
    let file = "/etc/reaper/config.toml";
    assert_lines(
        &said,
        &[
            &format!("mode observe, config {file}"),
            &format!("config     {file}"),
            "runtime directory /run/reaper\"",
            &format!("# Config file: {file} grace = \"41s\" ring_size = \"8 MiB\" first"),
            &format!("# Config file: {file} grace = \"42s\" ring_size = \"8 MiB\" reloaded"),
            &format!("# Config file: {file} grace = \"42s\" ring_size = \"8 MiB\" kept"),
        ],
    );
    assert!(!said.out.contains("99s"), "{}", said.out);
    let doctor = |line: &str| line.starts_with("yes  config ") && line.ends_with(file);
    assert!(said.out.lines().any(doctor), "{}", said.out);
    assert_eq!(said.out.matches("reload: 0").count(), 1, "{}", said.out);
    assert_eq!(said.out.matches("reload: 1").count(), 3, "{}", said.out);
    for why in [
        "may change this file",
        "may change its directory",
        "no such file",
    ] {
        assert!(said.out.contains(why), "no '{why}': {}", said.out);
    }
}

/// After a SIGHUP with a config that has errors, the status says since when it has been refused, and its first error. Other
/// users do not see the error. The next reload that works ends that.
fn config_that_is_refused() {
    let (_dir, said) = script(
        r#"
: > $file
watch
state() { "$@" ./reaper status --json > state; tr -d '\n ' < state | grep -o '"config_refused".*"source"' | sed 's/"since":"[^"]*"/SINCE/'; }
hangup() { kill -HUP $(cat daemon); await "$1"; }
refused=$(state | wc -l); echo "at the start: $refused"
printf 'grave = "5s"\nmode = "kill"\n' > $file
hangup 'state | grep -q grave'
./reaper status | tr -s ' ' | grep -A 2 ^config
state setpriv --reuid 61006 --clear-groups | sed 's/^/other: /'
since() { sed -n 's/.*config_refused":{"since":"\([^"]*\).*/\1/p' state; }
first=$(since)
printf 'mode = "kill"\n' > $file
hangup 'state | grep -q kill'
[ "$first" = "$(since)" ] && [ "$first" ] && echo "the same time"
: > $file
hangup '[ -z "$(state)" ]'
echo "at the end: applied"
"#,
    );
    let file = "/etc/reaper/config.toml";
    assert_lines(
        &said,
        &[
            "at the start: 0",
            &format!("config {file}"),
            "the same time",
            "at the end: applied",
        ],
    );
    let lines: Vec<&str> = said.out.lines().map(str::trim).collect();
    let refused = |line: &&str| line.starts_with("the file has been refused for ");
    let at = lines.iter().position(refused).expect("a row");
    let error = format!("{file}:1:1: ");
    let first = lines[at + 1];
    assert!(
        first.starts_with(&error) && first.contains("grave"),
        "{lines:#?}"
    );
    let other = lines.iter().find(|line| line.starts_with("other: "));
    let other = other.expect("the status of another user");
    assert!(
        other.contains("age_s") && !other.contains("grave"),
        "{other}"
    );
}

/// A user's own service reads the config of the user and not that of the host.
fn config_of_a_user() {
    let (dir, said) = script(
        r#"
echo 'grace = "99s"' > $file
echo 'grace = "41s"' > user/reaper/config.toml
chown -R 61006 user run
where=--user
watch setpriv --reuid 61006 --clear-groups
sed -n 's/.* ready  //p' stdout
./reaper config show | grep ^grace
unset REAPER_SOCKET
setpriv --reuid 61006 --clear-groups ./reaper config show --json | tr -d ' ' | grep -o '"grace":"[^"]*"'
"#,
    );
    let file = dir.path().join("user/reaper/config.toml");
    assert_lines(
        &said,
        &[
            &format!("mode observe, config {}", file.display()),
            "grace = \"41s\"",
            "\"grace\":\"41s\"",
        ],
    );
}

/// Root's daemon refuses a default config that others can change, replace or create.
fn config_of_others_is_refused() {
    let (_dir, said) = script(
        r#"
try() {
    timeout 20 ./reaper daemon --observe --scope $$ --source procfs --no-journal $where > said 2>&1
    echo "$1: $?"
    grep -q "/etc/reaper" said || cat said
}
: > $file
chown 4242 $file; try file-of-other-user
chown 0 $file; chmod 664 $file; try file-of-group
chmod 646 $file; try file-of-all
chmod 644 $file; chown 4242 /etc/reaper; try directory-of-other-user
chown 0 /etc/reaper; chmod 775 /etc/reaper; try directory-of-group
chmod 1777 /etc/reaper; try directory-of-all
rm $file; try absent-file-in-directory-of-all
chmod 755 /etc/reaper
ln -s "$PWD/user/reaper/config.toml" $file
: > user/reaper/config.toml; chmod 777 user/reaper; try target-of-link
[ -e run/reaper ] && echo something was started
rm $file; mkdir $file; try directory
exit 0
"#,
    );
    for case in [
        "file-of-other-user",
        "file-of-group",
        "file-of-all",
        "directory-of-other-user",
        "directory-of-group",
        "directory-of-all",
        "absent-file-in-directory-of-all",
        "target-of-link",
        "directory",
    ] {
        assert_lines(&said, &[&format!("{case}: 2")]);
    }
    assert_eq!(said.out.lines().count(), 9, "{}", said.out);
}

/// `config init` writes the example to the default place of root or of a user, and replaces no file.
fn config_example() {
    let (dir, said) = script(
        r#"
rmdir /etc/reaper user/reaper
chown 61006 user
umask 0
user="setpriv --reuid 61006 --clear-groups"
for as in "" "$user"; do
    $as ./reaper config init && $as ./reaper config check && $as ./reaper config init
    echo "again: $?"
done 2>&1
stat -c '%n %a %u' /etc/reaper $file user/reaper user/reaper/config.toml
"#,
    );
    let own = dir.path().join("user/reaper/config.toml");
    let own = own.display().to_string();
    for file in ["/etc/reaper/config.toml", &own] {
        let checked = format!("{file}: ok; mode enforce, ");
        assert!(said.out.contains(&checked), "{}", said.out);
        let refused = format!("reaper: {file} exists already and was left alone");
        assert!(said.out.contains(&refused), "{}", said.out);
    }
    assert_eq!(said.out.matches("again: 2").count(), 2, "{}", said.out);
    assert_lines(
        &said,
        &[
            "/etc/reaper 755 0",
            "/etc/reaper/config.toml 644 0",
            "user/reaper 755 61006",
            "user/reaper/config.toml 644 61006",
        ],
    );
}

/// A user whose HOME is a directory that only another user may enter gets the own home directory, or without one the
/// built-in settings with one line about that. Root adds no agent to the config of another user.
fn home_of_another_user() {
    let (dir, said) = script(
        r#"
mount -t tmpfs none /run || exit 99
mkdir -p locked home/.config/reaper
chmod 700 locked
cp /bin/sleep my-agent
echo 'grace = "41s"' > home/.config/reaper/config.toml
chown -R 61006 home user
unset XDG_CONFIG_HOME REAPER_SOCKET
export HOME=$PWD/locked
user="setpriv --reuid 61006 --clear-groups ./reaper"
for words in doctor agents "config show"; do
    $user $words > answer 2> said
    echo "$words: $?, $(grep -c built-in.settings said) about it"
done
echo "u:x:61006:61006::$PWD/home:/bin/sh" > /etc/passwd
$user config show 2> said | grep ^grace
$user agent add --dry-run ./my-agent 2>&1 | tail -n 1
HOME=$PWD/user ./reaper agent add --user ./my-agent 2>&1
echo "as root: $?"
"#,
    );
    let place = dir.path().display();
    assert_lines(
        &said,
        &[
            "doctor: 0, 1 about it",
            "agents: 0, 1 about it",
            "config show: 0, 1 about it",
            "grace = \"41s\"",
            &format!("Not written to {place}/home/.config/reaper/config.toml (--dry-run)."),
            "as root: 2",
        ],
    );
    let refused =
        format!("{place}/user/.config/reaper/config.toml belongs to user u, and you are root");
    assert!(said.out.contains(&refused), "{}", said.out);
}
