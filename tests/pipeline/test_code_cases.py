"""Tables of cases of the handler `code`: which block is run, which outputs are right, how rows are read.

A case is one line, and a new one needs no more.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict, deque
from decimal import Decimal
from fractions import Fraction
from typing import Any

import pytest
from rollyard_crds import Task
from rollyard_crds.fields.code_tests import CodeTests
from rollyard_crds.rolloutjob import TaskSource
from rollyard_pipeline.handlers.blocks import MAX_ANSWER
from rollyard_pipeline.handlers.code.assertions import placed_test
from rollyard_pipeline.handlers.code.handler import difference, same_result
from rollyard_pipeline.handlers.code.programs import program_of
from rollyard_pipeline.handlers.code.sandboxed import encode
from rollyard_pipeline.handlers.swe.handler import patch_of
from rollyard_tasks.task_list import TaskListError, parse_lines

P = "print(1)"
F = "def f(x):\n    return x"
TEXT = 's = """\n```\nin a text\n```\n"""'


@pytest.mark.parametrize(
    ("answer", "wanted", "program", "place"),
    [
        # What a fence is.
        (P, None, P, "the whole answer, which has no fenced block"),
        (f"```python\n{P}\n```", None, P, "block 1 of 1 (python, lines 1-3)"),
        (f"~~~python\n{P}\n~~~", None, P, "block 1 of 1 (python, lines 1-3)"),
        (f"````python\n{P}\n````", None, P, "block 1 of 1 (python, lines 1-3)"),
        (f"``` python title=\"a.py\"\n{P}\n```", None, P, "block 1 of 1 (python, lines 1-3)"),
        (f"```{{.python .numberLines}}\n{P}\n```", None, P, "block 1 of 1 (python, lines 1-3)"),
        (f"```Python3\n{P}\n```", None, P, "block 1 of 1 (python3, lines 1-3)"),
        (f"So:\n```py\n{P}\n```\nIt prints.", None, P, "block 1 of 1 (py, lines 2-4)"),
        (f"```python\r\n{P}\r\n```\r\n", None, P, "block 1 of 1 (python, lines 1-3)"),
        (f"Done:\n```python\n{P}\n", None, P, "block 1 of 1 (python, lines 2-3)"),
        (f"1. Do\n\n   ```python\n   {P}\n   ```\n2. End", None, P, "block 1 of 1 (python, lines 3-5)"),
        (f"10. Do\n    ```python\n    {P}\n    ```", None, P, "block 1 of 1 (python, lines 2-4)"),
        (f"- Do\n  - it\n\n    ```python\n    {P}\n    ```", None, P, "block 1 of 1 (python, lines 4-6)"),
        (f"- Do\n\n\t```python\n\t{P}\n\t```", None, P, "block 1 of 1 (python, lines 3-5)"),
        (f"> ```python\n> {P}\n> ```", None, P, "block 1 of 1 (python, lines 1-3)"),
        (f"So\n\n    ```python\n    {P}\n    ```", None, P, "block 1 of 1 (python, lines 3-5)"),
        (f"<answer>\n```python\n{P}\n```\n</answer>", None, P, "block 1 of 1 (python, lines 2-4)"),
        (f"```markdown\nSo:\n```python\n{P}\n```\nEnd\n```", None, P, "block 1 of 2 (python, lines 3-4)"),
        (f"````md\nSo:\n```python\n{P}\n```\n````", None, P, "block 1 of 1 (python, lines 3-5)"),
        (f"{P}\n```\nIt prints 1.", None, P, "what stands before the first fence"),
        (f"x = '```'\n{P}", None, f"x = '```'\n{P}", "the whole answer, which has no fenced block"),
        (f"<answer>\n```python\n{P}\n```</answer>", None, P, "block 1 of 1 (python, lines 2-4)"),
        (f"<answer>```python\n{P}\n```</answer>\n", None, P, "block 1 of 1 (python, lines 1-3)"),
        (f"```python\n{P}\n```<|im_end|>", None, P, "block 1 of 1 (python, lines 1-3)"),
        (f"\ufeff```python\n{P}\n```", None, P, "block 1 of 1 (python, lines 1-3)"),
        (f"So\n\u200b```python\n{P}\n```", None, P, "block 1 of 1 (python, lines 2-4)"),
        (f"```python\n```python\n{P}\n```", None, P, "block 1 of 1 (python, lines 2-3)"),
        (f"```sh\nls\n```\nSo:\n    ```python\n    {P}\n    ```", None, P,
         "block 2 of 2 (python, lines 5-7)"),
        (f"```python\ndef g():\n    '''\n    ```\n    x = f()\n    ```\n    '''\n{P}\n```", None,
         f"def g():\n    '''\n    ```\n    x = f()\n    ```\n    '''\n{P}",
         "block 1 of 1 (python, lines 1-9)"),
        (f"```python\n    {P}\n    {P}\n```", None, f"{P}\n{P}", "block 1 of 1 (python, lines 1-4)"),
        # A fence within a program.
        (f"```python\n{TEXT}\n{P}\n```", None, f"{TEXT}\n{P}", "block 1 of 1 (python, lines 1-8)"),
        (f"```python\n{TEXT}\n{P}\n```\n```\n1\n```", None, f"{TEXT}\n{P}",
         "block 1 of 2 (python, lines 1-8)"),
        (f"  ```\n  {TEXT}\n  {P}\n  ```", None, f"{TEXT}\n{P}", "block 1 of 1 (no label, lines 1-8)"),
        (f"```python\ndef f():\n    '''\n    ```\n    f()\n    ```\n    '''\n{P}\n```", "f",
         f"def f():\n    '''\n    ```\n    f()\n    ```\n    '''\n{P}", "block 1 of 1 (python, lines 1-9)"),
        (f"```python\ns = '''\n```\nThat was not whole.\n```python\n{F}\n```", "f", F,
         "block 2 of 2 (python, lines 5-8)"),
        # Which of several blocks it is.
        (f"```bash\npip install x\n```\n```python\n{P}\n```", None, P, "block 2 of 2 (python, lines 4-6)"),
        (f"```text\n1 2\n```\n```python\n{P}\n```\n```text\n3\n```", None, P,
         "block 2 of 3 (python, lines 4-6)"),
        (f"```python\n{P}\n```\n```\n1 2\n```\n```\n3\n```", None, P, "block 1 of 3 (python, lines 1-3)"),
        (f"```python\n{P}\n```\n```output\nx = 1\n```", None, P, "block 1 of 2 (python, lines 1-3)"),
        (f"```\n{P}\n```\nIt prints\n```\n1\n```\nor\n```\n1 2\n```", None, P,
         "block 1 of 3 (no label, lines 1-3)"),
        (f"```python\n{P}\n```\n```python\n```", None, P, "block 1 of 2 (python, lines 1-3)"),
        (f"```python\n{P}\n```\n```python\n>>> f(2)\n4\n```", None, P, "block 1 of 2 (python, lines 1-3)"),
        (f"```python\nprint(0)\n```\nNo:\n```python\n{P}\n```", None, P, "block 2 of 2 (python, lines 5-7)"),
        (f"```python\n{P}\n```\nNo:\n```python\nprint(\n```", None, "print(",
         "block 2 of 2 (python, lines 5-7)"),
        (f"```solution\n{P}\n```", None, P, "block 1 of 1 (solution, lines 1-3)"),
        ("```bash\nls\n```", None, "```bash\nls\n```",
         "the whole answer: none of its fenced blocks (1) is a program"),
        (f"```\n{P}\n```\nWith\n```\na = 1\nb = [2]\n```", None, P, "block 1 of 2 (no label, lines 1-3)"),
        (f"```python-3\n{P}\n```\n```\nf()\n```", None, P, "block 1 of 2 (python-3, lines 1-3)"),
        (f"```main.py\n{P}\n```\n```\nf()\n```", None, P, "block 1 of 2 (main.py, lines 1-3)"),
        (f"```python\n{P}\n```\n```python\n# 1 2\n```", None, P, "block 1 of 2 (python, lines 1-3)"),
        (f"```python\n{P}\n```\n```python\n3\n```", None, P, "block 1 of 2 (python, lines 1-3)"),
        ("```python\nx = 1\n```", None, "x = 1", "block 1 of 1 (python, lines 1-3)"),
        # Where a function is wanted.
        (f"```python\n{F}\n```\nExample:\n```python\nprint(f(2))\n```", "f", F,
         "block 1 of 2 (python, lines 1-4)"),
        (f"```\n{F}\n```\n```python\nprint(f(2))\n```", "f", F, "block 1 of 2 (no label, lines 1-4)"),
        (f"```python\ndef f(): 0\n```\n```python\n{F}\n```", "f", F, "block 2 of 2 (python, lines 4-7)"),
        (f"```python\n{F}\n```\n```python\ndef f(\n```", "f", "def f(", "block 2 of 2 (python, lines 5-7)"),
        *[(f"```python\n{F}\n```\n```python\n{other}\n```", "f", F, "block 1 of 2 (python, lines 1-4)")
          for other in ("from solution import f\nprint(f(1))", "import unittest\nfrom f import f", "f = f(1)",
                        "f = Solution().f", "for f in [1]:\n    print(f)", "with g() as f:\n    f()",
                        "class Solution:\n    def g(self): pass", "def f(x: int) -> int", "def f(x):",
                        "def f(x):\n    ...", "def f(x):\n    'It is 1.'\n    ...")],
        (f"```\n{F}\n```\n```\ndef f(x: int) -> int\n```", "f", F, "block 1 of 2 (no label, lines 1-4)"),
        (f"```python\n{F}\n```\n```python\nf = lambda x: x\n```", "f", "f = lambda x: x",
         "block 2 of 2 (python, lines 5-7)"),
        (f"```python\n{F}\n```\n```python\nclass Solution:\n    def f(s): return 0\n```", "f",
         "class Solution:\n    def f(s): return 0", "block 2 of 2 (python, lines 5-8)"),
        ("```python\n    def f(x):\n        return x\n```", "f", F, "block 1 of 1 (python, lines 1-4)"),
        ("```python\nasync def f(): 0\n```\n```python\nf()\n```", "f", "async def f(): 0",
         "block 1 of 2 (python, lines 1-3)"),
        ("```python\nf = lambda x: x\n```\n```python\nf()\n```", "f", "f = lambda x: x",
         "block 1 of 2 (python, lines 1-3)"),
        ("```python\nfrom math import gcd as f\n```\n```python\nf()\n```", "f", "from math import gcd as f",
         "block 1 of 2 (python, lines 1-3)"),
        ("```python\nclass Solution:\n    f = min\n```\n```python\nSolution().f()\n```", "f",
         "class Solution:\n    f = min", "block 1 of 2 (python, lines 1-4)"),
        ("```python\nif 1:\n    def f(): 0\n```\n```python\nf()\n```", "f", "if 1:\n    def f(): 0",
         "block 1 of 2 (python, lines 1-4)"),
        ("```python\ndef g():\n    def f(): 0\n```", "f", "def g():\n    def f(): 0",
         "block 1 of 1 (python, lines 1-4)"),
        (f"```python\n{F}\nN = {'9' * 5000}\n```\n```python\nf()\n```", "f", f"{F}\nN = {'9' * 5000}",
         "block 1 of 2 (python, lines 1-5)"),
        (f"```code\n{F}\n```\n```python\nprint(f(2))\n```", "f", F, "block 1 of 2 (code, lines 1-4)"),
        ("```python\n    return x\n```", "f", "    return x", "block 1 of 1 (python, lines 1-3)"),
        ("```\n    return x\n```\n```\n4\n```", "f", "    return x", "block 1 of 2 (no label, lines 1-3)"),
        ("x" * MAX_ANSWER + f"\n```python\n{P}\n```", None, P, "block 1 of 1 (python, lines 2-4)"),
    ],
)  # fmt: skip
def test_the_program_in_an_answer(answer: str, wanted: str | None, program: str, place: str) -> None:
    found = program_of(answer, wanted)
    assert (found.text.rstrip("\n"), found.part) == (program, place)


OTHER = "--- a/y\n+++ b/y\n@@ -1 +1 @@\n-a\n+b\n"
MOVED = "diff --git a/p b/q\nsimilarity index 100%\nrename from p\nrename to q\n"
DIFF = "--- a/x\n+++ b/x\n@@ -1 +1 @@\n-a\n+b\n"


FENCED = "--- a/x.md\n+++ b/x.md\n@@ -1,3 +1,4 @@\n ```\n-a\n+b\n ```\n+c\n"


@pytest.mark.parametrize(
    ("answer", "patch"),
    [
        (DIFF, DIFF), (DIFF[:-1], DIFF), (f"```diff\n{DIFF}```", DIFF), (f"~~~patch\n{DIFF}~~~", DIFF),
        (f"````diff\n{DIFF}````\n", DIFF), (f"```diff title='x'\n{DIFF}```", DIFF),
        (f"So:\n```\n{DIFF}```\nTry:\n```bash\npytest\n```", DIFF),
        (f"```diff\n{DIFF}```\n```\n1 passed\n```", DIFF), (f"```diff\nold\n```\n```diff\n{DIFF}```", DIFF),
        (f"- Do\n  ```diff\n{DIFF.replace('---', '  ---').replace(chr(10), chr(10) + '  ')}\n  ```", DIFF),
        (f"```diff\n{DIFF}", DIFF), ("", ""),
        (f"```diff\n{FENCED}```\n```\n1 passed\n```", FENCED),
        (FENCED, FENCED), (f"diff --git a/x.md b/x.md\n{FENCED}", f"diff --git a/x.md b/x.md\n{FENCED}"),
        (f"```diff\n{DIFF}```\n```\n", DIFF),
        ("```\nno diff\n```", "no diff\n"),
        (f"```diff\n{DIFF}```\nIn short:\n```diff\n-a\n+b\n```", DIFF),
        (f"```diff\n{DIFF}```\n```\n--- a\n+++ b\n```", DIFF),
        (f"```\n{DIFF}```\n```\n--- old\n+++ new\n```", DIFF),
        (f"```diff\n{DIFF}```\nand\n```diff\n{OTHER}```", DIFF + OTHER),
        (f"```\n{DIFF}```\nand\n```\n{OTHER}```\n```\n1 passed\n```", DIFF + OTHER),
        (f"```diff\n{DIFF}```\nNo:\n```diff\n{DIFF.replace('+b', '+c')}```", DIFF.replace("+b", "+c")),
        (f"```diff\n{DIFF}```\n```diff\n{OTHER}```\nNo:\n```diff\n{DIFF}```", DIFF),
        (f"```diff\n{DIFF}```\n```diff\n{MOVED}```", DIFF + MOVED),
        (f"```diff\n{DIFF}```</answer>", DIFF), (f"```diff\n```diff\n{DIFF}```\n```", DIFF),
    ],
)  # fmt: skip
def test_the_diff_in_an_answer(answer: str, patch: str) -> None:
    assert patch_of(answer).rstrip("\n") == patch.rstrip("\n")


TEXTS: list[tuple[str, str, bool, bool]] = [
    # The output, the expected one, and whether they are the same with `exact` and with `numeric`.
    ("1000000008", "1000000007", False, False), ("998244352 998244353", "998244353 998244352", False, False),
    ("1000000007", "1000000007", True, True), ("0", "0.0000001", False, False),
    ("0.0", "1e-9", False, False), ("0.00000010000001", "0.0000001", False, True),
    ("1e-17", "0.0", False, True), ("0.0000001", "0", False, True), ("0.01", "0", False, False),
    ("-0", "0", False, True), ("-0.0", "0", False, True), ("007", "7", False, True), ("+5", "5", False, True),
    ("5.0", "5", False, True), ("5", "5.0", False, True), ("5.", "5", False, True), ("5e0", "5", False, True),
    ("4.9999999", "5", False, True), ("0.3333333333", "0.3333333", False, True),
    ("0.33", "0.333333", False, False), ("3.14", "3.15", False, False), ("1e3", "1000", False, True),
    ("1.000001", "1.0", False, True), ("1.000003", "1.0", False, False), ("-1.5", "1.5", False, False),
    ("1000000008.0", "1000000007", False, False), ("1000000007.5", "1000000007", False, True),
    ("1000000007.0", "1000000007", False, True), ("1000000008", "1000000007.0", False, True),
    ("1e400", "1e400", True, True), ("1e400", "1.0000000001e400", False, True),
    ("1e400", "1e401", False, False),
    ("inf", "1e400", False, False), ("nan", "nan", True, True), ("nan", "1.0", False, False),
    ("inf", "inf", True, True), ("Infinity", "inf", False, False), ("1_000", "1000", False, False),
    ("0x10", "16", False, False), ("1e9999999", "1e9999998", False, False), ("٣", "3", False, False),
    (f"1{'0' * 9999}", f"1{'0' * 9999}", True, True), (f"1{'0' * 9999}", f"1{'0' * 9998}1", False, False),
    (f"1{'0' * 9999}", f"01{'0' * 9999}", False, True), ("True", "1", False, False),
    ("YES", "yes", False, False), ("True", "true", False, False),
    # Spaces.
    (" 5", "5", True, True), ("5 ", "5", True, True), ("1  2", "1 2", True, True),
    ("1\t2", "1 2", True, True),
    ("\n5", "5", True, True), ("5", "\n5", True, True), ("5\n\n\n", "5", True, True), ("", " \n", True, True),
    ("5\r\n6\r\n", "5\n6", True, True), ("a\n  b", "a\nb", True, True), ("a\n\nb", "a\nb", False, False),
    ("a  b", "a b", False, False), ("1 2", "12", False, False), ("1\n2", "1 2", False, False),
    ("x 1.0", "x 1", False, True), ("x  1.0", "x 1", False, False), ("1 1", "1", False, False),
    ("1.0 x", "1 y", False, False), ("1,2", "1, 2", False, False), ("[1, 2]", "[1,2]", False, False),
]  # fmt: skip


@pytest.mark.parametrize(("output", "expected", "exact", "numeric"), TEXTS)
def test_outputs(output: str, expected: str, exact: bool, numeric: bool) -> None:
    assert (difference(output, expected, None) is None) is exact
    assert (difference(output, expected, 1e-6) is None) is numeric
    assert difference(expected, expected, None) is None


@pytest.mark.parametrize(
    ("result", "expected", "exact", "numeric"),
    [
        # The result of a function, the expected one, and whether they are the same as above.
        (1000000008, 1000000007, False, False), (998244352, 998244353, False, False), (2, 2, True, True),
        ([998244352, 998244353], [998244353, 998244352], False, False), (0, 0.0000001, False, False),
        ({"a": [1000000008]}, {"a": [1000000007]}, False, False), (1e-17, 0.0, False, True),
        (1000000008.0, 1000000007, False, False), (1000000007.0, 1000000007, True, True),
        (0.1 + 0.2, 0.3, False, True), (3, 2.9999999, False, True), (3.5, 3, False, False),
        (True, True, True, True), (True, 1, False, False), (1, True, False, False), (1.0, True, False, False),
        (0, False, False, False), (None, 0, False, False), ("1", 1, False, False), ("1.0", "1", False, False),
        (float("nan"), float("nan"), True, True), (float("inf"), float("inf"), True, True),
        (float("inf"), 1e308, False, False), (1e308, float("inf"), False, False), (-0.0, 0, True, True),
        (float("-inf"), float("inf"), False, False), (10**400, 1.5, False, False),
        (1.5, 10**400, False, False),
        ([10**5000], [10**5000], True, True), ([10**5000], [10**5000 + 1], False, False),
        (2**53 + 1, 2.0**53, False, True),
        (Fraction(1, 2), 0.5, True, True), (Fraction(1, 3), 0.3333333333, False, True),
        (Fraction(1000000008), 1000000007, False, False), (Fraction(1), True, False, False),
        (Fraction(10**50 + 1, 10**50), 1, False, True), (Fraction(1, 10), 0.1, True, True),
        (Fraction(1, 3), 0.333, False, False), (Decimal("0.50"), 0.5, True, True),
        (Decimal("0.1"), 0.1, True, True), (Decimal("NaN"), 0.5, False, False),
        (Decimal("1e999999"), 0.5, False, False), (Counter("a"), {"a": 1}, True, True),
        (defaultdict(int, a=1), {"a": 1}, True, True), (deque([1]), [1], False, False),
        ((1, 2), [1, 2], True, True), ({1: 2}, {"1": 2}, False, False), ("a b", "a  b", False, False),
    ],
)  # fmt: skip
def test_results(result: Any, expected: Any, exact: bool, numeric: bool) -> None:
    encoded = json.loads(json.dumps(encode(result)))
    assert same_result(encoded, expected, None) is exact
    assert same_result(encoded, expected, 1e-6) is numeric


def task_of(row: dict[str, Any], format: str) -> Task:
    (task,) = parse_lines([json.dumps(row)], TaskSource(url="x", format=format))
    return task


def verl(truth: Any) -> dict[str, Any]:
    return {
        "data_source": "x",
        "prompt": [{"role": "user", "content": "?"}],
        "reward_model": {"ground_truth": truth},
    }


@pytest.mark.parametrize(
    ("inputs", "outputs", "cases", "unwrap"),
    [
        # The columns of a row with a function; the arguments and the result of each test.
        ([[[1, 2], "a"]], [True], [([[1, 2], "a"], True)], False),
        ([["a"], ["b"]], [[True], [False]], [(["a"], [True]), (["b"], [False])], True),
        ([["a"]], ["123"], [(["a"], "123")], False), ([["a"]], ["ok"], [(["a"], "ok")], False),
        ([["a"]], ["[1]"], [(["a"], "[1]")], False), ([["a"]], [["123"]], [(["a"], ["123"])], True),
        (["1\n[2]"], ["[3]"], [([1, [2]], [3])], False), (['"a"'], ['"b"'], [(["a"], "b")], False),
        (["1"], ["ok"], [([1], "ok")], False), (["1", "2"], ["ok", "3"], [([1], "ok"), ([2], "3")], False),
        (["1"], ["123"], [([1], 123)], False), ([7], [8], [([7], 8)], False), ([[]], [[]], [([], [])], False),
        ([[1], [2]], [[1], [1, 2]], [([1], [1]), ([2], [1, 2])], False),
        ([{"a": 1}], [None], [([{"a": 1}], None)], False),
        (["1\n\n2\n"], ["3\n"], [([1, 2], 3)], False), (['"a\u2028b"'], ["1"], [(["a\u2028b"], 1)], False),
    ],
)  # fmt: skip
def test_rows_of_apps_and_taco(
    inputs: list[Any], outputs: list[Any], cases: list[tuple[list[Any], Any]], unwrap: bool
) -> None:
    truth = {"fn_name": "f", "inputs": inputs, "outputs": outputs}
    for written in (truth, json.dumps(truth)):
        tests = task_of(verl(written), "verl").tests
        assert [(case.arguments(), case.result()) for case in tests.cases] == cases
        assert (tests.entry_point, tests.unwrap, tests.compare) == ("f", unwrap, "numeric")


@pytest.mark.parametrize(
    ("outputs", "results"),
    [(["3"], [3]), (["ok"], ["ok"]), (["ok", "3"], ["ok", "3"]), (['"3"'], ["3"]), (["[1]"], [[1]])],
)
def test_rows_of_deepcoder(outputs: list[str], results: list[Any]) -> None:
    call = {"testtype": "functional", "metadata": {"func_name": "f"}, "input": "1"}
    tests = task_of(verl([{**call, "output": output} for output in outputs]), "verl").tests
    assert [case.result() for case in tests.cases] == results


@pytest.mark.parametrize(
    ("case", "problem"),
    [
        ({"input": "[1", "output": "1"}, "'input' and 'output' must be JSON where there is an 'entry_point'"),
        ({"input": "1", "output": "ok"}, "'input' and 'output' must be JSON where there is an 'entry_point'"),
        ({"input": "1", "output": ""}, "'input' and 'output' must be JSON"),
        ({"input": "1", "output": "9" * 100_001}, "an integer has more than 100,000 digits"),
    ],
)
def test_a_test_that_is_no_json_is_refused_with_its_file(case: dict[str, str], problem: str) -> None:
    """So `validate` and `submit` say the same, and no rollout begins."""
    row = {
        "id": "a",
        "prompt": "?",
        "tests": {"entry_point": "f", "cases": [{"input": "", "output": "1"}, case]},
    }
    with pytest.raises(TaskListError, match=rf"line 1: tests: .*cases\[1\]: .*{problem}"):
        parse_lines([json.dumps(row)], TaskSource(url="x"))
    assert CodeTests.model_validate({"cases": [case]}).cases[0].output == case["output"]


def test_integers_of_any_length() -> None:
    case = CodeTests.model_validate(
        {"entry_point": "f", "cases": [{"input": f"-1{'0' * 20_000}", "output": f"[1{'0' * 9000}]"}]}
    ).cases[0]
    assert case.arguments() == [-(10**20_000)]
    assert case.result() == [10**9000]


NODE = "class Node:\n    def __init__(self, v):\n        self.v, self.next = v, None\n"
HEIGHT = "def height(n):\n    return 0 if n is None else 1 + height(n.next)\n"
MADE = "root = Node(1)\nroot.next = Node(2)"


@pytest.mark.parametrize(
    ("code", "tests", "setup", "imports", "found"),
    [
        # The function, its prefix, the setup and the helpers of a row of MBPP.
        (HEIGHT, ["assert height(None) == 0"], "", [], ("height", "", "", "")),
        (NODE + HEIGHT, ["assert (height(root)) == 2"], MADE, [], ("height", "", MADE, "")),
        (HEIGHT, ["assert height(root) == 2"], NODE + MADE, [],
         ("height", NODE + MADE, NODE + MADE, NODE + MADE)),
        (HEIGHT, ["assert height(None) == 0"], NODE, [], ("height", NODE.strip(), "", NODE.strip())),
        (HEIGHT, ["assert height(None) == 0"], "", ["import math"],
         ("height", "import math", "", "import math")),
        (NODE + HEIGHT, ["assert height(root) == 2"], MADE, ["import math"],
         ("height", "import math", MADE, "import math")),
        (HEIGHT, ["assert height(None) == N"], "N = 0", [], ("height", "N = 0", "", "N = 0")),
        ("f = lambda x: x + 1", ["assert f(1) == 2"], "", [], ("f", "", "", "")),
        ("f = g = lambda x: x", ["assert g(1) == 1"], "", [], ("g", "", "", "")),
        ("async def f(x): return x", ["assert f(1)"], "", [], ("f", "", "", "")),
        ("N = 3\ndef f(x): return N", ["assert f(N) == 3"], "", [], ("f", "", "", "")),
        ("def f(x): return x\ndef g(x): return f(x)", ["assert g(f(1)) == 1"], "", [], ("g", "", "", "")),
        (NODE + "def f(p): return p.v", ["assert f(Node(1)) == 1"], "", [], ("f", "", "", "")),
    ],
)  # fmt: skip
def test_rows_of_mbpp(
    code: str, tests: list[str], setup: str, imports: list[str], found: tuple[str, str, str, str]
) -> None:
    row = {"text": "?", "code": code, "test_list": tests, "test_setup_code": setup, "test_imports": imports}
    task = task_of(row, "mbpp")
    its = task.tests
    assert (its.entry_point, its.prefix.strip(), its.setup.strip(), its.helpers.strip()) == tuple(
        each.strip() for each in found
    )
    assert its.setup in str(task.prompt)


@pytest.mark.parametrize(
    ("program", "placed", "expressions"),
    [
        ("assert f(root) == 3", "assert candidate(0) == 3", ["f(root)"]),
        ("assert (f(a, k=b.next)) == f(c)", "assert candidate(0) == candidate(1)",
         ["f(a, k=b.next)", "f(c)"]),
        ("assert f(f(root)) == 3", "assert candidate(0) == 3", ["f(f(root))"]),
        ("def check(candidate):\n    assert candidate(root) == 3",
         "def check(candidate):\n    assert candidate(0) == 3", ["candidate(root)"]),
        ("assert True", "assert True", []),
        ("for r in [root]:\n    assert f(r) == 3", None, None), ("x = 3\nassert f(root, x) == 3", None, None),
        ("assert all(map(f, [root]))", None, None), ("g = f\nassert g(root) == 3", None, None),
        ("assert f(root) == 3 or f(root) == 4", None, None), ("assert [f(r) for r in roots]", None, None),
        ("is no Python", None, None),
    ],
)  # fmt: skip
def test_calls_are_taken_out_of_a_test(
    program: str, placed: str | None, expressions: list[str] | None
) -> None:
    """What is expected stays behind: the policy's process gets the expressions only."""
    found = placed_test(program, "f")
    assert (found and found.program, found and found.expressions) == (placed, expressions)
