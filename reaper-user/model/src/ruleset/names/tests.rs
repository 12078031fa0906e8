use proptest::prelude::*;

use super::*;
use crate::event::Image;
use crate::ruleset::Rule;

impl NameTable {
    /// Looks up a comm or a file name like the probes do (`bits` in `reaper-ebpf/src/member.rs`).
    pub fn lookup(&self, name: &[u8]) -> u32 {
        let mut key = [0; NAME_LEN];
        let len = name.len().min(NAME_LEN - 1);
        key[..len].copy_from_slice(&name[..len]);
        let first = self.first[usize::from(key[0])];
        let find = |key| self.names.get(&key).copied().unwrap_or(0);
        let mut bits = first & (NAME_AGENT | NAME_BOUNDARY | NAME_KEEP);
        if first & second_bit(key[1]) == 0 {
            return bits;
        }
        if first & NAME_INDEX_EXACT != 0 {
            bits |= find(key);
        }
        if first & NAME_INDEX_PREFIX != 0 {
            key[PREFIX_LEN..].fill(0);
            bits |= find(key);
        }
        bits
    }
}

fn rule(action: Action, conditions: Vec<Condition>) -> Rule {
    Rule::new("r", action, vec![Matcher::new(conditions)])
}

fn condition(field: Field, globs: &[&str]) -> Condition {
    let compile = match field {
        Field::Comm => Pattern::comm,
        Field::Exe => Pattern::exe,
        Field::Script => Pattern::script,
        _ => Pattern::argv,
    };
    Condition {
        field,
        any_of: globs.iter().map(|glob| compile(glob).unwrap()).collect(),
        negative: false,
    }
}

#[test]
fn path_glob_covers_the_names_that_it_can_match() {
    let digits: Vec<_> = (0..10).map(|digit| format!("{digit}x")).collect();
    let digits: Vec<_> = digits.iter().map(String::as_str).collect();
    // Names that the glob can match, and names that it cannot.
    let exe: [(&str, &[&str], &[&str]); 13] = [
        ("**/x", &["x"], &["xy", "y"]),
        ("/a/{b,c/{d,e}}", &["b", "d", "e"], &["a", "c"]),
        ("**/{node*,bun}", &["node", "node1"], &["bun1", "nod"]),
        ("**/v/[0-9]*", &digits, &["v", ""]),
        ("**/a[b-d]e", &["abe", "ade"], &["aee", "a"]),
        ("**/a[/]b", &["b", "anything"], &[]),
        ("**/a[!b]", &["anything"], &[]),
        ("/a{**/b,c}", &["ab", "b"], &[]),
        ("/tmp/**", &["anything", ""], &[]),
        ("**/", &["anything", ""], &[]),
        ("**/*x", &["x", "yx"], &[]),
        (r"**/\{a", &["{a"], &[]),
        (
            "**/a-name-of-sixteen",
            &["a-name-of-sixteen", "a-name-of-sixte"],
            &["a-name-of-sixt"],
        ),
    ];
    for (glob, some, none) in exe {
        let rules = Ruleset::new(vec![rule(
            Action::Keep,
            vec![condition(Field::Exe, &[glob])],
        )]);
        let table = rules.names();
        let keeps = |name: &&&str| table.lookup(name.as_bytes()) == NAME_KEEP;
        assert!(some.iter().all(|name| keeps(&name)), "{glob}");
        assert!(!none.iter().any(|name| keeps(&name)), "{glob}");
    }
}

#[test]
fn most_selective_condition_determines_the_names() {
    let names = |conditions| {
        let table = Ruleset::new(vec![rule(Action::Agent, conditions)]).names();
        move |name: &str| table.lookup(name.as_bytes())
    };
    let of = names(vec![
        condition(Field::Comm, &["x", "y"]),
        condition(Field::Exe, &["/opt/**"]),
        condition(Field::Argv, &["* serve"]),
    ]);
    assert_eq!((of("x"), of("y"), of("z")), (NAME_AGENT, NAME_AGENT, 0));
    let of = names(vec![condition(Field::Script, &["**/x"])]);
    assert_eq!(
        (of("bun1"), of("bunny"), of("x")),
        (NAME_AGENT, 0, 0),
        "a script condition covers the names of interpreters"
    );
    let of = names(vec![condition(Field::Argv, &["* serve"])]);
    assert_eq!((of("x"), of("")), (NAME_AGENT, NAME_AGENT));
    let any_program = Rule::new("r", Action::Keep, Vec::new());
    let table = Ruleset::new(vec![any_program]).names();
    assert_eq!(
        table.lookup(b"x"),
        0,
        "a rule without a program is not in the table"
    );
}

/// Pieces of globs, each with a text that it matches, or may match together with others.
const PIECES: [(&str, &str); 26] = [
    ("a", "a"),
    ("b", "b"),
    ("1", "1"),
    ("node", "node"),
    ("bun", "bun"),
    ("/", "/"),
    ("/", "/"),
    ("*", ""),
    ("*", "ab"),
    ("?", "b"),
    ("**", "a/b"),
    ("/**/", "/"),
    ("[ab]", "b"),
    ("[0-9]*", "3"),
    ("[!a]", "/"),
    ("[+-9]", "/"),
    ("[]/]", "]"),
    ("{a,b}", "b"),
    ("{a/b,1}", "a/b"),
    ("{**/a,b}", "a"),
    ("{a,/**}", "/1"),
    ("{a{b,/1},[,{}]b}", "{b"),
    ("{,a}", ""),
    (r"\{", "{"),
    ("python*", "python3.11.2.3.4.5"),
    ("a-long-name-of-", "a-long-name-of-"),
];

fn pieces() -> impl Strategy<Value = (String, String)> {
    prop::collection::vec(prop::sample::select(&PIECES[..]), 1..6)
        .prop_map(|pieces| pieces.into_iter().unzip())
}

/// Generates a rule with the comm and path of an image that it may match.
fn generated_rules() -> impl Strategy<Value = (Option<Rule>, String, String)> {
    let start = prop::sample::select(&[("/", "/"), ("**/", "/x/"), ("**/", "/")][..]);
    (0..3usize, 1..16, pieces(), start, pieces()).prop_map(
        |(action, fields, comm, (start, begun), exe)| {
            let glob = format!("{start}{}", exe.0);
            let patterns = [
                (Field::Comm, Pattern::comm(&comm.0)),
                (Field::Exe, Pattern::exe(&glob)),
                (Field::Script, Pattern::script("**/s")),
                (Field::Argv, Pattern::argv("* /s")),
            ];
            let given = (0..)
                .zip(patterns)
                .filter(|(nth, _)| fields >> nth & 1 == 1);
            let conditions: Option<Vec<_>> = given
                .map(|(_, (field, pattern))| {
                    let any_of = vec![pattern.ok()?];
                    Some(Condition {
                        field,
                        any_of,
                        negative: false,
                    })
                })
                .collect();
            let action = [Action::Agent, Action::Boundary, Action::Keep][action];
            let comm: String = comm.1.chars().take(NAME_LEN - 1).collect();
            let made = conditions.map(|conditions| rule(action, conditions));
            (made, comm, format!("{begun}{}", exe.1))
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(4_000))]

    #[test]
    fn name_table_has_the_bit_of_each_rule_that_matches(generated in prop::collection::vec(generated_rules(), 1..4)) {
        let rules = Ruleset::new(generated.iter().filter_map(|(rule, ..)| rule.clone()).collect());
        let table = rules.names();
        for (comm, exe) in generated.iter().flat_map(|(_, comm, _)| generated.iter().map(move |(.., exe)| (comm, exe))) {
            let image = Image {
                comm: comm.clone().into_bytes(),
                exe: exe.clone().into_bytes(),
                argv: b"x\0/s\0".into(),
                ..Image::default()
            };
            let name = exe.rsplit('/').next().unwrap_or_default();
            let bits = table.lookup(comm.as_bytes()) | table.lookup(name.as_bytes());
            let kept = rules.matching_member_rules(&image).first().copied();
            for (bit, found) in [
                (NAME_AGENT, rules.agent(&image)),
                (NAME_BOUNDARY, rules.leaves_session(&image)),
                (NAME_KEEP, kept),
            ] {
                prop_assert!(found.is_none() || bits & bit != 0, "{bit} of {comm:?} {exe:?}: {rules:?}");
            }
            let cut = Image { truncated: true, ..image };
            let may_be_kept = rules.unread_keep(&cut, &[]).is_some();
            prop_assert!(!may_be_kept || bits & (NAME_BOUNDARY | NAME_KEEP) != 0, "{comm:?} {exe:?}: {rules:?}");
        }
    }
}
