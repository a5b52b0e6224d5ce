//! Documents name what exists.

#![allow(clippy::unwrap_used)] // A test fails by panicking.

use std::path::Path;

#[test]
fn every_hand_off_case_names_tests_that_exist() {
    let repository = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let document = std::fs::read_to_string(repository.join("docs/handoff-cases.md")).unwrap();
    let mut cases = Vec::new();
    for row in document.lines().filter(|line| line.starts_with("| ")) {
        let cells: Vec<&str> = row.trim_matches('|').split('|').map(str::trim).collect();
        let [number, _, tests] = cells[..] else { panic!("{} cells in {row}", cells.len()) };
        let Ok(number) = number.parse::<usize>() else { continue };
        cases.push(number);
        let mut source = String::new();
        let mut found = 0;
        // Every other piece stands in backticks: a file, then names of tests in it.
        for name in tests.split('`').skip(1).step_by(2) {
            if name.contains('/') {
                source = std::fs::read_to_string(repository.join(name)).unwrap_or_default();
                assert!(!source.is_empty(), "case {number}: there is no {name}");
            } else {
                assert!(source.contains(&format!("fn {name}(")), "case {number}: no {name}");
                found += 1;
            }
        }
        assert!(found > 0 || tests.starts_with("Not yet: "), "case {number} has no test");
    }
    assert_eq!(cases, (1..=24).collect::<Vec<_>>());
}
