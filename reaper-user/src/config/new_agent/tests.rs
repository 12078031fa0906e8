use super::*;

/// Returns an image with this path, these arguments separated by spaces, and this resolved script.
fn image(exe: &str, args: &str, script: &str) -> Image {
    Image {
        exe: exe.into(),
        argv: args
            .split(' ')
            .flat_map(|arg| [arg, "\0"])
            .collect::<String>()
            .into(),
        script: script.into(),
        ..Image::default()
    }
}

#[test]
fn rule_matches_program_or_script_in_any_version() {
    for (exe, args, script, expected) in [
        (
            "/opt/my-agent/bin/my-agent",
            "x chat",
            "",
            "my-agent | /opt/my-agent/bin/my-agent",
        ),
        (
            "/home/me/.x/versions/2.1.197",
            "x",
            "",
            "x | /home/me/.x/versions/*",
        ),
        (
            "/opt/a[b]/My Agent",
            "x",
            "",
            r"My-Agent | /opt/a\[b\]/My Agent",
        ),
        (
            "/usr/bin/bash",
            "bash ./a.sh",
            "/w/a.sh",
            "a | **/bash | /w/a.sh",
        ),
        (
            "/usr/bin/python3.12",
            "python3 -m aider.cli",
            "",
            "aider | **/python* | -m aider.cli",
        ),
        (
            "/n/v20.11.0/bin/node",
            "node bin/x",
            "/n/v20.11.0/lib/node_modules/agent-x/dist/index.js",
            "agent-x | **/node | /n/*/lib/node_modules/agent-x/dist/index.js",
        ),
    ] {
        let found = NewAgent::of(&image(exe, args, script)).unwrap();
        let parts = [Some(found.name), Some(found.exe), found.script];
        let text = parts.into_iter().flatten().collect::<Vec<_>>().join(" | ");
        assert_eq!(text, expected, "{exe}");
    }
}

#[test]
fn rule_that_would_match_too_much_is_refused() {
    for (exe, args, why) in [
        ("", "x", "cannot be read"),
        ("/usr/bin/bash", "-bash", "runs no script"),
        ("/usr/bin/bash", "bash -c code", "runs no script"),
        ("/usr/bin/python3.12", "python3", "runs no script"),
        ("/usr/bin/node", "node -e code", "runs no script"),
        ("/usr/bin/node", "node a.js", "the path of its script a.js"),
        ("/bin/bash", "bash /shims/python3", "chooses a python3"),
        ("/usr/bin/sudo", "sudo x", "runs other programs"),
        ("/sbin/init", "init", "runs other programs"),
        ("/usr/bin/busybox", "sh a.sh", "runs other programs"),
        ("/dist/bin/index.js", "x", "no name"),
    ] {
        let refused = NewAgent::of(&image(exe, args, "")).unwrap_err();
        assert!(refused.contains(why), "{exe} {args}: {refused}");
    }
}

#[test]
fn program_or_script_that_runs_any_other_is_refused() {
    for name in "java deno dotnet electron28 tclsh tclsh8.6 wish8.6 npx npm pnpm yarn tsx ts-node uv uvx pipx make timeout \
                 nice nohup setsid stdbuf strace ltrace tini dumb-init xargs time doas su runuser chroot unshare nsenter \
                 watch ld-linux-x86-64.so.2"
        .split_whitespace()
    {
        let refused = NewAgent::of(&image(&format!("/opt/bin/{name}"), "x", "")).unwrap_err();
        assert!(refused.contains("runs other programs"), "{name}: {refused}");
    }
    for (exe, args, script, launcher) in [
        (
            "node",
            "node x",
            "/usr/share/nodejs/npm/bin/npm-cli.js",
            "npm-cli",
        ),
        (
            "node",
            "node x",
            "/n/lib/node_modules/npm/bin/npx-cli.js",
            "npm",
        ),
        (
            "node",
            "node x",
            "/n/lib/node_modules/tsx/dist/cli.mjs",
            "tsx",
        ),
        (
            "node",
            "node x",
            "/n/node_modules/ts-node/dist/bin.js",
            "ts-node",
        ),
        ("node", "node x", "/opt/corepack/dist/pnpm.cjs", "pnpm"),
        ("python3.12", "python3 x", "/usr/bin/pipx", "pipx"),
        ("python3.12", "python3 -m pipx", "", "pipx"),
        ("bash", "bash x", "/usr/bin/xvfb-run", "xvfb-run"),
    ] {
        let refused = NewAgent::of(&image(&format!("/usr/bin/{exe}"), args, script));
        let refused = refused.expect_err(script);
        let expected = format!("{launcher} runs other programs");
        assert!(refused.contains(&expected), "{script}: {refused}");
    }
    for (exe, args, script) in [
        ("/opt/make/my-agent", "x", ""),
        ("/opt/timer", "x", ""),
        ("/usr/bin/node", "node x", "/home/me/watch/agent.js"),
        (
            "/usr/bin/node",
            "node x",
            "/n/node_modules/tsx/node_modules/agent/cli.js",
        ),
        ("/usr/bin/node", "node x", "/opt/agent/bundle.js"),
        ("/usr/bin/python3", "python3 x", "/home/me/watch.py"),
        ("/usr/bin/python3", "python3 -m make.agent", ""),
    ] {
        assert!(
            NewAgent::of(&image(exe, args, script)).is_ok(),
            "{exe} {args} {script}"
        );
    }
}

#[test]
fn interpreter_that_will_be_chosen_matches_in_any_version() {
    for (exe, args, script, expected) in [
        ("/shims/python", "python a.py", "/w/a.py", "**/python*"),
        ("/shims/python3", "python3 a.py", "/w/a.py", "**/python*"),
        ("/shims/node", "node a.js", "/w/a.js", "**/node*"),
        ("/opt/my-agent", "my-agent", "", "/opt/my-agent"),
    ] {
        let rule = NewAgent::of(&image(exe, args, script)).unwrap();
        assert_eq!(rule.in_any_version().exe, expected, "{exe}");
    }
}

#[test]
fn rule_is_written_as_toml() {
    let rule = NewAgent {
        name: "x".into(),
        exe: r#"/a\[b\]/"x""#.into(),
        script: Some("-m x".into()),
    };
    assert_eq!(
        rule.toml(),
        "[[agent]]\nname = \"x\"\nexe = \"/a\\\\[b\\\\]/\\\"x\\\"\"\nscript = \"-m x\"\n"
    );
}
