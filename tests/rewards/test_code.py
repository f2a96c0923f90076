"""Which code is scored against which tests, and what it is given: with runners that say what a program does."""

import json
import re
from collections.abc import Callable

import pytest

from asyncgrpo.config.schema import CodeRewardConfig, RewardConfig
from asyncgrpo.errors import RewardError
from asyncgrpo.rewards.code import TIMEOUT, Program, Ran, code_of, read_tests, score_code
from asyncgrpo.rewards.http import ServiceError
from asyncgrpo.types import Score


class Fake:
    """A runner that ends each program as `does` says, and keeps them."""

    def __init__(self, does: Callable[[Program], Ran]) -> None:
        self.does, self.programs = does, list[Program]()

    async def run(self, program: Program) -> Ran:
        self.programs.append(program)
        return self.does(program)


async def score(does, ground_truth, text="code", **settings) -> tuple[Score, list[Program]]:
    runner = Fake(does)
    return await score_code(text, ground_truth, runner.run, RewardConfig(**settings)), runner.programs


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("print(1)", ("print(1)", "python")),
        ("```py\nprint(1)\n```\nbetter:\n```Python3\nprint(2)\n```", ("print(2)\n", "python")),
        ("```\nprint(1)\n```", ("print(1)\n", "python")),
        ("```python\nprint(1)\n```\nIt prints\n```\n1\n```", ("print(1)\n", "python")),
        ("```python\nprint(1)", ("print(1)", "python")),
        ("```c++\nint main() {}\n```", ("int main() {}\n", "cpp")),
        ("1. First\n   ```js\n   if (1)\n     f()\n   ```", ("if (1)\n  f()\n", "nodejs")),
        ("```output\n1\n```", ("1\n", "python")),
        ("", ("", "python")),
    ],
)
def test_the_code_of_a_completion(text, code):
    assert code_of(text) == code


FORMS = [
    {"inputs": ["2"], "outputs": ["4"]},
    json.dumps({"inputs": ["2"], "outputs": ["4"], "time_limit": 3}),
    {"inputs": [["2"]], "outputs": [["4"]]},
    {"inputs": ["[2]\n"], "outputs": ["4"], "fn_name": "double"},
    {"inputs": [[2]], "outputs": [[4]], "fn_name": "double"},
    {"assert_case": ["assert double(2) == 4"]},
    {"assert_case": ["assert double(2) == 4"], "inputs": [""], "outputs": [None]},
    ["assert double(2) == 4"],
    "assert double(2) == 4",
    "def check(f):\n    assert f(2) == 4\ncheck(double)",
]


def test_each_form_of_tests_is_one_test_and_lines_of_asserts_are_a_test_each():
    assert [len(read_tests(ground_truth)) for ground_truth in FORMS] == [1] * len(FORMS)
    assert len(read_tests("assert f(1)\n\nassert f(2)\n")) == 2
    assert len(read_tests(["", "import math", "for x in 1, 2:\n  assert f(x)", "f(2) ==", "if f(3):\n  raise f"])) == 3


@pytest.mark.parametrize(
    ("ground_truth", "why"),
    [
        (None, "is inputs and outputs, .*got `null`"),
        ({}, "0 inputs for 0 outputs"),
        ({"inputs": "1", "outputs": "2"}, "is inputs and outputs, or assert statements"),
        ("{'inputs': ['1'], 'outputs': ['2']}", "looks like JSON but does not parse"),
        ({"assert_case": [1]}, "is inputs and outputs, .*assert_case"),
        ({"assert_case": ["assert 1"], "inputs": ["", ""]}, "2 inputs for 1 outputs or assert statements"),
        ([{"input": "1"}], "is inputs and outputs"),
        ({"inputs": ["1 2"], "outputs": ["3"], "fn_name": "f"}, "an input that is not JSON"),
        ({"inputs": ["1"], "outputs": ["3"], "fn_name": "f(1)"}, "fn_name is not the name of a function"),
        ("42", "asserts and calls nothing: '42'"),
        ('"hello"', "asserts and calls nothing"),
        ({"assert_case": ["", "# f(2) == 4", "x = 1 / 2"]}, "asserts and calls nothing"),
        ("def check(f):\n    assert f(2) == 4", "asserts and calls nothing"),
    ],
)
def test_tests_that_cannot_be_read_are_refused_by_what_is_wrong(ground_truth, why):
    with pytest.raises(RewardError, match=why):
        read_tests(ground_truth)


async def test_the_score_is_the_share_of_tests_that_pass():
    tests = {"inputs": ["1", "2", "3", "4"], "outputs": ["1", "2", "3", "0"]}
    scored, programs = await score(lambda program: Ran(program.stdin), tests)
    assert (scored.value, scored.parts, scored.detail) == (0.75, {"tests_passed": 0.75}, "test 4: wrong output")
    assert [program.stdin for program in programs] == ["1", "2", "3", "4"]
    scored, _ = await score(lambda program: Ran(program.stdin), tests, code=CodeRewardConfig(score="all"))
    assert (scored.value, scored.parts) == (0.0, {"tests_passed": 0.75})


@pytest.mark.parametrize(("output", "passed"), [("1\n2", 1), ("1  \n2\n\n", 1), ("1\n\n2", 0), (" 1\n2", 0)])
async def test_blanks_at_the_ends_of_an_output_do_not_count(output, passed):
    scored, _ = await score(lambda _: Ran(output), {"inputs": [""], "outputs": ["1\n2\n"]})
    assert scored.value == passed


@pytest.mark.parametrize("ground_truth", FORMS[3:])
async def test_a_program_that_ends_well_before_its_test_has_not_passed_it(ground_truth):
    for output in ("", "4", "\n\n", "double"):
        assert (await score(lambda _, output=output: Ran(output), ground_truth))[0].value == 0.0


def test_a_function_is_compared_by_value():
    (test,) = read_tests({"inputs": [[1]], "outputs": [[[1, 2]]], "fn_name": "f"})
    mark = re.search("[0-9a-f]{16}", test.program(""))[0]
    for printed, passed in (("[1, 2]", True), ("[[1, 2]]", True), ("[1,2.0]", True), ("[2, 1]", False), ("?", False)):
        assert test.has_passed(f"hello\n{mark}{printed}\n") is passed
    assert not test.has_passed(f"\n{mark}{'[' * 100_000}")


async def test_no_test_is_started_after_one_that_was_late():
    """A loop without an end would otherwise take the deadline of one test for each."""

    def does(program: Program) -> Ran:
        return Ran("", TIMEOUT) if program.stdin == "2" else Ran(program.stdin)

    scored, _ = await score(lambda _: Ran("4", "exit code 1: ValueError"), FORMS[0])
    assert (scored.value, scored.detail) == (0.0, "test 1: exit code 1: ValueError"), "its output does not help it"
    scored, programs = await score(does, {"inputs": ["1", "2", "3"], "outputs": ["1", "2", "3"]})
    assert (scored.value, scored.detail, len(programs)) == (pytest.approx(1 / 3), "test 2: timeout", 2)


async def test_what_is_no_fault_of_the_code_is_a_named_failure():
    def does(program: Program) -> Ran:
        raise ServiceError("no sandbox today")

    scored, programs = await score(lambda _: Ran("4"), FORMS[0], timeout_s=-1.0)
    assert (scored.value, scored.failure, programs) == (None, "timeout", []), "its tests could not be started in time"
    assert "reward.timeout_s" in scored.detail
    scored, _ = await score(does, FORMS[0])
    assert (scored.value, scored.failure, scored.detail) == (None, "sandbox", "no sandbox today")


async def test_code_that_cannot_be_tested_fails_and_is_not_run():
    for text in ("x" * (2 << 20), "```cpp\nint main() {}\n```"):
        scored, programs = await score(lambda _: Ran("4"), FORMS[5], text=text)
        assert (scored.value, programs) == (0.0, [])
        assert scored.detail
