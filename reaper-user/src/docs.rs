//! The documentation for users and contributors, as in `reaper-user/docs`.
//!
//! Read [`concepts`] first, then [`rules`], [`configuration`] and [`operations`].

#[cfg(test)]
mod tests;

macro_rules! pages {
    ($($name:ident)*) => {
        $(
            #[doc = include_str!(concat!("../docs/", stringify!($name), ".md"))]
            pub mod $name {}
        )*
    };
}

#[doc = include_str!("../docs/what-is-reaped.md")]
pub mod what_is_reaped {}

pages!(architecture concepts rules configuration sources events run operations security benchmarks contributing agents);
