"""Whether two parsed answers are equal: numbers and expressions by value, everything else part by part.

It is used in the verifier's child process only, because it needs sympy. math-verify compares the rest, which
is equations and sets without a list of elements. What it calls equal is confirmed with numbers where there
are any: it rounds to six decimals, and takes two equations without a solution for the same.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any, Final

import sympy
from latex2sympy2_extended import is_expr_of_only_symbols
from latex2sympy2_extended.logic import And
from math_verify import verify
from math_verify.grader import unwrap_fcs
from sympy.core.function import AppliedUndef
from sympy.core.relational import Relational
from sympy.logic.boolalg import BooleanFunction

DECIMAL_TOLERANCE: Final = 1e-6
"""The relative difference of a decimal approximation, and also the absolute one of two decimals."""
_EXACT_TOLERANCE: Final = 1e-30
_FLOAT_TOLERANCE: Final = 1e-14
"""The relative difference of a number that a program printed, such as 0.30000000000000004."""
_FLOAT_DIGITS: Final = 15
_ROUNDING: Final = 1 + 1e-9  # 0.333333 differs from 1/3 by exactly the tolerance.
_DIGITS: Final = 45
_POINTS: Final = 5
_LONGEST: Final = 1000
"""The bits of a denominator whose digits are counted."""
_LARGEST_BOUND: Final = 12
"""The smallest number that may not be a bound of a sum that is evaluated."""
PERCENT: Final = sympy.UnevaluatedExpr(sympy.Rational(1, 100))
_CONFIRMED_POINTS: Final = 3
_ROUNDED_DIGITS: Final = 6
"""The digits of a decimal that may be a rounded number. `2.5` is an exact number."""


def equal(gold: Any, answer: Any) -> bool:
    """Return whether a parsed answer is equal to the parsed expected one."""
    gold, answer = _values(gold, answer)
    if _is_inequality(gold) and _is_inequality(answer):
        solved = [_solutions(each) for each in (gold, answer)]
        if all(isinstance(each, sympy.Set) for each in solved) and _symbols(gold) == _symbols(answer):
            return equal(*solved)
    if _is_relation(gold) and _is_relation(answer):
        values = _values_of_function(gold, answer)
        if values is not None:
            return equal(*values)
        return _proportional(gold, answer) or (
            _library_equal(gold, answer) and _relations_confirmed(gold, answer)
        )
    gold, answer = _as_set(gold, answer), _as_set(answer, gold)
    if _is_relation(gold) or _is_relation(answer):
        return False
    gold, answer = _only_element(gold, answer), _only_element(answer, gold)
    if isinstance(gold, sympy.MatrixBase) or isinstance(answer, sympy.MatrixBase):
        return _matrices_equal(gold, answer)
    if isinstance(gold, sympy.Interval) and isinstance(answer, sympy.Interval):
        same_ends = (gold.left_open, gold.right_open) == (answer.left_open, answer.right_open)
        return bool(same_ends) and _in_order((gold.start, gold.end), (answer.start, answer.end))
    if isinstance(gold, sympy.Union) and isinstance(answer, sympy.Union):
        return _in_any_order(gold.args, answer.args)
    if _is_collection(gold) or _is_collection(answer):
        return _collections_equal(gold, answer)
    if isinstance(gold, sympy.Expr) and isinstance(answer, sympy.Expr):
        decided = expressions_equal(gold, answer)
        return _library_equal(gold, answer) if decided is None else decided
    return _library_equal(gold, answer)


def _values(gold: Any, answer: Any) -> tuple[Any, Any]:
    """Take the right side of an equation if the other answer is not an equation: `x = 5` and 5, `AB = 4` and
    4."""
    if isinstance(answer, (sympy.Eq, And)) and not _is_relation(gold):
        answer = _right_side(answer)
    elif isinstance(gold, (sympy.Eq, And)) and not _is_relation(answer):
        gold = _stated_by_key(gold)
    return _explicit(gold), _explicit(answer)


def _stated_by_key(equation: Any) -> Any:
    """Return what the expected answer says that something is: of `x = 5`, `5 = x` and `1/2 = 0.5`."""
    left, right = _first(equation).lhs, _first(equation).rhs
    if _is_name(left):
        return _right_side(equation)
    if not (isinstance(equation, sympy.Eq) and isinstance(left, sympy.Expr)) or _symbols(left):
        return equation
    same = isinstance(right, sympy.Symbol) or (not _symbols(right) and equal(left, right))
    return left if same else equation


def _is_name(left: Any) -> bool:
    """Return whether the left side of an equation only names what the right side is: x, AB, f(x), (p, q)."""
    if isinstance(left, (sympy.Tuple, sympy.Interval)):
        return all(map(_is_name, _parts(left)))
    if isinstance(left, (AppliedUndef, sympy.Abs, sympy.Derivative)):
        return True
    return not isinstance(left, sympy.Add) and bool(is_expr_of_only_symbols(left))


def _is_value_of(left: Any, right: Any) -> bool:
    """Return whether the left side of an equation may be what was asked for: x, x + y, AB and cos(A)."""
    if not _symbols(left) or _is_name(left):
        return True
    if isinstance(left, sympy.Function):
        return all(isinstance(each, sympy.Symbol) for each in left.args)
    return bool(is_expr_of_only_symbols(left)) and not (right == 0 and _is_polynomial(left))


def _is_polynomial(left: Any) -> bool:
    """Return whether `left` is a sum with a product, as in the equation of a line: ax + by = 0."""
    return isinstance(left, sympy.Add) and any(len(_symbols(part)) > 1 for part in left.args)


def _first(equation: Any) -> Any:
    return equation._unsorted_args[0] if isinstance(equation, And) else equation


def _explicit(thing: Any) -> Any:
    """Return a matrix for a sum or product of matrices."""
    if isinstance(thing, sympy.MatrixExpr):
        return thing.doit().as_explicit()
    return thing


def _right_side(equation: Any) -> Any:
    """Return the value that an equation states, or the equation if it is one to be solved.

    `2x = 10` and `x^2 = 5` do not state that something is 10 or 5: their solutions are other numbers.
    """
    parts = equation._unsorted_args if isinstance(equation, And) else (equation,)
    if not all(isinstance(part, sympy.Eq) for part in parts):
        return equation
    left, right = parts[0].lhs, parts[-1].rhs
    if not _is_value_of(left, right):
        return equation
    if _symbols(right) & _symbols(left) and not isinstance(left, (AppliedUndef, sympy.Derivative)):
        return equation
    return right


def _values_of_function(gold: Any, answer: Any) -> tuple[Any, Any] | None:
    """Return the right sides of two definitions of the same function: f(x) = 2x, f(t) = 2t, and y = 2x."""
    if not (isinstance(gold, sympy.Eq) and isinstance(answer, sympy.Eq)):
        return None
    first, second = gold.lhs, answer.lhs
    if not (_is_function_of_symbols(first) or _is_function_of_symbols(second)):
        return None
    if isinstance(first, sympy.Symbol) or isinstance(second, sympy.Symbol):
        named = first if isinstance(first, sympy.Symbol) else second
        return (
            None if _symbols(named) & (_symbols(gold.rhs) | _symbols(answer.rhs)) else (gold.rhs, answer.rhs)
        )
    if getattr(first, "func", None) != getattr(second, "func", None) or len(first.args) != len(second.args):
        return None
    if not _is_function_of_symbols(first) or not _is_function_of_symbols(second):
        return None
    names = dict(zip(second.args, first.args, strict=True))
    if _symbols(answer.rhs) & _symbols(first) - _symbols(second):
        return None
    return gold.rhs, answer.rhs.xreplace(names) if isinstance(answer.rhs, sympy.Basic) else answer.rhs


def _is_function_of_symbols(thing: Any) -> bool:
    return isinstance(thing, AppliedUndef) and all(isinstance(each, sympy.Symbol) for each in thing.args)


def _is_relation(thing: Any) -> bool:
    return isinstance(thing, (Relational, And, BooleanFunction)) and not _is_membership(thing)


def _is_membership(thing: Any) -> bool:
    """Return whether `thing` is `x \\in …`, which latex2sympy reads as an equation."""
    return isinstance(thing, sympy.Eq) and isinstance(thing.rhs, sympy.Set)


def _as_set(thing: Any, other: Any) -> Any:
    """Return the set of an inequality that is compared with a set, so that 0 <= x < 1 is [0, 1)."""
    if _is_membership(thing):
        return thing.rhs
    other = other.rhs if _is_membership(other) else other
    if not isinstance(other, sympy.Set):
        return thing
    if _is_relation(thing) and not isinstance(thing, sympy.Eq):
        return _solutions(thing)
    return thing


def satisfied(relations: Sequence[Any], *, all_of_them: bool) -> Any:
    """Return the set of what satisfies inequalities of one variable, or None if they are not inequalities of
    one variable.

    Args:
        relations: What latex2sympy has read.
        all_of_them: Whether each must hold ("x > 1 and x < 3"). Where this leaves nothing, one must hold.
    """
    if not all(map(_is_inequality, relations)) or len(set().union(*map(_symbols, relations))) != 1:
        return None
    sets = [_solutions(each) for each in relations]
    if not all(isinstance(each, sympy.Set) for each in sets):
        return None
    both = sympy.Intersection(*sets) if all_of_them else sympy.EmptySet
    return sympy.Union(*sets) if both == sympy.EmptySet else both


def _is_inequality(thing: Any) -> bool:
    return _is_relation(thing) and not isinstance(thing, sympy.Eq)


def _solutions(relation: Any) -> Any:
    """Return the set of what satisfies inequalities, or the inequalities if sympy does not find it."""
    parts = relation._unsorted_args if isinstance(relation, And) else (relation,)
    simple = [_ray(part) for part in parts]
    if all(each is not None for each in simple) and len(_symbols(relation)) == 1:
        return sympy.Intersection(*simple)
    try:
        return unwrap_fcs(relation).as_set()
    except (NotImplementedError, ValueError, TypeError, AttributeError):
        return relation


def _ray(relation: Any) -> sympy.Set | None:
    """Return the set of an inequality with the variable alone on one side, without sympy's slow solver."""
    if not isinstance(relation, Relational):
        return None
    variable, bound, above = relation.lhs, relation.rhs, isinstance(relation, (sympy.Ge, sympy.Gt))
    if not isinstance(variable, (sympy.Symbol, AppliedUndef)):
        variable, bound, above = bound, variable, not above
    if (
        not isinstance(variable, (sympy.Symbol, AppliedUndef))
        or not bound.is_extended_real
        or bound.free_symbols
    ):
        return None
    if isinstance(relation, sympy.Ne):
        return sympy.Complement(sympy.S.Reals, sympy.FiniteSet(bound))
    strict = isinstance(relation, (sympy.Lt, sympy.Gt))
    return (
        sympy.Interval(bound, sympy.oo, strict, True)
        if above
        else sympy.Interval(-sympy.oo, bound, True, strict)
    )


def _only_element(thing: Any, other: Any) -> Any:
    """Return the point in a set of one point that is compared with a point."""
    if (
        isinstance(thing, sympy.FiniteSet)
        and len(thing) == 1
        and isinstance(other, (sympy.Tuple, sympy.Interval))
    ):
        return next(iter(thing))
    return thing


def _is_collection(thing: Any) -> bool:
    return isinstance(thing, (sympy.FiniteSet, sympy.Tuple))


def _parts(thing: Any) -> Sequence[Any]:
    """Return the elements of a list, in the order in which they were written where it is known."""
    if isinstance(thing, sympy.Interval):  # (1, 2) is read as an interval.
        return (thing.start, thing.end) if thing.is_open else ()
    if isinstance(thing, sympy.FiniteSet):
        return tuple(getattr(thing, "_unsorted_args", thing.args))
    return tuple(thing.args) if isinstance(thing, sympy.Tuple) else (thing,)


def _collections_equal(gold: Any, answer: Any) -> bool:
    if any(isinstance(each, (sympy.Tuple, sympy.Interval)) for each in (gold, answer)):
        return _in_order(_parts(gold), _parts(answer))
    return _in_any_order(*(e.args if isinstance(e, sympy.FiniteSet) else (e,) for e in (gold, answer)))


def _in_order(gold: Sequence[Any], answer: Sequence[Any]) -> bool:
    return 0 < len(gold) == len(answer) and all(equal(a, b) for a, b in zip(gold, answer, strict=True))


def _in_any_order(gold: Sequence[Any], answer: Sequence[Any]) -> bool:
    if not 0 < len(gold) == len(answer):
        return False
    left = list(answer)
    for part in gold:
        index = next((number for number, candidate in enumerate(left) if equal(part, candidate)), None)
        if index is None:
            return False
        del left[index]
    return True


def _matrices_equal(gold: Any, answer: Any) -> bool:
    """Compare by elements. A row or a column is also the tuple of its elements."""
    shapes = [each.shape for each in (gold, answer) if isinstance(each, sympy.MatrixBase)]
    if len(shapes) == 2:
        return bool(shapes[0] == shapes[1]) and _in_order(gold.flat(), answer.flat())
    if 1 not in shapes[0]:
        return False
    return _in_order(*(e.flat() if isinstance(e, sympy.MatrixBase) else _parts(e) for e in (gold, answer)))


def _library_equal(gold: Any, answer: Any) -> bool:
    try:
        return bool(verify(gold, answer, allow_set_relation_comp=True, timeout_seconds=None))
    except RecursionError:
        return False


def _proportional(gold: Any, answer: Any) -> bool:
    """Return whether one equation is the other one times a rational number: 2x = 10 and 4x = 20."""
    sides = [side for each in (gold, answer) if isinstance(each, sympy.Eq) for side in each.args]
    if len(sides) != 4 or not all(isinstance(side, sympy.Expr) for side in sides):
        return False
    first, second = gold.lhs - gold.rhs, answer.lhs - answer.rhs
    point = {
        symbol: sympy.Rational(1009 + number, 1013)
        for number, symbol in enumerate(sorted(first.free_symbols, key=str))
    }
    values = first.xreplace(point), second.xreplace(point)
    if not all(isinstance(value, sympy.Rational) and value for value in values):
        return False
    return bool(expressions_equal(first, second * values[0] / values[1]))


def _relations_confirmed(gold: Any, answer: Any) -> bool:
    """Return False for two equations that math-verify calls equal because it solves neither of them.

    Equations that say the same have sides whose difference is zero for the same values of the variables.
    """
    if not (isinstance(gold, sympy.Eq) and isinstance(answer, sympy.Eq)):
        return True
    if gold == answer:
        return True
    sides = (gold.lhs, gold.rhs, answer.lhs, answer.rhs)
    if not all(isinstance(side, sympy.Expr) for side in sides):
        return True
    # None stands for undecided.
    if expressions_equal(gold.lhs - gold.rhs, answer.lhs - answer.rhs) is not False:
        return True
    if expressions_equal(gold.lhs - gold.rhs, answer.rhs - answer.lhs):
        return True
    return bool(sympy.solve(gold, list(gold.free_symbols)))


def expressions_equal(gold: sympy.Expr, answer: sympy.Expr) -> bool | None:
    """Return whether two expressions have the same value, at seeded points if they have variables.

    It returns None if one has no value that sympy finds, such as a sum without known limits. A per cent sign
    may be left out: 28% is 28 as well as 0.28.
    """
    approximate = [bool(each.has(sympy.Float)) for each in (gold, answer)]
    percents = [_percent(each) for each in (gold, answer)]
    if any(percent is not None for percent in percents):
        bare = [e if p is None else p for e, p in zip((gold, answer), percents, strict=True)]
        numbers = not any(map(_symbols, bare))
        if numbers and _numbers_equal(_evaluable(bare[0]), _evaluable(bare[1]), approximate):
            return True
    gold, answer = _evaluable(gold), _evaluable(answer)
    names = sorted(_symbols(gold) | _symbols(answer))
    if not names:
        return _numbers_equal(gold, answer, approximate)
    return _same_at_points(gold, answer, names, _tolerance(gold, answer, approximate))


def _percent(expression: sympy.Expr) -> sympy.Expr | None:
    """Return the number before a per cent sign."""
    if isinstance(expression, sympy.Mul) and PERCENT in expression.args:
        return sympy.Mul(*(part for part in expression.args if part != PERCENT))
    return None


def _evaluable(expression: Any) -> Any:
    """Return the expression with f(x) as one variable, decimals as fractions, and all of it evaluated."""
    expression = expression.replace(
        lambda part: isinstance(part, AppliedUndef), lambda part: sympy.Symbol(f"{part}", real=True)
    )
    if expression.has(sympy.UnevaluatedExpr):
        expression = expression.replace(sympy.UnevaluatedExpr, lambda part: part)
    return expression.xreplace({each: sympy.Rational(str(each)) for each in expression.atoms(sympy.Float)})


def _symbols(expression: Any) -> set[str]:
    """Return the names of the variables; `i` is the imaginary unit."""
    return {symbol.name for symbol in getattr(expression, "free_symbols", ())} - {"i"}


def _numbers_equal(gold: Any, answer: Any, approximate: Sequence[bool]) -> bool | None:
    exact = [_rational(each) for each in (gold, answer)]
    tolerance = _tolerance(gold, answer, approximate)
    if None not in exact and (exact[0] == exact[1] or tolerance == _EXACT_TOLERANCE):
        return bool(exact[0] == exact[1])
    values = _value(gold, {}), _value(answer, {})
    if None in values:
        return None
    if any(value in (sympy.oo, -sympy.oo) for value in values):
        return bool(values[0] == values[1])
    if not all(value.is_number and value.is_finite for value in values):
        return False
    if all(map(_is_literal, exact)) and abs(values[0] - values[1]) > DECIMAL_TOLERANCE:
        # 16386.17 is not an approximation of 16386.16, nor is 1000000008.0 one of 1000000007.
        return False
    return _close(*values, tolerance)


def _rational(number: Any) -> sympy.Rational | None:
    value = number.doit() if isinstance(number, sympy.Expr) else number
    return value if isinstance(value, sympy.Rational) else None


def _tolerance(gold: Any, answer: Any, approximate: Sequence[bool]) -> float:
    """Return the relative difference that two expressions may have if some have decimals."""
    if not any(approximate):
        return _EXACT_TOLERANCE
    if all(map(_may_be_rounded, (gold, answer))):
        return DECIMAL_TOLERANCE
    digits = (_digits(each) for side in (gold, answer) for each in side.atoms(sympy.Rational))
    return _FLOAT_TOLERANCE if max(digits, default=0) >= _FLOAT_DIGITS else _EXACT_TOLERANCE


def _may_be_rounded(expression: Any) -> bool:
    """Return whether a decimal may only be near to this: it has no short form, or has six digits."""
    if expression.has(sympy.Function, sympy.NumberSymbol, sympy.Sum, sympy.Product, sympy.Integral):
        return True
    if any(not power.exp.is_integer for power in expression.atoms(sympy.Pow)):
        return True
    numbers = [*expression.atoms(sympy.Rational), *map(_rational, sympy.Mul.make_args(expression))]
    return any(
        each is not None and _digits(each) >= _ROUNDED_DIGITS for each in [*numbers, _rational(expression)]
    )


def _digits(number: sympy.Rational) -> int:
    """Return how many digits a decimal has between its zeros; integers count as short."""
    if number.q == 1:
        return 0
    if not _is_literal(number) or number.q.bit_length() > _LONGEST:
        return _ROUNDED_DIGITS
    return len(str(abs(number.p) * 10 ** (number.q.bit_length()) // number.q).strip("0"))


def _is_literal(number: sympy.Rational | None) -> bool:
    """Return whether a number can be written out as a decimal."""
    if number is None:
        return False
    rest = number.q
    for prime in (2, 5):
        while rest % prime == 0:
            rest //= prime
    return bool(rest == 1)


def _same_at_points(gold: Any, answer: Any, names: Sequence[str], tolerance: float) -> bool | None:
    """Compare at points of both signs, so that |x| is not x. Points where neither has a value say nothing."""
    seeded = random.Random(0)
    compared = 0
    bounds = sorted(_bounds(gold) | _bounds(answer))
    for _ in range(4 * _POINTS):
        point = {name: sympy.Rational(seeded.randrange(-4000, 4000), 1009) for name in names}
        if compared >= 2:
            point = {name: abs(value) for name, value in point.items()}
        point.update({name: sympy.Integer(seeded.randrange(1, _LARGEST_BOUND)) for name in bounds})
        values = _value(gold, point), _value(answer, point)
        if None in values:
            return None
        known = [bool(value.is_number and value.is_finite) for value in values]
        if known[0] != known[1]:
            return False
        if not all(known):
            continue
        if not _close(*values, tolerance):
            return False
        compared += 1
        if compared == _POINTS:
            return True
    return True if compared >= _CONFIRMED_POINTS else None


def _bounds(expression: Any) -> set[str]:
    """Return the variables over which a sum or a product runs."""
    sums = expression.atoms(sympy.Sum, sympy.Product)
    return {name for each in sums for limit in each.limits for end in limit[1:] for name in _symbols(end)}


def _value(expression: Any, point: dict[str, Any]) -> Any:
    """Return the value of an expression at a point, as sympy's number, or None if sympy finds none."""
    values = {
        symbol: sympy.I if symbol.name == "i" else point.get(symbol.name, symbol)
        for symbol in expression.free_symbols
    }
    try:
        value = expression.xreplace(values).doit().evalf(_DIGITS)
    except (TypeError, ValueError, NotImplementedError, ArithmeticError, AttributeError, RecursionError):
        return None
    return None if value.free_symbols else value


def _close(a: Any, b: Any, tolerance: float) -> bool:
    size = max(abs(a), abs(b))
    return bool(abs(a - b) <= size * tolerance * _ROUNDING)
