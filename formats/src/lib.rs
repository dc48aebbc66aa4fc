//! What the orkpack compiler and loader must agree on, and nothing else.
#![doc = include_str!("../README.md")]

pub mod golden;
pub mod layout;
pub mod lint;
pub mod model;
mod op;
pub mod pack;
pub mod quant;
pub mod regcmd;

/// `text` with control characters escaped: names out of files end up in errors, which are one line and
/// must not steer the terminal they are read on.
#[must_use]
pub fn one_line(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match c.is_control() {
            true => out.extend(c.escape_default()),
            false => out.push(c),
        }
    }
    out
}

#[cfg(test)]
mod tests {
    #[test]
    fn one_line_escapes_what_moves_the_cursor() {
        assert_eq!(super::one_line("a\nb\u{1b}[31m é"), "a\\nb\\u{1b}[31m é");
    }
}
