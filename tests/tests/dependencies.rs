//! Dependencies between crates point one way, and some crates must not know of others.

#![allow(clippy::unwrap_used)] // A test fails by panicking.

use std::collections::{BTreeMap, BTreeSet};
use std::process::Command;

/// For every crate of the workspace the workspace crates it depends on (not counting tests).
fn dependencies() -> BTreeMap<String, BTreeSet<String>> {
    let output = Command::new(env!("CARGO"))
        .args(["metadata", "--format-version", "1", "--no-deps", "--offline"])
        .current_dir(concat!(env!("CARGO_MANIFEST_DIR"), "/.."))
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let metadata: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    metadata["packages"]
        .as_array()
        .unwrap()
        .iter()
        .map(|package| {
            let dependencies = package["dependencies"]
                .as_array()
                .unwrap()
                .iter()
                .filter(|d| d["kind"].is_null())
                .map(|d| d["name"].as_str().unwrap().to_owned())
                .collect();
            (package["name"].as_str().unwrap().to_owned(), dependencies)
        })
        .collect()
}

#[test]
fn crates_depend_only_on_what_their_promise_allows() {
    // Crate -> the baton crates it may name. A crate that is not listed here fails the test: say what it may know.
    let allowed: BTreeMap<&str, &[&str]> = BTreeMap::from([
        ("baton-proto", &[][..]),
        ("baton-kernels", &[]),
        ("baton-plan", &[]),
        ("baton-telemetry", &[]),
        ("baton-transport", &["baton-plan"]),
        ("baton-model", &["baton-kernels", "baton-plan", "baton-transport"]),
        (
            "baton-stage",
            &[
                "baton-kernels",
                "baton-model",
                "baton-plan",
                "baton-proto",
                "baton-telemetry",
                "baton-transport",
            ],
        ),
        ("baton-coordinator", &["baton-plan", "baton-proto", "baton-telemetry"]),
        ("baton-verify", &["baton-kernels", "baton-model", "baton-plan", "baton-transport"]),
        ("baton-gateway", &["baton-coordinator", "baton-plan", "baton-telemetry"]),
        (
            "baton",
            &[
                "baton-coordinator",
                "baton-gateway",
                "baton-kernels",
                "baton-model",
                "baton-plan",
                "baton-proto",
                "baton-stage",
                "baton-telemetry",
                "baton-verify",
                "baton-transport",
            ],
        ),
        ("baton-benches", &["baton-kernels", "baton-model", "baton-plan"]),
        (
            "baton-tests",
            &["baton-kernels", "baton-model", "baton-plan", "baton-proto", "baton-transport"],
        ),
    ]);
    for (name, dependencies) in dependencies() {
        let may = allowed.get(name.as_str()).unwrap_or_else(|| panic!("{name} is not listed"));
        for dependency in dependencies.iter().filter(|d| d.starts_with("baton")) {
            assert!(may.contains(&dependency.as_str()), "{name} must not depend on {dependency}");
        }
    }
}

#[test]
fn tensors_and_grpc_stay_apart() {
    let dependencies = dependencies();
    let must_not = [
        ("baton-kernels", ["tonic", "prost", "tokio"]),
        ("baton-plan", ["tonic", "tokio", "memmap2"]),
        ("baton-model", ["tonic", "prost", "tokio"]),
        ("baton-transport", ["tonic", "prost", "tokio"]),
        ("baton-coordinator", ["safetensors", "half", "memmap2"]),
        ("baton-gateway", ["safetensors", "half", "tonic"]),
    ];
    for (name, banned) in must_not {
        for crate_name in banned {
            assert!(!dependencies[name].contains(crate_name), "{name} must not know {crate_name}");
        }
    }
}
