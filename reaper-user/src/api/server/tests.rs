use std::io::{Read, Write};
use std::sync::mpsc as std_mpsc;
use std::time::Instant;

use super::*;

use crate::api::client::{Client, ClientError};
use crate::api::messages::{EngineReply, EngineRequest, RequestKind, ScanContext};
use crate::api::{KeepsResponse, ProblemDetails, StatusCode};
use crate::config::Config;
use crate::leftovers::Scanner;
use crate::reap::Times;
use reaper_model::Scope;

/// Short limits for tests that wait for a timeout. Prompt requests on a busy machine still meet them.
const SHORT: Timeouts = Timeouts {
    request: Duration::from_secs(2),
    answer: Duration::from_secs(2),
    reaping: Duration::from_secs(2),
    whole: Duration::from_secs(8),
};

/// Limits for tests in which no timeout is expected.
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

/// Server with a fake engine that records the requests.
struct World {
    dir: tempfile::TempDir,
    _server: Server,
    asked: std_mpsc::Receiver<(Peer, RequestKind)>,
}

impl World {
    fn new(answer: impl Fn(&RequestKind) -> Option<EngineReply> + Send + 'static) -> World {
        World::with_journal(tempfile::tempdir().unwrap(), None, LONG, answer)
    }

    /// Creates a server with short limits, for tests that wait for a timeout.
    fn with_short_limits(
        answer: impl Fn(&RequestKind) -> Option<EngineReply> + Send + 'static,
    ) -> World {
        World::with_journal(tempfile::tempdir().unwrap(), None, SHORT, answer)
    }

    /// Creates a server with this journal and these limits. `answer` returns `None` for requests that stay unanswered.
    fn with_journal(
        dir: tempfile::TempDir,
        journal: Option<PathBuf>,
        timeouts: Timeouts,
        answer: impl Fn(&RequestKind) -> Option<EngineReply> + Send + 'static,
    ) -> World {
        let socket = Socket::bind(&dir.path().join("s.sock")).unwrap();
        let (asks, mut questions) = mpsc::channel::<EngineRequest>(QUEUE);
        let server = socket.serve_within(backend(asks, journal), timeouts);
        let (record, asked) = std_mpsc::channel();
        std::thread::spawn(move || {
            // Keeps the senders alive: a dropped sender would be an answer.
            let mut unanswered = Vec::new();
            while let Some(ask) = questions.blocking_recv() {
                match answer(&ask.kind) {
                    Some(answer) => drop(ask.reply.send(answer)),
                    None => unanswered.push(ask.reply),
                }
                let _ = record.send((ask.peer, ask.kind));
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

    /// Sends these bytes and returns the status and the body of the response.
    fn raw(&self, request: &[u8]) -> (u16, String) {
        let mut stream = self.connect();
        // A refused request may be closed before all is written.
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

/// Reads a response to its end. The status is 0 if the connection closes without one.
fn read(stream: &mut Stream) -> (u16, String) {
    let mut response = Vec::new();
    // A reset ends the response too.
    let _ = stream.read_to_end(&mut response);
    let response = String::from_utf8_lossy(&response).into_owned();
    let status = response
        .split(' ')
        .nth(1)
        .and_then(|status| status.parse().ok());
    let body = response.split_once("\r\n\r\n").map_or("", |(_, body)| body);
    (status.unwrap_or(0), body.to_owned())
}

fn answer_keeps(kind: &RequestKind) -> Option<EngineReply> {
    match kind {
        RequestKind::Keeps => Some(EngineReply::Keeps(Vec::new())),
        _ => Some(EngineReply::Refused(ProblemDetails::new(
            StatusCode::NOT_FOUND,
            "nothing here",
        ))),
    }
}

#[test]
fn request_reaches_engine_with_peer() {
    let world = World::new(answer_keeps);
    let client = Client::new(world.path());
    let keeps: KeepsResponse = client.get("/v1/keeps").unwrap().read().unwrap();
    assert_eq!(keeps.keeps, []);
    let uid = nix::unistd::geteuid().as_raw();
    assert_eq!(
        world.asked.recv().unwrap(),
        (Peer { uid }, RequestKind::Keeps)
    );
    let refused = client.get("/v1/tree?agent=a%20b&all=true").unwrap_err();
    assert!(matches!(refused, ClientError::Refused(ref r) if r.detail == "nothing here"));
    let (agent, all) = (Some("a b".to_owned()), true);
    assert_eq!(
        world.asked.recv().unwrap().1,
        RequestKind::Tree { agent, all }
    );
}

#[test]
fn invalid_requests_are_refused_with_a_reason() {
    let world = World::new(answer_keeps);
    let order = |body: &str| format!(r#"{{"pid":{}{body}}}"#, std::process::id());
    for (line, body, status) in [
        ("GET /", String::new(), 404),
        ("GET /v2/status", String::new(), 404),
        ("GET /v1/status/", String::new(), 404),
        ("POST /v1/status", String::new(), 405),
        ("DELETE /v1/scan", String::new(), 405),
        ("GET /v1/explain/", String::new(), 400),
        ("GET /v1/explain/-1", String::new(), 400),
        ("GET /v1/explain/4194305", String::new(), 400),
        ("GET /v1/tree?al=1", String::new(), 400),
        ("GET /v1/tree?all=maybe", String::new(), 400),
        ("GET /v1/tree?all=1&all=1", String::new(), 400),
        ("GET /v1/scan?min_age_s=1h", String::new(), 400),
        ("POST /v1/keeps", String::new(), 400),
        ("POST /v1/keeps", "[".repeat(9999), 400),
        ("POST /v1/keeps", order(r#","until":1"#), 400),
        ("POST /v1/keeps", order(r#","for_s":0"#), 400),
        ("POST /v1/keeps", order(r#","for_s":1e300"#), 400),
        ("POST /v1/keeps", r#"{"pid":2147483646}"#.into(), 404),
        ("POST /v1/keeps", r#"{"pid":2147483646.0}"#.into(), 404),
        ("POST /v1/keeps", r#"{"pid":4250.5}"#.into(), 400),
        ("POST /v1/keeps", r#"{"pid":-1.0}"#.into(), 400),
        ("POST /v1/keeps", r#"{"pid":4294967296}"#.into(), 400),
        ("POST /v1/keeps", r#"{"pid":1,"pid":2}"#.into(), 400),
        ("DELETE /v1/keeps/4194304", String::new(), 404),
        ("POST /v1/keeps", "x".repeat(BODY_MAX + 1), 413),
    ] {
        let (code, response) = world.ask(line, &body);
        let context = format!("{line} {}: {response}", body.get(..80).unwrap_or(&body));
        assert_eq!(code, status, "{context}");
        problem((code, response));
    }
    assert!(
        world.asked.try_recv().is_err(),
        "a request reached the engine"
    );
}

/// Checks that a response is a problem document with its status, and returns the status.
fn problem((status, body): (u16, String)) -> u16 {
    let problem: ProblemDetails =
        serde_json::from_str(&body).unwrap_or_else(|error| panic!("{status} {body:?}: {error}"));
    assert_eq!((problem.status, &*problem.kind), (status, "about:blank"));
    assert!(
        !problem.title.is_empty() && problem.detail.len() > 10,
        "{body}"
    );
    status
}

#[test]
fn invalid_http_is_refused_with_a_reason() {
    let world = World::new(answer_keeps);
    let long = format!(
        "GET /v1/status HTTP/1.1\r\nx: {}\r\n\r\n",
        "a".repeat(2 * HEADERS_MAX)
    );
    assert_eq!(problem(world.raw(long.as_bytes())), 431);
    let path = format!(
        "GET /{} HTTP/1.1\r\nhost: x\r\n\r\n",
        "a".repeat(2 * HEADERS_MAX)
    );
    assert_eq!(problem(world.raw(path.as_bytes())), 431);
    for garbage in [
        &b"\x16\x03\x01\x02\x00"[..],
        b"GET\r\n\r\n",
        b"\0\0\0\0\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"GET /v1/status HTTP/1.1\r\nno colon\r\n\r\n",
        b"POST /v1/keeps HTTP/1.1\r\ncontent-length: x\r\n\r\n",
    ] {
        assert_eq!(problem(world.raw(garbage)), 400, "{garbage:?}");
    }
    let response = world.ask("GET /v1/keeps", "");
    assert_eq!(
        response,
        (200, "{\"keeps\":[]}\n".into()),
        "the server stopped answering"
    );
}

#[test]
fn incomplete_request_is_refused() {
    let world = World::with_short_limits(answer_keeps);
    assert_eq!(problem(world.raw(b"GET /v1/keeps HT")), 408);
    let request = b"POST /v1/keeps HTTP/1.1\r\nhost: x\r\ncontent-length: 10\r\n\r\n{";
    assert_eq!(problem(world.raw(request)), 408);
    for request in [&b"GET /v1/keeps HT"[..], request] {
        let mut stream = world.connect();
        stream.write_all(request).unwrap();
        stream.shutdown(std::net::Shutdown::Write).unwrap();
        assert_eq!(problem(read(&mut stream)), 400);
    }
    let (code, response) =
        world.raw(b"POST /v1/keeps HTTP/1.1\r\nhost: x\r\ncontent-length: 99999999999\r\n\r\n{");
    assert_eq!(code, 413, "the server waited for the body: {response}");
    assert_eq!(world.ask("GET /v1/keeps", "").0, 200);
}

#[test]
fn responses_have_their_media_type_and_headers() {
    let world = World::new(answer_keeps);
    for (request, parts) in [
        (
            "GET /v1/openapi.json",
            &["HTTP/1.1 200 ", "content-type: application/json\r\n"][..],
        ),
        (
            "PUT /v1/keeps",
            &[
                "HTTP/1.1 405 ",
                "content-type: application/problem+json\r\n",
                "allow: GET, POST\r\n",
            ],
        ),
        (
            "no-request",
            &[
                "HTTP/1.1 400 ",
                "content-type: application/problem+json\r\n",
            ],
        ),
    ] {
        let mut stream = world.connect();
        write!(stream, "{request} HTTP/1.1\r\nhost: x\r\n\r\n").unwrap();
        let mut response = String::new();
        stream.read_to_string(&mut response).unwrap();
        for part in parts {
            assert!(response.contains(part), "{request}: {response}");
        }
    }
}

#[test]
fn late_engine_reply_times_out() {
    let world = World::with_short_limits(|kind| match kind {
        RequestKind::Agents => None,
        other => answer_keeps(other),
    });
    let (code, response) = world.ask("GET /v1/agents", "");
    assert_eq!(code, 504, "{response}");
    assert_eq!(
        world.ask("GET /v1/keeps", "").0,
        200,
        "other requests wait too"
    );
}

/// Context without members, so that a scan reads all processes.
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
fn slow_requests_do_not_delay_others() {
    let dir = tempfile::tempdir().unwrap();
    // Opening this blocks until a writer opens it.
    let journal = dir.path().join("journal.db");
    nix::unistd::mkfifo(&journal, nix::sys::stat::Mode::S_IRWXU).unwrap();
    let answer = |kind: &RequestKind| match kind {
        RequestKind::Scan { .. } => Some(EngineReply::Scan(Vec::new(), watched())),
        other => answer_keeps(other),
    };
    let world = World::with_journal(dir, Some(journal.clone()), SHORT, answer);
    let late = |line| {
        let (code, response) = world.ask(line, "");
        assert_eq!(code, 504, "{line}: {response}");
    };
    let busy = |line, name: &str| {
        let request = format!("{line} HTTP/1.1\r\nhost: x\r\n\r\n");
        let mut stream = world.connect();
        stream.write_all(request.as_bytes()).unwrap();
        let mut response = String::new();
        stream.read_to_string(&mut response).unwrap();
        assert!(response.starts_with("HTTP/1.1 503 "), "{response}");
        assert!(response.contains("\r\nretry-after: "), "{response}");
        assert!(
            response.contains(&format!("busy with another {name}")),
            "{response}"
        );
    };
    // The client disconnects, and the scan continues.
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
        assert!(Instant::now() < end, "the slots are not released");
    }
}

#[test]
fn unprivileged_users_leave_room_for_others() {
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
    assert!(
        has_room(&open, Peer { uid: 70_004 }),
        "four users take all slots"
    );
    for uid in 70_004..70_200 {
        fill(Peer { uid }, &mut open);
    }
    assert_eq!(open.values().sum::<usize>(), USERS_MAX);
    let uid = nix::unistd::geteuid().as_raw();
    for uid in [0, uid] {
        assert!(has_room(&open, Peer { uid }), "no room for {uid}");
    }
    assert_eq!(
        fill(Peer { uid: 0 }, &mut open),
        CONNECTIONS_MAX - USERS_MAX
    );
}

#[test]
fn stopped_engine_is_reported_as_busy() {
    let dir = tempfile::tempdir().unwrap();
    let socket = Socket::bind(&dir.path().join("s.sock")).unwrap();
    let (asks, _) = mpsc::channel(1);
    let _server = socket.serve_within(backend(asks, None), LONG).unwrap();
    let error = Client::new(dir.path().join("s.sock"))
        .get("/v1/status")
        .unwrap_err();
    assert!(
        matches!(error, ClientError::Refused(ref refusal) if refusal.status == StatusCode::SERVICE_UNAVAILABLE)
    );
}

#[test]
fn connection_slots_are_limited_and_released() {
    let world = World::new(answer_keeps);
    let idle: Vec<Stream> = (0..CONNECTIONS_MAX).map(|_| world.connect()).collect();
    let (code, response) = read(&mut world.connect());
    assert_eq!(code, 503, "{response}");
    let refusal: ProblemDetails = serde_json::from_str(&response).unwrap();
    assert_eq!(refusal.status, 503);
    drop(idle);
    let end = Instant::now() + Duration::from_secs(10);
    while world.ask("GET /v1/keeps", "").0 != 200 {
        assert!(Instant::now() < end, "the slots are not released");
    }
}

#[test]
fn stale_socket_is_replaced_but_not_other_files() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("s.sock");
    // A killed service leaves its socket like this.
    drop(Listener::bind(&path).unwrap());
    assert!(path.exists());
    let first = Socket::bind(&path).unwrap();
    let mode = fs::metadata(&path).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o666);
    assert!(matches!(Socket::bind(&path), Err(ServerError::Alive(_))));
    drop(first);
    assert!(!path.exists(), "the socket is left behind");
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
fn socket_of_another_service_is_not_removed() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("s.sock");
    let first = Socket::bind(&path).unwrap();
    fs::remove_file(&path).unwrap();
    // Bound before `first` is dropped, so that the inode differs.
    let _other = Listener::bind(&path).unwrap();
    drop(first);
    assert!(path.exists());
}
