"""Shell scripts are read and not run: which words a command gets, and whether it is known to run."""

import pytest

from asyncgrpo.config.shell import Line, read_lines
from asyncgrpo.errors import ConfigError


def words(text: str, **environment: str) -> list[str]:
    """The words of all commands that are known to run."""
    return [word for line in read_lines(text, environment) if not line.in_branch for word in line.words]


def branches(text: str, **environment: str) -> list[str]:
    """The words of all commands that may run."""
    return [word for line in read_lines(text, environment) if line.in_branch for word in line.words]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("run a.b=1 'c d' \"e f\" g\\ h", ["run", "a.b=1", "c d", "e f", "g h"]),
        ("run a.b='[\"x\"]' c.d=\"['$N', \\\"y\\\"]\"", ["run", 'a.b=["x"]', "c.d=['8', \"y\"]"]),
        ("run 'price: $N' \\$N a#b # all else", ["run", "price: $N", "$N", "a#b"]),
        ("run a \\\n  b \\\n  c", ["run", "a", "b", "c"]),
        ("# run a \\\nrun b", ["run", "b"]),
        ("run a \\", ["run", "a"]),
        ("run \"a\nb\" c", ["run", "a\nb", "c"]),
        ("echo it's; run a", ["echo", "it's", "run", "a"]),
        ("A='x y'\nrun $A \"$A\" z$A", ["run", "x", "y", "x y", "zx", "y"]),
        ("A=\"\n  k.a=1 \\\n  k.b=2\n\"\nB=\"$A k.c=3\"\nrun $B", ["run", "k.a=1", "k.b=2", "k.c=3"]),
        ("A=1; A+=2; run $A", ["run", "12"]),
        ("X=1 Y=2 run $X$Y", ["run", "12"]),
        ("export A=3 B=4\nrun ${A}${B}", ["run", "34"]),
        ("run ${E:-5} ${E-6} ${U:-7} ${U-\"a\"}b ${U:-${N}}", ["run", "5", "7", "ab", "8"]),
        ("run ${N:+set}${U:+unset} ${V:=9} $N", ["run", "set", "9", "8"]),
        ("run $((N * (2 + 1))) $((N / 3)) $((${N} + 1)) $((N + U))", ["run", "24", "2", "9", "$((N + U))"]),
        ("run $U ${U} $1 ${N%8} $(date +%H) `date -u` a$(x \"$(y)\")b", [
            "run", "$U", "${U}", "$1", "${N%8}", "$(date +%H)", "`date -u`", 'a$(x "$(y)")b',
        ]),
        ("run $(pwd)/a \"$(pwd)\" $PWD", ["run", "/here/a", "/here", "/here"]),
        ("L=(\n  a.b=1   # one\n  # two\n  'a.c=2'\n)\nL+=(a.d=3)\nrun \"${L[@]}\"", [
            "a.b=1", "a.c=2", "a.d=3", "run", "${L[@]}",
        ]),
        ("run a 2>&1 | tee b.log > c < d &> e\nexec > >(tee -a f) 2>&1", ["run", "a", "tee", "b.log", "exec"]),
        ("cat <<'END' > f\nIt's no command\nEND\nrun a", ["cat", "run", "a"]),
        ("f() {\n  local x=$N\n  run $x \"$@\"\n}\nf", ["f", "run", "8", "$@", "f"]),
        ("set -x; cd x && run a || exit 1", ["set", "-x", "cd", "x", "run", "a"]),
    ],
)  # fmt: skip
def test_a_command_has_the_words_that_the_shell_gives_it(text, expected):
    assert words(text, N="8", E="", PWD="/here") == expected


@pytest.mark.parametrize(
    ("text", "runs", "may_run"),
    [
        ("if [ $N -eq 8 ]; then run a; else run b; fi; run c", "run a run c", ""),
        ("if [ $N -gt 8 ]; then run a; elif [ \"$N\" = 8 ]; then run b; else run c; fi", "run b", ""),
        ("if [ $N -lt 3 ] || [ $N -ge 8 ] && [ -n \"$N\" ]; then\n  run a\nfi", "run a", ""),
        ("if ! [[ $N == 1* ]]; then run a; fi", "run a", ""),
        ("if [ -z \"${U:-}\" ]; then run a; fi", "run a", ""),
        ("if [ \"$U\" = x ]; then run a; else run b; fi\nrun c", "run c", "run a run b"),
        ("if [ \"$U\" = x ]; then run a; elif [ $N -eq 8 ]; then run b; else run c; fi", "", "run a run b"),
        ("V=1; if [ $U = x ]; then V=2; fi; if [ $V = 2 ]; then run a; fi; V=3; if [ $V = 3 ]; then run b; fi", "run b", "run a"),
        ("if [ -f x ]; then\n  if [ $N = 8 ]; then run a; else run b; fi\nfi", "", "run a"),
        ("if make; then run a; fi", "make", "run a"),
        ("if [ $N -eq 8 ] && { [ $U = x ] || [ $N = 8 ]; }; then run a; fi", "", "run a"),
        ("[ $N -gt 1 ] && V=$N || V=null\nrun $V", "run 8", ""),
        ("[ $N -gt 9 ] && V=$N || V=null\nrun $V", "run null", ""),
        ("case \"$N\" in\n  1|2) run a ;;\n  [78])\n    run b\n    ;;\n  *) run c ;;\nesac\nrun d", "run b run d", ""),
        ("case $N in 1) run a;; *) run b; esac; run d", "run b run d", ""),
        ("case $U in 1) run a;; *) run b;; esac; run d", "run d", "run a run b"),
        ("for i in 1 2; do run $i; done; run d", "run d", "run $i"),
        ("while [ $N -lt 9 ]; do case $1 in -x) run a;; esac; done; run d", "run d", "run a"),
        ("for i in 1 2\ndo\n  L+=(\n    a.b=1\n  )\ndone\nrun d", "run d", "a.b=1"),
    ],
)  # fmt: skip
def test_what_is_known_decides_which_branch_runs(text, runs, may_run):
    assert " ".join(words(text, N="8")) == runs
    assert " ".join(branches(text, N="8")) == may_run


def test_a_variable_of_a_branch_that_may_run_is_named_and_not_set():
    lines = list(read_lines("A=1\nif [ $U = x ]; then A=2; B=3; fi\nrun $A $B", {}))
    assert lines == [Line([], ["A"], False), *lines[1:-1], Line(["run", "1", "$B"], [], False)]
    assert [(line.assigned, line.in_branch) for line in lines if line.assigned] == [
        (["A"], False),
        (["A"], True),
        (["B"], True),
    ]


ODD = [
    "'",
    '"',
    "$(",
    "${",
    "`",
    "(",
    "A=(",
    "case",
    "case x in",
    "if",
    "fi",
    ";;",
    "esac",
    "done",
    "<<E",
    "\\",
    "$",
    "{",
    "}",
]


@pytest.mark.parametrize("text", [*ODD, "else", "elif x", "((", "[[ a == b", "for", "a |", "&& b"])
def test_text_that_is_no_script_breaks_nothing(text):
    list(read_lines(text, {}))
    assert "run" in [word for line in read_lines(f"run a\n{text}", {}) for word in line.words]


def test_a_variable_that_doubles_itself_fills_no_memory():
    assert len(words("A=xx\n" + "A=$A$A\n" * 60 + "run $A")[1]) <= 2_000_000


def test_what_is_nested_too_deeply_is_one_sentence():
    with pytest.raises(ConfigError, match="nested too deeply"):
        list(read_lines("run " + "$(" * 5000, {}))
