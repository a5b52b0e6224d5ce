//! `baton bench serve`: load on any OpenAI-compatible server.
//!
//! [`workload`] says what is asked and when, [`load`] puts it to the server, [`ask`] times one streamed answer, and
//! [`summary`] and [`html`] show what came of it.

mod ask;
mod html;
mod lengths;
mod load;
mod summary;
mod workload;

use std::io::Write as _;

use anyhow::{Context as _, bail, ensure};
use baton_verify::server::Server;
use indicatif::{ProgressBar, ProgressStyle};
use rand::SeedableRng as _;
use rand_chacha::ChaCha8Rng;
use serde_json::json;

use self::ask::Manner;
use self::load::{Extent, Outcome};
use self::summary::Summary;
use self::workload::{Arrivals, Workload};
use crate::args::{ArrivalArg, BenchServeArgs};
use crate::shutdown;

pub(crate) use self::lengths::Lengths;

/// Requests, when neither their number nor a time is given.
const REQUESTS: usize = 200;
/// Requests under way in a closed loop.
const CONCURRENCY: usize = 8;
/// Words of the prompt that shows how many tokens a word takes.
const SAMPLE: usize = 64;

pub(crate) async fn run(args: BenchServeArgs) -> anyhow::Result<()> {
    let arrivals = match args.rate {
        None => Arrivals::Closed,
        Some(rate) => {
            ensure!(rate > 0.0 && rate.is_finite(), "--rate {rate}: expected a number above 0");
            match args.arrivals {
                ArrivalArg::Poisson => Arrivals::Poisson(rate),
                ArrivalArg::Even => Arrivals::Even(rate),
            }
        }
    };
    let concurrency = args.concurrency.unwrap_or(match arrivals {
        Arrivals::Closed => CONCURRENCY,
        _ => usize::MAX,
    });
    ensure!(concurrency > 0, "--concurrency 0: expected at least 1");
    ensure!(args.requests != Some(0), "--requests 0: expected at least 1");
    if let Some(seconds) = args.seconds {
        ensure!(
            seconds > 0.0 && seconds.is_finite(),
            "--seconds {seconds}: expected a number above 0"
        );
    }
    let stop = shutdown::on_signal()?;
    let server =
        Server::connect(&args.url, args.model_name.as_deref(), args.api_key.as_deref()).await?;
    let per_word = tokens_per_word(&server, args.chat).await?;
    let lengths = (args.prompt_tokens, args.output_tokens);
    let workload = Workload::new(args.seed, arrivals, lengths, args.shared_prefix, per_word);
    let requests = args.requests.or(args.seconds.is_none().then_some(REQUESTS));
    let manner =
        Manner { chat: args.chat, temperature: args.temperature, ignore_eos: args.ignore_eos };
    let extent = Extent { seconds: args.seconds, concurrency };

    let bar = progress(requests);
    let show = |outcome: &Outcome| {
        bar.inc(1);
        let written: u64 = outcome.answers.iter().map(|a| a.completion_tokens).sum();
        let speed = written as f64 / outcome.seconds.max(1e-9);
        bar.set_message(format!("{speed:.0} tokens/s, {} failed", outcome.failures.len()));
    };
    let workload = workload.take(requests.unwrap_or(usize::MAX));
    let outcome = load::run(&server, workload, (manner, extent), &stop, show).await;
    bar.finish_and_clear();

    let load = describe(arrivals, concurrency);
    let summary = Summary::new((server.url(), server.model(), load, args.seed), &outcome);
    if let Some(path) = &args.html {
        let page = html::page(&summary, &outcome).map_err(anyhow::Error::msg).context("--html")?;
        std::fs::write(path, page).with_context(|| format!("--html {}", path.display()))?;
    }
    print(&summary, args.json)?;
    if summary.completed == 0 {
        bail!("no request was answered");
    }
    Ok(())
}

fn progress(requests: Option<usize>) -> ProgressBar {
    let (bar, template) = match requests {
        Some(requests) => (ProgressBar::new(requests as u64), "{bar:30} {pos}/{len} {msg}"),
        None => (ProgressBar::new_spinner(), "{spinner} {pos} answered in {elapsed}, {msg}"),
    };
    let style = ProgressStyle::with_template(template);
    bar.set_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()));
    bar
}

fn describe(arrivals: Arrivals, concurrency: usize) -> String {
    let (rate, how) = match arrivals {
        Arrivals::Closed => return format!("closed loop of {concurrency}"),
        Arrivals::Even(rate) => (rate, "at even times"),
        Arrivals::Poisson(rate) => (rate, "in a Poisson process"),
    };
    let bound = match concurrency {
        usize::MAX => String::new(),
        bound => format!(", at most {bound} under way"),
    };
    format!("open loop of {rate} requests/s {how}{bound}")
}

/// What a word of the prompts takes at this server's tokenizer.
async fn tokens_per_word(server: &Server, chat: bool) -> anyhow::Result<f64> {
    let count = async |words: usize| {
        let text = workload::text(&mut ChaCha8Rng::seed_from_u64(0), words, 1.0);
        let (path, prompt) = if chat {
            let messages = json!([{"role": "user", "content": text}]);
            ("/v1/chat/completions", ("messages", messages))
        } else {
            ("/v1/completions", ("prompt", json!(text)))
        };
        let mut body = json!({"model": server.model(), "max_tokens": 1, "temperature": 0});
        body[prompt.0] = prompt.1;
        let answer = server.post(path, &body).await?;
        let tokens = answer["usage"]["prompt_tokens"].as_f64();
        tokens.with_context(|| format!("{}: {path} reports no usage.prompt_tokens", server.url()))
    };
    // The difference: a chat template has tokens of its own.
    let tokens = count(SAMPLE + 1).await? - count(1).await?;
    ensure!(tokens > 0.0, "{}: {SAMPLE} words more are {tokens} tokens more", server.url());
    Ok(tokens / SAMPLE as f64)
}

fn print(summary: &Summary, json: bool) -> anyhow::Result<()> {
    let mut out = std::io::stdout().lock();
    if json {
        serde_json::to_writer_pretty(&mut out, summary)?;
        writeln!(out)?;
    } else {
        writeln!(out, "{summary}")?;
    }
    Ok(())
}
