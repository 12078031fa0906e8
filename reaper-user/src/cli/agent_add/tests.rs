use std::os::unix::fs::symlink;
use std::path::Path;

use super::check::{appended, recognises, refuse_known};
use super::program::{image_of, interpreter};
use crate::config::Config;
use crate::config::new_agent::NewAgent;
use reaper_model::event::Image;

#[test]
fn interpreter_is_read_from_the_first_line() {
    for (head, expected) in [
        ("#!/bin/bash\necho", Some("/bin/bash")),
        ("#! /usr/bin/python3 -I\n", Some("/usr/bin/python3")),
        ("#!/usr/bin/env node\n", Some("node")),
        ("#!/usr/bin/env -S A=1 -i node --x\n", Some("node")),
        ("#!/usr/bin/env", None),
        ("#!", None),
        ("\u{7f}ELF", None),
        ("", None),
    ] {
        let found = interpreter(head.as_bytes());
        assert_eq!(found.as_deref(), expected.map(str::as_bytes), "{head}");
    }
}

#[test]
fn interpreter_of_a_script_is_the_program_that_runs_it() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path().canonicalize().unwrap();
    let write = |name: &str, text: &str| std::fs::write(dir.join(name), text).unwrap();
    for (name, text) in [
        ("busybox", "ELF"),
        ("mise", "ELF"),
        ("python3.12", "ELF"),
        ("python", "#!/bin/sh\nexec pyenv"),
    ] {
        write(name, text);
    }
    for (link, program) in [
        ("sh", "busybox"),
        ("node", "mise"),
        ("python3", "python3.12"),
    ] {
        symlink(dir.join(program), dir.join(link)).unwrap();
    }
    for (named, expected) in [
        ("python3", Ok(("python3.12", false))),
        // A shim is a script. Or it links to a program that is no interpreter.
        ("python", Ok(("python", true))),
        ("node", Ok(("node", true))),
        ("absent/bash", Ok(("absent/bash", true))),
        ("sh", Err("a script for")),
        ("busybox", Err("a script for")),
    ] {
        write("agent", &format!("#!{}\n", dir.join(named).display()));
        match (image_of(&dir.join("agent")), expected) {
            (Ok((image, is_chosen)), Ok((exe, expected))) => {
                let exe = dir.join(exe);
                assert_eq!(image.exe[..], *exe.as_os_str().as_encoded_bytes());
                assert_eq!(is_chosen, expected, "{named}");
            }
            (Err(why), Err(expected)) => {
                assert!(why.contains(expected) && why.contains("busybox"), "{why}");
            }
            (found, expected) => panic!("{named}: {found:?} {expected:?}"),
        }
    }
    write("agent", "hello\n");
    let why = image_of(&dir.join("agent")).unwrap_err();
    assert!(why.contains("no `#!` line"), "{why}");
}

#[test]
fn rule_is_appended_with_comments_kept() {
    let agent = NewAgent::of(&Image {
        exe: b"/opt/my-agent".into(),
        ..Image::default()
    });
    let (agent, file) = (agent.unwrap(), Path::new("c.toml"));
    let known = |text: &str| Config::parse(text, file).unwrap().rules;
    for old in [
        "",
        "# mine\ngrace = \"1s\" # short",
        "[[agent]]\nname = 'a'\nexe = '/a'\n",
    ] {
        let (block, config) = appended(old, &known(old), &agent, file).unwrap();
        let text = format!("{old}{block}");
        assert!(
            text.starts_with(old) && text.contains("\n[[agent]]\nname = \"my-agent\"\n"),
            "{text}"
        );
        let image = Image {
            exe: b"/opt/my-agent".into(),
            ..Image::default()
        };
        assert!(recognises(&config.rules, "my-agent", &image), "{text}");
        assert_eq!(
            refuse_known(&config.rules, &image).unwrap_err(),
            "the rule \"my-agent\" recognises it already"
        );
    }
    let mut named = agent;
    named.name = "codex".into();
    let refused = appended("", &known(""), &named, file)
        .unwrap_err()
        .to_string();
    assert_eq!(
        refused,
        "a rule is named \"codex\" already: give another name with --name"
    );
}

#[test]
fn boundary_is_refused_as_an_agent() {
    let tmux = Image {
        exe: b"/usr/bin/tmux".into(),
        comm: b"tmux".into(),
        ..Image::default()
    };
    let refused = refuse_known(&Config::default().rules, &tmux).unwrap_err();
    assert_eq!(
        refused,
        "it is a boundary by the rule \"tmux\", so no agent rule would apply"
    );
}
