"""Seeded pairs of an expected mathematical answer and what somebody says, which is equal to it or is not.

The generator knows numbers and how people and models write them. It knows nothing of the code that compares.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fractions import Fraction


@dataclass(frozen=True)
class Pair:
    """An expected answer and a text.

    Attributes:
        kind: The kind of the answer.
        key: The expected answer.
        said: What a model says, whose answer is to be found in it.
        equal: Whether the two are equal. If not, they differ by one part in a thousand or more.
    """

    kind: str
    key: str
    said: str
    equal: bool


Forms = tuple[list[str], list[str], list[str]]
"""Ways to write a key, ways to write the same, and ways to write something else."""


def pairs(seed: int) -> Iterator[Pair]:
    """Yield an equal pair and a different one of the same kind."""
    rng = random.Random(seed)
    kind = sorted(KINDS)[seed % len(KINDS)]
    keys, same, other = KINDS[kind](rng)
    yield Pair(kind, rng.choice(keys), said(rng, rng.choice(same)), True)
    yield Pair(kind, rng.choice(keys), said(rng, rng.choice(other)), False)


def said(rng: random.Random, answer: str) -> str:
    """Return a text that ends with an answer."""
    forms = [
        rf"\boxed{{{answer}}}",
        rf"So the result is $\boxed{{{answer}}}$.",
        rf"\[ \boxed{{{answer}}} \]",
        f"The answer is ${answer}$.",
        f"**Answer:** ${answer}$",
        rf"First 3, then 12. The answer is \({answer}\).",
        f"Final Answer: The final answer is ${answer}$. I hope it is correct.",
        rf"We get \[{answer}\]",
        f"Step 1: add 4.\n\nStep 2: halve it.\n\nTherefore, the result is ${answer}$.",
        rf"\boxed{{17}} was a first guess, but after a check of each of the steps it is \boxed{{{answer}}}",
    ]
    if "\\" not in answer and "$" not in answer:
        forms += [answer, f"The answer is {answer}", f"Some work.\n{answer}"]
    return rng.choice(forms)


def _grouped(number: int, separator: str) -> str:
    return f"{number:,}".replace(",", separator)


def _integers(number: int) -> list[str]:
    written = [
        str(number),
        f"{number}.0",
        f"{number}.00",
        rf"{number}.",
        f"${number}$".strip("$"),
        f" {number} ",
    ]
    written += [
        _grouped(number, separator) for separator in (",", "{,}", r"\,", r",\!", " ", "\u2009", "\u202f")
    ]
    if number > 0:
        written += [f"+{number}", rf"\${number}", f"0{number}" if number > 9999 else str(number)]
    if number < 0:
        written += [str(number).replace("-", "\u2212"), rf"-({-number})"]
    return written


def integer(rng: random.Random) -> Forms:
    size = rng.choice((9, 99, 999, 9999, 10**6, 10**9, 10**12))
    number = rng.randrange(-size, size) or 7
    step = max(1, abs(number) // 1000 + 1)
    others = [number + step, number - step, -number, number * 10]
    part = rng.randrange(1, 50)
    same = [
        *_integers(number),
        f"{number - part} + {part}",
        rf"{2 * number} \div 2",
        rf"\frac{{{3 * number}}}{{3}}",
    ]
    wrong = [text for other in others for text in _integers(other)]
    wrong += [
        f"{number}, {number + step}",
        rf"{number} \text{{ or }} {number + step}",
        rf"\pm {abs(number)}",
        f"{number}x",
    ]
    if abs(number) > 9999:
        wrong.append(str(number)[:-3] + " " + str((int(str(number)[-3:]) + 7) % 1000).zfill(3))
    return _integers(number)[:2] + _integers(number)[6:8], same, wrong


def _proper(rng: random.Random) -> Fraction:
    bottom = rng.choice((2, 3, 4, 5, 6, 7, 8, 9, 11, 12, 13, 16, 25, 40, 97, 120))
    top = rng.randrange(1, 6 * bottom)
    found = Fraction(top, bottom) * rng.choice((1, 1, -1))
    return found if found.denominator > 1 else found + Fraction(1, 2)


def _fractions(value: Fraction, factor: int = 1) -> list[str]:
    sign = "-" if value < 0 else ""
    top, bottom = abs(value.numerator) * factor, value.denominator * factor
    written = [
        rf"{sign}\frac{{{top}}}{{{bottom}}}",
        rf"{sign}\dfrac{{{top}}}{{{bottom}}}",
        f"{sign}{top}/{bottom}",
        rf"\frac{{{sign}{top}}}{{{bottom}}}",
        rf"{sign}\tfrac{{{top}}}{{{bottom}}}",
        rf"{sign}{top} / {bottom}",
    ]
    if top < 10 and bottom < 10:
        written.append(rf"{sign}\frac{top}{bottom}")
    return written


def _decimals(value: Fraction) -> list[str]:
    """Return decimals of at least nine digits."""
    exact = value
    for _ in range(12):
        exact *= 10
        if exact.denominator == 1:
            text = f"{float(value):.12f}".rstrip("0")
            return [text, f"{text}0", rf"{text}00"]
    return [f"{float(value):.10f}", f"{float(value):.12f}"]


def _mixed(value: Fraction) -> list[str]:
    whole, rest = divmod(abs(value), 1)
    if not whole or not rest:
        return []
    sign = "-" if value < 0 else ""
    top, bottom = rest.numerator, rest.denominator
    return [
        rf"{sign}{whole}\frac{{{top}}}{{{bottom}}}",
        f"{sign}{whole} {top}/{bottom}",
        rf"{sign}{whole} \frac{{{top}}}{{{bottom}}}",
    ]


def fraction(rng: random.Random) -> Forms:
    value = _proper(rng)
    same = [*_fractions(value), *_fractions(value, rng.randrange(2, 9)), *_decimals(value), *_mixed(value)]
    same += [rf"x = {_fractions(value)[0]}", rf"{_fractions(value)[0]} \approx {float(value):.2f}"]
    if not (value * 10_000).denominator > 1:
        same += [rf"{float(value * 100):g}\%"]
    wrong = []
    for other in (
        value + Fraction(1, value.denominator),
        -value,
        1 / value,
        value * Fraction(1001, 1000),
        value * 100,
    ):
        if abs(other) != 1 and other not in (value, value / 100):
            wrong += [*_fractions(other)[:3], *_decimals(other)[:1], *_mixed(other)]
    wrong += [str(value.numerator), str(value.denominator), f"{float(value) * 1.0011:.6f}"]
    mixed = _mixed(value)
    if mixed:  # The product instead of the sum, and the whole lost.
        whole, rest = divmod(abs(value), 1)
        wrong += [rf"{whole} \cdot {_fractions(rest)[0]}", _fractions(rest)[0]]
    return _fractions(value)[:3] + mixed[:1], same, wrong


def decimal(rng: random.Random) -> Forms:
    value = Fraction(rng.randrange(1, 10**5), 10 ** rng.randrange(1, 5))
    if value.denominator == 1:
        value += Fraction(1, 4)
    text = _decimals(value)[0]
    same = [
        *_decimals(value),
        *_fractions(value)[:3],
        rf"{text} \text{{ units}}",
        f"+{text}",
        text.replace("0.", ".", 1) if value < 1 else text,
    ]
    wrong = [
        _decimals(value * ratio)[0]
        for ratio in (Fraction(1001, 1000), Fraction(999, 1000), 10, Fraction(1, 10), -1)
    ]
    return [text], same, wrong


def _powers(mantissa: Fraction, exponent: int) -> list[str]:
    text = f"{float(mantissa):g}"
    raised = str(exponent).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))
    return [
        rf"{text} \times 10^{{{exponent}}}",
        rf"{text}\cdot 10^{{{exponent}}}",
        f"{text}e{exponent}",
        f"{text} × 10^{exponent}",
        f"{text}·10{raised}",
        f"{text}E{exponent}",
        f"{text}*10^{{{exponent}}}",
    ]


def scientific(rng: random.Random) -> Forms:
    mantissa, exponent = (
        Fraction(rng.randrange(101, 999), 100),
        rng.choice((-34, -19, -12, -5, -3, 3, 4, 8, 23)),
    )
    if mantissa.denominator == 1:
        mantissa += Fraction(1, 100)
    same = [
        *_powers(mantissa, exponent),
        *_powers(mantissa * 10, exponent - 1),
        *_powers(mantissa / 10, exponent + 1),
    ]
    if 0 < exponent < 9:
        same.append(str(mantissa * 10**exponent))
    wrong = [
        *_powers(mantissa + Fraction(1, 100), exponent),
        *_powers(mantissa, exponent + 1),
        *_powers(mantissa, -exponent),
        *_powers(-mantissa, exponent),
    ]
    return _powers(mantissa, exponent)[:2], same, wrong


def root(rng: random.Random) -> Forms:
    under = rng.choice((2, 3, 5, 6, 7, 10, 11, 13))
    times, added = rng.randrange(2, 12), rng.randrange(1, 20)
    value = times * math.sqrt(under)
    keys = [rf"{times}\sqrt{{{under}}}"]
    same = [
        *keys,
        rf"\sqrt{{{times**2 * under}}}",
        rf"{times} \cdot \sqrt{{{under}}}",
        f"{value:.9f}",
        rf"\sqrt{under} \cdot {times}",
        f"{times}√{under}",
        f"{times}*sqrt({under})",
        rf"\frac{{{times * under}}}{{\sqrt{{{under}}}}}",
        rf"{times} \times {under}^{{1/2}}",
        rf"{times}\sqrt{under}",
        f"{times}sqrt({under})",
    ]
    wrong = [
        rf"{times + 1}\sqrt{{{under}}}",
        rf"{times}\sqrt{{{under + 1}}}",
        f"{value * 1.0011:.9f}",
        rf"\sqrt{{{times * under}}}",
        str(times),
        rf"-{times}\sqrt{{{under}}}",
        f"{value:.2f}" if abs(round(value, 2) / value - 1) > 2e-6 else "0",
        rf"{times}\sqrt[3]{{{under}}}",
    ]
    if rng.random() < 0.5:
        return (
            [rf"{added} + {key}" for key in keys],
            [rf"{added} + {form}" for form in same if "." not in form]
            + [rf"{same[1]} + {added}", f"{added + value:.9f}"],
            [rf"{added} + {form}" for form in wrong] + [rf"{added} - {keys[0]}", rf"{added + 1} + {keys[0]}"],
        )
    return keys, same, wrong


def circle(rng: random.Random) -> Forms:
    top, bottom = rng.randrange(1, 20), rng.choice((1, 1, 2, 3, 4, 6))
    value = Fraction(top, bottom)
    top, bottom = value.numerator, value.denominator
    times = "" if top == 1 else str(top)
    over = [
        rf"\frac{{{times}\pi}}{{{bottom}}}",
        rf"\frac{{{top}}}{{{bottom}}}\pi",
        f"{times}π/{bottom}",
        f"{times}pi/{bottom}",
    ]
    whole = [rf"{times}\pi", f"{times}π", rf"{top} \pi", rf"{times} pi", rf"\pi \cdot {top}"]
    keys = whole if bottom == 1 else over
    same = [
        *keys,
        f"{float(value) * math.pi:.10f}",
        rf"{float(2 * value):g}\cdot\frac{{\pi}}{{2}}" if bottom in (1, 2, 4) else keys[0],
    ]
    wrong = [
        rf"\frac{{{top + 1}\pi}}{{{bottom}}}",
        str(value),
        f"{float(value) * 3.14:.4f}",
        rf"\frac{{{top}\pi^2}}{{{bottom}}}",
        rf"-{keys[0]}",
        rf"\frac{{{top}}}{{{bottom}\pi}}",
    ]
    return keys[:2], same, wrong


def interval(rng: random.Random) -> Forms:
    low = rng.randrange(-20, 20)
    high = low + rng.randrange(1, 30)
    left, right = rng.choice("[("), rng.choice(")]")
    less = {"[": r"\le", "(": "<", "]": r"\le", ")": "<"}

    def written(a: str, b: str, left: str, right: str) -> list[str]:
        plain = [
            f"{left}{a}, {b}{right}",
            f"{left}{a},{b}{right}",
            rf"\left{left}{a}, {b}\right{right}",
            rf"x \in {left}{a}, {b}{right}",
        ]
        if a == r"-\infty":
            return [*plain, f"x {less[right]} {b}", rf"{b} {'>' if right == ')' else chr(92) + 'ge'} x"]
        if b == r"\infty":
            return [*plain, f"{a} {less[left]} x", rf"x {'>' if left == '(' else chr(92) + 'geq'} {a}"]
        return [
            *plain,
            f"{a} {less[left]} x {less[right]} {b}",
            rf"{b} {'>' if right == ')' else chr(92) + 'ge'} x {'>' if left == '(' else chr(92) + 'ge'} {a}",
        ]

    a, b = str(low), str(high)
    end = rng.randrange(3)
    if end == 0:
        a, left = r"-\infty", "("
    if end == 1:
        b, right = r"\infty", ")"
    keys = written(a, b, left, right)
    flipped = {"[": "(", "(": "[", "]": ")", ")": "]"}
    wrong = []
    if end != 0:
        wrong += written(a, b, flipped[left], right) + written(str(low - 1), b, left, right)
    if end != 1:
        wrong += written(a, b, left, flipped[right]) + written(a, str(high + 1), left, right)
    return keys, keys, [*wrong, rf"\{{{low}, {high}\}}" if end != 2 else str(low), str(high)]


def _element(rng: random.Random) -> Fraction:
    return rng.choice((Fraction(rng.randrange(-30, 30)), _proper(rng)))


def _elements(rng: random.Random, values: list[Fraction]) -> list[str]:
    return [
        rng.choice(_fractions(v)[:4] + _decimals(v)[:1]) if v.denominator > 1 else str(v.numerator)
        for v in values
    ]


def point(rng: random.Random) -> Forms:
    values = [_element(rng) for _ in range(rng.choice((2, 3, 3, 4)))]
    if values == sorted(values):
        values[0] = values[1] + 3
    keys = ["(" + ", ".join(_elements(rng, values)) + ")", "(" + ",".join(_elements(rng, values)) + ")"]
    same = [
        *keys,
        rf"\left({', '.join(_elements(rng, values))}\right)",
        rf"(\,{', '.join(_elements(rng, values))})",
        f"({','.join(_elements(rng, values))})",
    ]
    wrong = []
    for other in (
        values[1:],
        [values[0] + 1, *values[1:]],
        [*values[:-1], values[-1] - 1],
        [*values, Fraction(1)],
    ):
        wrong.append("(" + ", ".join(_elements(rng, other)) + ")")
    if len(values) > 2 and values[::-1] != values:
        wrong.append("(" + ", ".join(_elements(rng, values[::-1])) + ")")
    return keys, same, wrong


def collection(rng: random.Random) -> Forms:
    values = sorted({_element(rng) for _ in range(rng.choice((2, 3, 4)))})
    if len(values) < 2:
        values.append(values[0] + 2)

    def written(values: list[Fraction]) -> list[str]:
        mixed = rng.sample(values, len(values))
        texts = _elements(rng, mixed)
        listed = ", ".join(texts)
        return [
            listed,
            rf"\{{{listed}\}}",
            rf"{', '.join(texts[:-1])} \text{{ and }} {texts[-1]}",
            rf"\left\{{ {listed} \right\}}",
            " , ".join(texts),
            "; ".join(texts),
            r" \text{ or } ".join(f"x = {text}" for text in texts),
        ]

    keys = written(values)[:2]
    wrong = [*written([*values[:-1], values[-1] + 1]), *written([*values, values[-1] + 1])]
    if len(values) > 2:
        wrong += written(values[1:])
    return keys, written(values), wrong


def _polynomial(coefficients: list[int], letter: str, rng: random.Random) -> str:
    terms = []
    for power, coefficient in enumerate(coefficients):
        if coefficient:
            sign = "-" if coefficient < 0 else "+"
            size = "" if abs(coefficient) == 1 and power else str(abs(coefficient))
            raised = (
                ""
                if not power
                else letter
                if power == 1
                else f"{letter}^{power}"
                if power < 10
                else f"{letter}^{{{power}}}"
            )
            terms.append((sign, f"{size}{raised}"))
    order = terms[::-1] if rng.random() < 0.5 else rng.sample(terms, len(terms))
    text = " ".join(f"{sign} {term}" for sign, term in order)
    return text[2:] if text.startswith("+ ") else "-" + text[2:] if text.startswith("- ") else text


def polynomial(rng: random.Random) -> Forms:
    letter = rng.choice("xyznta")
    roots = [rng.choice([n for n in range(-9, 10) if n]) for _ in range(rng.choice((1, 2, 2, 3)))]
    lead = rng.choice((1, 1, 2, 3, -1))

    def expanded(roots: list[int], lead: int) -> list[int]:
        found = [lead]
        for root in roots:
            found = [a - root * b for a, b in zip([0, *found], [*found, 0], strict=True)]
        return found

    def factored(roots: list[int], lead: int) -> str:
        factors = "".join(
            f"({letter} {'-' if root > 0 else '+'} {abs(root)})" for root in rng.sample(roots, len(roots))
        )
        return {1: "", -1: "-"}.get(lead, str(lead)) + factors

    right = expanded(roots, lead)
    others = [
        expanded([roots[0] + 1, *roots[1:]], lead),
        expanded(roots, lead + 7),
        [right[0] + 1, *right[1:]],
        [-c for c in right],
    ]
    same = [
        _polynomial(right, letter, rng),
        _polynomial(right, letter, rng),
        factored(roots, lead),
        _polynomial(right, letter, rng).replace(" ", ""),
    ]
    wrong = [_polynomial(other, letter, rng) for other in others]
    wrong += [_polynomial(right, "w", rng), factored([roots[0] + 2, *roots[1:]], lead)]
    return [_polynomial(right, letter, rng), factored(roots, lead)], same, wrong


def matrix(rng: random.Random) -> Forms:
    rows, columns = rng.choice(((2, 2), (2, 3), (3, 3), (2, 1)))
    values = [[_element(rng) for _ in range(columns)] for _ in range(rows)]

    def written(values: list[list[Fraction]]) -> list[str]:
        body = r" \\ ".join(" & ".join(_elements(rng, row)) for row in values)
        return [rf"\begin{{{name}}} {body} \end{{{name}}}" for name in ("pmatrix", "bmatrix")]

    changed = [list(row) for row in values]
    changed[rng.randrange(rows)][rng.randrange(columns)] += rng.choice((1, -1, Fraction(1, 2)))
    wrong = [*written(changed), *written([*values, values[0]])]
    return written(values), written(values), wrong


def unit(rng: random.Random) -> Forms:
    number = rng.randrange(2, 500)
    name = rng.choice(
        ("cm", "km", "kg", "meters", "dollars", "bolts", "square feet", "hours", "apples", "miles per hour")
    )

    def written(number: int) -> list[str]:
        return [
            f"{number} {name}",
            rf"{number} \text{{ {name}}}",
            rf"{number}\text{{{name}}}",
            rf"{number}~\mathrm{{{name}}}",
            str(number),
            rf"{number}\,\text{{{name}}}",
        ]

    return (
        [*written(number)[1:3], str(number)],
        written(number),
        [*written(number + 1), *written(number * 10), *written(number + 100)],
    )


def expression(rng: random.Random) -> Forms:
    a, b = rng.randrange(2, 9), rng.randrange(2, 9)
    return rng.choice(
        [
            (
                [rf"{2 * a}\sin x \cos x"],
                [rf"{a} \sin(2x)", rf"{2 * a}\cos x\sin x"],
                [rf"{a} \sin x", rf"{a}\cos(2x)", rf"{a + 1} \sin(2x)"],
            ),
            (
                [rf"\ln {a} + \ln {b}"],
                [rf"\ln {a * b}", rf"\ln({a}) + \ln({b})"],
                [rf"\ln {a + b}", rf"\log {a * b}", rf"\ln {a * b + 1}"],
            ),
            (
                [f"e^{{{a}x}}"],
                [rf"(e^x)^{{{a}}}", rf"\exp({a}x)", f"e^{{x}} e^{{{a - 1}x}}"],
                [f"e^{{{a + 1}x}}", f"{a}e^x", f"e^{{x^{a}}}"],
            ),
            (
                [rf"\frac{{{a}x + {b}}}{{y}}"],
                [rf"\frac{{{a}x}}{{y}} + \frac{{{b}}}{{y}}", rf"({b} + {a}x)/y"],
                [rf"\frac{{{a}x}}{{y}} + {b}", rf"\frac{{{b}x + {a + 10}}}{{y}}"],
            ),
            (
                [rf"\binom{{{a + b}}}{{{b}}}"],
                [str(math.comb(a + b, b)), rf"\frac{{{a + b}!}}{{{a}! {b}!}}"],
                [str(math.comb(a + b, b) + 1), f"{a + b}!"],
            ),
            (
                [rf"{a}^{{n + 1}}"],
                [rf"{a} \cdot {a}^n", rf"{a}^{{n}} \cdot {a}"],
                [rf"{a}^n + {a}", rf"{a}^{{n}}", rf"{a + 1}^{{n + 1}}"],
            ),
            (
                [f"{a} + {b}i"],
                [f"{b}i + {a}", rf"{a}+{b} i"],
                [f"{a} - {b}i", f"{b} + {a + 10}i", f"{a + b}"],
            ),
            (
                [f"y = {a}x + {b}"],
                [f"{a}x + {b} = y", f"y - {a}x = {b}", f"y={b}+{a}x"],
                [f"y = {a + 1}x + {b}", f"y = {a}x - {b}", f"x = {a}y + {b}"],
            ),
            (
                [rf"\frac{{1}}{{x - {a}}} - \frac{{1}}{{x + {a}}}"],
                [rf"\frac{{{2 * a}}}{{x^2 - {a * a}}}"],
                [rf"\frac{{{a}}}{{x^2 - {a * a}}}", rf"\frac{{{2 * a}}}{{x^2 + {a * a}}}"],
            ),
        ]
    )


KINDS: dict[str, Callable[[random.Random], Forms]] = {
    function.__name__: function
    for function in (
        integer,
        fraction,
        decimal,
        scientific,
        root,
        circle,
        interval,
        point,
        collection,
        polynomial,
        matrix,
        unit,
        expression,
    )
}
