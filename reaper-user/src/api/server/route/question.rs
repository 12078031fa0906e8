//! What a request asks for.

use std::time::Duration;

use hyper::Method;

use super::Answered;
use crate::api::ask::{EndAsked, Question};
use crate::api::peer::{Peer, Target};
use crate::api::{EndRequest, KEEP_MAX_S, KeepOrder, Refusal};
use crate::export::printable;
use reaper_model::event::ProcessKey;

/// Characters of a name that is told of.
const NAME_MAX: usize = 64;

/// The methods that a path knows, for who has used another; empty for one that there is not.
pub(super) fn methods(path: &str) -> &'static str {
    match segments(path).as_slice() {
        ["v1", "status" | "tree" | "agents" | "history"] | ["v1", "explain", _] => "GET",
        ["v1", "keeps" | "scan"] => "GET, POST",
        ["v1", "keeps", _] => "DELETE",
        ["v1", "end"] | ["v1", "config", "reload"] => "POST",
        _ => "",
    }
}

pub(super) fn segments(path: &str) -> Vec<&str> {
    path.strip_prefix('/').unwrap_or(path).split('/').collect()
}

/// What a request asks for.
pub(super) fn question(
    method: &Method,
    path: &str,
    query: Option<&str>,
    body: &[u8],
    (peer, pid): (Peer, Option<u32>),
) -> Answered<Question> {
    let mut query = Query::read(query)?;
    let question = match (method.as_str(), segments(path).as_slice()) {
        ("GET", ["v1", "status"]) => Question::Status,
        ("GET", ["v1", "tree"]) => Question::Tree {
            agent: query.take("agent"),
            all: query.flag("all")?,
        },
        ("GET", ["v1", "explain", pid]) => Question::Explain { pid: number(pid)? },
        ("GET", ["v1", "agents"]) => Question::Agents,
        ("GET", ["v1", "keeps"]) => Question::Keeps,
        ("POST", ["v1", "keeps"]) => keep(body, peer)?,
        ("DELETE", ["v1", "keeps", pid]) => Question::Unkeep {
            target: target(number(pid)?, peer)?,
        },
        (method @ ("GET" | "POST"), ["v1", "scan"]) => {
            let reap = method == "POST";
            if reap {
                only_root(peer, "reap what a scan has found")?;
            }
            Question::Scan {
                max_age: query.seconds("max_age_s")?,
                reap,
            }
        }
        ("POST", ["v1", "config", "reload"]) => {
            only_root(peer, "reload the config")?;
            Question::Reload
        }
        ("POST", ["v1", "end"]) => end(body, pid)?,
        _ => return Err(unknown(method, path)),
    };
    query.finish()?;
    Ok(question)
}

fn unknown(method: &Method, path: &str) -> Refusal {
    match methods(path) {
        "" => Refusal::new("not_found", "there is no such path; /v1/status is one"),
        methods => {
            let what = format!("{method} is not for this path: use {methods}");
            Refusal::new("wrong_method", what)
        }
    }
}

fn only_root(peer: Peer, what: &str) -> Answered<()> {
    if peer.is_master() {
        return Ok(());
    }
    let what = format!("only root may {what}; run it with sudo");
    Err(Refusal::new("eperm", what))
}

fn keep(body: &[u8], peer: Peer) -> Answered<Question> {
    let order: KeepOrder = serde_json::from_slice(body).map_err(|error| {
        let what = format!(r#"the body is not as {{"pid":42,"for_s":7200,"tree":true}}: {error}"#);
        Refusal::new("bad_request", what)
    })?;
    if order.for_s.is_some_and(|s| s == 0 || s > KEEP_MAX_S) {
        let what = format!("for_s is not from 1 to {KEEP_MAX_S}: leave it out to keep for ever");
        return Err(Refusal::new("bad_request", what));
    }
    Ok(Question::Keep {
        target: target(order.pid, peer)?,
        lasts: order.for_s.map(Duration::from_secs),
        tree: order.tree,
    })
}

fn end(body: &[u8], pid: Option<u32>) -> Answered<Question> {
    let wrong = |why: &dyn std::fmt::Display| {
        let what = format!(
            r#"the body is not as {{"pid":42,"start_ns":120000000,"until_ns":130000000,"signal":"SIGTERM","grace_ms":5000}}: {why}"#
        );
        Refusal::new("bad_request", what)
    };
    let order: EndRequest = serde_json::from_slice(body).map_err(|error| wrong(&error))?;
    let signal = order.signal.parse().map_err(|_| wrong(&"no such signal"))?;
    if pid != Some(order.pid) {
        let what =
            "only the process itself may ask for that, from the pid namespace of this service";
        return Err(Refusal::new("eperm", what));
    }
    Ok(Question::End(EndAsked {
        root: ProcessKey {
            pid: order.pid,
            start: order.start_ns,
        },
        until: order.until_ns,
        signal,
        grace: Duration::from_millis(order.grace_ms),
    }))
}

/// A process that the one who asks may signal.
fn target(pid: u32, peer: Peer) -> Answered<Target> {
    match Target::read(pid) {
        Ok(Some(target)) if peer.reaches(&target) => Ok(target),
        Ok(Some(_)) => {
            let what =
                format!("process {pid} is another user's: only its owner or root may do that");
            Err(Refusal::new("eperm", what))
        }
        Ok(None) => Err(Refusal::new(
            "not_found",
            format!("there is no process {pid}"),
        )),
        Err(error) => {
            let what = format!("cannot read whose process {pid} is: {error}");
            Err(Refusal::new("failed", what))
        }
    }
}

fn number(word: &str) -> Answered<u32> {
    let digits = word.bytes().all(|byte| byte.is_ascii_digit());
    let number = word.parse().ok().filter(|_| digits);
    number.ok_or_else(|| Refusal::new("bad_request", "a pid is a number from 0 to 4294967295"))
}

/// The part of a path after the question mark.
pub(super) struct Query(Vec<(String, String)>);

impl Query {
    pub(super) fn read(text: Option<&str>) -> Answered<Query> {
        let pairs = form_urlencoded::parse(text.unwrap_or_default().as_bytes());
        let pairs: Vec<_> = pairs.into_owned().collect();
        let mut names: Vec<_> = pairs.iter().map(|(name, _)| name).collect();
        names.sort_unstable();
        if let Some(twice) = names.windows(2).find(|two| two[0] == two[1]) {
            let name = printable(twice[0], NAME_MAX);
            let what = format!("the query has `{name}` twice");
            return Err(Refusal::new("bad_request", what));
        }
        Ok(Query(pairs))
    }

    pub(super) fn take(&mut self, name: &str) -> Option<String> {
        let at = self.0.iter().position(|(n, _)| n == name)?;
        Some(self.0.swap_remove(at).1)
    }

    pub(super) fn flag(&mut self, name: &str) -> Answered<bool> {
        match self.take(name).as_deref() {
            None | Some("false" | "0") => Ok(false),
            Some("" | "true" | "1") => Ok(true),
            Some(_) => Err(Refusal::new(
                "bad_request",
                format!("{name} is neither true nor false"),
            )),
        }
    }

    pub(super) fn seconds(&mut self, name: &str) -> Answered<Option<Duration>> {
        let Some(word) = self.take(name) else {
            return Ok(None);
        };
        let seconds = word.parse().map(Duration::from_secs);
        let seconds = seconds.map_err(|_| format!("{name} is no number of seconds"));
        seconds
            .map(Some)
            .map_err(|what| Refusal::new("bad_request", what))
    }

    /// Nothing is left over.
    pub(super) fn finish(self) -> Answered<()> {
        match self.0.first() {
            None => Ok(()),
            Some((name, _)) => {
                let name = printable(name, NAME_MAX);
                let what = format!("the query has `{name}` in it, which this path does not know");
                Err(Refusal::new("bad_request", what))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn others_reach_only_what_is_theirs() {
        // Whoever runs the tests.
        let own = nix::unistd::geteuid().as_raw();
        let stranger = Peer { uid: own + 4242 };
        let pid = std::process::id();
        let path = format!("/v1/keeps/{pid}");
        let body = format!(r#"{{"pid":{pid}}}"#);
        let asked = |method, path, body: &str, peer| {
            let asked = question(&method, path, None, body.as_bytes(), (peer, Some(pid)));
            asked.map_err(|refusal| refusal.error)
        };
        for (method, path, body) in [
            (Method::POST, "/v1/keeps", &*body),
            (Method::DELETE, &*path, ""),
            (Method::POST, "/v1/scan", ""),
            (Method::POST, "/v1/config/reload", ""),
        ] {
            let refused = asked(method.clone(), path, body, stranger);
            assert_eq!(refused, Err("eperm".into()), "{method} {path}");
            assert!(
                asked(method, path, body, Peer { uid: own }).is_ok(),
                "{path}"
            );
        }
    }
}
