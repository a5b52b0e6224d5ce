use std::process::Stdio;

use crate::fake::Server;

/// The clients' own tests, against this gateway. Wants Python with `openai` and `pytest`; `BATON_PYTHON` names it.
#[tokio::test]
#[ignore = "wants Python with the packages openai and pytest"]
async fn the_openai_package_understands_every_answer() {
    let server = Server::model().await;
    let python = std::env::var("BATON_PYTHON").unwrap_or_else(|_| "python3".into());
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/clients/test_openai.py");
    let status = tokio::process::Command::new(python)
        .args(["-m", "pytest", "-q", "-p", "no:cacheprovider", script])
        .env("BATON_URL", &server.url)
        .stdin(Stdio::null())
        .status()
        .await
        .unwrap();
    assert!(status.success(), "{status}");
}
