"""Collects the training text: prose of the doc comments and READMEs of crates that may be redistributed.

    python corpus.py SOURCES        SOURCES: a folder with one folder per unpacked crate, for example what `cargo vendor` writes

Writes `corpus/text.xz` and `corpus/SOURCES.md`, which names every crate with its version, licence and repository. Only crates under
Apache-2.0 (alone or as a choice) are taken; code, tables, links and markup are dropped, and every paragraph is kept once.
"""

import lzma
import re
import sys
import tomllib
from pathlib import Path

HERE = Path(__file__).resolve().parent
SHORTEST = 80
LARGEST = 6_000_000
LICENCE = re.compile(r"\bApache-2\.0\b(?! WITH)")


def comments(source):
    """Doc comments of a Rust file, one text per run of lines."""
    lines = []
    for line in source.splitlines():
        found = re.match(r"\s*//[/!] ?(.*)", line)
        if found:
            lines.append(found[1])
        elif lines:
            yield "\n".join(lines)
            lines = []
    if lines:
        yield "\n".join(lines)


def paragraphs(markdown):
    """Prose of a Markdown text."""
    markdown = re.sub(r"(?ms)^\s*(```|~~~).*?^\s*(```|~~~)\s*$", "\n\n", markdown)
    markdown = re.sub(r"(?s)<!--.*?-->|<[^>]+>", " ", markdown)
    for block in re.split(r"\n\s*\n", markdown):
        lines = [line for line in block.splitlines() if not re.match(r"\s*(#|\||\[.*\]:|=|>|- \[)", line)]
        text = " ".join(line.strip().removeprefix("* ").removeprefix("- ") for line in lines)
        text = re.sub(r"!?\[([^\]]*)\](\([^)]*\)|\[[^\]]*\])?", r"\1", text)
        text = text.replace("`", "").replace("**", "").replace("__", "_")
        text = re.sub(r"\s+", " ", text).strip()
        letters = sum(c.isalpha() or c == " " for c in text)
        if len(text) < SHORTEST or "http" in text or not text.isascii() or letters < 0.85 * len(text):
            continue
        if text[-1] in ".:!?" and text[0].isupper():
            yield text


def package(folder):
    """Name, version, licence and repository from the manifest; nothing when the licence does not fit."""
    manifest = folder / "Cargo.toml"
    if not manifest.exists():
        return None
    data = tomllib.loads(manifest.read_text(errors="replace")).get("package", {})
    licence = data.get("license", "")
    if not isinstance(licence, str) or not LICENCE.search(licence):
        return None
    return data["name"], data["version"], licence.replace("/", " OR "), data.get("repository", "")


def main():
    root = Path(sys.argv[1])
    newest = {}
    for folder in sorted(root.iterdir()):
        found = package(folder)
        if found:
            newest[found[0]] = (found, folder)
    seen, texts, used = set(), [], []
    for name in sorted(newest):
        found, folder = newest[name]
        files = sorted(folder.glob("*.md")) + sorted(folder.rglob("*.rs"))
        size = 0
        for file in files:
            if file.name.upper().startswith(("CHANGELOG", "LICENSE", "CODE_OF")):
                continue
            source = file.read_text(errors="replace")
            pieces = [source] if file.suffix == ".md" else comments(source)
            kept = []
            for piece in pieces:
                for text in paragraphs(piece):
                    if text not in seen:
                        seen.add(text)
                        kept.append(text)
            if kept:
                texts.append("\n".join(kept))
                size += sum(map(len, kept))
        if size:
            used.append((*found, size))
    text = "\n\n".join(texts)[:LARGEST]
    folder = HERE / "corpus"
    folder.mkdir(exist_ok=True)
    (folder / "text.xz").write_bytes(lzma.compress(text.encode(), preset=9 | lzma.PRESET_EXTREME))
    rows = "\n".join(f"| {n} | {v} | {l} | {r} | {s:,} |" for n, v, l, r, s in used)
    (folder / "SOURCES.md").write_text(
        "# Sources of the training text\n\n"
        "`text.xz` holds prose from the doc comments and READMEs of the crates below, used under Apache-2.0, the licence of this\n"
        "repository. Code, tables, links and markup were dropped, and paragraphs that occur twice kept once (`corpus.py`). Copyright\n"
        "remains with the authors of each crate, who are named in its repository.\n\n"
        "| crate | version | licence | repository | characters |\n|---|---|---|---|---|\n" + rows + "\n"
    )
    print(f"{len(used)} crates, {len(text):,} characters, {(folder / 'text.xz').stat().st_size:,} bytes compressed")


if __name__ == "__main__":
    main()
