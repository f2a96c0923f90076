"""The pages name only what exists: commands, files, links, settings, messages, names in code; and their tables are today's.

`python -m tests.test_docs` writes the tables of `docs/configuration.md` and `docs/metrics-file.md` anew.
A strict build by mkdocs is one of the tests where mkdocs is installed; without it the others say nearly the same.
"""

import re
import subprocess
import sys
from collections import defaultdict
from contextlib import suppress
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import get_args

import pytest
import typer
import yaml
from msgspec import inspect

from asyncgrpo.cli import app
from asyncgrpo.config.explain import knobs, sections, type_in_words, value_in_words
from asyncgrpo.config.foreign_rules import VERL
from asyncgrpo.recording.events import KINDS, Kind
from asyncgrpo.wire import codec
from tests import scrape
from tests.cli.test_printed_commands import take
from tests.simulation.mutants import MUTANTS
from tests.test_imports import LAYERS

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = [
    *sorted(ROOT.glob("*.md")),
    ROOT / "ops" / "README.md",
    *sorted(DOCS.rglob("*.md")),
]
CONFIGURATION = DOCS / "configuration.md"
EVENTS = DOCS / "metrics-file.md"
LONGEST_README = 160
MOST_FIELDS_OF_A_SMALL_EVENT = 4
FIRST = "<!-- TABLE: written by `python -m tests.test_docs`; do not edit by hand -->\n"
LAST = "<!-- END OF TABLE -->"

# Folders and files at the top of the repository that a page may mean when it writes a path.
_TOP = r"(?:asyncgrpo|benchmarks|configs|docs|ops|packaging|requirements|tests|\.ci)/"
_PATH = re.compile(rf"(?<![\w./-])({_TOP}[\w./*-]*)")
_LINK = re.compile(r"\]\(([^)#\s]*)(?:#[^)\s]*)?\)")
_COMMAND = re.compile(r"(?<![\w/-])(?:\.venv/bin/)?asyncgrpo ([a-z]+)(?: ([a-z]+(?:-[a-z]+)*)\b(?![./_-]))?")
_BLOCK = re.compile(r"```.*?```", re.DOTALL)
_CODE = re.compile(r"`([^`\n]+)`")
_ASSIGNED = re.compile(r"(?<![\w./-])([a-z]+(?:\.[a-z_]+)+)=")
_FILES = (".py", ".yaml", ".yml", ".json", ".jsonl", ".md", ".png", ".sh", ".toml", ".txt")
_NOT_CODE = {"lineage.version"}  # how a policy version is written
_ROW = re.compile(r"^\| `([\w.]+)` \| (.*) \|$", re.MULTILINE)
_OPTION = re.compile(r"(?<![\w-])--[a-z][a-z-]*")
_DOTTED = re.compile(r"(?:asyncgrpo\.)?([A-Za-z_][\w.]*)\.([A-Za-z_]\w*)")
_MODULE = re.compile(r"python -m ([\w.]+)")
_PAST = re.compile(r"`[^`\n]*\b(benchmarks[./]|asyncgrpo )[^`]*` at [0-9a-f]{7}\b")
"""A benchmark or command that an older commit has."""
_SELECTED = re.compile(r"(tests/[\w/]+\.py) -k (?:\"([^\"]+)\"|(\w+))")
_SCRIPT = re.compile(r"(?<![\w/.])\./([\w.-]+\.sh)\b")
_DEFINED_IN = re.compile(r"`(\w+)` in\s+`([\w/]+\.py)`")


def keys_table() -> str:
    """A table for each section at the top; the sections inside it are named above its keys."""
    lines: list[str] = []
    for top in dict.fromkeys(key.partition(".")[0] for key in knobs()):
        keys = [knob for knob in knobs().values() if knob.key.startswith(f"{top}.")]
        inner = {name: knob.section for knob in keys if (name := knob.key.rpartition(".")[0]) != top}
        lines += ["", f"### {top}", "", next(knob.section for knob in keys if knob.key.count(".") == 1), ""]
        lines += [f"- `{name}`: {meaning}" for name, meaning in inner.items()] + [""] * bool(inner)
        lines += ["| key | takes | default | meaning |", "|---|---|---|---|"]
        for knob in keys:
            default = "required" if knob.required else f"`{value_in_words(knob.default)}`"
            lines += [f"| `{knob.key}` | {type_in_words(knob.type)} | {default} | {knob.description} |"]
            lines += [
                f"| `{field.key}` | {type_in_words(field.type)} | `{value_in_words(field.default)}` | {field.description} |"
                for field in knob.fields.values()
            ]
    return "\n".join(lines) + "\n\n"


def events_table() -> str:
    """A table for each event of many fields, and one for the others."""
    lines: list[str] = []
    columns = ["| field | type | present | meaning |", "|---|---|---|---|"]
    small = {name: kind for name, kind in KINDS.items() if len(kind.fields) <= MOST_FIELDS_OF_A_SMALL_EVENT}
    for name, kind in KINDS.items():
        if name not in small:
            lines += ["", f"### {name}", "", kind.meaning, "", *columns]
            lines += [f"| {cells} |" for cells in fields_in_words(kind)]
    lines += ["", "### Small events", "", "The first row of an event has its meaning, the others its fields.", ""]
    lines += [f"| event {columns[0]}", f"|---{columns[1]}"]
    for name, kind in small.items():
        lines.append(f"| `{name}` | | | | {kind.meaning} |")
        lines += [f"| | {cells} |" for cells in fields_in_words(kind)]
    return "\n".join(lines) + "\n\n"


def fields_in_words(kind: Kind) -> list[str]:
    return [
        f"`{name}` | {type_in_words(inspect.type_info(field.type)).removeprefix('a ')} | "
        f"{'always' if field.is_needed else 'optional'} | {field.meaning}"
        for name, field in kind.fields.items()
    ]


TABLES = {CONFIGURATION: keys_table, EVENTS: events_table}


def with_table(path: Path) -> str:
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


def unknown_commands(text: str) -> list[str]:
    """Commands in code that there are not, and options between single backticks that their command does not have."""
    tree, found = typer.main.get_command(app), []
    for name, sub in _COMMAND.findall("\n".join(code_of(text))):
        command = tree.commands.get(name)
        if command is None or sub not in getattr(command, "commands", {sub: command}):
            found.append(f"{name} {sub}".strip() if command else name)
    for code in _CODE.findall(_BLOCK.sub("", text)):
        if (typed := _COMMAND.match(code)) and typed[1] in tree.commands:
            command = tree.commands[typed[1]]
            command = getattr(command, "commands", {}).get(typed[2], command)
            known = {option for parameter in command.params for option in parameter.opts} | {"--help"}
            found += [option for option in _OPTION.findall(code) if option not in known]
    return found


def refused_commands(text: str) -> list[str]:
    lines = [line.removeprefix(".venv/bin/") for line in typed_in(text)]
    return [line for line in lines if line.startswith("asyncgrpo ") and not is_taken(line)]


def is_taken(line: str) -> bool:
    with suppress(Exception):  # of click, whatever it is: the line cannot be typed
        return bool(take(line))
    return False


def missing_files(text: str) -> list[str]:
    """Paths from the top of the repository that lead nowhere, and scripts beside them."""
    paths = [path.rstrip(".-") for path in _PATH.findall(text)] + _SCRIPT.findall(text)
    return [path for path in paths if not (any(ROOT.glob(path)) if "*" in path else (ROOT / path).exists())]


def wrong_links(text: str, page: Path) -> list[str]:
    """Links that lead nowhere, or from `docs/` to what is no part of the site. mkdocs checks the headings."""
    found = []
    for target in filter(None, _LINK.findall(_BLOCK.sub("", text))):
        file = (page.parent / target).resolve()
        leaves = DOCS in page.parents and DOCS not in file.parents
        if "://" not in target and (leaves or not file.exists()):
            found.append(target)
    return found


def unknown_names(text: str) -> list[str]:
    """Names in code that are not there: `module.name`, `Class.name`, "`name` in `file.py`", what `-m` runs, what `-k` finds."""
    dotted = [match for code in _CODE.findall(_BLOCK.sub("", text)) if (match := _DOTTED.fullmatch(code.strip("()")))]
    names = [match for match in dotted if not match[0].endswith(_FILES) and match[0] not in _NOT_CODE]
    found = [match[0] for match in names if not is_elsewhere(match[0]) and match[2] not in members_of(match[1])]
    found += [name for name in _MODULE.findall(text) if name.startswith(("tests", "benchmarks")) and not module(name)]
    searched = [(word, file) for file, quoted, one in _SELECTED.findall(text) for word in (quoted or one).split()]
    searched = [(word, file) for word, file in searched if word not in ("or", "and", "not")]
    return found + [name for name, file in searched + _DEFINED_IN.findall(text) if name not in source(file)]


def source(path: str) -> str:
    return (ROOT / path).read_text("utf-8") if (ROOT / path).exists() else ""


def is_elsewhere(name: str) -> bool:
    """Settings, ours or verl's, have a check of their own."""
    return name.partition(".")[0] in {section.partition(".")[0] for section in sections()} or name in VERL.keys


def module(name: str) -> Path | None:
    """The file of `package.module`, counted from the top of the repository or from `asyncgrpo/`."""
    path = Path(*name.split("."))
    tries = [top / end for top in (ROOT / path, ROOT / "asyncgrpo" / path) for end in ("__main__.py", "__init__.py")]
    tries += [(top / path).with_suffix(".py") for top in (ROOT, ROOT / "asyncgrpo")]
    return next((file for file in tries if file.exists()), None)


@cache
def words() -> dict[str, set[str]]:
    """By the name of each module and each class of the package, the words of its file; of a package, its modules."""
    found = defaultdict[str, set[str]](set)
    for file in [*(ROOT / "asyncgrpo").rglob("*.py"), *(ROOT / "benchmarks").glob("*.py")]:
        text = file.read_text("utf-8")
        found[file.parent.name].add(file.stem)
        for name in (file.stem, *re.findall(r"^class (\w+)", text, re.MULTILINE)):
            found[name] |= set(re.findall(r"\w+", text))
    return found


def members_of(name: str) -> set[str]:
    return words().get(name.rpartition(".")[2], set())


def unknown_metrics(text: str) -> list[str]:
    names = {name for code in code_of(text) for name in re.findall(r"\basyncgrpo_[a-z_]+\b", code)}
    exported = scrape.names() | {name.removesuffix("_count") for name in scrape.names()}  # a histogram has no sample
    return sorted(names - exported - {"asyncgrpo_cpu_shims"})


def unknown_settings(text: str) -> list[str]:
    """Dotted names in code that begin like a setting and are none, of ours or of verl's."""
    tops = {section.partition(".")[0] for section in sections()}
    names = [code.partition("=")[0] for code in _CODE.findall(text)] + _ASSIGNED.findall(text)
    keys = [name for name in names if re.fullmatch(r"[a-z]+(\.[a-z_]+)+", name) and not name.endswith(_FILES)]
    return [key for key in keys if key.partition(".")[0] in tops and not is_setting(key)]


def is_setting(key: str) -> bool:
    """A key of ours, a section, a key below a mapping (`generators.extra.x`), or a name of verl's."""
    free = any(isinstance(knob.type, inspect.DictType) and key.startswith(f"{knob.key}.") for knob in knobs().values())
    return key in knobs() or key in sections() or free or key in VERL.keys


def wrong_translations(text: str) -> list[str]:
    """Rows `| verl's key | ours |` that `foreign_keys.yaml` translates otherwise, or has not."""
    _, heading, table = text.partition("| verl |")
    rows = _ROW.findall(table.partition("\n\n")[0]) if heading else []
    return [verls for verls, ours in rows if verls not in VERL.keys or not names_all(VERL.keys[verls].ours, ours)]


def names_all(meant: str, said: str) -> bool:
    return meant != "" and all(f"`{key}`" in said for key in meant.split(" and "))


@pytest.mark.parametrize("path", TABLES, ids=lambda path: path.name)
def test_the_table_of_a_page_is_todays(path: Path):
    assert path.read_text(encoding="utf-8") == with_table(path), "run `python -m tests.test_docs`"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_page_names_only_what_exists(page: Path):
    text = _PAST.sub("", page.read_text(encoding="utf-8"))
    assert unknown_commands(text) + refused_commands(text) + missing_files(text) + wrong_links(text, page) == []
    assert unknown_settings(text) + unknown_names(text) + unknown_metrics(text) + wrong_translations(text) == []


def test_what_does_not_exist_and_a_link_that_leads_nowhere_are_found():
    text = "`asyncgrpo fly` and `asyncgrpo data chek x`, but asyncgrpo is prose"
    assert unknown_commands(text) == ["fly", "data chek"]
    assert unknown_commands("```\n.venv/bin/asyncgrpo demos --steps 3\n```") == ["demos"]
    text = "```\nasyncgrpo audit\nasyncgrpo demo --step 3  # typo\nasyncgrpo audit run\n```"
    assert refused_commands(text) == ["asyncgrpo audit", "asyncgrpo demo --step 3"]
    assert unknown_commands("`asyncgrpo samples RUN --first`, `asyncgrpo data check --model`") == ["--first"]
    lost = missing_files("`asyncgrpo/buffers/buffer.py`, `configs/*.toml`, `configs/*.yaml`, ./setup.sh, ./start.sh")
    assert lost == ["asyncgrpo/buffers/buffer.py", "configs/*.toml", "start.sh"]
    assert unknown_settings("`buffer.max_lags`, `learner.lr=1`, run.steeps=3") == ["buffer.max_lags", "run.steeps"]
    rows = "".join(f"| `data.{name}` | `data.eval` |\n" for name in ("train_files", "no_such", "val_files"))
    assert wrong_translations(f"| verl | here |\n|---|---|\n{rows}\n") == ["data.train_files", "data.no_such"]
    start = DOCS / "start.md"
    assert wrong_links("[a](train.md#the-data) [c](nowhere.md) [d](#set-up-and-run)", start) == ["nowhere.md"]
    assert wrong_links("[README](../README.md)", start) == ["../README.md"], "no part of the site"
    assert wrong_links("[start](docs/start.md)", ROOT / "README.md") == []
    assert unknown_metrics("`asyncgrpo_groups_total`, `asyncgrpo_grups_total`") == ["asyncgrpo_grups_total"]


def test_a_name_that_nothing_defines_is_found():
    there = "`Buffer.outcomes`, `corrections.combine`, `asyncgrpo.errors.ConfigError`, `lineage.version`"
    assert unknown_names(there) == []
    gone = ["Buffer.incomes", "corrections.abnormalise", "asyncgrpo.errors.ConfigEror", "Nobody.here"]
    assert unknown_names(", ".join(f"`{name}`" for name in gone)) == gone
    assert unknown_names("`python -m tests.simulation`, `python -m benchmarks.nothing`") == ["benchmarks.nothing"]
    past = "`python -m benchmarks.nothing --a 1` at 2657806, `benchmarks.none`"
    assert unknown_names(_PAST.sub("", past)) == ["benchmarks.none"]
    assert unknown_names('`tests/test_docs.py -k "name or a_test_of_that"`') == []
    assert unknown_names("`tests/test_imports.py -k flies`") == ["flies"]
    assert unknown_names("`LAYERS` in `tests/test_imports.py`, `FLOORS` in `tests/test_imports.py`") == ["FLOORS"]


def nav() -> list[str]:
    def files(entry: object) -> list[str]:
        if isinstance(entry, str):
            return [entry]
        return [file for part in (entry if isinstance(entry, list) else entry.values()) for file in files(part)]

    return files(yaml.safe_load((ROOT / "mkdocs.yml").read_text("utf-8"))["nav"])


def test_the_navigation_has_every_page_once_and_the_index_has_them_in_its_order():
    assert sorted(nav()) == sorted(page.name for page in DOCS.glob("*.md"))
    rows = re.findall(r"^\| \[.+?\]\((.+?)\) \| .+\? \|$", (DOCS / "index.md").read_text("utf-8"), re.MULTILINE)
    assert ["index.md", *rows] == nav()


def test_every_command_is_on_a_page():
    pages = "\n".join(page.read_text("utf-8") for page in DOCS.glob("*.md"))
    tree = typer.main.get_command(app).commands
    names = [f"asyncgrpo {name} {sub}".strip() for name in tree for sub in getattr(tree[name], "commands", [""])]
    assert [name for name in names if not re.search(rf"{name}\b", pages)] == []


def test_the_table_of_packages_is_in_the_order_of_imports():
    page = (DOCS / "develop.md").read_text("utf-8")
    rows = [re.findall(r"`asyncgrpo/(\w+)(?:/|\.py)`", row) for row in re.findall(r"^\| (.+?) \|", page, re.MULTILINE)]
    layers = [{LAYERS[name] for name in row} for row in rows if row]
    assert [len(layer) for layer in layers] == [1] * len(layers), "one row, one layer"
    assert layers == sorted(layers, key=min)
    assert {name for row in rows for name in row} == set(LAYERS) - {"__main__"}


@pytest.mark.skipif(find_spec("mkdocs") is None, reason="mkdocs is not installed: pip install 'asyncgrpo[docs]'")
def test_mkdocs_builds_the_site_without_a_warning(tmp_path: Path):
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert (done.returncode, re.findall(r"^(?:WARNING|ERROR).*", done.stderr, re.MULTILINE)) == (0, [])
    built = {page.parent.name: page.read_text("utf-8") for page in tmp_path.glob("*/index.html")}
    assert {f"{name}.md" for name in built} >= set(nav()) - {"index.md"}
    assert [name for name, html in built.items() if re.search(r"<p>(\||```)|^\|--", html, re.MULTILINE)] == []


def test_the_architecture_shows_every_message_and_the_page_of_the_simulation_counts_the_mutants():
    assert f"plant {len(MUTANTS)} bugs" in (DOCS / "simulation.md").read_text("utf-8")
    page = (DOCS / "architecture.md").read_text(encoding="utf-8")
    names = {kind.__name__ for kind in get_args(codec.AnyMessage)}
    assert {name for name in names if not re.search(rf"\b{name}\b", page)} == set()


def test_both_readmes_have_the_same_sections_commands_and_names():
    assert len((ROOT / "README.md").read_text("utf-8").splitlines()) <= LONGEST_README
    english, chinese = ((ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "README.zh-CN.md"))
    headings = [re.findall(r"^#+ ", _BLOCK.sub("", text), re.MULTILINE) for text in (english, chinese)]
    assert headings[0] == headings[1]
    assert typed_in(english) == typed_in(chinese)
    assert set(_CODE.findall(_BLOCK.sub("", english))) == set(_CODE.findall(_BLOCK.sub("", chinese)))


if __name__ == "__main__":
    for path in TABLES:
        path.write_text(with_table(path), encoding="utf-8")
