//! `tojson` as chat templates expect it: what Python's `json.dumps(value, ensure_ascii=False)` writes.

use std::io::{self, Write};

use minijinja::value::{Kwargs, Value};
use minijinja::{Error, ErrorKind};
use serde::Serialize;
use serde_json::ser::{CharEscape, Formatter};

/// The filter, with the options of `json.dumps` that templates use.
pub(crate) fn tojson(
    value: &Value,
    indent: Option<Value>,
    options: Kwargs,
) -> Result<String, Error> {
    let ensure_ascii = options.get::<Option<bool>>("ensure_ascii")?.unwrap_or(false);
    let sort_keys = options.get::<Option<bool>>("sort_keys")?.unwrap_or(false);
    let indent = match indent {
        Some(indent) => Some(indent),
        None => options.get::<Option<Value>>("indent")?,
    };
    let indent = indent
        .filter(|v| !v.is_none())
        .map(|v| match v.as_str() {
            Some(text) => Ok(text.to_owned()),
            None => usize::try_from(v).map(|n| " ".repeat(n)),
        })
        .transpose()?;
    let (item, key) = match options.get::<Option<Vec<String>>>("separators")? {
        None if indent.is_some() => (",".to_owned(), ": ".to_owned()),
        None => (", ".to_owned(), ": ".to_owned()),
        Some(pair) => {
            <[String; 2]>::try_from(pair).map(|[item, key]| (item, key)).map_err(|v| {
                let message = format!("separators has {} entries, expected 2", v.len());
                Error::new(ErrorKind::InvalidOperation, message)
            })?
        }
    };
    options.assert_all_used()?;

    let failed = |e: serde_json::Error| Error::new(ErrorKind::BadSerialization, e.to_string());
    let mut json = serde_json::to_value(value).map_err(failed)?;
    if sort_keys {
        json.sort_all_objects();
    }
    let format = PythonFormat { item, key, indent, ensure_ascii, depth: 0, filled: false };
    let mut out = Vec::new();
    json.serialize(&mut serde_json::Serializer::with_formatter(&mut out, format))
        .map_err(failed)?;
    String::from_utf8(out).map_err(|e| Error::new(ErrorKind::BadSerialization, e.to_string()))
}

struct PythonFormat {
    item: String,
    key: String,
    indent: Option<String>,
    ensure_ascii: bool,
    depth: usize,
    filled: bool,
}

impl PythonFormat {
    fn line<W: ?Sized + Write>(&self, w: &mut W) -> io::Result<()> {
        let Some(indent) = &self.indent else { return Ok(()) };
        w.write_all(b"\n")?;
        (0..self.depth).try_for_each(|_| w.write_all(indent.as_bytes()))
    }

    fn open<W: ?Sized + Write>(&mut self, w: &mut W, bracket: &[u8]) -> io::Result<()> {
        self.depth += 1;
        self.filled = false;
        w.write_all(bracket)
    }

    fn close<W: ?Sized + Write>(&mut self, w: &mut W, bracket: &[u8]) -> io::Result<()> {
        self.depth -= 1;
        if self.filled {
            self.line(w)?;
        }
        self.filled = true;
        w.write_all(bracket)
    }

    fn entry<W: ?Sized + Write>(&mut self, w: &mut W, first: bool) -> io::Result<()> {
        self.filled = true;
        if !first {
            w.write_all(self.item.as_bytes())?;
        }
        self.line(w)
    }
}

impl Formatter for PythonFormat {
    fn begin_array<W: ?Sized + Write>(&mut self, w: &mut W) -> io::Result<()> {
        self.open(w, b"[")
    }

    fn end_array<W: ?Sized + Write>(&mut self, w: &mut W) -> io::Result<()> {
        self.close(w, b"]")
    }

    fn begin_array_value<W: ?Sized + Write>(&mut self, w: &mut W, first: bool) -> io::Result<()> {
        self.entry(w, first)
    }

    fn begin_object<W: ?Sized + Write>(&mut self, w: &mut W) -> io::Result<()> {
        self.open(w, b"{")
    }

    fn end_object<W: ?Sized + Write>(&mut self, w: &mut W) -> io::Result<()> {
        self.close(w, b"}")
    }

    fn begin_object_key<W: ?Sized + Write>(&mut self, w: &mut W, first: bool) -> io::Result<()> {
        self.entry(w, first)
    }

    fn begin_object_value<W: ?Sized + Write>(&mut self, w: &mut W) -> io::Result<()> {
        w.write_all(self.key.as_bytes())
    }

    fn write_f64<W: ?Sized + Write>(&mut self, w: &mut W, value: f64) -> io::Result<()> {
        w.write_all(python_float(value).as_bytes())
    }

    fn write_string_fragment<W: ?Sized + Write>(
        &mut self,
        w: &mut W,
        fragment: &str,
    ) -> io::Result<()> {
        if !self.ensure_ascii {
            return w.write_all(fragment.as_bytes());
        }
        for c in fragment.chars() {
            match c {
                '\0'..='\x7f' => w.write_all(&[c as u8])?,
                _ => {
                    for unit in c.encode_utf16(&mut [0; 2]) {
                        write!(w, "\\u{unit:04x}")?;
                    }
                }
            }
        }
        Ok(())
    }

    fn write_char_escape<W: ?Sized + Write>(
        &mut self,
        w: &mut W,
        escape: CharEscape,
    ) -> io::Result<()> {
        serde_json::ser::CompactFormatter.write_char_escape(w, escape)
    }
}

/// The shortest text that reads back as the same number, as Python's `repr` lays it out.
fn python_float(value: f64) -> String {
    let scientific = format!("{value:e}");
    let exponent: i32 = scientific.split_once('e').and_then(|(_, e)| e.parse().ok()).unwrap_or(0);
    if (-4..16).contains(&exponent) {
        return format!("{value:?}");
    }
    let (digits, _) = scientific.split_once('e').unwrap_or((&scientific, ""));
    let sign = if exponent < 0 { '-' } else { '+' };
    format!("{digits}e{sign}{:02}", exponent.abs())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn floats_are_written_as_python_writes_them() {
        for (value, text) in [
            (1.0, "1.0"),
            (0.1, "0.1"),
            (-2.5e-7, "-2.5e-07"),
            (1e16, "1e+16"),
            (1e15, "1000000000000000.0"),
            (0.0001, "0.0001"),
            (0.00001, "1e-05"),
            (1.5e300, "1.5e+300"),
            (0.0, "0.0"),
        ] {
            assert_eq!(python_float(value), text);
        }
    }
}
