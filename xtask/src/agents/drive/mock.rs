//! Mock model server for real agents: one shell command per conversation, then a short text.
//!
//! It implements Anthropic messages, OpenAI responses and chat completions, and Gemini, with and without streaming. Each
//! response closes its connection, so streams need no framing.

use std::fs::{File, OpenOptions};
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use anyhow::{Context, Result};
use serde_json::{Map, Value, json};

/// Port on the loopback device. Each world has its own network namespace.
pub const PORT: u16 = 8080;
/// Word in the prompt of the one conversation that gets a tool call.
pub const PROMPT: &str = "drive-turn";
/// Events of the log: the result of the tool call was received, the response after it was sent.
pub const RESULT: &str = "tool-result";
pub const ANSWERED: &str = "answered";

/// Names of shell tools, preferred ones first.
const SHELLS: &str = "exec_command Bash bash run_shell_command shell shell_command execute_command run_commands \
    run_command Execute execute terminal run_terminal_cmd";
const USAGE: u64 = 10;

/// State that all connections share.
struct Mock {
    log: File,
    command: String,
    /// File for whose existence the second response waits.
    held_until: Option<PathBuf>,
}

/// Response of the model in a turn.
enum Turn {
    Text(&'static str),
    Call {
        tool: String,
        arguments: Value,
        custom: bool,
    },
}

/// Serves requests until the process is killed.
///
/// # Errors
/// The port is taken, or the log cannot be opened.
pub fn serve(log: &Path, command: &str, held_until: Option<PathBuf>) -> Result<()> {
    let listener = TcpListener::bind(("127.0.0.1", PORT)).context("cannot listen for agents")?;
    let log = OpenOptions::new().create(true).append(true).open(log)?;
    let mock = Arc::new(Mock {
        log,
        command: command.into(),
        held_until,
    });
    for stream in listener.incoming().flatten() {
        let mock = Arc::clone(&mock);
        std::thread::spawn(move || {
            if let Err(error) = mock.answer(stream) {
                mock.note("error", &format!("{error:#}"));
            }
        });
    }
    Ok(())
}

impl Mock {
    fn note(&self, event: &str, detail: &str) {
        let since = SystemTime::UNIX_EPOCH.elapsed().unwrap_or_default();
        let line = format!("{:.3} {event} {detail}\n", since.as_secs_f64());
        // Failing to write the log must not stop the response.
        let _ = (&self.log).write_all(line.as_bytes());
    }

    fn answer(&self, mut stream: TcpStream) -> Result<()> {
        let (target, body) = read_request(&stream)?;
        let path = target.split('?').next().unwrap_or_default();
        let request: Value = serde_json::from_slice(&body).unwrap_or_default();
        let api = [
            ("/responses", "responses"),
            ("/chat/completions", "chat"),
            ("/messages", "messages"),
            ("enerateContent", "gemini"),
        ];
        let api = api
            .iter()
            .find(|(end, _)| path.ends_with(end))
            .map(|(_, api)| *api);
        let Some(api) = api.filter(|_| !request.is_null()) else {
            self.note("other", &target);
            return send_json(&mut stream, &other(path));
        };
        let conversation = ["messages", "input", "contents"].map(|key| &request[key]);
        let has_result = conversation.iter().any(|part| contains_result(part));
        let is_asked = conversation
            .iter()
            .any(|part| part.to_string().contains(PROMPT));
        let tools = tools(&request);
        let turn = if has_result || !is_asked {
            None
        } else {
            self.call(&tools)
        };
        let names: Vec<&str> = tools.iter().map(|(name, ..)| name.as_str()).collect();
        let names = names.join(",");
        // Auxiliary requests, such as for a title, may contain the result too, but offer no shell.
        let is_second = has_result && is_asked && shell(&tools).is_some();
        self.note(
            if is_second { RESULT } else { "request" },
            &format!("{target} tools={names}"),
        );
        if is_second && let Some(file) = &self.held_until {
            while !file.exists() {
                std::thread::sleep(Duration::from_millis(50));
            }
        }
        let is_json = request["generationConfig"]["responseMimeType"] == "application/json";
        let text = if is_json { "{}" } else { "done" };
        let turn = turn.unwrap_or(Turn::Text(text));
        let streams = request["stream"] == true || path.contains("stream");
        let (events, whole) = match api {
            "responses" => responses(&turn),
            "chat" => chat(&turn),
            "messages" => messages(&turn),
            _ => gemini(&turn),
        };
        match streams {
            true => send_events(&mut stream, &events, api)?,
            false => send_json(&mut stream, &whole)?,
        }
        self.note(if is_second { ANSWERED } else { "sent" }, &target);
        Ok(())
    }

    /// Returns the call of the shell tool, if the request offers one.
    fn call(&self, tools: &[(String, Value, bool)]) -> Option<Turn> {
        let (tool, schema, custom) = shell(tools)?;
        let arguments = match custom {
            // Codex's tool that runs a JavaScript program.
            true => json!(format!(
                "const r = await tools.exec_command({}); text(JSON.stringify(r));",
                json!({"cmd": self.command, "yield_time_ms": 3000})
            )),
            false => arguments(schema, &self.command),
        };
        Some(Turn::Call {
            tool: tool.clone(),
            arguments,
            custom: *custom,
        })
    }
}

/// Reads a request and returns its target and body.
fn read_request(stream: &TcpStream) -> Result<(String, Vec<u8>)> {
    let mut reader = BufReader::new(stream);
    let mut line = String::new();
    reader.read_line(&mut line)?;
    let target = line
        .split(' ')
        .nth(1)
        .context("no HTTP request")?
        .to_owned();
    let (mut length, mut is_chunked) = (0, false);
    loop {
        line.clear();
        reader.read_line(&mut line)?;
        let Some((name, value)) = line.trim_end().split_once(':') else {
            break;
        };
        match name.to_ascii_lowercase().as_str() {
            "content-length" => length = value.trim().parse()?,
            "transfer-encoding" => is_chunked = value.contains("chunked"),
            _ => {}
        }
    }
    let mut body = vec![0; length];
    reader.read_exact(&mut body)?;
    while is_chunked {
        line.clear();
        reader.read_line(&mut line)?;
        let size =
            usize::from_str_radix(line.trim_end().split(';').next().unwrap_or_default(), 16)?;
        let mut chunk = vec![0; size + 2];
        reader.read_exact(&mut chunk)?;
        body.extend_from_slice(&chunk[..size]);
        is_chunked = size > 0;
    }
    Ok((target, body))
}

fn send_json(stream: &mut TcpStream, body: &Value) -> Result<()> {
    let body = body.to_string();
    let length = body.len();
    write!(
        stream,
        "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: {length}\r\nconnection: close\r\n\r\n{body}"
    )?;
    Ok(())
}

fn send_events(stream: &mut TcpStream, events: &[Value], api: &str) -> Result<()> {
    let mut text = String::from(
        "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n",
    );
    for event in events {
        if let Some(name) = event["type"].as_str() {
            text += &format!("event: {name}\n");
        }
        text += &format!("data: {event}\n\n");
    }
    if api == "chat" {
        text += "data: [DONE]\n\n";
    }
    stream.write_all(text.as_bytes())?;
    Ok(())
}

/// Returns the response to requests other than turns.
fn other(path: &str) -> Value {
    let model =
        json!({"id": "mock", "object": "model", "owned_by": "mock", "created": 1, "name": "mock"});
    match path {
        _ if path.contains("count_tokens") => json!({"input_tokens": USAGE}),
        _ if path.contains("countTokens") => json!({"totalTokens": USAGE}),
        _ if path.ends_with("/models") => json!({"object": "list", "data": [model], "models": []}),
        _ => json!({}),
    }
}

/// Returns the tools that a request offers: name, schema of the arguments, and whether the tool takes plain text.
fn tools(request: &Value) -> Vec<(String, Value, bool)> {
    let list = request["tools"].as_array().into_iter().flatten();
    let flat = list.flat_map(|tool| match tool["functionDeclarations"].as_array() {
        Some(declared) => declared.clone(),
        None if tool["function"].is_object() => vec![tool["function"].clone()],
        None => vec![tool.clone()],
    });
    flat.map(|tool| {
        let name = tool["name"]
            .as_str()
            .or(tool["type"].as_str())
            .unwrap_or_default();
        let schema = ["parameters", "input_schema", "parametersJsonSchema"].map(|key| &tool[key]);
        let schema = schema.into_iter().find(|schema| schema.is_object());
        let custom = tool["type"] == "custom";
        (name.to_owned(), schema.cloned().unwrap_or_default(), custom)
    })
    .collect()
}

fn shell(tools: &[(String, Value, bool)]) -> Option<&(String, Value, bool)> {
    let mut shells = SHELLS.split_whitespace().map(|shell| (shell, false));
    let find = |(wanted, is_custom): (&str, bool)| {
        let mut tools = tools.iter();
        tools.find(|(name, _, custom)| name == wanted && *custom == is_custom)
    };
    shells.find_map(find).or_else(|| find(("exec", true)))
}

/// Returns whether a conversation contains the result of a tool.
fn contains_result(value: &Value) -> bool {
    match value {
        Value::Array(items) => items.iter().any(contains_result),
        Value::Object(fields) => {
            let is_result = |key: &str| {
                let text = fields.get(key).and_then(Value::as_str).unwrap_or_default();
                text == "tool" || text == "tool_result" || text.ends_with("call_output")
            };
            is_result("type")
                || is_result("role")
                || fields.contains_key("functionResponse")
                || fields.values().any(contains_result)
        }
        _ => false,
    }
}

/// Returns arguments for a shell tool by its schema: the command, and values for required properties.
fn arguments(schema: &Value, command: &str) -> Value {
    let empty = Map::new();
    let properties = schema["properties"].as_object().unwrap_or(&empty);
    let required = schema["required"].as_array();
    let is_required =
        |name: &str| required.is_some_and(|list| list.iter().any(|item| item == name));
    let mut filled = Map::new();
    for (name, property) in properties {
        let kind = property["type"]
            .as_str()
            .unwrap_or_default()
            .to_ascii_lowercase();
        let value = match (name.as_str(), kind.as_str()) {
            ("command" | "cmd" | "commands", "array") => {
                let single = name == "commands";
                if single {
                    json!([command])
                } else {
                    json!(["bash", "-c", command])
                }
            }
            ("command" | "cmd" | "commands", _) => json!(command),
            ("yield_time_ms", _) => json!(3000),
            _ if !is_required(name) => continue,
            (_, "boolean") => json!(false),
            (_, "integer" | "number") => json!(30),
            (_, "array") => json!([]),
            (_, "object") => json!({}),
            _ => property["enum"]
                .get(0)
                .cloned()
                .unwrap_or_else(|| json!("low")),
        };
        filled.insert(name.clone(), value);
    }
    Value::Object(filled)
}

fn responses(turn: &Turn) -> (Vec<Value>, Value) {
    let item = match turn {
        Turn::Text(text) => json!({
            "type": "message", "role": "assistant", "id": "msg_1", "status": "completed",
            "content": [{"type": "output_text", "text": text, "annotations": []}],
        }),
        Turn::Call {
            tool,
            arguments,
            custom: true,
        } => json!({
            "type": "custom_tool_call", "id": "ctc_1", "call_id": "call_1", "name": tool, "input": arguments,
        }),
        Turn::Call {
            tool, arguments, ..
        } => json!({
            "type": "function_call", "id": "fc_1", "call_id": "call_1", "name": tool, "status": "completed",
            "arguments": arguments.to_string(),
        }),
    };
    let usage = json!({
        "input_tokens": USAGE, "input_tokens_details": {"cached_tokens": 0},
        "output_tokens": USAGE, "output_tokens_details": {"reasoning_tokens": 0}, "total_tokens": 2 * USAGE,
    });
    let response = |status: &str, output: &[&Value]| {
        json!({
            "id": "resp_1", "object": "response", "created_at": 1, "model": "mock", "status": status,
            "output": output, "usage": usage,
        })
    };
    let whole = response("completed", &[&item]);
    let mut events = vec![
        json!({"type": "response.created", "response": response("in_progress", &[])}),
        json!({"type": "response.output_item.added", "output_index": 0, "item": item}),
    ];
    match turn {
        Turn::Text(text) => events.push(json!({
            "type": "response.output_text.delta", "item_id": "msg_1", "output_index": 0, "content_index": 0,
            "delta": text,
        })),
        Turn::Call { arguments, custom: false, .. } => events.push(json!({
            "type": "response.function_call_arguments.done", "item_id": "fc_1", "output_index": 0,
            "arguments": arguments.to_string(),
        })),
        Turn::Call { .. } => {}
    }
    events.push(json!({"type": "response.output_item.done", "output_index": 0, "item": item}));
    events.push(json!({"type": "response.completed", "response": whole}));
    (events, whole)
}

fn chat(turn: &Turn) -> (Vec<Value>, Value) {
    let (message, reason) = match turn {
        Turn::Text(text) => (json!({"role": "assistant", "content": text}), "stop"),
        Turn::Call {
            tool, arguments, ..
        } => {
            let function = json!({"name": tool, "arguments": arguments.to_string()});
            let call =
                json!({"index": 0, "id": "call_1", "type": "function", "function": function});
            (
                json!({"role": "assistant", "content": null, "tool_calls": [call]}),
                "tool_calls",
            )
        }
    };
    let usage =
        json!({"prompt_tokens": USAGE, "completion_tokens": USAGE, "total_tokens": 2 * USAGE});
    let chunk = |delta: &Value, reason: Value| {
        json!({
            "id": "chat_1", "object": "chat.completion.chunk", "created": 1, "model": "mock",
            "choices": [{"index": 0, "delta": delta, "finish_reason": reason}],
        })
    };
    let mut last = chunk(&json!({}), json!(reason));
    last["usage"] = usage.clone();
    let events = vec![chunk(&message, Value::Null), last];
    let whole = json!({
        "id": "chat_1", "object": "chat.completion", "created": 1, "model": "mock", "usage": usage,
        "choices": [{"index": 0, "message": message, "finish_reason": reason}],
    });
    (events, whole)
}

fn messages(turn: &Turn) -> (Vec<Value>, Value) {
    let (block, start, delta, reason) = match turn {
        Turn::Text(text) => (
            json!({"type": "text", "text": text}),
            json!({"type": "text", "text": ""}),
            json!({"type": "text_delta", "text": text}),
            "end_turn",
        ),
        Turn::Call {
            tool, arguments, ..
        } => {
            let block = |input: &Value| json!({"type": "tool_use", "id": "toolu_1", "name": tool, "input": input});
            let delta = json!({"type": "input_json_delta", "partial_json": arguments.to_string()});
            (block(arguments), block(&json!({})), delta, "tool_use")
        }
    };
    let usage = json!({"input_tokens": USAGE, "output_tokens": USAGE});
    let message = |content: &[&Value], reason: Value| {
        json!({
            "id": "msg_1", "type": "message", "role": "assistant", "model": "mock", "content": content,
            "stop_reason": reason, "stop_sequence": null, "usage": usage,
        })
    };
    let events = vec![
        json!({"type": "message_start", "message": message(&[], Value::Null)}),
        json!({"type": "content_block_start", "index": 0, "content_block": start}),
        json!({"type": "content_block_delta", "index": 0, "delta": delta}),
        json!({"type": "content_block_stop", "index": 0}),
        json!({"type": "message_delta", "delta": {"stop_reason": reason, "stop_sequence": null}, "usage": usage}),
        json!({"type": "message_stop"}),
    ];
    (events, message(&[&block], json!(reason)))
}

fn gemini(turn: &Turn) -> (Vec<Value>, Value) {
    let part = match turn {
        Turn::Text(text) => json!({"text": text}),
        Turn::Call {
            tool, arguments, ..
        } => json!({"functionCall": {"name": tool, "args": arguments}}),
    };
    let whole = json!({
        "candidates": [{"content": {"role": "model", "parts": [part]}, "finishReason": "STOP", "index": 0}],
        "usageMetadata": {"promptTokenCount": USAGE, "candidatesTokenCount": USAGE, "totalTokenCount": 2 * USAGE},
    });
    (vec![whole.clone()], whole)
}
