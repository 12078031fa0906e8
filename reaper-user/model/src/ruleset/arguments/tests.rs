use super::super::{Action, Class, Condition, Field, Matcher, Rule, Ruleset};
use super::*;

fn image(exe: &str, args: &str) -> Image {
    let argv = args.split('|').flat_map(|arg| arg.bytes().chain([0]));
    Image {
        comm: b"x".into(),
        exe: exe.into(),
        argv: argv.collect(),
        ..Image::default()
    }
}

fn syntax(value_options: &[&str], command_at: u32) -> Syntax {
    Syntax {
        value_options: value_options.iter().map(|&option| option.into()).collect(),
        command_at,
    }
}

/// Returns the words separated by spaces, with options in brackets.
fn words(args: &str, is_cut: bool, syntax: &Syntax) -> String {
    shown(&image("/bin/x", args), is_cut, syntax)
}

fn shown(image: &Image, is_cut: bool, syntax: &Syntax) -> String {
    let words = read(image, 1, is_cut, syntax).map(|word| match word {
        Word::Option(option) => format!("[{}]", String::from_utf8_lossy(&option)),
        Word::Positional(arg) => format!("'{}'", String::from_utf8_lossy(arg)),
    });
    words.collect::<Vec<_>>().join(" ")
}

#[test]
fn options_and_positional_arguments_are_distinguished() {
    let plain = syntax(&["-c", "--config"], 0);
    let command = syntax(&["--name"], 2);
    for (args, syntax, expected) in [
        ("x", &plain, ""),
        ("x|a b|c", &plain, "'a b' 'c'"),
        ("x|-v|a|--all", &plain, "[-v] 'a' [--all]"),
        ("x|-c|a=b c|serve", &plain, "[-c=a=b c] 'serve'"),
        ("x|--config|-v|serve", &plain, "[--config=-v] 'serve'"),
        ("x|--config=a|serve", &plain, "[--config=a] 'serve'"),
        ("x|--config", &plain, "[--config]"),
        ("x|-|--|-v|--|a", &plain, "'-' '-v' '--' 'a'"),
        ("x|--", &plain, ""),
        ("x||a", &plain, "'' 'a'"),
        (
            "x|run|--name|y|-d|cmd|-d",
            &command,
            "'run' [--name=y] [-d] 'cmd' '-d'",
        ),
        ("x|run|--|cmd|--|-d", &command, "'run' 'cmd' '--' '-d'"),
        ("x|run|cmd|--", &command, "'run' 'cmd' '--'"),
    ] {
        assert_eq!(words(args, false, syntax), expected, "{args}");
    }
    assert_eq!(words("x|-v|serve", true, &plain), "[-v]");
}

fn rule(field: Field, globs: &[&str], negative: bool, syntax: Syntax) -> Ruleset {
    let compile = match field {
        Field::Arg0 => Pattern::script,
        Field::Options => Pattern::option,
        _ => Pattern::argv,
    };
    let conditions = vec![
        Condition {
            field: Field::Comm,
            any_of: vec![Pattern::comm("x").unwrap()],
            negative: false,
        },
        Condition {
            field,
            any_of: globs.iter().map(|glob| compile(glob).unwrap()).collect(),
            negative,
        },
    ];
    let matcher = Matcher::new(conditions).with_syntax(syntax);
    Ruleset::new(vec![Rule::new("r", Action::Boundary, vec![matcher])])
}

fn holds(rules: &Ruleset, image: &Image) -> bool {
    matches!(rules.classify(image), Class::Boundary(_))
}

#[test]
fn title_written_over_the_arguments_is_split_at_spaces() {
    for (argv, expected) in [
        (&b"x --type=renderer a\0\0\0\0"[..], "[--type=renderer] 'a'"),
        (b"x --type=renderer a\0", "[--type=renderer] 'a'"),
        (b"x --type=renderer\0a\0", "'a'"),
        (b"x\0a b\0", "'a b'"),
        (b"x\0", ""),
    ] {
        let image = Image {
            argv: argv.into(),
            ..Image::default()
        };
        assert_eq!(shown(&image, false, &Syntax::default()), expected);
    }
    let mut god = image("/bin/node", "node --title serve");
    god.argv.extend([0; 40]);
    assert!(holds(
        &rule(Field::Args, &["serve"], false, Syntax::default()),
        &god
    ));
}

#[test]
fn arguments_match_by_position() {
    let x = "/bin/x";
    let c = || syntax(&["-c"], 0);
    // Each case runs with the condition and with its negation.
    for (field, globs, exe, args, expected) in [
        (Field::Args, &["serve"][..], x, "x|serve", true),
        (Field::Args, &["serve"], x, "x|-v|serve|--port|1", true),
        (Field::Args, &["serve"], x, "x|-c|a=b c|serve", true),
        (Field::Args, &["serve"], x, "x|run|serve", false),
        (Field::Args, &["serve"], x, "x|serve is slow", false),
        (Field::Args, &["serve"], x, "x|-c|serve", false),
        (Field::Args, &["serve"], x, "x", false),
        (Field::Args, &["serve"], x, "serve", false),
        (Field::Args, &["*", "se*"], x, "x|a|serve|b", true),
        (Field::Args, &["*", "se*"], x, "x|serve", false),
        (
            Field::Args,
            &["serve"],
            "/bin/node",
            "node|-v|a.js|serve",
            true,
        ),
        (
            Field::Args,
            &["a.js"],
            "/bin/node",
            "node|a.js|serve",
            false,
        ),
        (Field::Args, &["serve"], x, "x|a.js|serve", false),
        (Field::Options, &["-v", "--all=*"], x, "x|a|-v", true),
        (Field::Options, &["-v", "--all=*"], x, "x|--all=1", true),
        (Field::Options, &["-v"], x, "x|a -v", false),
        (Field::Options, &["-v"], x, "x|-c|-v", false),
        (Field::Options, &["-c=-v"], x, "x|-c|-v", true),
        (Field::Options, &["-v"], x, "x|--|-v", false),
        (Field::Options, &["-v"], "/bin/node", "node|-v|a.js", false),
        (Field::Options, &["-v"], "/bin/node", "node|-v", true),
        (Field::Arg0, &["**/y"], x, "/a/y|z", true),
        (Field::Arg0, &["**/y"], x, "y", true),
        (Field::Arg0, &["**/y"], x, "x|y", false),
    ] {
        let image = image(exe, args);
        let held = [false, true].map(|negative| holds(&rule(field, globs, negative, c()), &image));
        assert_eq!(held, [expected, !expected], "{field:?} {globs:?} {args}");
        let unknown = Image {
            argv: Vec::new(),
            ..image
        };
        let held =
            [false, true].map(|negative| holds(&rule(field, globs, negative, c()), &unknown));
        assert_eq!(held, [false; 2], "unknown arguments fulfil no condition");
    }
}

#[test]
fn missing_arguments_may_match_if_they_decide() {
    // Expected results of the condition and of its negation.
    for (field, globs, args, expected) in [
        (Field::Args, &["serve"][..], "x|-v|se", [true, true]),
        (Field::Args, &["serve"], "x|run|se", [false, true]),
        (Field::Args, &["serve"], "x|-v|run", [false, true]),
        (Field::Args, &["serve"], "x|--|-v", [false, true]),
        (Field::Args, &["serve"], "x|-v|-r", [true, true]),
        (Field::Args, &["serve"], "x|-c|run", [true, true]),
        (Field::Args, &["serve"], "xyz", [true, true]),
        (Field::Args, &["serve"], "x|serve|a", [true, false]),
        (Field::Args, &["serve", "now"], "x|serve|n", [true, true]),
        (Field::Options, &["-v"], "x|a|b", [true, true]),
        (Field::Options, &["-v"], "x|-v|b", [true, false]),
        (Field::Options, &["-v"], "x|--|a|b", [false, true]),
        (Field::Arg0, &["x"], "x|b", [true, false]),
        (Field::Arg0, &["y"], "x|b", [false, true]),
        (Field::Arg0, &["xyz"], "xy", [true, true]),
        (Field::Arg0, &["xyz"], "xz", [false, true]),
        (Field::Argv, &["* mount *"], "x|mount|a", [true, false]),
        (Field::Argv, &["* mount *"], "x|mou", [true, true]),
        (Field::Argv, &["y v*: *"], "x|v1", [false, true]),
        (Field::Argv, &["x v*: *"], "x|v1", [true, true]),
        (Field::Argv, &["x v1"], "x|v1", [true, true]),
        (Field::Argv, &["x v1"], "x|v2", [false, true]),
        (Field::Argv, &["y*", "* v1 *"], "x|v1|a", [true, false]),
        (Field::Argv, &["y*", "z*"], "x|v1|a", [false, true]),
    ] {
        let mut image = image("/bin/x", args);
        let might = |image: &Image| {
            let of = |negative| rule(field, globs, negative, syntax(&["-c"], 0));
            [false, true].map(|negative| of(negative).unread_keep(image, &[]).is_some())
        };
        assert_eq!(might(&image), [false; 2], "no arguments are missing");
        image.truncated = true;
        assert_eq!(might(&image), expected, "{field:?} {globs:?} {args}");
    }
}
