use std::io::{Read, Write};
use std::sync::mpsc as std_mpsc;
use std::time::Instant;

use super::*;
use nix::sys::signal::Signal;

use crate::api::client::{Client, ClientError};
use crate::api::messages::{EndAsked, EngineReply, EngineRequest, RequestKind, ScanContext};
use crate::api::{Claimed, Claims, EndRequest, ErrorResponse, KeepsResponse};
use crate::config::Config;
use crate::leftovers::Scanner;
use crate::reap::Times;
use reaper_model::Scope;
use reaper_model::event::ProcessKey;

/// Short, so that the slow are waited for in a test; but longer than a busy machine holds up those that are not.
const SHORT: Timeouts = Timeouts {
    request: Duration::from_secs(2),
    answer: Duration::from_secs(2),
    reaping: Duration::from_secs(2),
    whole: Duration::from_secs(8),
};

/// Where nothing is slow but the machine.
const LONG: Timeouts = Timeouts {
    request: Duration::from_secs(20),
    answer: Duration::from_secs(20),
    reaping: Duration::from_secs(20),
    whole: Duration::from_secs(60),
};

fn backend(engine: mpsc::Sender<EngineRequest>, journal: Option<PathBuf>) -> Backend {
    Backend {
        engine: engine.clone(),
        journal: journal.clone(),
        leftovers: Arc::new(Scanner::new(engine, journal)),
    }
}

/// A server, and an engine of which only the questions are looked at.
struct World {
    dir: tempfile::TempDir,
    _server: Server,
    asked: std_mpsc::Receiver<(Peer, RequestKind)>,
}

impl World {
    fn new(answer: impl Fn(&RequestKind) -> Option<EngineReply> + Send + 'static) -> World {
        World::beside(tempfile::tempdir().unwrap(), None, LONG, answer)
    }

    /// One in which somebody is too slow.
    fn hasty(answer: impl Fn(&RequestKind) -> Option<EngineReply> + Send + 'static) -> World {
        World::beside(tempfile::tempdir().unwrap(), None, SHORT, answer)
    }

    /// With this journal.
    fn beside(
        dir: tempfile::TempDir,
        journal: Option<PathBuf>,
        patience: Timeouts,
        answer: impl Fn(&RequestKind) -> Option<EngineReply> + Send + 'static,
    ) -> World {
        let socket = Socket::bind(&dir.path().join("s.sock")).unwrap();
        let (asks, mut questions) = mpsc::channel::<EngineRequest>(QUEUE);
        let server = socket.serve_within(
            backend(asks, journal),
            EventClock::new("boot".into()),
            patience,
        );
        let (tell, asked) = std_mpsc::channel();
        std::thread::spawn(move || {
            // Who gets no answer goes on waiting for one.
            let mut unanswered = Vec::new();
            while let Some(ask) = questions.blocking_recv() {
                match answer(&ask.question) {
                    Some(answer) => drop(ask.answer.send(answer)),
                    None => unanswered.push(ask.answer),
                }
                let _ = tell.send((ask.peer, ask.question));
            }
        });
        World {
            dir,
            _server: server.unwrap(),
            asked,
        }
    }

    fn path(&self) -> PathBuf {
        self.dir.path().join("s.sock")
    }

    fn connect(&self) -> Stream {
        let stream = Stream::connect(self.path()).unwrap();
        stream
            .set_read_timeout(Some(Duration::from_secs(10)))
            .unwrap();
        stream
    }

    /// The status and the body that come back for these bytes.
    fn raw(&self, request: &[u8]) -> (u16, String) {
        let mut stream = self.connect();
        // Refused, it may be closed before all is written.
        let _ = stream.write_all(request);
        read(&mut stream)
    }

    fn ask(&self, line: &str, body: &str) -> (u16, String) {
        let length = body.len();
        let request =
            format!("{line} HTTP/1.1\r\nhost: x\r\ncontent-length: {length}\r\n\r\n{body}");
        self.raw(request.as_bytes())
    }
}

/// 0 for a connection that is closed without a word.
fn read(stream: &mut Stream) -> (u16, String) {
    let mut said = Vec::new();
    // A reset is an end too.
    let _ = stream.read_to_end(&mut said);
    let said = String::from_utf8_lossy(&said).into_owned();
    let status = said
        .split(' ')
        .nth(1)
        .and_then(|status| status.parse().ok());
    let body = said.split_once("\r\n\r\n").map_or("", |(_, body)| body);
    (status.unwrap_or(0), body.to_owned())
}

fn nothing_kept(question: &RequestKind) -> Option<EngineReply> {
    match question {
        RequestKind::Keeps => Some(EngineReply::Keeps(Vec::new())),
        _ => Some(EngineReply::Refused(ErrorResponse::new(
            "not_found",
            "nothing here",
        ))),
    }
}

#[test]
fn a_question_comes_through_with_who_asks() {
    let world = World::new(nothing_kept);
    let client = Client::new(world.path());
    let keeps: KeepsResponse = client.get("/v1/keeps").unwrap().read().unwrap();
    assert_eq!(keeps.keeps, []);
    let uid = nix::unistd::geteuid().as_raw();
    assert_eq!(
        world.asked.recv().unwrap(),
        (Peer { uid }, RequestKind::Keeps)
    );
    let refused = client.get("/v1/tree?agent=a%20b&all=true").unwrap_err();
    assert!(matches!(refused, ClientError::Refused(ref r) if r.message == "nothing here"));
    let (agent, all) = (Some("a b".to_owned()), true);
    assert_eq!(
        world.asked.recv().unwrap().1,
        RequestKind::Tree { agent, all }
    );
}

#[test]
fn wrong_requests_are_told_what_is_wrong() {
    let world = World::new(nothing_kept);
    let order = |body: &str| format!(r#"{{"pid":{}{body}}}"#, std::process::id());
    let end = |pid: u32, signal: &str| {
        format!(r#"{{"pid":{pid},"start_ns":1,"until_ns":2,"signal":"{signal}","grace_ms":3}}"#)
    };
    for (line, body, status, word) in [
        ("GET /", String::new(), 404, "not_found"),
        ("GET /v2/status", String::new(), 404, "not_found"),
        ("GET /v1/status/", String::new(), 404, "not_found"),
        ("POST /v1/status", String::new(), 405, "wrong_method"),
        ("DELETE /v1/scan", String::new(), 405, "wrong_method"),
        ("GET /v1/explain/", String::new(), 400, "bad_request"),
        ("GET /v1/explain/-1", String::new(), 400, "bad_request"),
        (
            "GET /v1/explain/4294967296",
            String::new(),
            400,
            "bad_request",
        ),
        ("GET /v1/tree?al=1", String::new(), 400, "bad_request"),
        ("GET /v1/tree?all=maybe", String::new(), 400, "bad_request"),
        (
            "GET /v1/tree?all=1&all=1",
            String::new(),
            400,
            "bad_request",
        ),
        (
            "GET /v1/scan?min_age_s=1h",
            String::new(),
            400,
            "bad_request",
        ),
        ("POST /v1/keeps", String::new(), 400, "bad_request"),
        ("POST /v1/keeps", "[".repeat(9999), 400, "bad_request"),
        ("POST /v1/keeps", order(r#","until":1"#), 400, "bad_request"),
        ("POST /v1/keeps", order(r#","for_s":0"#), 400, "bad_request"),
        (
            "POST /v1/keeps",
            order(r#","for_s":1e300"#),
            400,
            "bad_request",
        ),
        (
            "POST /v1/keeps",
            r#"{"pid":2147483646}"#.into(),
            404,
            "not_found",
        ),
        (
            "DELETE /v1/keeps/2147483646",
            String::new(),
            404,
            "not_found",
        ),
        ("POST /v1/keeps", "x".repeat(BODY_MAX + 1), 413, "too_large"),
        ("GET /v1/end", String::new(), 405, "wrong_method"),
        ("POST /v1/end", order(""), 400, "bad_request"),
        (
            "POST /v1/end",
            end(std::process::id(), "TERM"),
            400,
            "bad_request",
        ),
        // Nobody orders the end of another's tree.
        ("POST /v1/end", end(1, "SIGTERM"), 403, "eperm"),
    ] {
        let (code, said) = world.ask(line, &body);
        let about = format!("{line} {}: {said}", body.get(..80).unwrap_or(&body));
        assert_eq!(code, status, "{about}");
        let refusal: ErrorResponse = serde_json::from_str(&said).expect(&about);
        assert_eq!(refusal.error, word, "{about}");
        assert!(refusal.message.len() > 10, "{about}");
    }
    assert!(world.asked.try_recv().is_err(), "the engine was asked");
}

#[test]
fn the_end_of_a_tree_is_asked_for_by_its_root() {
    let world = World::new(|question| match question {
        RequestKind::End(_) => Some(EngineReply::End(vec![Claimed {
            pid: 42,
            start_ns: 7,
            rss: None,
        }])),
        _ => None,
    });
    let client = Client::new(world.path()).within(Duration::from_secs(10));
    let pid = std::process::id();
    let order = EndRequest {
        pid,
        start_ns: 70_000_000,
        until_ns: 80_000_000,
        signal: "SIGINT".into(),
        grace_ms: 1500,
    };
    let said = client.post("/v1/end", &order).unwrap();
    assert_eq!(said.pid, Some(pid), "of the service");
    let ending: Claims = said.read().unwrap();
    assert_eq!(ending.processes[0].pid, 42);
    let asked = EndAsked {
        root: ProcessKey {
            pid,
            start: 70_000_000,
        },
        until: 80_000_000,
        signal: Signal::SIGINT,
        grace: Duration::from_millis(1500),
    };
    assert_eq!(world.asked.recv().unwrap().1, RequestKind::End(asked));
}

#[test]
fn what_is_no_request_is_refused() {
    let world = World::new(nothing_kept);
    let long = format!(
        "GET /v1/status HTTP/1.1\r\nx: {}\r\n\r\n",
        "a".repeat(2 * HEADERS_MAX)
    );
    assert_eq!(world.raw(long.as_bytes()).0, 431);
    let path = format!(
        "GET /{} HTTP/1.1\r\nhost: x\r\n\r\n",
        "a".repeat(2 * HEADERS_MAX)
    );
    assert!(matches!(world.raw(path.as_bytes()).0, 414 | 431));
    for garbage in [
        &b"\x16\x03\x01\x02\x00"[..],
        b"GET\r\n\r\n",
        b"\0\0\0\0\r\n\r\n",
    ] {
        assert!(matches!(world.raw(garbage).0, 0 | 400), "{garbage:?}");
    }
    let said = world.ask("GET /v1/keeps", "");
    assert_eq!(said, (200, "{\"keeps\":[]}\n".into()), "it answers no more");
}

#[test]
fn who_stops_in_the_middle_is_not_waited_for() {
    let world = World::hasty(nothing_kept);
    let (code, _) = world.raw(b"GET /v1/keeps HT");
    assert!(matches!(code, 0 | 408), "{code}");
    let request = b"POST /v1/keeps HTTP/1.1\r\nhost: x\r\ncontent-length: 10\r\n\r\n{";
    let (code, said) = world.raw(request);
    assert_eq!(code, 504, "{said}");
    assert!(said.contains(r#""error":"timeout""#), "{said}");
    let (code, said) =
        world.raw(b"POST /v1/keeps HTTP/1.1\r\nhost: x\r\ncontent-length: 99999999999\r\n\r\n{");
    assert_eq!(code, 413, "it is waited for: {said}");
    assert_eq!(world.ask("GET /v1/keeps", "").0, 200);
}

#[test]
fn a_late_answer_is_not_waited_for() {
    let world = World::hasty(|question| match question {
        RequestKind::Agents => None,
        other => nothing_kept(other),
    });
    let (code, said) = world.ask("GET /v1/agents", "");
    assert_eq!(code, 504, "{said}");
    assert_eq!(
        world.ask("GET /v1/keeps", "").0,
        200,
        "others wait for that too"
    );
}

/// Of nobody, so that all are to be looked at.
fn watched() -> Box<ScanContext> {
    Box::new(ScanContext {
        members: Vec::new(),
        rules: Config::default().rules,
        scope: Scope::default(),
        started_ns: 0,
        enforce: false,
        times: Times::default(),
        gap: false,
    })
}

#[test]
fn what_takes_long_is_in_no_other_answers_way() {
    let dir = tempfile::tempdir().unwrap();
    // Whoever opens this waits until somebody writes to it.
    let journal = dir.path().join("journal.db");
    nix::unistd::mkfifo(&journal, nix::sys::stat::Mode::S_IRWXU).unwrap();
    let answer = |question: &RequestKind| match question {
        RequestKind::Scan { .. } => Some(EngineReply::Scan(Vec::new(), watched())),
        other => nothing_kept(other),
    };
    let world = World::beside(dir, Some(journal.clone()), SHORT, answer);
    let late = |line| {
        let (code, said) = world.ask(line, "");
        assert_eq!(code, 504, "{line}: {said}");
    };
    let busy = |line, name: &str| {
        let request = format!("{line} HTTP/1.1\r\nhost: x\r\n\r\n");
        let mut stream = world.connect();
        stream.write_all(request.as_bytes()).unwrap();
        let mut said = String::new();
        stream.read_to_string(&mut said).unwrap();
        assert!(said.starts_with("HTTP/1.1 503 "), "{said}");
        assert!(said.contains("\r\nretry-after: "), "{said}");
        assert!(
            said.contains(&format!("busy with another {name}")),
            "{said}"
        );
    };
    // Whoever has asked is gone, and it goes on.
    drop(
        world
            .connect()
            .write_all(b"GET /v1/scan HTTP/1.1\r\nhost: x\r\n\r\n"),
    );
    world.asked.recv().unwrap();
    busy("GET /v1/scan", "scan");
    late("GET /v1/history");
    late("GET /v1/history?since_s=1");
    busy("GET /v1/history", "history");
    assert_eq!(world.ask("GET /v1/keeps", "").0, 200);
    let aside = journal.with_extension("aside");
    fs::rename(&journal, &aside).unwrap();
    fs::write(&journal, "no journal").unwrap();
    drop(fs::File::options().write(true).open(aside).unwrap());
    let end = Instant::now() + Duration::from_secs(10);
    while world.ask("GET /v1/history", "").0 != 500 {
        assert!(Instant::now() < end, "the places are not given back");
    }
}

#[test]
fn users_leave_room_for_each_other_and_for_who_may_do_all() {
    let mut open = HashMap::new();
    let fill = |peer: Peer, open: &mut HashMap<Peer, usize>| {
        while has_room(open, peer) {
            *open.entry(peer).or_default() += 1;
        }
        open.get(&peer).copied().unwrap_or(0)
    };
    for uid in 70_000..70_004 {
        assert_eq!(fill(Peer { uid }, &mut open), PER_USER_MAX);
    }
    assert!(has_room(&open, Peer { uid: 70_004 }), "four have it all");
    for uid in 70_004..70_200 {
        fill(Peer { uid }, &mut open);
    }
    assert_eq!(open.values().sum::<usize>(), USERS_MAX);
    let uid = nix::unistd::geteuid().as_raw();
    for uid in [0, uid] {
        assert!(has_room(&open, Peer { uid }), "{uid} is kept off");
    }
    assert_eq!(
        fill(Peer { uid: 0 }, &mut open),
        CONNECTIONS_MAX - USERS_MAX
    );
}

#[test]
fn an_engine_that_is_gone_is_named() {
    let dir = tempfile::tempdir().unwrap();
    let socket = Socket::bind(&dir.path().join("s.sock")).unwrap();
    let (asks, _) = mpsc::channel(1);
    let _server = socket
        .serve_within(backend(asks, None), EventClock::new("boot".into()), LONG)
        .unwrap();
    let error = Client::new(dir.path().join("s.sock"))
        .get("/v1/status")
        .unwrap_err();
    assert!(matches!(error, ClientError::Refused(ref refusal) if refusal.error == "busy"));
}

#[test]
fn connections_have_a_bound_and_places_are_given_back() {
    let world = World::new(nothing_kept);
    let idle: Vec<Stream> = (0..CONNECTIONS_MAX).map(|_| world.connect()).collect();
    let (code, said) = read(&mut world.connect());
    assert_eq!(code, 503, "{said}");
    let refusal: ErrorResponse = serde_json::from_str(&said).unwrap();
    assert_eq!(refusal.error, "busy");
    drop(idle);
    let end = Instant::now() + Duration::from_secs(10);
    while world.ask("GET /v1/keeps", "").0 != 200 {
        assert!(Instant::now() < end, "the places are not given back");
    }
}

#[test]
fn a_stale_socket_is_replaced_and_nothing_else() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("s.sock");
    // As one who is killed leaves it.
    drop(Listener::bind(&path).unwrap());
    assert!(path.exists());
    let first = Socket::bind(&path).unwrap();
    let mode = fs::metadata(&path).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o666);
    assert!(matches!(Socket::bind(&path), Err(ServerError::Alive(_))));
    drop(first);
    assert!(!path.exists(), "it is left behind");
    fs::write(&path, "mine").unwrap();
    assert!(matches!(
        Socket::bind(&path),
        Err(ServerError::NotASocket(_))
    ));
    assert_eq!(fs::read(&path).unwrap(), b"mine");
    let error = Client::new(&path).get("/v1/status").unwrap_err();
    assert!(matches!(error, ClientError::NoService { .. }), "{error}");
    assert!(error.to_string().contains("it is not a socket"), "{error}");
}

#[test]
fn a_socket_that_another_has_put_there_is_left_to_them() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("s.sock");
    let first = Socket::bind(&path).unwrap();
    fs::remove_file(&path).unwrap();
    // Made before the first is let go of, so that its inode is another.
    let _theirs = Listener::bind(&path).unwrap();
    drop(first);
    assert!(path.exists());
}
