use super::*;

fn image(comm: &str, exe: &[u8], args: &[&[u8]]) -> Image {
    let argv = args
        .iter()
        .flat_map(|arg| arg.iter().chain(&[0]))
        .copied()
        .collect();
    Image {
        comm: comm.into(),
        exe: exe.into(),
        argv,
        ..Image::default()
    }
}

fn condition(field: Field, pattern: Result<Pattern, PatternError>) -> Condition {
    Condition {
        field,
        any_of: vec![pattern.unwrap()],
        negative: false,
    }
}

fn not(condition: Condition) -> Condition {
    Condition {
        negative: true,
        ..condition
    }
}

fn rule(name: &str, action: Action, conditions: Vec<Condition>) -> Rule {
    Rule::new(name, action, vec![Matcher::new(conditions)])
}

fn class(rules: &Ruleset, image: &Image) -> String {
    match rules.classify(image) {
        Class::Agent(id) => format!("agent {}", rules.name(id)),
        Class::Boundary(id) => format!("boundary {}", rules.name(id)),
        Class::Server(id) => format!("server {}", rules.name(id)),
        Class::Plain => "plain".into(),
    }
}

#[test]
fn boundary_precedes_server_precedes_agent_and_first_given_wins() {
    let comm = |name| condition(Field::Comm, Pattern::comm(name));
    let exe = |path| condition(Field::Exe, Pattern::exe(path));
    let rules = Ruleset::new(vec![
        rule("a1", Action::Agent, vec![exe("**/x")]),
        rule("a2", Action::Agent, vec![comm("x")]),
        rule(
            "b1",
            Action::Boundary,
            vec![condition(Field::Argv, Pattern::argv("* serve"))],
        ),
        rule("a3", Action::Agent, vec![comm("y*")]),
        rule("a4", Action::Agent, vec![comm("yy")]),
        rule("s1", Action::Server, vec![comm("x"), exe("**/s")]),
    ]);
    assert_eq!(class(&rules, &image("x", b"/bin/s", &[b"x"])), "server s1");
    assert_eq!(
        class(&rules, &image("x", b"/bin/s", &[b"x", b"serve"])),
        "boundary b1"
    );
    assert_eq!(class(&rules, &image("x", b"/bin/x", &[b"x"])), "agent a1");
    assert_eq!(class(&rules, &image("x", b"/bin/z", &[b"x"])), "agent a2");
    assert_eq!(
        class(&rules, &image("x", b"/bin/x", &[b"x", b"serve"])),
        "boundary b1"
    );
    assert_eq!(class(&rules, &image("yy", b"/bin/z", &[b"x"])), "agent a3");
    assert_eq!(class(&rules, &image("z", b"/bin/z", &[b"x"])), "plain");
    let served = image("x", b"/bin/x", &[b"x", b"serve"]);
    assert_eq!(rules.agent(&served).map(|id| &**rules.name(id)), Some("a1"));
    assert_eq!(
        rules.leaves_session(&served).map(|id| &**rules.name(id)),
        Some("b1")
    );
}

#[test]
fn rule_needs_all_conditions_and_known_fields() {
    let rules = Ruleset::new(vec![rule(
        "r",
        Action::Agent,
        vec![
            condition(Field::Comm, Pattern::comm("x")),
            not(condition(Field::Exe, Pattern::exe("/tmp/**"))),
            not(condition(Field::Argv, Pattern::argv("* --help*"))),
        ],
    )]);
    assert_eq!(class(&rules, &image("x", b"/bin/x", &[b"x"])), "agent r");
    assert_eq!(class(&rules, &image("x", b"/tmp/a/x", &[b"x"])), "plain");
    assert_eq!(
        class(&rules, &image("x", b"/bin/x", &[b"x", b"--help"])),
        "plain"
    );
    assert_eq!(class(&rules, &image("x", b"", &[b"x"])), "plain");
    assert_eq!(class(&rules, &image("x", b"/bin/x", &[])), "plain");
    assert_eq!(class(&rules, &image("", b"/bin/x", &[b"x"])), "plain");
}

#[test]
fn globs_and_regexes_match_any_bytes() {
    let exe = Pattern::exe("/opt/*/x").unwrap();
    assert!(exe.is_match(b"/opt/\xff\xfe/x"));
    assert!(!exe.is_match(b"/opt/\xff/\xfe/x"));
    assert!(
        Pattern::exe("/opt/?/x").unwrap().is_match(b"/opt/\x80/x"),
        "`?` matches one byte, not one character"
    );
    assert!(
        Pattern::exe("**/\u{e9}")
            .unwrap()
            .is_match("/opt/\u{e9}".as_bytes())
    );
    assert!(
        Pattern::exe("/o[!p]t/\u{e9}*")
            .unwrap()
            .is_match("/o\u{1}t/\u{e9}\u{e9}".as_bytes())
    );
    let argv = Pattern::argv("*--x *").unwrap();
    assert!(
        argv.is_match(b"\xff\n --x \xff/y"),
        "`*` matches newlines and slashes"
    );
    let regex = Pattern::argv_regex("^[^ ]+ .* z$").unwrap();
    assert!(regex.is_match(b"\xff\xfe a\nb z"));
    assert!(
        Pattern::argv_regex("\u{e9}")
            .unwrap()
            .is_match("x\u{e9}".as_bytes())
    );
    let rules = Ruleset::new(vec![rule(
        "r",
        Action::Agent,
        vec![condition(Field::Exe, Pattern::exe("**/x"))],
    )]);
    assert_eq!(
        class(&rules, &image("x", b"/\xff/x", &[b"\xff"])),
        "agent r"
    );
}

#[test]
fn exe_glob_stops_at_slashes() {
    for (glob, path, expected) in [
        ("**/a/b", "/x/y/a/b", true),
        ("**/a/b", "/a/b", true),
        ("**/a/b", "/x/ya/b", false),
        ("/x/*/b", "/x/a/b", true),
        ("/x/*/b", "/x/a/c/b", false),
        ("/x/**/b", "/x/a/c/b", true),
        ("**/{a,b}", "/x/b", true),
        ("**/{a/b,c}", "/x/a/b", true),
        ("/x/y", "/x/y", true),
        ("/x/y", "/x/y/z", false),
    ] {
        assert_eq!(
            Pattern::exe(glob).unwrap().is_match(path.as_bytes()),
            expected,
            "{glob} {path}"
        );
        // The index must find what the pattern matches.
        let rules = Ruleset::new(vec![rule(
            "r",
            Action::Agent,
            vec![condition(Field::Exe, Pattern::exe(glob))],
        )]);
        let class = class(&rules, &image("x", path.as_bytes(), &[b"x"]));
        assert_eq!(class == "agent r", expected, "{glob} {path}");
    }
}

#[test]
fn pattern_decides_early_if_no_rest_can_change_it() {
    let (glob, regex) = (Pattern::argv, Pattern::argv_regex);
    for (pattern, front, expected) in [
        (glob("a b"), "a", None),
        (glob("a b"), "a b", None),
        (glob("a b"), "a bc", Some(false)),
        (glob("a b*"), "a bc", Some(true)),
        (glob("a*b"), "ab", None),
        (glob("b*a"), "a", Some(false)),
        (glob("{a,b}c"), "d", None),
        (Pattern::script("/**/a"), "b", Some(false)),
        (Pattern::script("**/a"), "b", None),
        (regex("a(?: |$)"), "a", None),
        (regex("a(?: |$)"), "a b", Some(true)),
        (regex(r"^ab\("), "ac", Some(false)),
        (regex(r"^ab\("), "ab", None),
        (regex("^ab?c"), "ac", None),
        (regex("^a|b"), "c", None),
        (regex(r"a\b"), "a", None),
    ] {
        let pattern = pattern.unwrap();
        let found = pattern.matches_prefix(front.as_bytes());
        assert_eq!(found, expected, "{pattern:?} {front}");
    }
}

proptest::proptest! {
    #[test]
    fn early_decision_of_a_pattern_is_final(
        pattern in "\\^?[ab]{0,2}([*?]|[ab]|\\{a,b\\}|\\|b| ){0,3}[ab*$]{0,2}",
        front in "[ab ]{0,5}",
        rest in "[ab ]{0,5}",
    ) {
        let text = format!("{front}{rest}");
        for pattern in [Pattern::argv(&pattern), Pattern::argv_regex(&pattern), Pattern::script(&pattern)] {
            let Ok(pattern) = pattern else { continue };
            if let Some(decided) = pattern.matches_prefix(front.as_bytes()) {
                proptest::prop_assert_eq!(pattern.is_match(text.as_bytes()), decided);
            }
        }
    }
}

#[test]
fn exe_of_a_replaced_file_matches() {
    let rules = Ruleset::new(vec![rule(
        "r",
        Action::Agent,
        vec![condition(Field::Exe, Pattern::exe("/bin/x"))],
    )]);
    assert_eq!(
        class(&rules, &image("x", b"/bin/x (deleted)", &[b"x"])),
        "agent r"
    );
}

#[test]
fn title_written_over_argv_matches_as_one_line() {
    let rules = Ruleset::new(vec![rule(
        "r",
        Action::Agent,
        vec![condition(Field::Argv, Pattern::argv_regex("^x y$"))],
    )]);
    let mut image = image("x", b"/bin/x", &[b"x y"]);
    image.argv.extend([0; 40]);
    assert_eq!(class(&rules, &image), "agent r");
}

#[test]
fn script_is_the_first_argument_that_is_no_option() {
    for (exe, args, expected) in [
        ("node", "node /x/a.js /x/b.js", "/x/a.js"),
        ("node", "node --flag -r /x/r.js --max=1 a.js", "a.js"),
        ("node-22", "node -- -a.js", "-a.js"),
        ("node", "node -e code a.js", ""),
        ("node", "node --import", ""),
        ("node", "", ""),
        ("bun", "bun /x/a.ts", "/x/a.ts"),
        ("python3.13", "python3 -u -X dev /x/a.py", "/x/a.py"),
        ("python3", "python3 -W ignore -Walways /x/a.py", "/x/a.py"),
        (
            "python3",
            "python3 --check-hash-based-pycs never a.py",
            "a.py",
        ),
        ("python3", "python3 -m http.server 80", "-m http.server"),
        ("python3", "python3 -Im aider --model x", "-m aider"),
        ("python3", "python3 -maider", "-m aider"),
        ("python3", "python3 -m", ""),
        ("python3", "python3 -Bc code /x/a.py", ""),
        ("python3", "python3 - /x/a.py", ""),
        ("nodemon", "nodemon /x/a.js", ""),
        ("bash", "bash /x/a.sh -c", "/x/a.sh"),
        ("bash5", "-bash", ""),
        ("bash", "bash -lc code /x/a.sh", ""),
        ("bash", "bash --rcfile f -euo pipefail a.sh", "a.sh"),
        ("bash", "bash -s /x/a.sh", ""),
        ("dash", "sh -eu -- -a.sh", "-a.sh"),
        ("sh5", "sh5 a.sh", ""),
        ("zsh", "zsh -f --emulate sh a.sh", "a.sh"),
        ("fish", "fish -C code a.fish", "a.fish"),
        ("perl5.36", "perl -wT -Ilib -MX a.pl", "a.pl"),
        ("perl", "perl -i.bak -ne code a.pl", ""),
        ("ruby3.3", "ruby -W0 -r set -Ilib a.rb", "a.rb"),
        ("php8.2", "php -d x=1 -f a.php", "a.php"),
        ("php", "php -S host:80 a.php", ""),
        ("lua5.4", "lua -e code -l m a.lua", "a.lua"),
        ("tclsh", "tclsh a.tcl", ""),
        // `-` and `+letters` are options of a shell alone.
        ("bash", "bash +e a.sh", "a.sh"),
        ("sh", "sh - a.sh x", "a.sh"),
        ("dash", "sh -e - +e", "+e"),
        ("bash", "bash -- +e a.sh", "+e"),
        ("zsh", "zsh -f +e - a.sh", "a.sh"),
        ("bash", "bash +c code a.sh", ""),
        ("perl", "perl +e a.pl", "+e"),
        ("perl", "perl - a.pl", ""),
        ("fish", "fish - a.fish", ""),
        // `o` of bash and dash takes the next argument, that of zsh and ksh the rest first.
        ("bash", "bash -oe pipefail a.sh", "a.sh"),
        ("dash", "sh +oo nounset errexit a.sh", "a.sh"),
        ("bash", "bash -oOe nounset extglob a.sh", "a.sh"),
        ("bash", "bash -oc nounset code a.sh", ""),
        ("mksh", "mksh -onounset a.sh", "a.sh"),
        ("ksh93", "ksh +eo nounset a.sh", "a.sh"),
        ("zsh", "zsh -O a.sh", "a.sh"),
        // Long options of bash with one `-` are no letters.
        ("bash", "bash -posix -norc a.sh", "a.sh"),
        ("bash", "bash -rcfile f a.sh", "a.sh"),
        ("perl", "perl -I DIR a.pl", "a.pl"),
        ("perl", "perl -wI DIR -IDIR a.pl", "a.pl"),
        ("perl", "perl -0777ne code a.pl", ""),
    ] {
        let args: Vec<&[u8]> = args
            .split(' ')
            .filter(|a| !a.is_empty())
            .map(str::as_bytes)
            .collect();
        let image = image("x", format!("/usr/bin/{exe}").as_bytes(), &args);
        assert_eq!(
            Subject::new(&image).field(Field::Script),
            expected.as_bytes(),
            "{exe} {args:?}"
        );
    }
}

#[test]
fn absolute_script_glob_matches_no_relative_path() {
    let script = Pattern::script("/**/bin/x").unwrap();
    assert!(script.is_match(b"/usr/bin/x") && script.is_match(b"/bin/x"));
    assert!(
        !script.is_match(b"bin/x")
            && !script.is_match(b"./bin/x")
            && !script.is_match(b"/usr/bin/xy")
    );
    let script = Pattern::script("**/bin/x").unwrap();
    assert!(
        script.is_match(b"bin/x") && script.is_match(b"./bin/x") && script.is_match(b"/usr/bin/x")
    );
}

#[test]
fn invalid_pattern_gives_the_cause() {
    let error = |pattern: Result<Pattern, PatternError>| pattern.unwrap_err().to_string();
    assert_eq!(
        error(Pattern::comm("a-name-of-sixteen")),
        "the kernel keeps 15 bytes of a name: write \"a-name-of-sixte\", or match `exe`"
    );
    assert_eq!(
        error(Pattern::exe("~/bin/x")),
        "it is matched against the whole path, so start it with `/` or `**/`: \"**/bin/x\""
    );
    assert_eq!(
        error(Pattern::argv("a[")),
        "unclosed character class; missing ']'"
    );
    assert_eq!(
        error(Pattern::argv("a{b")),
        "unclosed alternate group; missing '}' (maybe escape '{' with '[{]'?)"
    );
    assert_eq!(error(Pattern::argv_regex("a(")), "unclosed group");
    assert_eq!(
        error(Pattern::argv_regex(r"\w{9999}{9999}")),
        "compiled regex exceeds size limit of 10485760 bytes"
    );
}

#[test]
fn member_rules_of_all_actions_share_one_order() {
    let x = || vec![condition(Field::Comm, Pattern::comm("x"))];
    let bare = |name: &str, action| Rule::new(name, action, vec![]);
    let rules = Ruleset::new(vec![
        rule("first", Action::Reap, x()),
        bare("all", Action::Report),
        rule(
            "other",
            Action::Keep,
            vec![condition(Field::Exe, Pattern::exe("**/y"))],
        ),
        rule(
            "agent",
            Action::Agent,
            vec![condition(Field::Comm, Pattern::comm("a"))],
        ),
        rule("last", Action::Keep, x()),
    ]);
    let matching = |comm| {
        let ids = rules.matching_member_rules(&image(comm, b"/bin/x", &[b"x"]));
        ids.iter()
            .map(|id| rules.name(*id).to_string())
            .collect::<Vec<_>>()
    };
    assert_eq!(matching("x"), ["first", "all", "last"]);
    assert_eq!(matching("y"), ["all"]);
    assert_eq!(
        rules.classify(&image("x", b"/bin/x", &[b"x"])),
        Class::Plain,
        "a keep rule gives no class"
    );
}

#[test]
fn markers_of_several_rules_share_bits() {
    let with = |globs: &[&str]| {
        let mut rule = Rule::new("r", Action::Keep, vec![]);
        rule.when.markers = globs
            .iter()
            .map(|glob| Pattern::marker(glob).unwrap())
            .collect();
        rule
    };
    let rules = Ruleset::new(vec![with(&["A=*", "B=1"]), with(&["B=1"])]);
    let texts: Vec<_> = rules.marker_patterns().iter().map(Pattern::text).collect();
    assert_eq!(texts, ["REAPER_KEEP=1", "A=*", "B=1"]);
    let bits: Vec<_> = rules
        .rules()
        .iter()
        .map(|rule| rule.when.marker_bits)
        .collect();
    assert_eq!(bits, [0b110, 0b100]);
    assert_eq!(rules.facts_to_prefetch(), FactSet::MARKERS);
    assert_eq!(Ruleset::new(vec![]).facts_to_prefetch(), FactSet::NONE);
}

#[test]
fn reap_and_report_rules_can_be_for_living_roots() {
    use SessionCondition::{Alive, Any, Ok};
    for (action, session, orphan, idle, expected) in [
        (Action::Reap, Ok, None, None, [false, false]),
        (Action::Keep, Alive, None, None, [false, false]),
        (Action::Boundary, Any, None, None, [false, false]),
        (Action::Reap, Alive, None, None, [true, true]),
        (Action::Report, Any, None, None, [true, true]),
        (Action::Reap, Alive, Some(true), None, [false, true]),
        (Action::Reap, Alive, Some(false), None, [true, false]),
        (Action::Reap, Alive, None, Some(1), [false, false]),
    ] {
        let mut rule = Rule::new("r", action, vec![]);
        rule.when = When {
            session,
            orphan,
            idle,
            ..When::default()
        };
        let rules = Ruleset::new(vec![rule]);
        let found = [false, true].map(|orphans| rules.has_rules_for_living(orphans));
        assert_eq!(
            found, expected,
            "{action:?} {session:?} {orphan:?} {idle:?}"
        );
    }
}

#[test]
fn only_agents_and_servers_open_sessions() {
    let opening = [
        Action::Boundary,
        Action::Server,
        Action::Agent,
        Action::Keep,
        Action::Reap,
        Action::Report,
    ]
    .map(Action::opens_session);
    assert_eq!(opening, [false, true, true, false, false, false]);
}

#[test]
fn exe_glob_has_a_name_if_it_ends_in_one() {
    for (glob, name) in [
        ("**/x", Some("x")),
        ("/bin/x", Some("x")),
        ("/bin/x*", None),
        ("/bin/", None),
        ("/{bin,opt/x}/y", None),
    ] {
        let found = Pattern::exe(glob).unwrap();
        assert_eq!(found.name(), name.map(str::as_bytes), "{glob}");
    }
}

#[test]
fn matcher_display_lists_all_conditions() {
    let either = Condition {
        any_of: vec![Pattern::comm("a").unwrap(), Pattern::comm("b*").unwrap()],
        ..condition(Field::Comm, Pattern::comm("a"))
    };
    let matcher = Matcher::new(vec![
        not(condition(Field::Exe, Pattern::exe("/opt/**"))),
        either,
    ]);
    assert_eq!(matcher.to_string(), "comm a | b*, not exe /opt/**");
}

#[test]
fn session_kinds_have_their_stream_names() {
    let names = [SessionKind::Agent, SessionKind::Server].map(SessionKind::name);
    assert_eq!(names, ["agent", "server"]);
}
