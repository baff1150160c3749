"""The rule of each reward that comes with us, as accepted and refused answers with their values."""

import json
import math
import re

import pytest

from cosmos_core.errors import RewardError
from cosmos_core.registry import list_defined_names
from cosmos_core.rewards.base import REWARD_PARAMETERS, load_reward

THOUGHT = "<think>2 + 2\nis 4</think>"


def score(name, answer, reference="unused", **fields):
    value, _ = load_reward(name)({"to_be_evaluated": answer, "reference": reference, **fields})
    return value


FORMAT = [
    *[(f"{THOUGHT}\n\n<answer>{end}", 1) for end in ("4</answer>", "4\n5</answer>\n", "</answer>")],
    *[(f"{THOUGHT}\n\n<answer>4</answer>{end}", 0) for end in ("\n\n", " so")],
    *[(f"{start}<answer>4</answer>", 0) for start in (f"{THOUGHT}\n", f"{THOUGHT}\n\n\n", f" {THOUGHT}\n\n", "")],
    ("<think>a<think>b</think>\n\n<answer>4</answer>", 0),
    ("<think>a</think>b</think>\n\n<answer>4</answer>", 0),
    ("", 0),
]


def test_format_wants_thought_blank_line_answer_and_nothing_else():
    for answer, value in FORMAT:
        assert score("format", answer) == value, answer


CHOICE = [
    ("<answer>B</answer>", "B", 1),
    ("<think>x</think> <answer> b\n</answer>", "<answer>B</answer>", 1),
    ("B", "b", 1),
    *[(said, "B", 0) for said in ("<answer>A</answer><answer>B</answer>", "the answer is B", "")],
]


def test_single_choice_compares_the_first_answer_tags_without_blanks_and_case():
    for answer, reference, value in CHOICE:
        assert score("single_choice", answer, reference) == value, (answer, reference)


GSM8K = [
    ("so\n#### 42", "work work\n#### 42", 1),
    ("#### 1,234", "#### 1234", 1),
    ("#### -3.5", "#### -3.5", 1),
    ("#### 42", "#### 41 is wrong\n#### 42", 1),
    ("#### -$42", "#### -42", 1),
    ("#### **42**", "#### $42.00", 1),
    *[(said, "#### 42", 1) for said in ("#### 43 or #### 42", "####42", "#### 42.0", "#### 42.", "#### $42")],
    *[(said, "#### 42", 0) for said in ("#### 42 or #### 43", "42", "#### 4.2", "#### -42", "#### ,", "#### .")],
    *[(f"#### {number}", "#### 1", 0) for number in ("1/2", "1 1/2", "1e3", "1.5e3")],
    *[(f"#### {number}", "#### 1.5", 1) for number in ("3/2", "1 1/2", "15e-1", "1.5/hour")],
    ("#### -1 1/2", "#### -3 / 2", 1),
    (f"#### -{'1' * 40}", f"#### -{'1' * 39}2", 0),
    *[(f"#### {number}", "#### 42", 1) for number in ("$\\boxed{42}$", "`42`", "__42__", "(42)", "€42")],
    *[("#### 1234", number, 1) for number in ("1234", " 1,234\n", "$1,234.00", "1{,}234", "\\(1234\\)", "$1234.")],
    *[("#### -5", number, 1) for number in ("\u22125", "\\boxed{-5}", "$\\boxed{-5}$.")],
    ("1234", "1234", 0),
    ("#### 1234", "1235", 0),
    *[(f"#### {number}", "#### -1234", 1) for number in ("\u22121,234", "-1\\,234", "-1{,}234")],
]


def test_gsm8k_compares_the_last_marked_numbers():
    for answer, reference, value in GSM8K:
        assert score("gsm8k", answer, reference) == value, (answer, reference)


@pytest.mark.full
def test_the_test_answers_of_gsm8k_are_right_by_themselves_and_wrong_with_another_number(test_data):
    lines = (test_data / "gsm8k" / "test.jsonl").read_text().splitlines()
    references = [json.loads(line)["answer"] for line in lines]
    assert len(references) == 1319
    changed = [re.sub(r"#### (-?[\d,.]+)", lambda found: f"#### 1{found[1].lstrip('-')}", each) for each in references]
    assert {score("gsm8k", each, each) for each in references} == {1}
    assert {score("gsm8k", one, each) for one, each in zip(changed, references, strict=True)} == {0}


DIRECT = [
    *[(said, "42", 1) for said in ("Let me see.\nAnswer: 42", "answer: 41\nANSWER: 42", "Answer: 42\nI think")],
    *[(said, "42", 1) for said in ("Answer: x = 42", "Answer: $42$")],
    ("Answer: \\$42.50", "42.50", 1),
    ("Answer: 1,234", "1234", 1),
    ("Answer: 12 cm", "12", 1),
    ("Answer: 90^\\circ", "90", 1),
    ("Answer: 5 \\text{ and } 6", "5,6", 1),
    ("Answer: 3 \\text{ m}", "3", 1),
    ("Answer: \\frac12", "\\frac{1}{2}", 1),
    ("Answer: \\sqrt2", "\\sqrt{2}", 1),
    ("Answer: \\boxed{7}", "7", 1),
    ("Answer: \\textbf{(A)}", "(A)", 1),
    *[(said, "42", -1) for said in ("Answer: 43", "Answer: 42.", "42", "Answer:")],
    ("Answer: 1/2", "0.5", -1),
    *[(said, "banana", 1) for said in ("Answer: banana ", "Answer: a banana")],
    ("Answer: banana split", "banansplit", -1),
    ("Answer: an apple", "apple", 1),
    ("Answer: A C", "C", -1),
    ("Answer: A B C", "BC", -1),
    ("Answer: a b", "b", -1),
    ("Answer: a + b", "a+b", 1),
    ("Answer: x = a dog", "dog", 1),
    ("Answer: $a sin x$", "$a sin x$", 1),
    ("Answer: $a sin x$", "$sin x$", -1),
    ("Answer: $y = a sin x$", "$sin x$", -1),
    ("Answer: a sin x", "sin x", -1),
    *[(f"Answer: {it}", it.replace("a ", ""), -1) for it in (r"\(a bc\)", r"\[a bc\]", "2 + a bc", "-a bc", "(a bc)")],
    ("Answer: a train costs $a bc$", "abc", 1),
    ("Answer: 3 ways", "3", 1),
    ("Answer: ways", "3", -1),
]


def test_direct_math_compares_the_last_answer_line_after_normalisation():
    for answer, reference, value in DIRECT:
        assert score("direct_math", answer, reference) == value, (answer, reference)
    with pytest.raises(ValueError, match="reference answer is empty"):
        score("direct_math", "Answer: a square", "")


BOXED = [
    ("so \\boxed{\\frac{1}{2}}", "0.5", 1),
    ("The answer is 0.5.", "\\frac12", 1),
    ("$x = 4$", "4", 1),
    ("\\boxed{(x+1)^2}", "x^2 + 2x + 1", 1),
    ("first 3, then \\boxed{4}", "$4$", 1),
    ("\\boxed{1,000}", "1000", 1),
    ("\\boxed{ -7 }.", "-7", 1),
    *[(said, "7", 1) for said in ("$\\boxed{07}$", "\\boxed{7.0}")],
    ("\\boxed{70}", "7", 0),
    ("\\boxed{3} or \\boxed{4}", "4", 1),
    *[(said, "4", 0) for said in (r"\boxed{4} or \boxed{3}", r"\boxed{5}", "I do not know", r"\boxed{\frac{1}{", "")],
    ("\\boxed{3}, no: $\\boxed{\\frac{1}{2}}$.", "0.5", 1),
    ("\\boxed{4}", "first \\boxed{3}, then \\boxed{4}", 1),
    ("\\boxed{72}", "He sold 48+24 = <<48+24=72>>72 clips.\n#### 72", 1),
    ("\\boxed{71}", "He sold 48+24 = <<48+24=72>>72 clips.\n#### 72", 0),
    *[(f"\\boxed{{{said}}}", "7", 1) for said in ("7.", "7,", "7;", "7\\,", "7.0", " 7 . ")],
    ("\\boxed {42}", "42", 1),
    *[(said, "42", 1) for said in ("\\fbox{42}", "$\\fbox {42.}$.", "\\boxed 42", "\\framebox{42}")],
    *[(f"\\boxed{{{said}}}", "42", 1) for said in ("42\\\\", "42~", "42.~")],
    *[(f"\\boxed{{1{space}234}}", "1234", 1) for space in ("\\,", "\\ ", "{,}", "~", "\\!", "\u00a0", "\u202f")],
    ("\\boxed{1\\,234\\,567.5}", "1234567.5", 1),
    ("\\boxed{1 234 567.5}", "1234567.5", 1),
    ("\\boxed{-1234}", "-1 234", 1),
    ("\\boxed{1 2345}", "12345", 0),
    ("\\boxed{90°}", "90", 1),
    ("\\boxed{90^\\circ}", "90°", 1),
    ("\\boxed{6.02e23}", "6.02 \\times 10^{23}", 1),
    ("\\boxed{6.02\\cdot 10^{23}}", "6.02E+23", 1),
    ("It is 1.5e-3.", "0.0015", 1),
    ("\\boxed{6.02e23}", "6.02e22", 0),
    ("\\boxed{0.\\overline{3}}", "\\frac13", 1),
    ("\\boxed{-0.1\\overline{6}}", "-1/6", 1),
    ("\\boxed{1/3}", "0.\\bar{3}", 1),
    ("\\boxed{0.\\dot{1}\\dot{2}}", "4/33", 1),
    ("\\boxed{1/7}", "0.\\dot14285\\dot7", 1),
    ("\\boxed{0.3}", "0.\\overline{3}", 0),
    *[("\\boxed{42}", wanted, 1) for wanted in ("42.", "$42.$", "$42$.", "\\boxed {42.}", "#### 42.")],
    ("\\boxed{\\frac{1}{2}.}", "0.5,", 1),
    ("\\boxed{2.5}", "25", 0),
    ("\\boxed{1,2}", "12", 0),
    *[
        (f"\\boxed{{{wanted}}}", wanted, 1)
        for wanted in ("x^2+\\frac{1}{2}", "\\left(-\\infty, \\frac{1}{2}\\right]", "\\sqrt{\\frac{15}{17}}")
    ],
    *[("\\boxed{1/2}", wanted, 0) for wanted in ("x^2+\\frac{1}{2}", "1\\frac{1}{2}", "\\sqrt{\\frac{1}{2}}")],
    ("\\boxed{1.5}", "1\\frac{1}{2}", 1),
    *[("\\boxed{0.5}", wanted, 1) for wanted in ("so $\\frac{1}{2}$", "\\(\\frac{1}{2}\\)", "0.5$", "\\$0.5")],
    *[
        ("\\boxed{\\frac34}", f"{said} \\frac{{3}}{{4}}", 1)
        for said in (
            "The probability is",
            "It is",
            "\\text{(B)}",
            "\\textbf{(B)}\\",
            "(B)",
            "Therefore",
            "Answer:",
            "B:",
            "Answer - ",
            "The answer is x =",
            "\\textbf{(B) }",
            "\\mathrm{(B)}",
            "\\text{John: }",
        )
    ],
    *[
        ("\\boxed{\\frac34}", f"\\frac{{3}}{{4}} {said}", 1)
        for said in ("dollars", "chance", "of the cake", "or 75\\%", "= 0.75", "probability of rain")
    ],
    ("\\boxed{3/4 dollars}", "3/4 dollars", 1),
    *[("\\boxed{5}", f"5 {word}", 0) for word in ("million", "thousand", "dozen", "squared", "factorial", "theta")],
    *[("\\boxed{5}", f"{word} 5", 0) for word in ("negative", "minus", "the answer is negative")],
    ("\\boxed{\\frac12}", "\\frac{1}{2} or 1.5", 0),
    *[
        (f"\\boxed{{{wanted}}}", wanted, 1)
        for wanted in ("abc+\\frac{1}{2}", "x_{total}+\\frac{1}{2}", "\\sin x+\\frac{1}{2}\\text{ for each } x")
    ],
    *[(f"\\boxed{{{wanted}}}", wanted, 1) for wanted in ("\\text{Area} = \\frac{1}{2}bh", "(B)^2 + \\frac{1}{2}")],
    *[("\\boxed{5.5}", wanted, 1) for wanted in ("5\\frac{1}{2} feet", "5+\\frac{1}{2} units")],
    *[("\\boxed{0.5}", wanted, 0) for wanted in ("5\\frac{1}{2} feet", "\\text{Re}(z) + \\frac{1}{2}")],
    *[(f"\\boxed{{{said} \\cdot 10^3}}", "25000", 1) for said in ("5^2", "5^ 2", "50/2", "5 \\cdot 5")],
    ("\\boxed{100000}", "10^2 \\times 10^{3}", 1),
    ("\\boxed{3 \\times 10^12}", "3 \\times 10^{12}", 1),
    *[(f"\\boxed{{2^{{0.{said}}}}}", "\\sqrt[3]{2}", 1) for said in ("\\overline{3}", "\\bar3", "{\\overline{3}}")],
    ("$\\sqrt{0.\\overline{25}}$", "\\sqrt{25/99}", 1),
    ("\\boxed{0.\\dot14285\\dot7}", "\\frac17", 1),
]


def test_boxed_math_compares_mathematically():
    for answer, reference, value in BOXED:
        assert score("boxed_math", answer, reference) == value, (answer, reference)


def test_exact_match_ignores_blanks_around_only():
    assert score("exact_match", " cba\n", "cba") == score("exact_match", "cba", " cba ") == 1
    assert score("exact_match", "Cba", "cba") == score("exact_match", "", "cba") == 0


WITHOUT_ANSWER = {
    "gsm8k": ["", "no number here", "2 + 2 = 4", "5 apples", "#### ,", "#### ..."],
    "single_choice": [" ", "<answer> </answer>"],
    "direct_math": ["", "ways", "square"], "boxed_math": [""], "exact_match": ["\n"],
}  # fmt: skip


def test_nothing_is_right_or_wrong_against_a_reference_that_has_no_answer():
    for name, references in WITHOUT_ANSWER.items():
        for reference in references:
            with pytest.raises(ValueError, match="reference"):
                score(name, reference, reference)


def test_known_rewards_are_the_files_that_hold_one():
    texts = ["boxed_math", "direct_math", "exact_match", "format", "gsm8k", "judge", "overlong", "reasoning_gym"]
    texts.append("single_choice")
    images = ["aesthetic", "clip_score", "jpeg_size", "ocr", "pickscore"]
    served = ["cosmos_reason1", "dance_grpo", "gen_eval", "hpsv2", "hpsv3", "image_reward", "unified_reward"]
    assert list_defined_names("cosmos_core.rewards") == sorted(texts + images)
    assert list_defined_names("cosmos_core.rewards", "Reward") == sorted(images + served)


def test_an_unknown_reward_of_any_key_is_named_with_the_nearest_name():
    with pytest.raises(RewardError, match=r"^there is no reward 'gsm8'; .*did you mean 'gsm8k'"):
        load_reward("gsm8")
    with pytest.raises(RewardError, match=r"known: aesthetic, boxed_math, .*, pickscore, reasoning_gym, single_choice"):
        load_reward("zzzz")
    with pytest.raises(RewardError, match="there is no reward 'runner'"):
        load_reward("runner")


def test_a_users_reward_gets_the_keywords_that_it_declares_and_may_return_metrics(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(
        "def brief(to_be_evaluated, reference, num_tokens, custom=None):\n"
        "    return -num_tokens / custom['limit'], {'tokens': num_tokens}\n"
        "def everything(to_be_evaluated, reference, **others): return float(len(others))\n"
        "def tokens(to_be_evaluated, reference, tokenizer): return 1.0\n"
        "number = 3\n"
    )
    fields = {"to_be_evaluated": "a", "reference": "b", "num_tokens": 5, "custom": {"limit": 10}, "prompt": "p"}
    assert load_reward(f"{file}:brief")(fields) == (-0.5, {"tokens": 5.0})
    assert load_reward(f"{file}:everything")(fields) == (len({*REWARD_PARAMETERS} - {"images"}), {})
    with pytest.raises(RewardError, match="wants 'tokenizer', which is not offered: rewards run in child processes"):
        load_reward(f"{file}:tokens")
    with pytest.raises(RewardError, match="is a int, not a function"):
        load_reward(f"{file}:number")
    with pytest.raises(RewardError, match="has no 'absent'"):
        load_reward(f"{file}:absent")


def test_a_users_file_that_cannot_be_imported_is_a_reward_error(tmp_path):
    file = tmp_path / "broken.py"
    file.write_text("def broken(:\n")
    with pytest.raises(RewardError, match=r"cannot be imported: SyntaxError"):
        load_reward(f"{file}:broken")


@pytest.mark.parametrize(
    "returned",
    ["None", "'1.0'", "float('nan')", "float('inf')", "[1.0]", "(1.0, {'x': float('nan')})", "(1.0, 2.0)",
     "(1.0, 'why')", "(1.0, None)", "(1.0,)", "(1.0, {}, 2)"],
)  # fmt: skip
def test_what_is_no_finite_number_is_an_error(tmp_path, returned):
    file = tmp_path / "odd.py"
    file.write_text(f"def odd(to_be_evaluated, reference):\n    return {returned}\n")
    with pytest.raises(ValueError, match="the rule is a"):
        score(f"{file}:odd", "a")


def test_numpy_scalars_and_booleans_are_numbers(tmp_path):
    file = tmp_path / "kinds.py"
    file.write_text(
        "import numpy\ndef f(to_be_evaluated, reference):\n    return numpy.float32(0.5)\n"
        "def g(to_be_evaluated, reference):\n    return to_be_evaluated == 'a'\n"
    )
    assert math.isclose(score(f"{file}:f", "a"), 0.5)
    assert score(f"{file}:g", "a") == 1.0


def test_overlong_is_a_ramp_that_ends_at_the_limit():
    table = {"enable_overlong_penalty": True, "buffer_length": 40, "penalty_factor": 1.0}
    for num_tokens, value in ((1, 0), (60, 0), (70, -0.25), (80, -0.5), (100, -1), (101, -1), (1000, -1)):
        assert score("overlong", "x", num_tokens=num_tokens, max_tokens=100, overlong=table) == value


def test_an_overlong_buffer_that_is_longer_than_the_limit_is_the_whole_of_it():
    table = {"enable_overlong_penalty": False, "buffer_length": 4096, "penalty_factor": 0.5}
    assert score("overlong", "x", num_tokens=50, max_tokens=100, overlong=table) == -0.25
