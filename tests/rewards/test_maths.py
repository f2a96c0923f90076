"""The rule for mathematics, answer by answer."""

import pytest

from asyncgrpo.errors import RewardError
from asyncgrpo.rewards.maths import score_maths
from asyncgrpo.rewards.pool import Call
from tests.rewards.conftest import prompt


def score(completion_text, ground_truth, source="math_reasoning"):
    return score_maths(Call(prompt=prompt(ground_truth, source), completions=(completion_text,)))


RIGHT = [
    ("15 + 27 = 42", "42"),
    (r"\boxed{41} is wrong, it is \boxed{42}", "42"),
    (r"\boxed{\frac{1}{2}}", "0.5"),
    (r"\boxed{1} and \boxed{\frac{1}{2", "1"),  # one that is cut off is none
    (r"$\frac{3}{4}$", "3/4"),
    (r"\boxed{50\%}", "1/2"),
    ("In total 1,234 people.", "1234"),
    (r"\boxed{42 \text{ apples}}", "42"),
    (r"\boxed{5\text{ cm}^2}", "5"),
    (r"\boxed{x = 45°}", "45"),
    (r"\boxed{90^°}", "90"),
    (r"\boxed{90}", "90°"),
    ("She pays $42.", "42"),
    (r"\boxed{−3}", "-3"),
    (r"\boxed{2√3/3}", r"\frac{2\sqrt{3}}{3}"),
    (r"\boxed{√(x+1)}", r"\sqrt{x+1}"),
    (r"\boxed{2½}", "2.5"),
    (r"\boxed{2x¹⁰-10⁻³}", "2x^{10}-0.001"),
    (r"\boxed{x^2}", "x²"),
    (r"\boxed{(−∞, 2)}", r"(-\infty, 2)"),
    (r"\boxed{\sqrt{\frac{1}{4}}}", "½"),
    ("所以最终答案为：42个苹果，谢谢！", "42"),
    ("一共有１２个，答案＝１２", "12"),
    (r"因此，小明有 \boxed{42元}。", "42"),
    (r"\boxed{x = 5}", "5"),
    (r"\boxed{(x+1)(x-1)}", "x^2-1"),
    (r"\boxed{\{1, 2\}}", r"\{2, 1\}"),
    (r"\boxed{[0, 1)}", "[0,1)"),
    (r"\boxed{1 1/2}", "1.5"),
    (r"\boxed{\begin{pmatrix}1\\2\end{pmatrix}}", r"\begin{pmatrix}1\\2\end{pmatrix}"),
    (r"\boxed{\text{(B)}}", "B"),
    (r"\boxed{42}", r"We add and get \boxed{42}."),
    (r"\boxed{42}", ["41", "42"]),
    (r"\boxed{42}" + "\n#### 1", "42"),
    ("0.00001", 1e-05),
]

WRONG = [
    ("15 + 27 = 43", "42"),
    ("", "42"),
    (r"\boxed{}", "42"),
    (r"\boxed{42, 43}", "42"),
    (r"\boxed{40 2}", "42"),
    (r"\boxed{√23}", r"3\sqrt{2}"),
    (r"\boxed{1½}", "11/2"),
    (r"\boxed{3²}", "32"),
    (r"\boxed{0.33}", "1/3"),
    (r"\boxed{12}", "12:30"),
    (r"\boxed{(2, 1)}", "(1,2)"),
    (r"\boxed{\frac{1}{0}}", "42"),
    (r"\boxed{\frac{{}", "42"),
    (r"\boxed{C}", "B"),
    ("答案是42，不是43。", "43"),
]


@pytest.mark.parametrize(
    ("completion_text", "ground_truth", "value"), [*((*row, 1.0) for row in RIGHT), *((*row, 0.0) for row in WRONG)]
)
def test_a_completion_has_its_score(completion_text, ground_truth, value):
    assert score(completion_text, ground_truth) == value


@pytest.mark.parametrize(
    ("completion_text", "value"),
    [
        ("She has 40 + 2 = 42.\n#### 42", 1.0),
        ("#### 1,042", 0.0),
        ("#### $42.00", 1.0),
        ("#### 42 apples.", 1.0),
        (r"\boxed{41}" + "\n#### 42", 1.0),
        (r"\boxed{42}" + "\n#### 41", 0.0),
        ("#### Step 1: think\nThe answer is 42.", 1.0),
        (r"so \boxed{42}", 1.0),
    ],
)
@pytest.mark.parametrize("ground_truth", ["42", "20 and 22 are 42\n#### 42"])
def test_gsm8k_prefers_the_number_after_the_hashes(completion_text, value, ground_truth):
    assert score(completion_text, ground_truth, "gsm8k")["correct"] == value


@pytest.mark.parametrize("ground_truth", [None, "", "  "])
def test_a_row_without_ground_truth_is_no_wrong_answer(ground_truth):
    with pytest.raises(RewardError, match="no ground truth"):
        score("42", ground_truth)
