"""Are all keys of verl's scripts in what `asyncgrpo config from-verl` prints? One row per key, and a total per script.

python -m benchmarks.verl_scripts FOLDER

A key is right if the output translates it, said if the output names it with a reason, and lost if it is not in the output.
The keys are the words `a.b=` of the script's text, found by a regular expression and not by the command's own reader. A
printed command whose exit code is 0 must load as a configuration. Exits with 1 if a key is lost or a command does not load.
"""

import argparse
import re
import shlex
import subprocess
import sys
from collections import Counter
from pathlib import Path

from asyncgrpo.config.load import load_config
from asyncgrpo.errors import ConfigError

_COMMENT = re.compile(r"(?:^|\s)(?:#|echo\s).*", re.MULTILINE)
_WORD = re.compile(r"""(?:^|[\s"'(])\+{0,2}([a-z_]\w*(?:\.[\w-]+)+)=""", re.MULTILINE)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="scripts, *.sh")
    parser.add_argument("--quiet", action="store_true", help="totals only, as a Markdown table")
    arguments = parser.parse_args()
    wrong = 0
    if arguments.quiet:
        print("| script | keys | right | said | lost | exit code |\n|---|---|---|---|---|---|")
    for script in sorted(arguments.folder.glob("*.sh")):
        ended = subprocess.run(
            [sys.executable, "-m", "asyncgrpo", "config", "from-verl", str(script)], capture_output=True, text=True
        )
        verdicts = judge(script.read_text(encoding="utf-8"), ended.stdout)
        counts = Counter(verdicts.values())
        row = [script.name, len(verdicts), *(counts[name] for name in ("right", "said", "lost")), ended.returncode]
        if arguments.quiet:
            print("| " + " | ".join(map(str, row)) + " |")
        else:
            print("\n".join(f"{verdict:<6}{key}" for key, verdict in verdicts.items()))
            print("{}: {} keys, {} right, {} said, {} lost, exit code {}".format(*row), flush=True)
        problem = "" if counts["lost"] == 0 else "keys are lost"
        problem = problem or (misfit(ended.stdout) if ended.returncode == 0 else says_why(ended.stdout))
        if problem:
            print(f"{script.name}: {problem}", file=sys.stderr)
        wrong += bool(problem)
    sys.exit(1 if wrong else 0)


def judge(script: str, output: str) -> dict[str, str]:
    """Return `right`, `said` or `lost` for each key of a script, in its order."""
    translated = re.search(r"^# Translated:\n((?:#   .*\n?)*)", output, re.MULTILINE)
    places = {"right": translated[1] if translated else "", "said": output}
    return {
        key: next((verdict for verdict, text in places.items() if _names(text, key)), "lost")
        for key in dict.fromkeys(_WORD.findall(_COMMENT.sub("", script)))
    }


def _names(text: str, key: str) -> bool:
    """True if the whole key is in the text, and not only as the start of a longer one."""
    return re.search(rf"(?<![\w.]){re.escape(key)}(?![\w.-])", text) is not None


def misfit(output: str) -> str:
    """Return why the printed command does not load; empty if it does."""
    words = shlex.split(output.replace("\\\n", ""), comments=True)
    try:
        load_config(None, words[2:])
    except ConfigError as error:
        return f"exit code 0, but {error}"
    return ""


def says_why(output: str) -> str:
    """Return what is missing in an output whose exit code is not 0; empty if it says why it does not run."""
    return "" if "# It does not run yet:" in output else "no reason for its exit code"


if __name__ == "__main__":
    main()
