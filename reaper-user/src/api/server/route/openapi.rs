//! Makes `docs/openapi.json`, the description of the API, from the table of endpoints and the types.

use std::fs;
use std::path::Path;

use hyper::Method;
use regex::Regex;
use schemars::generate::{SchemaGenerator, SchemaSettings};
use schemars::{JsonSchema, Schema};
use serde_json::{Map, Value, json};

use super::endpoints::{ENDPOINTS, Endpoint, read_request};
use super::{JSON, PROBLEM};
use crate::api::peer::Peer;
use crate::api::{
    AgentsResponse, Explanation, History, KeepParams, KeepResult, KeepsResponse, ProblemDetails,
    Reloaded, RuleTestResponse, ScanReport, ShownConfig, Status, TreeResponse,
};

const ABOUT: &str = "\
API of the `reaper` service, with HTTP/1.1 on a Unix socket: `/run/reaper/reaper.sock`, or \
`$XDG_RUNTIME_DIR/reaper/reaper.sock` with `--user`. The kernel names the user at the other end. Root sees all processes, \
and other users those of their own user id. A client in another PID namespace is refused, because pids mean other \
processes there.

Names that end in `_s` are whole seconds, those in `_ns` nanoseconds since boot (CLOCK_BOOTTIME) or a duration. Memory is \
in bytes. Later versions can add members to objects.";

/// Function that returns the schema of a type.
type SchemaOf = fn(&mut SchemaGenerator) -> Schema;

/// Description of an endpoint.
#[derive(Default)]
struct Description {
    summary: &'static str,
    /// Name, schema and description of each parameter of the query.
    query: Vec<(&'static str, Value, &'static str)>,
    body: Option<SchemaOf>,
    /// Types of which the response has one.
    response: Vec<SchemaOf>,
    /// Refusals that need an explanation: status and cause.
    refusals: Vec<(u16, &'static str)>,
}

const PROBLEM_RESPONSE: &str = "#/components/responses/problem";
const NO_PROCESS: (u16, &str) = (404, "There is no such process.");
const NOT_OWN: (u16, &str) = (403, "The process belongs to another user.");
const NOT_ROOT: (u16, &str) = (
    403,
    "The user is neither root nor the one that the service runs as.",
);

fn pid_schema() -> Value {
    json!({"type": "integer", "minimum": 1, "maximum": 4_194_304, "examples": [4250]})
}

fn describe(endpoint: &Endpoint) -> Description {
    let text = json!({"type": "string"});
    let agent = ("agent", text.clone(), "Only sessions of this agent.");
    let seconds = json!({"type": "integer", "minimum": 0, "maximum": u64::MAX});
    let min_age = (
        "min_age_s",
        seconds.clone(),
        "Age from which an orphaned shell of a tool is a leftover.",
    );
    match (endpoint.method, endpoint.path) {
        ("GET", "/v1/openapi.json") => Description {
            summary: "This document",
            response: vec![Map::<String, Value>::json_schema],
            ..Description::default()
        },
        ("GET", "/v1/status") => Description {
            summary: "State of the service, as `reaper status`",
            response: vec![subschema::<Status>],
            ..Description::default()
        },
        ("GET", "/v1/tree") => Description {
            summary: "Sessions and their processes, as `reaper tree`",
            query: vec![
                agent,
                (
                    "all",
                    json!({"type": "boolean", "default": false}),
                    "Whether to add the processes without a session.",
                ),
            ],
            response: vec![subschema::<TreeResponse>],
            refusals: vec![(404, "No rule for agents has this name.")],
            ..Description::default()
        },
        ("GET", "/v1/explain/{pid}") => Description {
            summary: "What happens to a process and why, as `reaper explain PID`. For a process that has exited, from the \
                      memory of the service or from the journal",
            response: vec![subschema::<Explanation>],
            refusals: vec![NOT_OWN, NO_PROCESS],
            ..Description::default()
        },
        ("GET", "/v1/agents") => Description {
            summary: "Rules for agents and their sessions, as `reaper agents`; with `test` the rules for one process",
            query: vec![("test", pid_schema(), "Process on which to test the rules.")],
            response: vec![subschema::<AgentsResponse>, subschema::<RuleTestResponse>],
            refusals: vec![NOT_OWN, NO_PROCESS],
            ..Description::default()
        },
        ("GET", "/v1/keeps") => Description {
            summary: "Processes that users keep, as `reaper keep --list`",
            response: vec![subschema::<KeepsResponse>],
            ..Description::default()
        },
        ("POST", "/v1/keeps") => Description {
            summary: "Keeps a process, as `reaper keep PID`",
            body: Some(subschema::<KeepParams>),
            response: vec![subschema::<KeepResult>],
            refusals: vec![
                NOT_OWN,
                NO_PROCESS,
                (409, "The process belongs to no session."),
                (413, "The body is larger than 64 KiB."),
            ],
            ..Description::default()
        },
        ("DELETE", "/v1/keeps/{pid}") => Description {
            summary: "Releases a kept process, as `reaper unkeep PID`",
            response: vec![subschema::<KeepResult>],
            refusals: vec![NOT_OWN, NO_PROCESS, (409, "The process is not kept.")],
            ..Description::default()
        },
        ("GET", "/v1/scan") => Description {
            summary: "Members and leftovers, as `reaper scan`",
            query: vec![min_age],
            response: vec![subschema::<ScanReport>],
            ..Description::default()
        },
        ("POST", "/v1/scan") => Description {
            summary: "Reaps what a scan finds, as `reaper scan --reap`",
            query: vec![min_age],
            response: vec![subschema::<ScanReport>],
            refusals: vec![NOT_ROOT],
            ..Description::default()
        },
        ("GET", "/v1/history") => Description {
            summary: "Sessions with decisions and outcomes from the journal, as `reaper history`",
            query: vec![
                (
                    "since_s",
                    seconds,
                    "Only sessions with records since so many seconds.",
                ),
                agent,
                (
                    "session",
                    text,
                    "Only sessions whose id begins with this text.",
                ),
                (
                    "pid",
                    json!({"type": "array", "items": pid_schema(), "minItems": 1}),
                    "Only sessions of agents with these pids, and these processes in other sessions.",
                ),
                (
                    "limit",
                    json!({"type": "integer", "minimum": 0, "maximum": u32::MAX}),
                    "Only so many sessions, the newest.",
                ),
            ],
            response: vec![subschema::<History>],
            refusals: vec![(404, "The service has no journal.")],
            ..Description::default()
        },
        ("GET", "/v1/config") => Description {
            summary: "Settings and rules in force, as `reaper config show`",
            response: vec![subschema::<ShownConfig>],
            refusals: vec![NOT_ROOT],
            ..Description::default()
        },
        ("POST", "/v1/config/reload") => Description {
            summary: "Reads the config file again, as `reaper config reload`",
            response: vec![subschema::<Reloaded>],
            refusals: vec![
                NOT_ROOT,
                (409, "The file is wrong, so the old config stays in force."),
            ],
            ..Description::default()
        },
        (method, path) => panic!("describe {method} {path} here"),
    }
}

fn subschema<T: JsonSchema>(generator: &mut SchemaGenerator) -> Schema {
    generator.subschema_for::<T>()
}

/// Returns a generator for schemas of one direction: what the service sends or receives.
fn generator(is_sent: bool) -> SchemaGenerator {
    let settings = SchemaSettings::draft2020_12().with(|settings| {
        settings.definitions_path = "/components/schemas".into();
    });
    match is_sent {
        true => settings.for_serialize().into_generator(),
        false => settings.for_deserialize().into_generator(),
    }
}

/// Returns the document.
fn document() -> Value {
    let (mut sent, mut received) = (generator(true), generator(false));
    let mut paths = Map::new();
    for endpoint in ENDPOINTS {
        let operation = operation(endpoint, &mut sent, &mut received);
        paths.entry(endpoint.path).or_insert_with(|| json!({}))[endpoint.method.to_lowercase()] =
            operation;
    }
    let problem = sent.subschema_for::<ProblemDetails>();
    let mut schemas = sent.take_definitions(true);
    schemas.values_mut().for_each(without_null);
    schemas.extend(received.take_definitions(true));
    let mut document = json!({
        "openapi": "3.1.0",
        "info": {"title": "reaper", "version": "1", "description": ABOUT},
        "servers": [{"url": "http://localhost"}],
        "paths": paths,
        "components": {
            "schemas": schemas,
            "responses": {"problem": {
                "description": "The request was refused or has failed.",
                "headers": {
                    "Allow": {
                        "description": "Methods that the path accepts, with status 405.",
                        "schema": {"type": "string"},
                    },
                    "Retry-After": {
                        "description": "Seconds to wait before the next try, with status 503.",
                        "schema": {"type": "integer"},
                    },
                },
                "content": {PROBLEM: {"schema": problem}},
            }},
        },
    });
    let link = Regex::new(r"\[(`[^`]+`)\](\([^)]+\))?").expect("a valid pattern");
    plain(&mut document, &link);
    document
}

fn operation(
    endpoint: &Endpoint,
    sent: &mut SchemaGenerator,
    received: &mut SchemaGenerator,
) -> Value {
    let about = describe(endpoint);
    let path = endpoint.path.replace("/{pid}", "").replace(['/', '.'], "_");
    let id = endpoint.method.to_lowercase() + path.trim_start_matches("_v1");
    let pid = endpoint.path.contains("{pid}").then(|| {
        json!({
            "name": "pid", "in": "path", "required": true, "schema": pid_schema(),
            "description": "Pid in the PID namespace of the service.",
        })
    });
    let query = about.query.into_iter().map(|(name, schema, description)| {
        // Only lists have the second key: their items stand between commas.
        let mut parameter =
            json!({"name": name, "in": "query", "schema": schema, "description": description});
        if parameter["schema"]["type"] == "array" {
            parameter["explode"] = false.into();
        }
        parameter
    });
    let mut schemas: Vec<Schema> = about.response.iter().map(|of| of(sent)).collect();
    let schema = match schemas.len() {
        1 => json!(schemas.remove(0)),
        _ => json!({"anyOf": schemas}),
    };
    let mut responses = json!({
        "200": {"description": "Success.", "content": {JSON: {"schema": schema}}},
        "default": {"$ref": PROBLEM_RESPONSE},
    });
    for (status, cause) in about.refusals {
        responses[status.to_string()] = json!({"$ref": PROBLEM_RESPONSE, "description": cause});
    }
    let mut operation = json!({
        "operationId": id,
        "summary": about.summary,
        "responses": responses,
    });
    let parameters: Vec<Value> = pid.into_iter().chain(query).collect();
    if !parameters.is_empty() {
        operation["parameters"] = parameters.into();
    }
    if let Some(of) = about.body {
        operation["requestBody"] =
            json!({"required": true, "content": {JSON: {"schema": of(received)}}});
    }
    operation
}

/// Removes `null` from the types of optional members: what the service sends then lacks them.
fn without_null(schema: &mut Value) {
    let required = schema["required"].as_array().cloned().unwrap_or_default();
    let members = schema["properties"].as_object_mut().into_iter().flatten();
    for (_, member) in members.filter(|(name, _)| !required.contains(&json!(name))) {
        let Some(member) = member.as_object_mut() else {
            continue;
        };
        if let Some(types) = member.get_mut("type").and_then(Value::as_array_mut) {
            types.retain(|one| one != "null");
            if let [one] = &mut types[..] {
                let one = one.take();
                member.insert("type".into(), one);
            }
        }
        if let Some(Value::Array(mut any)) = member.remove("anyOf") {
            any.retain(|one| one["type"] != "null");
            let one = any.pop().and_then(|one| one.as_object().cloned());
            member.extend(one.into_iter().flatten());
        }
    }
}

/// Turns doc comments into plain Markdown: joins the lines of a paragraph, and removes links to Rust's items.
fn plain(value: &mut Value, link: &Regex) {
    match value {
        Value::Object(all) => {
            for (key, value) in all {
                match value {
                    Value::String(text) if key == "description" => {
                        let paragraphs = text.split("\n\n").map(|one| one.replace('\n', " "));
                        let joined = paragraphs.collect::<Vec<_>>().join("\n\n");
                        *text = link.replace_all(&joined, "$1").into_owned();
                    }
                    value => plain(value, link),
                }
            }
        }
        Value::Array(all) => all.iter_mut().for_each(|value| plain(value, link)),
        _ => {}
    }
}

/// With `INSTA_UPDATE=always`, as for snapshots, the file is written.
#[test]
fn checked_in_document_is_current() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/openapi.json");
    let made = format!("{:#}\n", document());
    if std::env::var_os("INSTA_UPDATE").is_some_and(|how| how == "always") {
        fs::write(&path, &made).expect("write the document");
    }
    let checked_in = fs::read_to_string(&path).expect("read the document");
    assert!(
        made == checked_in,
        "docs/openapi.json differs from the code: call `INSTA_UPDATE=always cargo xtask test openapi`"
    );
}

/// The document names exactly the parameters that a request accepts, and their types.
#[test]
fn documented_parameters_are_those_of_requests() {
    let pid = std::process::id().to_string();
    let uid = nix::unistd::geteuid().as_raw();
    let body = format!(r#"{{"pid":{pid}}}"#);
    for endpoint in ENDPOINTS {
        let path = endpoint.path.replace("{pid}", &pid);
        let method = Method::from_bytes(endpoint.method.as_bytes()).expect("a method");
        let refusal = |query: &str| {
            let read = read_request(&method, &path, Some(query), body.as_bytes(), Peer { uid });
            read.err().map(|problem| problem.detail)
        };
        let query = describe(endpoint).query;
        let mut names: Vec<_> = query.iter().map(|(name, ..)| format!("`{name}`")).collect();
        let refused = refusal("unknown=1").expect("a refusal");
        let known = refused
            .split_once("known are ")
            .map_or("", |(_, known)| known);
        let mut known: Vec<_> = known.split(", ").filter(|name| !name.is_empty()).collect();
        names.sort_unstable();
        known.sort_unstable();
        assert_eq!(known, names, "{path}: {refused}");
        for (name, schema, _) in query {
            let is_text = schema["type"] == "string";
            let refused = refusal(&format!("{name}=x"));
            assert_eq!(refused.is_none(), is_text, "{path}?{name}: {refused:?}");
        }
    }
}

#[test]
fn docs_list_each_endpoint() {
    let page = include_str!("../../../../docs/events.md");
    for endpoint in ENDPOINTS {
        let path = endpoint.path.replace("{pid}", "PID");
        let request = format!("`{} {path}", endpoint.method);
        assert!(page.contains(&request), "events.md lacks {request}");
    }
}
