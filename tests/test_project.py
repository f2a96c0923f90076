"""What `pyproject.toml` says of the package is true, and the files beside it (setup.sh, requirements, hooks) agree."""

import configparser
import re
import shlex
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parent.parent
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
PROJECT = PYPROJECT["project"]
EXTRAS = {extra: [Requirement(line) for line in lines] for extra, lines in PROJECT["optional-dependencies"].items()}
DEPENDENCIES = [Requirement(line) for line in PROJECT["dependencies"]]
SETUP = (ROOT / "setup.sh").read_text(encoding="utf-8")
TEXTS = [*(ROOT / "asyncgrpo").rglob("*.py"), *ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]
_CLASSIFIED = re.compile(r"Programming Language :: Python :: (\d+\.\d+)$")


def pythons() -> list[str]:
    """The versions of Python that the classifiers name, such as `3.11`."""
    return [match[1] for line in PROJECT["classifiers"] if (match := _CLASSIFIED.match(line))]


def pins() -> dict[str, str]:
    """Canonical name to version of all that `setup.sh` installs."""
    listed = "\n".join((ROOT / "requirements" / name).read_text(encoding="utf-8") for name in ("cpu.txt", "gym.txt"))
    lines = [*listed.splitlines(), *SETUP.split()]
    pinned = [match.groups() for line in lines if (match := re.match(r"([\w.-]+)==([^\s;]+)", line))]
    return {canonicalize_name(name): version for name, version in pinned}


def test_files_and_urls_that_are_named_exist_and_classifiers_are_sorted_and_known():
    named = [PROJECT["readme"], *PROJECT.get("license-files", [])]
    assert [name for name in named if not any(ROOT.glob(name))] == []
    assert [url for url in PROJECT.get("urls", {}).values() if not url.startswith("https://")] == []
    for words in (PROJECT["keywords"], PROJECT["classifiers"]):
        assert words == sorted(set(words))
    trove = pytest.importorskip("trove_classifiers", reason="the list of classifiers is not installed (extra dev)")
    assert set(PROJECT["classifiers"]) <= trove.classifiers - set(trove.deprecated_classifiers)


def test_the_pythons_that_are_named_are_those_that_are_asked_for():
    needed = SpecifierSet(PROJECT["requires-python"])
    assert pythons() and all(f"{python}.0" in needed for python in pythons())
    oldest = pythons()[0]
    major, minor = oldest.split(".")
    assert f"{major}.{int(minor) - 1}.9" not in needed, "the oldest Python is a classifier"
    assert PYPROJECT["tool"]["mypy"]["python_version"] == oldest
    assert PYPROJECT["tool"]["ruff"]["target-version"] == f"py{major}{minor}"
    assert re.findall(r"python(\d\.\d+)", SETUP.partition("done")[0]) == pythons()


def test_extras_that_are_named_exist_and_setup_pins_what_the_package_asks_for():
    named = {extra for file in TEXTS for extra in re.findall(r"asyncgrpo\[(\w+)\]", file.read_text(encoding="utf-8"))}
    assert named and named <= set(EXTRAS)
    pinned = pins()
    assert [str(need) for need in DEPENDENCIES if canonicalize_name(need.name) not in pinned] == []
    needs = [*DEPENDENCIES, *(need for needs in EXTRAS.values() for need in needs)]
    kept = [(need, pinned.get(canonicalize_name(need.name))) for need in needs]
    assert [f"{need}: {pin}" for need, pin in kept if pin and not need.specifier.contains(pin)] == []


def test_a_wheel_has_the_code_the_configurations_the_runbooks_and_the_command(tmp_path: Path):
    wheel = pytest.importorskip("hatchling.builders.wheel", reason="hatchling is not installed (extra dev)")
    (built,) = wheel.WheelBuilder(str(ROOT)).build(directory=str(tmp_path), versions=["standard"])
    with zipfile.ZipFile(built) as archive:
        names = set(archive.namelist())
        (scripts,) = [name for name in names if name.endswith("entry_points.txt")]
        commands = configparser.ConfigParser()
        commands.read_string(archive.read(scripts).decode())
    assert dict(commands["console_scripts"]) == PROJECT["scripts"]
    package = [file.relative_to(ROOT) for file in (ROOT / "asyncgrpo").rglob("*") if file.is_file()]
    wanted = {str(file) for file in package if "__pycache__" not in file.parts}
    wanted |= {f"asyncgrpo/{file.relative_to(ROOT)}" for file in (ROOT / "configs").rglob("*.yaml")}
    wanted |= {f"asyncgrpo/runbooks/{file.name}" for file in (ROOT / "docs" / "runbooks").glob("*.md")}
    observed = [file for kind in ("*.yml", "*.yaml", "*.json") for file in (ROOT / "ops").glob(f"*/**/{kind}")]
    observed = [file for file in observed if "launch" not in file.parts]
    wanted |= {f"asyncgrpo/{file.relative_to(ROOT)}" for file in observed}
    assert wanted - names == set()


def test_the_hooks_are_what_ci_runs():
    config = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8"))
    hooks = [hook for repository in config["repos"] for hook in repository["hooks"]]
    assert [repository["repo"] for repository in config["repos"]] == ["local"], "nothing is downloaded"
    assert all((hook["language"], hook["pass_filenames"]) == ("system", False) for hook in hooks)
    lines = [line.strip() for line in (ROOT / ".ci" / "run").read_text(encoding="utf-8").splitlines()]
    linters = {line for line in lines if line.startswith(".venv/bin/") and "pytest" not in shlex.split(line)}
    assert len(linters) == 3 and {hook["entry"] for hook in hooks} == linters


@pytest.mark.slow
def test_every_extra_resolves():
    result = subprocess.run([sys.executable, ROOT / "packaging" / "check_extras.py"], capture_output=True, text=True)
    if result.returncode == 3:
        pytest.skip(result.stdout.strip())
    assert result.returncode == 0, result.stderr
