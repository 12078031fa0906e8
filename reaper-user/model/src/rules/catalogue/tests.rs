//! Classes of real processes, and of similar ones, by the built-in rules.

use std::sync::Arc;

use reaper_common::{NAME_AGENT, NAME_BOUNDARY, NAME_KEEP};

mod prompts;
mod recorded;

use crate::event::Image;
use crate::rules::{self, catalogue};
use crate::ruleset::{Action, Class, Field, Matcher, RuleId, Ruleset, UidCondition};

/// Returns an image. The arguments are separated by `|`.
fn image(comm: &str, exe: &str, argv: &str) -> Image {
    let argv = argv
        .split('|')
        .flat_map(|arg| arg.bytes().chain([0]))
        .collect();
    Image {
        comm: comm.into(),
        exe: exe.into(),
        argv,
        ..Image::default()
    }
}

fn class(rules: &Ruleset, image: &Image) -> String {
    match rules.classify(image) {
        Class::Agent(id) => format!("agent {}", rules.name(id)),
        Class::Boundary(id) => format!("boundary {}", rules.name(id)),
        Class::Server(id) => format!("server {}", rules.name(id)),
        Class::Plain => {
            // Rules without positive conditions on the program match almost every image.
            let matching = rules.matching_member_rules(image);
            let is_named = |id: &&RuleId| {
                let matchers = &rules.rule(**id).matchers;
                matchers.iter().any(Matcher::is_positive)
            };
            let mut named = matching.iter().filter(is_named);
            // A rule that reaps has no effect on the class if it only sets the time to exit.
            let kind = |action| match action {
                Action::Reap => "reap",
                Action::Report => "report",
                _ => "keep",
            };
            named.next().map_or("plain".into(), |id| {
                format!("{} {}", kind(rules.rule(*id).action), rules.name(*id))
            })
        }
    }
}

/// Abbreviations of paths in the tables.
const PATHS: [(&str, &str); 5] = [
    ("$npm", "/usr/lib/node_modules"),
    ("$node", NODE),
    ("$claude", "/home/u/.local/share/claude/versions/2.1.50"),
    (
        "$codex",
        "/usr/lib/node_modules/@openai/codex/node_modules/@openai/codex-linux-x64/vendor/x86_64-unknown-linux-musl/bin/codex",
    ),
    ("$chrome", "/opt/google/chrome/chrome"),
];

/// Checks a table. Each line has the expected class, comm, exe and argv.
#[track_caller]
fn check(table: &str) {
    let rules = rules::built_in();
    let lines = table.lines().map(str::trim).filter(|line| !line.is_empty());
    let wrong: Vec<_> = lines
        .filter_map(|line| {
            let mut full = line.to_owned();
            PATHS
                .iter()
                .for_each(|(short, path)| full = full.replace(short, path));
            let [expected, comm, exe, argv] = full.splitn(4, "; ").collect::<Vec<_>>()[..] else {
                panic!("not four fields: {line}");
            };
            let class = class(&rules, &image(comm, exe, argv));
            (class != expected).then(|| format!("{class}: {line}"))
        })
        .collect();
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

const NODE: &str = "/home/u/.nvm/versions/node/v24.1.0/bin/node";

#[test]
fn observed_agents_are_recognised() {
    check(
        "
        agent claude-code; claude; $npm/@anthropic-ai/claude-code/bin/claude.exe; claude
        agent claude-code; claude; $npm/@anthropic-ai/claude-code/bin/claude.exe; /usr/bin/claude|-p|run the daemon run test
        agent claude-code; claude; $claude; claude|--resume
        agent claude-code; 2.1.50; $claude; $claude|--output-format|stream-json|--resume|8f
        agent claude-code; claude; $claude (deleted); claude
        agent claude-code; claude; /opt/claude-code/bin/claude; claude
        agent claude-code; claude; /x/lib/python3.13/site-packages/claude_agent_sdk/_bundled/claude; claude|--print
        agent claude-code; claude; /home/u/.vscode/extensions/anthropic.claude-code-2.1.145-linux-x64/resources/native-binary/claude; claude
        agent claude-code; node; $node; node|/usr/local/bin/claude
        agent claude-code; MainThread; /usr/bin/node-22; node|--no-warnings|/x/node_modules/@anthropic-ai/claude-code/cli.js|-p|hi
        agent codex; node; $node; node|/home/u/.nvm/versions/node/v24.1.0/bin/codex
        agent codex; codex; $codex; /x/vendor/x86_64-unknown-linux-musl/bin/codex
        agent codex; codex; $codex; codex|exec|fix the app-server tests
        agent codex; codex; /usr/local/bin/codex; codex
        agent gemini-cli; node; $node; node|/usr/bin/gemini
        agent gemini-cli; node; $node; /usr/bin/node|--max-old-space-size=7962|/usr/bin/gemini|-i|hello
        agent gemini-cli; node; $node; node|--require|/x/preload.js|/home/John Doe/.npm-global/bin/gemini
        agent gemini-cli; node; $node; node|/home/u/.npm/_npx/0a/node_modules/.bin/gemini
        agent copilot-cli; node; $node; node|/usr/local/bin/copilot
        agent copilot-cli; MainThread; $npm/@github/copilot/node_modules/@github/copilot-linux-x64/copilot; copilot
        agent opencode; opencode; $npm/opencode-ai/bin/opencode.exe; opencode
        agent opencode; opencode; /home/u/.opencode/bin/opencode; opencode|run|serve the page
        agent qwen-code; node; $node; node|/usr/bin/qwen
        agent qwen-code; node; $node; /usr/bin/node|--max-old-space-size=7962|/usr/bin/qwen
        agent amp; amp; $npm/@sourcegraph/amp/node_modules/@ampcode/cli/bin/amp.exe; amp
        agent cursor-agent; node; /home/u/.local/share/cursor-agent/versions/2026.10.2-ab/node; /home/u/.local/bin/agent|--use-system-ca|/home/u/.local/share/cursor-agent/versions/2026.10.2-ab/index.js|fix the worker start
        agent crush; crush; /home/u/go/bin/crush; crush
        agent reaper-run; reaper; /usr/local/bin/reaper; reaper|run|--|npm|test
        agent reaper-run; reaper; /home/u/reaper/target/release/reaper; ./reaper|run|true
        plain; reaper; /usr/bin/reaper; reaper|run|--detach|--|true
        plain; reaper; /usr/bin/reaper; reaper|run|--done-when|a -- b|--on-failure|echo  x|--detach|npm|start
        agent reaper-run; reaper; /usr/bin/reaper; reaper|run-owner|--tell|5|--name|x|--detach|npm|start
        agent reaper-run; reaper; /usr/bin/reaper; reaper|run-owner|docker|run|--detach|x
        agent reaper-run; reaper; /usr/bin/reaper; reaper|run|npm|start|--detach
        agent reaper-run; reaper; /usr/bin/reaper; reaper|run|--|npm|start|--detach
        agent reaper-run; reaper; /usr/bin/reaper; reaper|run|--on-failure|x --detach|npm
        plain; reaper; /usr/bin/reaper; reaper|daemon|--events|run
        plain; reaper; /opt/REAPER/reaper; reaper|run
        agent crush; crush; $npm/@charmland/crush/bin/crush; crush|run|start the server
        agent goose; goose; /home/u/.local/bin/goose; goose|session
        agent aider; aider; /usr/bin/python3.12; /home/u/.local/share/uv/tools/aider-chat/bin/python|/home/u/.local/bin/aider|--model|x
        agent aider; python3; /usr/bin/python3.12; python3|/x/venv/bin/aider
        agent aider; python; /usr/bin/python3.12; python|-m|aider|--model|x
        agent aider; python3; /usr/bin/python3.12; python3|-Im|aider
        agent claude-code; claude; /opt/homebrew/Caskroom/claude-code@latest/2.1.9/claude; claude
        agent claude-code; .claude-wrapped; /nix/store/a-claude-code-2.1/bin/.claude-wrapped; claude
        agent claude-code; node; $node; node|/nix/store/a-claude-code-2.0/bin/.claude-wrapped
        agent claude-code; claude; /opt/claude/claude; claude
        agent claude-code; claude; $npm/@anthropic-ai/.claude-code-x9Pq02Lm/bin/claude.exe (deleted); claude
        agent claude-code; claude; $npm/@anthropic-ai/.claude-code-linux-x64-x9Pq02Lm/claude (deleted); claude
        agent codex; codex; $npm/@openai/.codex-x9Pq02Lm/vendor/x/codex/codex (deleted); codex
        server codex-app-server; .codex-wrapped; /nix/store/a-codex/bin/.codex-wrapped; codex|app-server|--listen|unix://
        boundary codex-daemon; .codex-wrapped; /nix/store/a-codex/bin/.codex-wrapped; codex|app-server|daemon|start
        agent codex; .codex-wrapped; /nix/store/a-codex/bin/.codex-wrapped; codex
        agent opencode; opencode; $npm/.opencode-ai-x9Pq02Lm/bin/opencode.exe (deleted); opencode
        agent opencode; .opencode-wrapp; /nix/store/a-opencode/bin/.opencode-wrapped; opencode
        agent amp; amp; $npm/@sourcegraph/.amp-x9Pq02Lm/node_modules/@ampcode/cli/bin/amp.exe (deleted); amp
        agent amp; amp; $npm/@ampcode/.cli-x9Pq02Lm/bin/amp.exe (deleted); amp
        agent kiro-cli; kiro-cli; /home/u/.local/bin/kiro-cli; kiro-cli
        agent mistral-vibe; vibe-rs; /x/venv/lib/python3.12/site-packages/vibe/_bin/vibe-rs; /x/vibe-rs|--agent|x
        agent kimi; kimi; /home/u/.kimi-code/bin/kimi; kimi
        agent cline; cline; $npm/@cline/cli-linux-x64/bin/cline; cline|fix the --cline-hub-daemon
        server cline-hub; cline; $npm/@cline/cli-linux-x64/bin/cline; cline|--cline-hub-daemon|--cwd|/x|--port|25463
        agent droid; droid; $npm/@factory/cli/bin/droid; droid
        agent kilo; .kilo; $npm/@kilocode/cli/bin/.kilo; kilo
        agent kilo; .kilo; $npm/@kilocode/cli/bin/.kilo; kilo|run|serve the page
        agent kilo; .kilo; $npm/@kilocode/cli/bin/.kilo; kilo|serve|--port|4096
        plain; kilo; /usr/bin/kilo; kilo|serve
        agent plandex; plandex; /usr/local/bin/plandex; pdx
        ",
    );
}

/// Each line has the expected class, exe, the script as given, and the script with links resolved.
#[test]
fn agent_is_recognised_by_resolved_script_path() {
    let table = "
        agent claude-code; $node; assistant; $npm/@anthropic-ai/claude-code/cli.js
        agent codex; $node; ./codex.js; $npm/@openai/codex/bin/codex.js
        agent gemini-cli; $node; bin/gemini; $npm/@google/gemini-cli/bundle/gemini.js
        agent qwen-code; $node; /home/u/bin/q; $npm/@qwen-code/qwen-code/cli-entry.js
        agent copilot-cli; $node; /home/u/bin/q; $npm/@github/copilot/npm-loader.js
        agent aider; /usr/bin/python3.12; /home/u/bin/ai; /home/u/.local/share/uv/tools/aider-chat/bin/aider
        agent aider; /usr/bin/python3.12; bin/aider; /x/venv/bin/aider
        agent aider; /usr/bin/python3.12; /nix/store/a/bin/ai; /nix/store/a/bin/.aider-wrapped
        agent cline; $node; /usr/bin/cline; $npm/cline/bin/cline
        agent continue; $node; /usr/bin/cn; $npm/@continuedev/cli/dist/cn.js
        agent kilo; $node; /usr/bin/kilo; $npm/@kilocode/cli/bin/kilo
        agent droid; $node; /usr/bin/droid; $npm/@factory/cli/bin/droid
        agent auggie; $node; /usr/bin/auggie; $npm/@augmentcode/auggie/augment.mjs
        agent pi; $node; /usr/bin/pi; $npm/@mariozechner/pi-coding-agent/dist/cli.js
        agent pi; $node; /usr/bin/pi; $npm/@earendil-works/pi-coding-agent/dist/bundle/cli.js
        agent letta; $node; /usr/bin/letta; $npm/@letta-ai/letta-code/letta.js
        agent codebuff; $node; /usr/bin/codebuff; $npm/codebuff/index.js
        agent qodo; $node; /usr/bin/qodo; $npm/@qodo/command/bin/qodo.js
        agent grok; $node; /usr/bin/grok; $npm/@vibe-kit/grok-cli/dist/index.js
        agent jules; $node; /usr/bin/jules; $npm/@google/jules/run.cjs
        agent openclaw; $node; /usr/bin/openclaw; $npm/openclaw/openclaw.mjs
        agent crush; $node; /usr/bin/c; $npm/@charmland/crush/run-crush.js
        agent hermes; /usr/bin/python3.11; /home/u/h; /x/venv/bin/hermes
        agent kimi; $node; /usr/bin/kimi; $npm/@moonshot-ai/kimi-code/dist/main.mjs
        agent kimi; /usr/bin/python3.13; k; /home/u/.local/share/uv/tools/kimi-cli/bin/kimi
        agent mistral-vibe; /usr/bin/python3.13; v; /home/u/.local/share/uv/tools/mistral-vibe/bin/vibe
        agent openhands; /usr/bin/python3.13; o; /x/venv/bin/openhands
        agent swe-agent; /usr/bin/python3.13; s; /x/venv/bin/sweagent
        agent trae-agent; /usr/bin/python3.13; t; /x/venv/bin/trae-cli
        agent open-interpreter; /usr/bin/python3.13; i; /home/u/.local/share/uv/tools/open-interpreter/bin/interpreter
        plain; $node; /usr/bin/pi; $npm/raspberry-pi/dist/cli.js
        plain; $node; /usr/bin/grok; $npm/grok-cli/dist/index.js
        plain; $node; /usr/bin/kilo; $npm/kilo/bin/kilo
        plain; $node; bin/server; $npm/@github/copilot-language-server/dist/language-server.js
        plain; $node; /usr/bin/auggie; $npm/@augmentcode/auggie-sdk/augment.mjs
        plain; $node; /usr/bin/cline; $npm/@cline/core/bin/cline.js
        plain; $node; /usr/bin/qodo; $npm/@qodo/gen/bin/qodo.js
        plain; $node; /usr/bin/jules; $npm/jules/run.cjs
        plain; $node; /usr/bin/openclaw; $npm/openclaw-skills/openclaw.mjs
        plain; $node; /usr/bin/codebuff; $npm/@codebuff/sdk/index.js
        plain; $node; /usr/bin/droid; $npm/@jetbrains/droid/bin/droid
        plain; $node; /usr/bin/letta; $npm/@letta-ai/letta-client/letta.js
        plain; /usr/bin/python3.12; bin/ai; /x/venv/bin/aider-server
        plain; /usr/bin/python3.12; run; /home/u/compiler/bin/interpreter
        plain; $node; /usr/bin/foo; $npm/foo/dist/cli.js
    ";
    let rules = rules::built_in();
    for line in table.lines().map(str::trim).filter(|line| !line.is_empty()) {
        let mut full = line.to_owned();
        PATHS
            .iter()
            .for_each(|(short, path)| full = full.replace(short, path));
        let [expected, exe, given, script] = full.splitn(4, "; ").collect::<Vec<_>>()[..] else {
            panic!("not four fields: {line}");
        };
        let image = Arc::new(image("x", exe, &format!("x|{given}|-p|hi")));
        let matched = rules.matched_script(&image, script.into());
        let found = match matched.class {
            Class::Agent(id) => format!("agent {}", rules.name(id)),
            Class::Plain => "plain".to_owned(),
            class => format!("{class:?}"),
        };
        assert_eq!(found, expected, "{line}");
    }
}

#[test]
fn programs_similar_to_agents_are_no_agents() {
    check(
        "
        boundary editors-terminal; vim; /usr/bin/vim.basic; vim|/usr/bin/gemini
        plain; node; $node; node|build.js|--out|bin/gemini
        plain; node; $node; node|build.js|/usr/bin/gemini
        plain; node; $node; node|-e|require('/usr/bin/gemini')|/usr/bin/gemini
        plain; node; $node; node|--require|/usr/bin/gemini|x.js
        plain; node; $node; node|bin/gemini
        plain; node; $node; node|/x/bin/gemini-server
        plain; node; $node; node|/x/node_modules/@google/gemini-cli-core/dist/index.js
        plain; node; $node; node
        plain; python3; /usr/bin/python3.13; /usr/bin/python3|/usr/local/bin/gemini
        plain; goose; /home/u/go/bin/goose; goose|postgres|up
        plain; aider; /home/u/x/aider; aider
        plain; aider; /usr/bin/python3.12; python3|-c|import x|/home/u/.local/bin/aider
        plain; aider; /usr/bin/python3.12; python3|-m|aider_tools
        plain; pngcrush; /usr/bin/pngcrush; pngcrush|a.png
        plain; claude; /usr/lib/claude-desktop/claude; claude
        plain; claude; /opt/claude/bin.d/claude; claude
        plain; kilo; /usr/bin/kilo; kilo|a.txt
        plain; droid; /usr/bin/droid; droid
        plain; node; $node; node|/usr/bin/droid
        plain; pi; /usr/local/bin/pi; pi|100
        plain; node; $node; node|/usr/bin/pi
        plain; python3; /usr/bin/python3.12; python3|/home/u/.local/bin/letta|server
        plain; codebuff; /usr/bin/codebuff; codebuff
        plain; node; $node; node|/usr/bin/qodo
        plain; grok; /usr/bin/grok; grok
        plain; node; $node; node|/usr/bin/grok
        plain; jules; /usr/bin/jules; jules
        plain; openclaw; /usr/games/openclaw; openclaw
        plain; cn; /usr/bin/cn; cn
        plain; node; $node; node|/x/node_modules/@continuedev/core/dist/index.js
        plain; node; $node; node|/x/node_modules/@augmentcode/auggie-sdk/dist/index.js
        plain; cline; /usr/bin/cline; cline
        plain; hermes; /x/node_modules/hermes-engine/linux64-bin/hermes; hermes|-O|a.js
        plain; python3; /usr/bin/python3.12; python3|-m|hermes_core
        plain; kiro-cli; /usr/bin/python3.12; python3|/home/u/.local/bin/kiro-cli|new
        plain; vibe; /usr/bin/vibe; vibe
        plain; vibe-app-server; /usr/bin/python3.12; python3|/x/venv/bin/vibe-app-server
        plain; node; $node; node|/x/node_modules/kimi-code/dist/main.mjs
        plain; kiro-cli-term; /home/u/.local/bin/kiro-cli-term; kiro-cli-term
        plain; kiro; /usr/share/kiro/kiro; kiro
        plain; python3; /usr/bin/python3.12; python3|/usr/bin/kimi-server
        plain; node; $node; node|/x/node_modules/vibe/bin/vibe
        plain; python3; /usr/bin/python3.12; python3|-m|openhands.server.listen
        plain; plandex-server; /usr/local/bin/plandex-server; plandex-server
        plain; python3; /usr/bin/python3.12; python3|/x/bin/sweagent-web
        plain; trae-cli; /usr/bin/trae-cli; trae-cli
        plain; python3; /usr/bin/python3.12; python3|/x/interpreter/main.py
        plain; python3; /usr/bin/python3.12; python3|-m|interpreter|a.txt
        plain; node; $node; node|$npm/foo/dist/cli.js|daemon
        plain; node; $node; node|/x/bin/codex.js|app-server
        plain; node; /home/u/.local/share/cursor-agent/versions/1/node; node|/home/u/x/index.js
        plain; gemini; /usr/local/bin/gemini; gemini
        plain; bash; /usr/bin/bash; bash|-c|claude --version; codex; node /usr/bin/gemini
        plain; claude; /home/u/src/claude/target/debug/claude; claude
        plain; claude; ; claude
        plain; codex; ; codex
        plain; codex; /home/u/src/codex/target/debug/codex; codex
        plain; codex; $codex; codex-linux-sandbox|--sandbox-policy|{}|--|bash|-c|npm test
        plain; codex-linux-san; $codex; /home/u/.codex/tmp/arg0/codex-arg0a1/codex-linux-sandbox|--|bash
        plain; codex; $codex; apply_patch|*** Begin Patch
        plain; codex; $codex; codex|--codex-run-as-apply-patch|*** Begin Patch
        plain; claude; $claude; rg|--files|daemon
        plain; copilot-languag; /x/node_modules/@github/copilot-language-server-linux-x64/copilot-language-server; copilot-language-server|--stdio
        plain; copilot; /usr/local/bin/copilot; copilot|svc|deploy
        plain; amp; /usr/local/bin/amp; amp|song.mp3
        plain; opencode; /home/u/src/opencode/dist/opencode; opencode
        ",
    );
}

/// Observed with the real programs, except for crush, cursor-agent, goose and aider.
#[test]
fn agent_that_prints_version_or_help_opens_no_session() {
    check(
        "
        plain; claude; $claude; claude|--version
        plain; claude; $claude; claude|-v
        plain; claude; $claude; claude|mcp|--help
        plain; node; $node; node|$npm/@anthropic-ai/claude-code/cli.js|--version
        plain; claude; $claude; claude|--resume|--version
        agent claude-code; claude; $claude; claude|-p|--append-system-prompt|--help
        agent claude-code; claude; $claude; claude|--name|-v
        agent claude-code; claude; $claude; claude|-p|--|--version
        plain; codex; $codex; codex|--version
        plain; codex; $codex; codex|exec|-h
        plain; node; $node; node|/usr/bin/codex|-V
        agent codex; codex; $codex; codex|exec|why is --version slow
        agent codex; codex; $codex; codex|exec|--|--version
        plain; node; $node; node|/usr/bin/gemini|--version
        plain; node; $node; /usr/bin/node|--max-old-space-size=7962|/usr/bin/gemini|-v
        agent gemini-cli; node; $node; node|/usr/bin/gemini|-p=--help
        plain; node; $node; node|/usr/bin/qwen|--help
        plain; copilot; $npm/@github/copilot/node_modules/@github/copilot-linux-x64/copilot; copilot|--binary-version
        plain; node; $node; node|/usr/local/bin/copilot|--binary-version
        agent copilot-cli; node; $node; node|/usr/local/bin/copilot|-V
        plain; opencode; /home/u/.opencode/bin/opencode; opencode|-v
        agent opencode; opencode; /home/u/.opencode/bin/opencode; opencode|run|--|--version
        plain; amp; /home/u/.amp/bin/amp; amp|--version
        agent amp; amp; /home/u/.amp/bin/amp; amp|--mode|--version
        plain; node; /home/u/.local/share/cursor-agent/versions/1/node; agent|/home/u/.local/share/cursor-agent/versions/1/index.js|--version
        agent cursor-agent; node; /home/u/.local/share/cursor-agent/versions/1/node; agent|/home/u/.local/share/cursor-agent/versions/1/index.js|--model|-h
        plain; crush; /usr/bin/crush; crush|--version
        agent crush; crush; /usr/bin/crush; crush|run|-v|fix it
        agent crush; crush; /usr/bin/crush; crush|run|-m|--help|fix it
        plain; goose; /home/u/.local/bin/goose; goose|-V
        plain; aider; /usr/bin/python3.12; python3|/home/u/.local/bin/aider|--version
        agent aider; aider; /usr/bin/python3.12; python3|/home/u/.local/bin/aider|-v
        plain; reaper; /usr/bin/reaper; reaper|run|--help
        agent reaper-run; reaper; /usr/bin/reaper; reaper|run|codex|--help
        ",
    );
}

#[test]
fn agent_server_is_recognised_by_its_arguments() {
    check(
        "
        server claude-daemon; claude; $claude; claude|daemon|run
        server claude-daemon; 2.1.50; $claude; /home/John Doe/.local/share/claude/versions/2.1.50|daemon|run
        server codex-app-server; codex; $codex; codex|app-server|--listen|unix://|--managed-daemon
        reap agents-without-client; codex; $codex; codex|app-server|--managed-daemon|--help
        plain; opencode; /x/opencode-ai/bin/opencode.exe; opencode|serve|--help
        server codex-app-server; codex; /home/u/.codex/packages/app-server-daemon/releases/0.169.0-x86_64-unknown-linux-musl/bin/codex; /home/u/.codex/packages/app-server-daemon/releases/0.169.0-x86_64-unknown-linux-musl/bin/codex|app-server|--listen|unix://|--analytics-default-enabled|--managed-daemon
        agent claude-code; claude; /usr/lib/node_modules/@anthropic-ai/claude-code/bin/claude.exe; claude bg-pty-host|--bg-pty-host|/tmp/cc-daemon-0/H/spare/X.pty.sock|200|50|--|/x/claude.exe|--bg-spare|/tmp/x
        agent claude-code; claude; /usr/lib/node_modules/@anthropic-ai/claude-code/bin/claude.exe; claude bg-spare|--bg-spare|/tmp/cc-daemon-0/H/spare/X.claim.sock
        boundary codex-daemon; codex; $codex; /John Doe/bin/codex|app-server|daemon|pid-update-loop
        boundary codex-daemon; codex; $codex; codex|app-server|daemon|start
        boundary codex-daemon; codex; $codex; codex|-c|a=b c|app-server|daemon|start
        agent codex; codex; $codex; codex|app-server|proxy
        server codex-app-server; codex; $codex; codex|-c|model=o3|--verbose|app-server
        server codex-app-server; codex; $codex; codex|-c|a=b c|app-server|--listen|unix://
        server codex-app-server; codex; $codex; codex|--config|a=b c|-C|/x y|--enable|f|-p|fast|app-server
        server codex-app-server; node; $node; node|/usr/bin/codex|-m|o3|app-server
        server codex-app-server; codex; ; codex|app-server
        server codex-app-server; node; $node; node|/usr/bin/codex|app-server
        server opencode-serve; opencode; /x/opencode-ai/bin/opencode.exe; opencode|serve|--port|4096
        server opencode-serve; opencode; /x/opencode-ai/bin/opencode.exe; opencode|--print-logs|serve
        server opencode-serve; opencode; /x/opencode-ai/bin/opencode.exe; opencode|--log-level|DEBUG|serve
        server crush-server; crush; /usr/bin/crush; crush|server|--host|unix:///x
        server crush-server; crush; /usr/bin/crush; crush|--cwd|/a b|-d|server
        server amp-runner; amp; /x/@ampcode/cli/bin/amp.exe; amp|--no-tui
        server amp-runner; amp; /x/@ampcode/cli/bin/amp.exe; amp|--mode|smart|--no-tui
        agent crush; crush; /usr/bin/crush; crush
        boundary cursor-worker; node; /home/u/.local/share/cursor-agent/versions/1/node; agent|/home/u/.local/share/cursor-agent/versions/1/index.js|worker|start
        boundary cursor-worker; node; /home/u/.local/share/cursor-agent/versions/1/node; agent|--use-system-ca|/home/u/.local/share/cursor-agent/versions/1/index.js|--api-key|k|worker|start
        server claude-daemon; claude; $claude; claude|daemon|run|--spawned-by|{\"pid\":1}
        server claude-daemon; node; $node; node|$npm/@anthropic-ai/claude-code/cli.js|daemon|run
        agent claude-code; claude; $npm/@anthropic-ai/claude-code/bin/claude.exe; claude|bg-pty-host|--bg-pty-host|/x.sock|200|50|--|$npm/@anthropic-ai/claude-code/bin/claude.exe|--bg-spare|/y.sock
        agent claude-code; claude; $npm/@anthropic-ai/claude-code/bin/claude.exe; claude|bg-spare|--bg-spare|/y.sock
        ",
    );
}

#[test]
fn programs_of_boundary_rules_are_boundaries() {
    check(
        "
        boundary tmux; tmux; /usr/bin/tmux; tmux|-L|claude-swarm-1|new|-d
        boundary tmux; tmux: server; ; tmux
        boundary screen; screen; /usr/bin/screen; SCREEN|-dmS|x
        boundary zellij; zellij; /usr/bin/zellij; zellij|--server|/x
        boundary containers; dockerd; /usr/bin/dockerd; dockerd
        boundary containers; podman; /usr/bin/podman; podman|--log-level|info|system|service|--time=0
        boundary containers; containerd-shim; /usr/bin/containerd-shim-runc-v2; x
        boundary containers; conmon; /usr/bin/conmon; conmon
        boundary containers; pasta.avx2; /usr/bin/pasta.avx2; /usr/bin/pasta|--config-net
        boundary virtual-machines; libvirtd; /usr/sbin/libvirtd; libvirtd
        boundary virtual-machines; qemu-system-x86; /usr/bin/qemu-system-x86_64; qemu-system-x86_64|-name|guest=web,debug-threads=on
        plain; qemu-system-x86; /usr/bin/qemu-system-x86_64; qemu-system-x86_64|-kernel|bzImage|-nographic
        keep compositors; sxhkd; /usr/bin/sxhkd; sxhkd
        keep mounts; rclone; /usr/bin/rclone; rclone|mount|drive:|/mnt
        plain; rclone; /usr/bin/rclone; rclone|copy|drive:|/x
        boundary systemd; systemd; /usr/lib/systemd/systemd; /usr/lib/systemd/systemd|--user
        boundary editors-gui; code; /usr/share/code/code; /usr/share/code/code|.
        boundary editors-gui; java; /opt/idea/jbr/bin/java; java|-Xmx2g|com.intellij.idea.Main
        boundary editors-gui; java; /opt/idea/jbr/bin/java; java|@/x/args|-cp|a:b|com.intellij.idea.Main
        boundary editors-gui; node; /home/u/.vscode-server/cli/servers/Stable-1/server/node; /home/u/.vscode-server/cli/servers/Stable-1/server/node|/home/u/.vscode-server/cli/servers/Stable-1/server/out/server-main.js|--port=0
        plain; code; /w/.vscode-test/vscode-linux-x64-1.9/code; code|--extensionTestsPath=/w/out
        plain; code; /usr/share/code/code; code|--extensionTestsPath=/w/out
        plain; java; /opt/idea/jbr/bin/java; java|-jar|x.jar
        boundary editors-terminal; nvim; /usr/bin/nvim; nvim|notes
        boundary editors-terminal; emacs; /usr/bin/emacs-31.1-x; emacs|--daemon
        plain; nvim; /usr/bin/nvim; nvim|--headless|-c|q
        plain; emacs; /usr/bin/emacs; emacs|-batch|-l|x
        reap git; git; /usr/bin/git; git|commit|-m|tmux screen zellij docker
        ",
    );
}

#[test]
fn browser_is_a_boundary_unless_automated() {
    check(
        "
        boundary browser; chrome; $chrome; /opt/google/chrome/chrome|https://example.org
        boundary browser; chrome; $chrome; /opt/google/chrome/chrome|--user-data-dir=/home/u/second profile
        boundary browser; firefox; /usr/lib/firefox/firefox; firefox|-new-tab|https://example.org/headless
        plain; chrome; $chrome; chrome|--headless=new|--dump-dom|x
        plain; chrome; $chrome; chrome|--headless
        plain; chrome; $chrome; chrome|--remote-debugging-port=9222
        plain; chrome; $chrome; chrome|--remote-debugging-pipe
        plain; chrome; $chrome; chrome|--user-data-dir=/home/u/.cache/ms-playwright/mcp-chrome-1|about:blank
        plain; chrome; $chrome; chrome|--user-data-dir=/run/agent-browser-chrome-7
        plain; chrome; $chrome; chrome|--user-data-dir=/x/puppeteer_dev_chrome_profile-Ab
        plain; chrome; $chrome; chrome|--user-data-dir=/tmp/x
        plain; chrome; $chrome; /opt/google/chrome/chrome|--type=renderer|--lang=en
        plain; chrome; $chrome; /opt/google/chrome/chrome --type=renderer --lang=en
        plain; chrome; /home/u/.cache/ms-playwright/chromium-1200/chrome-linux/chrome; chrome
        plain; chrome-headless; /home/u/.cache/puppeteer/x/chrome-headless-shell; chrome-headless-shell
        plain; firefox; /usr/lib/firefox/firefox; firefox|-headless|-profile|/tmp/playwright_firefoxdev_profile-x|-juggler-pipe
        plain; firefox; /usr/lib/firefox/firefox; firefox|--marionette|-profile|/tmp/rust_mozprofileX
        plain; firefox; /usr/lib/firefox/firefox; firefox|-contentproc|{1}|tab
        ",
    );
}

#[test]
fn programs_with_windows_are_boundaries() {
    check(
        "
        boundary terminals; xterm; /usr/bin/xterm; xterm|-e|vim|notes
        boundary terminals; x-terminal-emul; /usr/bin/xterm; x-terminal-emulator
        boundary terminals; gnome-terminal-; /usr/libexec/gnome-terminal-server; gnome-terminal-server
        boundary terminals; alacritty; /usr/bin/alacritty; alacritty
        boundary terminals; kitty; /home/u/.local/kitty.app/bin/kitty; kitty
        boundary terminals; konsole; /usr/bin/konsole; konsole|-e|bash
        boundary terminals; foot; /usr/bin/foot; foot
        boundary terminals; wezterm-gui; /usr/bin/wezterm-gui; wezterm-gui|start
        boundary terminals; ghostty; /usr/bin/ghostty; ghostty
        boundary terminals; ptyxis; /usr/bin/ptyxis; ptyxis|--new-window
        boundary terminals; ttyd; /usr/bin/ttyd; ttyd|bash
        boundary terminals; terminator; /usr/bin/python3.13; /usr/bin/python3|/usr/bin/terminator
        plain; tabby; /usr/local/bin/tabby; tabby|serve
        plain; tabby; /opt/Tabby/tabby; tabby|--type=renderer
        boundary documents; evince; /usr/bin/evince; evince|a.pdf
        boundary documents; nautilus; /usr/bin/nautilus; nautilus|--new-window
        boundary office; soffice.bin; /usr/lib/libreoffice/program/soffice.bin; soffice.bin|a.odt
        plain; soffice.bin; /usr/lib/libreoffice/program/soffice.bin; soffice.bin|--headless|--convert-to|pdf|a.odt
        plain; soffice.bin; /usr/lib/libreoffice/program/soffice.bin; soffice.bin|--convert-to|pdf|a.odt
        plain; inkscape; /usr/bin/inkscape; inkscape|--export-filename=a.png|a.svg
        boundary mail-and-chat; thunderbird; /usr/lib/thunderbird/thunderbird; thunderbird
        boundary mail-and-chat; slack; /usr/lib/slack/slack; /usr/lib/slack/slack
        plain; slack; /usr/lib/slack/slack; slack|--type=zygote
        plain; slack; /usr/local/bin/slack; slack|run
        boundary media; vlc; /usr/bin/vlc; vlc|a.mkv
        plain; vlc; /usr/bin/vlc; vlc|-I|dummy|a.mkv
        ",
    );
}

#[test]
fn agents_and_boundaries_do_not_match_joined_arguments() {
    let rules = catalogue::entries();
    let joined = rules.iter().map(|entry| &entry.rule).filter(|rule| {
        let mut conditions = rule.matchers.iter().flat_map(|m| m.conditions());
        conditions.any(|condition| condition.field == Field::Argv)
    });
    let actions: Vec<_> = joined.map(|rule| rule.action).collect();
    assert!(
        !actions.is_empty()
            && actions
                .iter()
                .all(|a| !matches!(a, Action::Agent | Action::Boundary))
    );
}

#[test]
fn programs_of_keep_rules_are_kept() {
    check(
        "
        keep pm2; node; $node; node|$npm/pm2/lib/Daemon.js
        keep pm2; PM2 v6.0.1: God; $node; PM2 v6.0.1: God Daemon (/home/u/.pm2)
        keep supervisord; supervisord; /usr/bin/python3.13; /usr/bin/python3|/usr/bin/supervisord|-c|x
        keep ssh-agent; ssh-agent; /usr/bin/ssh-agent; ssh-agent|-s
        keep gpg-agent; gpg-agent; /usr/bin/gpg-agent; gpg-agent|--daemon
        keep ssh-master; ssh; /usr/bin/ssh; ssh: /home/u/.ssh/cm-x [mux]
        keep ssh-master; ssh; /usr/bin/ssh; ssh|-M|-N|host
        plain; ssh; /usr/bin/ssh; ssh|-o|ControlMaster=no|host
        keep dbus; dbus-daemon; /usr/bin/dbus-daemon; dbus-daemon|--session
        keep sound; pipewire; /usr/bin/pipewire; pipewire
        keep compositors; gnome-shell; /usr/bin/gnome-shell; gnome-shell
        plain; Xvfb; /usr/bin/Xvfb; Xvfb|:99
        keep gradle; java; /usr/lib/jvm/21/bin/java; java|-cp|x|org.gradle.launcher.daemon.bootstrap.GradleDaemon|9.1
        plain; java; /usr/lib/jvm/21/bin/java; java|org.gradle.wrapper.GradleWrapperMain|test
        keep bazel; java; /home/u/.cache/bazel/x/jdk/bin/java; bazel(repo)|--add-opens|-jar|/x/A-server.jar
        keep sccache; sccache; /usr/bin/sccache; sccache
        keep watchman; watchman; /usr/bin/watchman; watchman|--foreground
        keep adb; adb; /opt/android/platform-tools/adb; adb|-L|tcp:5037|fork-server|server
        plain; adb; /opt/android/platform-tools/adb; adb|logcat
        keep git-fsmonitor; git; /usr/bin/git; git|fsmonitor--daemon|run|--detach
        reap git; git; /usr/bin/git; git|status
        keep package-managers; apt-get; /usr/bin/apt-get; apt-get|install|x
        keep package-managers; dnf; /usr/bin/python3.13; /usr/bin/python3|/usr/bin/dnf|upgrade
        keep npm-global; node; $node; node|/usr/bin/npm|install|-g|@openai/codex
        keep npm-global; node; $node; node|/usr/bin/npm|-g|i|@openai/codex
        plain; node; $node; node|/usr/bin/npm|run|dev|--|-g
        ",
    );
}

#[test]
fn clients_of_containers_are_no_boundaries() {
    check(
        "
        reap container-clients; docker; /usr/bin/docker; docker|logs|-f|web
        reap container-clients; docker; /usr/bin/docker; docker|--context|remote|exec|-it|web|bash
        reap container-clients; docker; /usr/bin/docker; docker|compose|-f|/x/y.yml|logs|-f
        reap container-clients; podman; /usr/bin/podman; podman|attach|web
        reap container-clients; docker; /usr/bin/docker; docker|run|--rm|-i|mcp/fetch
        reap container-clients; docker; /usr/bin/docker; docker|run|-i|--rm|-e|A=1|mcp/fetch
        reap container-clients; docker; /usr/bin/docker; docker|run|-it|--rm|debian
        reap container-clients; docker; /usr/bin/docker; docker|--context|x|run|-v|/a:/b|--name|x|--rm|-i|mcp/fetch
        reap container-clients; podman; /usr/bin/podman; podman|container|run|--rm|--interactive|mcp/fetch
        reap container-clients; docker-compose; /usr/libexec/docker/cli-plugins/docker-compose; docker-compose|compose|-f|x|logs|-f
        report containers-left; docker-compose; /usr/libexec/docker/cli-plugins/docker-compose; docker-compose|compose|up
        report containers-left; docker; /usr/bin/docker; docker|run|--rm|web|grep|-i|x
        report containers-left; docker; /usr/bin/docker; docker|run|--rm|-i|-d|web
        reap container-clients; docker; /usr/bin/docker; docker|wait|web
        reap container-clients; kubectl; /usr/local/bin/kubectl; kubectl|-n|web|logs|-f|pod/x
        plain; kubectl; /usr/local/bin/kubectl; kubectl|-n|web|port-forward|svc/x|80
        report containers-left; docker; /usr/bin/docker; docker|run|--rm|web
        report containers-left; docker; /usr/bin/docker; docker|run|-i|web
        report containers-left; docker; /usr/bin/docker; docker|compose|up
        report containers-left; podman; /usr/bin/podman; podman|build|.
        plain; kubectl; /usr/local/bin/kubectl; kubectl|apply|-f|x.yml
        plain; sh; /usr/bin/dash; sh|-c|docker run --rm -i x
        ",
    );
}

#[test]
fn starters_of_detached_containers_are_noted() {
    let rules = rules::built_in();
    for (program, argv, is_noted) in [
        ("docker", "docker|run|-d|nginx", true),
        (
            "docker",
            "docker|--context|x|run|--name|web|-dp|80:80|nginx",
            true,
        ),
        ("docker", "docker|run|-it|--detach=true|nginx", true),
        ("podman", "podman|container|run|-itd|nginx", true),
        ("docker", "docker|compose|-f|x.yml|up|--build|-d", true),
        ("docker-compose", "docker-compose|up|--detach", true),
        ("docker", "docker|start|db", true),
        ("docker", "docker|run|nginx|-d", false),
        (
            "docker",
            "docker|run|--rm|-i|--dns|1.1.1.1|mcp/fetch",
            false,
        ),
        ("docker", "docker|run|--detach-keys|ctrl-a|-it|nginx", false),
        ("docker", "docker|start|-ai|db", false),
        ("docker", "docker|compose|up", false),
        ("docker", "docker|compose|down", false),
        ("docker", "docker|logs|-f|web", false),
        ("sh", "sh|-c|docker run -d nginx", false),
    ] {
        let image = image(program, &format!("/usr/bin/{program}"), argv);
        let rule = rules.note(&image).map(|id| &**rules.name(id));
        let expected = is_noted.then_some("containers-detached");
        assert_eq!(rule, expected, "{argv}");
    }
}

#[test]
fn build_servers_and_daemons_are_kept() {
    check(
        "
        keep build-servers; java; /usr/lib/jvm/21/bin/java; java|-cp|x|org.mvndaemon.mvnd.common.MavenDaemon
        plain; java; /usr/lib/jvm/21/bin/java; java|org.mvndaemon.mvnd.client.DefaultClient|verify
        keep build-servers; java; /usr/lib/jvm/21/bin/java; java|-cp|x|bloop.Server|8212
        plain; java; /usr/lib/jvm/21/bin/java; java|-cp|x|bloop.cli.Main|compile
        keep build-servers; java; /usr/lib/jvm/21/bin/java; java|-jar|/x/sbt-launch.jar|--detach-stdio
        plain; java; /usr/lib/jvm/21/bin/java; java|-jar|/x/sbt-launch.jar|test
        keep build-servers; java; /usr/lib/jvm/21/bin/java; java|-cp|x|mill.daemon.MillDaemonMain|/x
        keep build-servers; java; /usr/lib/jvm/21/bin/java; java|-cp|x|mill.runner.MillServerMain|/x
        keep build-servers; java; /usr/lib/jvm/21/bin/java; java|-cp|x|mill.main.MillServerMain|/x
        plain; java; /usr/lib/jvm/21/bin/java; java|-cp|x|mill.runner.MillMain|test
        keep build-servers; buck2d; /usr/bin/buck2; buck2d[repo]|--isolation-dir|v2|daemon|{}
        plain; buck2; /usr/bin/buck2; buck2|build|//:x
        keep build-servers; pantsd; /usr/bin/python3.11; pantsd [/home/u/repo]
        plain; python3; /usr/bin/python3.11; python3|/usr/bin/pants|test
        keep build-servers; dotnet; /usr/share/dotnet/dotnet; dotnet|/usr/share/dotnet/sdk/9.0/MSBuild.dll|/nodemode:1|/nodeReuse:true
        plain; dotnet; /usr/share/dotnet/dotnet; dotnet|/usr/share/dotnet/sdk/9.0/MSBuild.dll|/nodemode:1|/nodeReuse:false
        ",
    );
    check(
        "
        keep build-servers; dotnet; /usr/share/dotnet/dotnet; dotnet|exec|/usr/share/dotnet/sdk/9.0/Roslyn/bincore/VBCSCompiler.dll|-pipename:x
        plain; dotnet; /usr/share/dotnet/dotnet; dotnet|test
        keep build-servers; turbo; /x/node_modules/turbo-linux-64/bin/turbo; turbo|--skip-infer|daemon
        plain; turbo; /x/node_modules/turbo-linux-64/bin/turbo; turbo|run|build
        keep build-servers; node; $node; node|/x/node_modules/nx/src/daemon/server/start.js
        plain; node; $node; node|/x/node_modules/nx/bin/nx.js|test
        keep build-servers; flow; /x/flow; flow|start-server|--daemon|/x
        plain; flow; /x/flow; flow|check
        keep git-credential-cache; git-credential-; /usr/lib/git-core/git-credential-cache--daemon; git-credential-cache--daemon|/x
        reap git; git-credential-; /usr/lib/git-core/git-credential-store; git-credential-store|get
        keep process-managers; node; $node; node|$npm/forever/bin/monitor|x.js
        plain; node; $node; node|$npm/forever/bin/forever|list
        keep process-managers; process-compose; /usr/bin/process-compose; process-compose|up|-t=false
        plain; process-compose; /usr/bin/process-compose; process-compose|up
        keep system-daemons; sshd; /usr/sbin/sshd; sshd: /usr/sbin/sshd [listener] 0 of 10-100 startups
        keep system-daemons; sshd; /usr/bin/sshd; sshd|-D
        plain; sshd; /home/u/openssh/sshd; sshd|-D
        plain; sshd; /usr/sbin/sshd; /usr/sbin/sshd|-D|-f|/tmp/x/sshd_config
        keep system-daemons; cron; /usr/sbin/cron; cron
        plain; cron; /x/bin/cron; cron
        keep system-daemons; nginx; /usr/sbin/nginx; nginx: master process /usr/sbin/nginx
        plain; nginx; /usr/sbin/nginx; nginx|-g|daemon off;
        keep package-managers; nix-build; /nix/store/x/bin/nix-build; nix-build|x
        keep package-managers; update-initramf; /usr/bin/dash; /bin/sh|/usr/sbin/update-initramfs|-u
        plain; dash; /usr/bin/dash; /bin/sh|/x/build.sh|update-initramfs
        boundary browser; zen-bin; /opt/zen/zen-bin; zen-bin
        plain; zen-bin; /opt/zen/zen-bin; zen-bin|-headless
        boundary browser; floorp; /opt/floorp/floorp; floorp
        plain; floorp; /opt/floorp/floorp; floorp|--marionette
        boundary browser; Ladybird; /usr/bin/Ladybird; Ladybird
        plain; Ladybird; /usr/bin/Ladybird; Ladybird|--headless
        boundary browser; falkon; /usr/bin/falkon; falkon
        plain; falkon; /usr/bin/falkon; falkon|--remote-debugging-port=9222
        keep dbus; dbus-daemon; /usr/bin/dbus-daemon; dbus-daemon|--session|--address=systemd:
        plain; dbus-daemon; /usr/bin/dbus-daemon; dbus-daemon|--nofork|--print-address|4|--session
        ",
    );
}

#[test]
fn programs_with_state_have_time_to_exit() {
    let rules = rules::built_in();
    for (comm, exe, argv, has_grace) in [
        (
            "postgres",
            "/usr/lib/postgresql/17/bin/postgres",
            "postgres|-D|/x",
            true,
        ),
        (
            "redis-server",
            "/usr/bin/redis-server",
            "redis-server *:6379",
            true,
        ),
        ("redis-cli", "/usr/bin/redis-cli", "redis-cli", false),
        (
            "java",
            "/usr/bin/java",
            "java|-cp|x|org.apache.cassandra.service.CassandraDaemon",
            true,
        ),
        ("java", "/usr/bin/java", "java|-jar|app.jar", false),
        ("terraform", "/usr/bin/terraform", "terraform|apply", true),
        (
            "terraform-prov",
            "/x/terraform-provider-aws_v5",
            "terraform-provider-aws_v5",
            true,
        ),
        (
            "ansible-playbo",
            "/usr/bin/python3.13",
            "python3|/usr/bin/ansible-playbook|x.yml",
            true,
        ),
        (
            "python3",
            "/usr/bin/python3.13",
            "python3|-m|pip|install|x",
            true,
        ),
        ("python3", "/usr/bin/python3.13", "python3|-m|pytest", false),
        ("npm install", NODE, "node|/usr/bin/npm|install", true),
        ("node", NODE, "node|server.js|npm", false),
        ("cargo", "/home/u/.cargo/bin/cargo", "cargo|build", true),
        ("cargo", "/home/u/.cargo/bin/cargo", "cargo|test", false),
        ("git", "/usr/bin/git", "git|rebase|main", true),
        ("gitk", "/usr/bin/gitk", "gitk", false),
    ] {
        let matching = rules.matching_member_rules(&image(comm, exe, argv));
        let graces = matching.iter().map(|id| rules.rule(*id).grace_ns);
        assert_eq!(graces.max() > Some(0), has_grace, "{argv}");
    }
}

#[test]
fn other_uid_is_the_first_keep() {
    let rules = rules::built_in();
    let matching = rules.matching_member_rules(&image("dpkg", "/usr/bin/dpkg", "dpkg|-i|x"));
    let names: Vec<_> = matching.iter().map(|id| &**rules.name(*id)).collect();
    assert_eq!(
        names,
        [
            "other-uid",
            "package-managers",
            "own-unit",
            "windows",
            "asked-for-servers",
            "asked-for-commands",
            "unattended-servers",
            "unattended-commands",
            "young",
            "unused-servers"
        ]
    );
    assert_eq!(rules.rule(matching[0]).when.uid, Some(UidCondition::Other));
}

#[test]
fn name_table_of_the_catalogue_selects_few_names() {
    const A: u32 = NAME_AGENT;
    const B: u32 = NAME_BOUNDARY;
    const K: u32 = NAME_KEEP;
    let table = rules::built_in().names();
    for (name, bits) in [
        ("true", 0),
        ("ls", 0),
        ("bash", 0),
        ("cargo", 0),
        ("sleep", 0),
        ("make", 0),
        ("cc1", 0),
        ("rg", 0),
        ("bunzip2", 0),
        ("", 0),
        ("claude", A | B),
        ("2.1.3", A | B),
        ("codex", A | B),
        ("codex-x86_64-unknown-linux-musl", A | B),
        ("node", A | B | K),
        ("node20", A | B | K),
        ("bun", A | B | K),
        ("bun-1.2", 0),
        ("python3.11", A | B | K),
        (".claude-wrapped", A | B),
        (".opencode-wrapped", A | B),
        ("tmux", B),
        ("xterm", B),
        ("gnome-terminal-server", B),
        ("tmux: server", B),
        ("vim", B),
        ("java", B | K),
        // `git fsmonitor--daemon` has the same name as any other git.
        ("git", K),
        ("gnome-keyring-daemon", K),
    ] {
        assert_eq!(table.lookup(name.as_bytes()), bits, "{name}");
    }
    let marked = (0..=255).filter(|byte| table.first[usize::from(*byte)] & (A | B | K) != 0);
    assert!(
        marked.eq(b'0'..=b'9'),
        "only versions match by their first byte"
    );
}

#[test]
fn rule_names_are_unique() {
    let mut names: Vec<_> = catalogue::rules()
        .into_iter()
        .map(|rule| rule.name)
        .collect();
    names.sort();
    let all = names.len();
    names.dedup();
    assert_eq!(names.len(), all);
}

/// Prints the time of one classification, with `--nocapture`.
#[test]
fn time_of_a_classification() {
    let start = std::time::Instant::now();
    let rules = rules::built_in();
    println!(
        "compiling the catalogue: {} us",
        start.elapsed().as_micros()
    );
    let args = "x".repeat(40);
    let long = format!(
        "node|/home/u/project/node_modules/.bin/vite|{}",
        vec![&args[..]; 40].join("|")
    );
    for (what, image) in [
        (
            "no rule",
            image(
                "cc1plus",
                "/usr/lib/gcc/x86_64-linux-gnu/14/cc1plus",
                "cc1plus|-quiet|-o|x.o",
            ),
        ),
        (
            "a shell",
            image("bash", "/usr/bin/bash", "bash|-c|make -j8 && make test"),
        ),
        ("a script of node", image("node", NODE, &long)),
        (
            "an agent",
            image(
                "claude",
                "/home/u/.local/share/claude/versions/2.1.50",
                "claude|--resume",
            ),
        ),
    ] {
        let rounds = 5_000;
        let measure = || {
            let start = std::time::Instant::now();
            for _ in 0..rounds {
                std::hint::black_box(rules.classify(std::hint::black_box(&image)));
            }
            start.elapsed().as_nanos() / rounds
        };
        println!("{what}: {} ns, then {} ns", measure(), measure());
    }
}

#[test]
fn no_built_in_rule_reaps_inferred_members() {
    let all = catalogue::entries();
    let has_condition = |entry: &&crate::rules::read::RuleEntry| entry.rule.when.inferred.is_some();
    assert_eq!(all.iter().filter(has_condition).count(), 0);
}

#[test]
fn root_rules_match_servers_and_protocol_modes() {
    const CODEX: &str = "/usr/lib/node_modules/@openai/codex/vendor/x/bin/codex";
    const NPM: &str = "/usr/lib/node_modules/.bin";
    let rules = rules::built_in();
    let named = |exe: &str, argv: &str| -> Vec<String> {
        let matching = rules.matching_member_rules(&image("x", exe, argv));
        let of_root = matching
            .iter()
            .map(|id| rules.rule(*id))
            .filter(|rule| rule.when.is_of_root());
        of_root.map(|rule| rule.name.to_string()).collect()
    };
    let (none, hung_up) = (
        ["unused-servers"],
        ["agents-without-client", "unused-servers"],
    );
    for (exe, argv, expected) in [
        (
            CODEX,
            "codex|-c|a=b|app-server|--listen|unix://|--managed-daemon",
            &["unused-managed-servers", "unused-servers"][..],
        ),
        (CODEX, "codex|app-server|--listen|unix://", &none),
        (CODEX, "codex|app-server|--listen=npipe://x", &none),
        (CODEX, "codex|-s|read-only|app-server", &hung_up),
        (CODEX, "codex|app-server|--listen|stdio://", &hung_up),
        (CODEX, "codex|exec|app-server", &none),
        (NODE, &format!("node|{NPM}/codex|app-server"), &hung_up),
        (NODE, &format!("node|{NPM}/gemini|--acp|-y"), &hung_up),
        (
            NODE,
            &format!("node|{NPM}/gemini|--experimental-acp"),
            &hung_up,
        ),
        (NODE, &format!("node|{NPM}/gemini|what is --acp"), &none),
        (NODE, &format!("node|{NPM}/qwen|--acp"), &hung_up),
        (
            "/x/@github/copilot-linux-x64/copilot",
            "copilot|--acp|--stdio",
            &hung_up,
        ),
        ("/x/opencode-ai/bin/opencode.exe", "opencode|acp", &hung_up),
        ("/x/opencode-ai/bin/opencode.exe", "opencode|serve", &none),
        ("/home/u/.local/bin/claude", "claude|mcp|serve", &hung_up),
        ("/home/u/.local/bin/claude", "claude|-p|mcp", &none),
        ("/home/u/.local/bin/claude", "claude|mcp|list", &none),
    ] {
        assert_eq!(named(exe, argv), expected, "{argv}");
    }
}
