//! Tests that are not run in an emulated machine, because what they ask of it is speed.

/// Name and reason. With KVM they are run.
const EMULATED: &[(&str, &str)] = &[
    ("soak::ten-thousand-children", LIFETIME),
    ("enforce::two-threads-give-away", LIFETIME),
    (
        "enforce::recycled-pid",
        "an emulated machine hardly ever gives a pid away again within a clock tick of 10 ms",
    ),
];

const LIFETIME: &str = "so many processes take an emulated machine longer than the 180 s after which the tests' \
                        processes end by themselves";

/// Returns those of them with one of these words in their name, all where there is no word, with the reason.
pub fn emulated(names: &[String]) -> Vec<(&'static str, &'static str)> {
    let wanted = |(test, _): &&(&str, &str)| {
        names.is_empty() || names.iter().any(|name| test.contains(name))
    };
    EMULATED.iter().filter(wanted).copied().collect()
}

/// Why this test is not run.
pub fn reason(test: &str) -> Option<&'static str> {
    EMULATED
        .iter()
        .find(|(name, _)| *name == test)
        .map(|(_, why)| *why)
}
