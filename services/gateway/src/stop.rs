//! Finding stop strings in text that arrives in pieces.
//!
//! The text ends before the stop string that is complete first; of several complete at the same character the longest
//! counts. So the result does not depend on how the text was cut into pieces.

/// Text that may go out, and whether a stop string ended it.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Released {
    pub(crate) text: String,
    pub(crate) stopped: bool,
}

/// Holds back what may still become a stop string.
#[derive(Debug)]
pub(crate) struct StopMatcher {
    stops: Vec<String>,
    held: String,
}

impl StopMatcher {
    /// Empty stop strings never match.
    pub(crate) fn new(stops: Vec<String>) -> Self {
        let stops = stops.into_iter().filter(|s| !s.is_empty()).collect();
        Self { stops, held: String::new() }
    }

    /// Takes the next piece. After `stopped` the matcher must not be used again.
    pub(crate) fn push(&mut self, piece: &str) -> Released {
        if self.stops.is_empty() {
            return Released { text: piece.to_owned(), stopped: false };
        }
        self.held.push_str(piece);
        if let Some(cut) = self.first_complete() {
            self.held.truncate(cut);
            return Released { text: std::mem::take(&mut self.held), stopped: true };
        }
        let keep = self.held.len() - self.longest_open_prefix();
        let rest = self.held.split_off(keep);
        Released { text: std::mem::replace(&mut self.held, rest), stopped: false }
    }

    /// The text ends here: what was held back is text after all.
    pub(crate) fn finish(&mut self) -> String {
        std::mem::take(&mut self.held)
    }

    /// Where the stop string that is complete first begins.
    fn first_complete(&self) -> Option<usize> {
        let found = self.stops.iter().filter_map(|stop| {
            let start = self.held.find(stop.as_str())?;
            Some((start + stop.len(), start))
        });
        found.min().map(|(_, start)| start)
    }

    /// Length of the longest suffix that begins a stop string.
    fn longest_open_prefix(&self) -> usize {
        let longest = |stop: &String| {
            (1..stop.len().min(self.held.len() + 1))
                .rev()
                .find(|&n| stop.is_char_boundary(n) && self.held.ends_with(&stop[..n]))
        };
        self.stops.iter().filter_map(longest).max().unwrap_or(0)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// The definition: grow the text by one character until it ends with a stop string.
    fn naive(stops: &[String], text: &str) -> (String, bool) {
        for end in 1..=text.len() {
            if !text.is_char_boundary(end) {
                continue;
            }
            let longest =
                stops.iter().filter(|s| text[..end].ends_with(s.as_str())).map(String::len).max();
            if let Some(length) = longest {
                return (text[..end - length].to_owned(), true);
            }
        }
        (text.to_owned(), false)
    }

    fn run(stops: &[String], pieces: &[String]) -> (String, bool) {
        let mut matcher = StopMatcher::new(stops.to_vec());
        let mut text = String::new();
        for piece in pieces {
            let released = matcher.push(piece);
            text.push_str(&released.text);
            if released.stopped {
                return (text, true);
            }
        }
        text.push_str(&matcher.finish());
        (text, false)
    }

    fn pieces() -> impl Strategy<Value = Vec<String>> {
        prop::collection::vec("[abé\u{4e2d}]{0,4}", 0..12)
    }

    proptest! {
        #[test]
        fn equals_the_definition_however_the_text_is_cut(
            stops in prop::collection::vec("[abé\u{4e2d}]{1,4}", 0..4),
            pieces in pieces(),
        ) {
            prop_assert_eq!(run(&stops, &pieces), naive(&stops, &pieces.concat()));
        }

        #[test]
        fn holds_back_no_more_than_an_open_stop_string(
            stops in prop::collection::vec("[ab]{1,4}", 1..4),
            pieces in pieces(),
        ) {
            let mut matcher = StopMatcher::new(stops.clone());
            for piece in &pieces {
                if matcher.push(piece).stopped {
                    break;
                }
                let held = &matcher.held;
                prop_assert!(held.is_empty() || stops.iter().any(|s| s.starts_with(held)));
            }
        }
    }

    #[test]
    fn a_stop_string_across_pieces_is_found() {
        let stops = ["\n\nHuman:".to_owned()];
        let pieces = ["Hi", "\n", "\nHum", "an", ": you"].map(str::to_owned);
        assert_eq!(run(&stops, &pieces), ("Hi".to_owned(), true));
    }

    #[test]
    fn a_broken_off_stop_string_is_text() {
        let stops = ["END".to_owned()];
        let pieces = ["E", "N", "TRY E"].map(str::to_owned);
        assert_eq!(run(&stops, &pieces), ("ENTRY E".to_owned(), false));
    }

    #[test]
    fn without_stop_strings_nothing_is_held_back() {
        let mut matcher = StopMatcher::new(vec![]);
        assert_eq!(matcher.push("abc"), Released { text: "abc".into(), stopped: false });
        assert_eq!(matcher.finish(), "");
    }
}
