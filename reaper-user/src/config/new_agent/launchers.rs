//! Programs that run any other program or script, so that a rule for one would match too much.

use reaper_model::ruleset::without_version;

/// File names without a version.
const LAUNCHERS: &str = "
    busybox toybox coreutils ld.so ld-linux.so ld-linux-x86-64.so ld-linux-aarch64.so ld-musl-x86_64.so ld-musl-aarch64.so
    env sudo su sudo-rs su-rs doas runuser login pkexec sg setpriv gosu su-exec sshd ssh init systemd systemd-run
    nohup setsid timeout nice ionice chrt taskset numactl prlimit setarch stdbuf unbuffer script rlwrap time flock watch
    entr xargs parallel strace ltrace gdb valgrind perf tini docker-init dumb-init catatonit supervisord chroot unshare
    nsenter bwrap firejail fakeroot proot xvfb-run dbus-run-session cron crond atd
    make gmake ninja just cargo go bundle npm npx pnpm pnpx yarn yarnpkg corepack bunx tsx ts-node nodemon pm2 volta
    volta-shim uv uvx pip pipx pipenv poetry conda mise asdf direnv
    java deno dotnet mono wine wine64 electron tclsh wish expect Rscript julia beam.smp guile racket sbcl
    awk gawk mawk osascript qemu-x86_64 qemu-aarch64
";

/// Packages and scripts of node, without the ending, that run any other program or script.
const OF_NODE: &str = "
    npm npm-cli npx npx-cli pnpm pnpx yarn yarnpkg corepack bunx tsx ts-node nodemon pm2 electron
";

/// Returns the name of the launcher that the path of a program or script, or `-m NAME` of a python module, names.
pub(super) fn launcher(path: &str) -> Option<&'static str> {
    let name = path.strip_prefix("-m ").unwrap_or(path);
    let file = name.rsplit('/').next()?;
    let unversioned = without_version(file.as_bytes());
    let is_it = |name: &&str| *name == file || name.as_bytes() == unversioned;
    let listed = LAUNCHERS.split_whitespace().find(is_it);
    listed.or_else(|| launcher_of_node(path, file))
}

/// Returns the launcher whose script this is, such as `yarn.js`, or in whose package it is: `node_modules/tsx/dist/cli.mjs`.
fn launcher_of_node(path: &str, file: &str) -> Option<&'static str> {
    let package = path.rsplit_once("/node_modules/");
    let package = package.and_then(|(_, rest)| rest.split('/').next());
    let endings = [".js", ".cjs", ".mjs"];
    let script = endings.iter().find_map(|ending| file.strip_suffix(ending));
    let is_it = |name: &&str| [package, script].contains(&Some(name));
    OF_NODE.split_whitespace().find(is_it)
}
