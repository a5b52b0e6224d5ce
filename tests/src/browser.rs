//! Debian's Chromium without a window, driven through chromedriver.

use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail};
use fantoccini::{Client, ClientBuilder};
use hyper_util::client::legacy::connect::HttpConnector;
use serde_json::json;

use crate::pipeline::free_address;

/// How long the driver may take to start.
const START: Duration = Duration::from_secs(30);

/// A browser with one window. Dropping it kills it.
#[derive(Debug)]
pub struct Browser {
    /// Its window.
    pub page: Client,
    driver: Child,
}

impl Browser {
    /// Starts the driver and a browser. They are Debian's packages `chromium` and `chromium-driver`.
    ///
    /// # Errors
    /// When they are missing or do not start.
    pub async fn start() -> anyhow::Result<Self> {
        let address = free_address()?;
        let (_, port) = address.rsplit_once(':').context("a port")?;
        let driver = Command::new("chromedriver")
            .arg(format!("--port={port}"))
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .context("start chromedriver, of Debian's package chromium-driver")?;
        // Killed if the browser does not start.
        let mut driver = Started(Some(driver));
        let options = json!({
            // The sandbox wants rights that a container does not give.
            "args": ["--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu",
                "--no-proxy-server", "--window-size=1400,800", "--force-color-profile=srgb"],
        });
        let capabilities = serde_json::Map::from_iter([
            ("goog:chromeOptions".to_owned(), options),
            ("goog:loggingPrefs".to_owned(), json!({"browser": "ALL"})),
        ]);
        let begun = Instant::now();
        loop {
            let connected = ClientBuilder::new(HttpConnector::new())
                .capabilities(capabilities.clone())
                .connect(&format!("http://{address}"))
                .await;
            match connected {
                Ok(page) => {
                    let driver = driver.0.take().context("a driver")?;
                    return Ok(Self { page, driver });
                }
                Err(error) if begun.elapsed() > START => bail!("no browser: {error}"),
                // The driver does not listen yet.
                Err(_) => tokio::time::sleep(Duration::from_millis(100)).await,
            }
        }
    }

    /// Waits until a script's answer is true.
    ///
    /// # Errors
    /// When it is not within `limit`; the error holds the page's text.
    pub async fn until(&self, script: &str, limit: Duration) -> anyhow::Result<()> {
        let begun = Instant::now();
        while self.page.execute(script, Vec::new()).await? != json!(true) {
            if begun.elapsed() > limit {
                let text = self.page.execute("return document.body.innerText", Vec::new()).await?;
                bail!("not within {limit:?}: {script}\n{}", text.as_str().unwrap_or_default());
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        Ok(())
    }
}

/// A driver that nobody has taken over.
struct Started(Option<Child>);

fn kill(driver: &mut Child) {
    let children = crate::process::children_of(driver.id());
    // It may have ended by itself.
    let _ = driver.kill();
    let _ = driver.wait();
    for child in children {
        child.signal(rustix::process::Signal::KILL);
    }
}

impl Drop for Started {
    fn drop(&mut self) {
        self.0.iter_mut().for_each(kill);
    }
}

impl Drop for Browser {
    fn drop(&mut self) {
        kill(&mut self.driver);
    }
}
