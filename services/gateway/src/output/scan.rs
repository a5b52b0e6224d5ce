//! Finding tags in text that is not complete yet.

/// Where the text may be cut.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Found {
    /// The first of the tags.
    Tag { at: usize, tag: &'static str },
    /// None of them yet; from `at` on the text may become one.
    Open { at: usize },
}

/// Looks for the first of these tags.
pub(super) fn find(text: &str, tags: [Option<&'static str>; 2]) -> Found {
    let tags = tags.into_iter().flatten();
    let first = tags.clone().filter_map(|tag| Some((text.find(tag)?, tag))).min();
    if let Some((at, tag)) = first {
        return Found::Tag { at, tag };
    }
    let open = |tag: &str| {
        let longest = tag.len().saturating_sub(1).min(text.len());
        (1..=longest).rev().find(|&n| text.ends_with(&tag[..n])).unwrap_or(0)
    };
    Found::Open { at: text.len() - tags.map(open).max().unwrap_or(0) }
}
