"""The pages name only what exists: commands, files, settings, messages; and the table of settings is today's.

`python -m tests.test_docs` writes the tables of `docs/configuration.md` and `docs/metrics-file.md` anew.
"""

import re
from pathlib import Path
from typing import get_args

import pytest
import typer
from msgspec import inspect

from asyncgrpo.cli import app
from asyncgrpo.config.explain import knobs, sections, type_in_words, value_in_words
from asyncgrpo.config.verl import verl_keys
from asyncgrpo.recording.events import KINDS
from asyncgrpo.wire import codec

ROOT = Path(__file__).parent.parent
PAGES = [*sorted(ROOT.glob("README*.md")), ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]
CONFIGURATION = ROOT / "docs" / "configuration.md"
EVENTS = ROOT / "docs" / "metrics-file.md"
FIRST = "<!-- TABLE: written by `python -m tests.test_docs`; do not edit by hand -->\n"
LAST = "<!-- END OF TABLE -->"

# Folders and files at the top of the repository that a page may mean when it writes a path.
_TOP = r"(?:asyncgrpo|benchmarks|configs|docs|ops|packaging|requirements|tests|\.ci)/"
_PATH = re.compile(rf"(?<![\w./-])({_TOP}[\w./*-]*)")
_LINK = re.compile(r"\]\(([^)#]+)(?:#[^)]*)?\)")
_COMMAND = re.compile(r"(?<![\w/-])(?:\.venv/bin/)?asyncgrpo ([a-z]+)(?: ([a-z]+(?:-[a-z]+)*)\b(?![./_-]))?")
_BLOCK = re.compile(r"```.*?```", re.DOTALL)
_CODE = re.compile(r"`([^`\n]+)`")
_ASSIGNED = re.compile(r"(?<![\w./-])([a-z]+(?:\.[a-z_]+)+)=")
_FILES = (".py", ".yaml", ".yml", ".json", ".jsonl", ".md", ".png")
_ROW = re.compile(r"^\| `([\w.]+)` \| (.*) \|$", re.MULTILINE)


def keys_table() -> str:
    """Every setting by section, as Markdown."""
    lines: list[str] = []
    section = ""
    for knob in knobs().values():
        name = knob.key.rpartition(".")[0]
        if name != section:
            section = name
            lines += ["", f"### {name}", "", knob.section, ""]
            lines += ["| key | takes | default | meaning |", "|---|---|---|---|"]
        default = "required" if knob.required else f"`{value_in_words(knob.default)}`"
        lines += [f"| `{knob.key}` | {type_in_words(knob.type)} | {default} | {knob.description} |"]
        lines += [
            f"| `{field.key}` | {type_in_words(field.type)} | `{value_in_words(field.default)}` | {field.description} |"
            for field in knob.fields.values()
        ]
    return "\n".join(lines) + "\n\n"


def events_table() -> str:
    """Every event of `metrics.jsonl` and its fields, as Markdown."""
    lines: list[str] = []
    for name, kind in KINDS.items():
        lines += ["", f"### {name}", "", kind.meaning, "", "| field | type | present | meaning |", "|---|---|---|---|"]
        for field, (type_, meaning, is_needed) in kind.fields.items():
            words = type_in_words(inspect.type_info(type_)).removeprefix("a ")
            lines.append(f"| `{field}` | {words} | {'always' if is_needed else 'optional'} | {meaning} |")
    return "\n".join(lines) + "\n\n"


TABLES = {CONFIGURATION: keys_table, EVENTS: events_table}


def with_table(path: Path) -> str:
    """The page, its table written anew."""
    before, first, rest = path.read_text(encoding="utf-8").partition(FIRST)
    _, last, after = rest.partition(LAST)
    assert first and last, f"{path} has no place for its table"
    return before + FIRST + TABLES[path]() + LAST + after


def code_of(text: str) -> list[str]:
    """Blocks of code, and what stands between single backticks outside them."""
    return _BLOCK.findall(text) + _CODE.findall(_BLOCK.sub("", text))


def typed_in(text: str) -> list[str]:
    """Lines of the blocks that a person types, without their comments."""
    lines = [line.strip() for block in _BLOCK.findall(text) for line in block.splitlines()]
    starts = (".", "asyncgrpo ", "python", "prometheus")
    return [re.split(r"\s+#", line)[0] for line in lines if line.startswith(starts)]


def commands() -> dict[str, set[str]]:
    """Each command, with its subcommands where it has some."""
    tree = typer.main.get_command(app)
    return {name: set(getattr(command, "commands", ())) for name, command in tree.commands.items()}


def unknown_commands(text: str) -> list[str]:
    known, found = commands(), []
    for command, sub in _COMMAND.findall("\n".join(code_of(text))):
        if command not in known:
            found.append(command)
        elif known[command] and sub not in known[command]:
            found.append(f"{command} {sub}")
    return found


def missing_files(text: str, folder: Path) -> list[str]:
    """Paths from the top of the repository, and links from `folder`, that lead nowhere."""
    paths = [(ROOT, path.rstrip(".-")) for path in _PATH.findall(text)]
    paths += [(folder, link) for link in _LINK.findall(text) if "://" not in link]
    return [path for base, path in paths if not (any(base.glob(path)) if "*" in path else (base / path).exists())]


def unknown_settings(text: str) -> list[str]:
    """Dotted names in code that begin like a setting and are none, of ours or of verl's."""
    tops = {section.partition(".")[0] for section in sections()}
    names = [code.partition("=")[0] for code in _CODE.findall(text)] + _ASSIGNED.findall(text)
    keys = [name for name in names if re.fullmatch(r"[a-z]+(\.[a-z_]+)+", name) and not name.endswith(_FILES)]
    return [key for key in keys if key.partition(".")[0] in tops and not is_setting(key)]


def is_setting(key: str) -> bool:
    """A key of ours, a section, a key below a mapping (`generators.extra.x`), or a name of verl's."""
    free = any(knob.is_mapping and key.startswith(f"{knob.key}.") for knob in knobs().values())
    return key in knobs() or key in sections() or free or key in verl_keys()


def wrong_translations(text: str) -> list[str]:
    """Rows `| verl's key | ours |` that `verl_keys.yaml` translates otherwise, or has not."""
    _, heading, table = text.partition("| verl |")
    rows = _ROW.findall(table.partition("\n\n")[0]) if heading else []
    return [verls for verls, ours in rows if verls not in verl_keys() or not names_all(verl_keys()[verls].ours, ours)]


def names_all(meant: str, said: str) -> bool:
    return meant != "" and all(f"`{key}`" in said for key in meant.split(" and "))


@pytest.mark.parametrize("path", TABLES, ids=lambda path: path.name)
def test_the_table_of_a_page_is_todays(path: Path):
    assert path.read_text(encoding="utf-8") == with_table(path), "run `python -m tests.test_docs`"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_page_names_only_what_exists(page: Path):
    text = page.read_text(encoding="utf-8")
    assert unknown_commands(text) == []
    assert missing_files(text, page.parent) == []
    assert unknown_settings(text) == []
    assert wrong_translations(text) == []


def test_what_does_not_exist_is_found():
    assert unknown_commands("`asyncgrpo fly` and `asyncgrpo data chek x`, but asyncgrpo is prose") == [
        "fly",
        "data chek",
    ]
    assert unknown_commands("```\n.venv/bin/asyncgrpo demos --steps 3\n```") == ["demos"]
    lost = missing_files("`asyncgrpo/buffers/buffer.py`, [here](nowhere.md#top), `configs/*.toml`", ROOT)
    assert lost == ["asyncgrpo/buffers/buffer.py", "configs/*.toml", "nowhere.md"]
    assert unknown_settings("`buffer.max_lags`, `learner.lr=1`, run.steeps=3") == ["buffer.max_lags", "run.steeps"]
    rows = (
        "| `data.train_files` | `data.eval` |\n| `data.no_such` | `data.eval` |\n| `data.val_files` | `data.eval` |\n\n"
    )
    assert wrong_translations(f"| verl | here |\n|---|---|\n{rows}") == ["data.train_files", "data.no_such"]


def test_the_architecture_shows_every_message():
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    names = {kind.__name__ for kind in get_args(codec.AnyMessage)}
    assert names, "there are messages"
    assert {name for name in names if not re.search(rf"\b{name}\b", page)} == set()


def test_the_architecture_names_every_room():
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    rooms = [path.parent.name for path in (ROOT / "asyncgrpo").glob("*/__init__.py")]
    assert [room for room in rooms if f"`asyncgrpo/{room}/`" not in page] == []


def test_both_readmes_have_the_same_sections_commands_and_names():
    english, chinese = ((ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "README.zh-CN.md"))
    headings = [re.findall(r"^#+ ", _BLOCK.sub("", text), re.MULTILINE) for text in (english, chinese)]
    assert headings[0] == headings[1]
    assert typed_in(english) == typed_in(chinese)
    assert set(_CODE.findall(_BLOCK.sub("", english))) == set(_CODE.findall(_BLOCK.sub("", chinese)))


if __name__ == "__main__":
    for path in TABLES:
        path.write_text(with_table(path), encoding="utf-8")
