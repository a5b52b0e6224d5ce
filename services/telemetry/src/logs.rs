//! Log lines.
//!
//! Logs go to standard error, so that standard output stays free for what a command prints. `BATON_LOG` (or `RUST_LOG`)
//! filters them in `tracing`'s directive syntax; `BATON_LOG_FORMAT=json` makes one JSON object per line. A line that belongs
//! to a request has its `request_id` and `trace_id`.

use std::io::IsTerminal as _;

use thiserror::Error;
use tracing_subscriber::EnvFilter;
use tracing_subscriber::fmt::time::Uptime;

/// Environment variable with the filter directives.
pub const LOG_VARIABLE: &str = "BATON_LOG";
/// Environment variable with the format: "text" or "json".
pub const FORMAT_VARIABLE: &str = "BATON_LOG_FORMAT";

/// Why logging could not be set up.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum TelemetryError {
    /// The filter does not parse.
    #[error("{variable}={value:?} is not a log filter: {reason}")]
    Filter {
        /// Which variable.
        variable: &'static str,
        /// Its value.
        value: String,
        /// What the parser said.
        reason: String,
    },
    /// The format is not known.
    #[error("{FORMAT_VARIABLE}={0:?} is not a log format, expected \"text\" or \"json\"")]
    Format(String),
    /// Another subscriber is already installed.
    #[error("logging is already set up in this process")]
    AlreadySet,
    /// Metrics cannot be counted or exported.
    #[error("metrics: {0}")]
    Metrics(String),
    /// Traces or metrics cannot be exported as asked.
    #[error("OTLP: {0}")]
    Otlp(String),
}

/// Shape of a log line.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LogFormat {
    /// For people.
    Text,
    /// One JSON object per line.
    Json,
}

/// What to log and how.
#[derive(Debug)]
pub struct LogConfig {
    filter: EnvFilter,
    format: LogFormat,
}

impl LogConfig {
    /// Reads [`LOG_VARIABLE`] (else `RUST_LOG`) and [`FORMAT_VARIABLE`]; `default_filter` holds when neither filter
    /// variable is set.
    ///
    /// # Errors
    /// When a variable holds something else than a filter or a format.
    pub fn from_env(default_filter: &str) -> Result<Self, TelemetryError> {
        let (variable, value) = [LOG_VARIABLE, "RUST_LOG"]
            .into_iter()
            .find_map(|name| std::env::var(name).ok().map(|value| (name, value)))
            .unwrap_or((LOG_VARIABLE, default_filter.to_owned()));
        Self::parse(variable, &value, std::env::var(FORMAT_VARIABLE).ok().as_deref())
    }

    /// With this format, whatever the environment says; the environment's when absent.
    #[must_use]
    pub fn with_format(mut self, format: Option<LogFormat>) -> Self {
        self.format = format.unwrap_or(self.format);
        self
    }

    fn parse(
        variable: &'static str,
        filter: &str,
        format: Option<&str>,
    ) -> Result<Self, TelemetryError> {
        let filter = EnvFilter::try_new(filter).map_err(|e| TelemetryError::Filter {
            variable,
            value: filter.to_owned(),
            reason: e.to_string(),
        })?;
        let format = match format {
            None | Some("" | "text") => LogFormat::Text,
            Some("json") => LogFormat::Json,
            Some(other) => return Err(TelemetryError::Format(other.to_owned())),
        };
        Ok(Self { filter, format })
    }

    /// Installs the subscriber for this process.
    ///
    /// # Errors
    /// When one is installed already.
    pub fn install(self) -> Result<(), TelemetryError> {
        let builder = tracing_subscriber::fmt()
            .with_env_filter(self.filter)
            .with_writer(std::io::stderr)
            .with_ansi(std::io::stderr().is_terminal())
            .with_target(false);
        match self.format {
            LogFormat::Text => builder.with_timer(Uptime::default()).try_init(),
            // What belongs to a request names it in "span"; an event's own fields stand beside its message.
            LogFormat::Json => builder.json().flatten_event(true).with_span_list(false).try_init(),
        }
        .map_err(|_| TelemetryError::AlreadySet)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bad_filter_names_variable_and_value() {
        let error = LogConfig::parse(LOG_VARIABLE, "info,baton=loud", None).unwrap_err();
        let message = error.to_string();
        assert!(message.contains("BATON_LOG") && message.contains("baton=loud"), "{message}");
    }

    #[test]
    fn a_bad_format_says_what_is_expected() {
        let error = LogConfig::parse(LOG_VARIABLE, "info", Some("xml")).unwrap_err();
        assert!(error.to_string().contains("expected \"text\" or \"json\""), "{error}");
    }

    #[test]
    fn both_formats_are_known() {
        assert_eq!(
            LogConfig::parse("RUST_LOG", "warn", Some("json")).unwrap().format,
            LogFormat::Json
        );
        assert_eq!(LogConfig::parse("RUST_LOG", "warn", None).unwrap().format, LogFormat::Text);
    }
}
