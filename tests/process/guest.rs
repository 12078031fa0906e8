//! Members that behave like common programs: servers, clients, editors, busy loops, installed commands.

use std::net::{Ipv4Addr, TcpListener};
use std::os::fd::OwnedFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};
use std::time::Duration;

use super::context::{ProcessContext, fork, leave, rest};
use crate::proc;

/// `listen [ROLE HOW…]`: listens on a free TCP port. Starts a child, which does not listen, if arguments are given.
pub fn listen(s: &ProcessContext) -> ! {
    let _socket = TcpListener::bind((Ipv4Addr::UNSPECIFIED, 0)).expect("listen on a port");
    if let [role, how @ ..] = &s.args[..] {
        s.spawn(role, &how.join(" "));
    }
    s.report();
    rest()
}

/// `serve [ROLE HOW…]`: accepts connections on the Unix socket of its role. Starts a child if arguments are given.
pub fn serve(s: &ProcessContext) -> ! {
    let path = s.dir.join(&s.role).with_extension("socket");
    let socket = UnixListener::bind(path).expect("listen on a socket");
    if let [role, how @ ..] = &s.args[..] {
        s.spawn(role, &how.join(" "));
    }
    s.report();
    loop {
        let (mut client, _) = socket.accept().expect("accept a connection");
        // The thread ends when the client disconnects.
        std::thread::spawn(move || std::io::copy(&mut client, &mut std::io::sink()));
    }
}

/// `client ROLE`: connects to the server with this role.
pub fn client(s: &ProcessContext) -> ! {
    let path = s.dir.join(&s.args[0]).with_extension("socket");
    let connected = || {
        let stream = UnixStream::connect(&path);
        stream.inspect_err(|_| std::thread::sleep(Duration::from_millis(2)))
    };
    let _stream = std::iter::repeat_with(connected).find_map(Result::ok);
    s.report();
    rest()
}

/// `editor ENDS PARENT ROLE HOW…`: starts an agent and holds the other ends of its standard input and output.
///
/// `ENDS`: `pipes`, `sockets`, `closed` (pipes whose other ends are closed), or `file` (such a pipe as input, a file as
/// output). With `PARENT` = `orphan`, an intermediate process starts the agent and exits at once.
pub fn editor(s: &ProcessContext) -> ! {
    let [ends, parent, role, how @ ..] = &s.args[..] else {
        panic!("an editor needs ENDS, PARENT, ROLE and HOW");
    };
    let (own, [input, output]): (Vec<OwnedFd>, [OwnedFd; 2]) = match ends.as_str() {
        "sockets" => {
            let pairs = [(); 2].map(|()| UnixStream::pair().expect("make a pair of sockets"));
            let [(a, input), (b, output)] = pairs;
            (vec![a.into(), b.into()], [input.into(), output.into()])
        }
        ends => {
            let (input, writer) = std::io::pipe().expect("make a pipe");
            let (reader, output) = std::io::pipe().expect("make a pipe");
            match ends {
                "pipes" => (
                    vec![writer.into(), reader.into()],
                    [input.into(), output.into()],
                ),
                "closed" => (Vec::new(), [input.into(), output.into()]),
                _ => {
                    let file = std::fs::File::create(s.dir.join(role).with_extension("log"));
                    (
                        Vec::new(),
                        [input.into(), file.expect("create a file").into()],
                    )
                }
            }
        }
    };
    let how = how.join(" ");
    if parent == "orphan" {
        let middle = fork(|| s.spawn_between(role, &how, [input.into(), output.into()]));
        nix::sys::wait::waitpid(middle, None).expect("wait for the agent's parent");
    } else {
        s.spawn_between(role, &how, [input.into(), output.into()]);
    }
    s.report();
    let _own = own;
    rest()
}

/// Uses a whole CPU.
pub fn burn(s: &ProcessContext) -> ! {
    s.report();
    loop {
        std::hint::spin_loop();
    }
}

/// `family N ROLE HOW…`: starts N children.
pub fn family(s: &ProcessContext) -> ! {
    let n: u32 = s.args[0].parse().expect("a number");
    (0..n).for_each(|_| s.spawn(&s.args[1], &s.args[2..].join(" ")));
    s.report();
    rest()
}

/// `in-unit BEHAVIOUR…`: moves to the cgroup to which `DIR/unit` links, and executes the worker program.
pub fn in_unit(s: &ProcessContext) -> ! {
    std::fs::write(s.dir.join("unit/cgroup.procs"), "0").expect("move to the cgroup");
    s.exec(&s.args.join(" "))
}

/// `to-unit BEHAVIOUR…`: moves to the same cgroup, without exec.
pub fn to_unit(s: &ProcessContext) -> ! {
    std::fs::write(s.dir.join("unit/cgroup.procs"), "0").expect("move to the cgroup");
    s.run_behaviour(&s.role, &s.args.join(" "))
}

/// Executes the command in its arguments, without a report.
pub fn exec(s: &ProcessContext) -> ! {
    panic!("exec {:?}: {}", s.args, s.real(&s.args).exec())
}

/// `pipeline READER WRITER HOW…`: starts a process whose output `cat` reads, as a shell does.
pub fn pipeline(s: &ProcessContext) -> ! {
    let [reader, writer, how @ ..] = &s.args[..] else {
        panic!("pipeline READER WRITER HOW…");
    };
    let (input, output) = std::io::pipe().expect("make a pipe");
    s.spawn_between(writer, &how.join(" "), [Stdio::null(), output.into()]);
    let mut cat = Command::new("cat");
    let cat = cat.stdin(input).stdout(Stdio::null()).spawn();
    await_sleep(s, reader, cat.expect("start cat").id());
    s.report();
    rest()
}

/// Reports a program once it sleeps. `spawn` can return before the kernel reports the exec, which it has then.
pub fn await_sleep(s: &ProcessContext, role: &str, pid: u32) {
    while proc::stat(pid).is_some_and(|stat| stat.state != b'S') {
        std::thread::sleep(Duration::from_millis(1));
    }
    s.report_other(role, proc::stat(pid).expect("its stat").id);
}

/// `program ROLE COMMAND…`: starts a command that sleeps, and reports it once it does.
pub fn program(s: &ProcessContext) -> ! {
    let mut command = s.real(&s.args[1..]);
    let command = command.stdin(Stdio::null()).stdout(Stdio::null());
    let mut child = command.spawn().expect("start the command");
    await_sleep(s, &s.args[0], child.id());
    s.report();
    let ended = child.wait();
    panic!("{command:?} has exited: {ended:?}")
}

/// `daemonized ROLE COMMAND…`: runs a command that leaves a daemon behind, and reports the daemon: the process with the
/// same arguments that is alive after the command has exited.
pub fn daemonized(s: &ProcessContext) -> ! {
    let mut command = s.real(&s.args[1..]);
    let status = command.stdin(Stdio::null()).stdout(Stdio::null()).status();
    assert!(
        status.expect("run the command").success(),
        "{command:?} fails"
    );
    let words = [command.get_program()]
        .into_iter()
        .chain(command.get_args());
    let line: Vec<u8> = words
        .flat_map(|word| [word.as_encoded_bytes(), &b"\0"[..]].concat())
        .collect();
    let is_daemon = |stat: &proc::Stat| {
        stat.is_alive()
            && std::fs::read(format!("/proc/{}/cmdline", stat.id.pid)).is_ok_and(|l| l == line)
    };
    let daemon = proc::all().into_iter().find(is_daemon);
    s.report_other(&s.args[0], daemon.expect("a daemon of this command").id);
    leave(0)
}
