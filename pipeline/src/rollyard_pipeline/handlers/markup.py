"""Mark-up of answers: one spelling for what LaTeX, Markdown and Unicode spell in many ways."""

from __future__ import annotations

import re
import unicodedata
from typing import Final

from rollyard_pipeline.handlers.tables import words

MAX_ANSWER: Final = 4096
"""Characters. No answer is longer than this."""
_SUPERSCRIPTS: Final = re.compile("[⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻]++")
_VULGAR: Final = re.compile("[¼-¾⅐-⅞]")
_SAME: Final = str.maketrans(
    {
        **dict.fromkeys("−–‐‑‒﹣－", "-"),
        **dict.fromkeys("·⋅∙•×✕∗", "*"),
        **dict.fromkeys("⁄∕÷", "/"),
        **dict.fromkeys("≃≅∼", "≈"),
        **dict.fromkeys("º˚", "°"),
        **dict.fromkeys("⊙☉", "odot"),
        **dict.fromkeys("\0\1\2\u200b\u200c\u200d\u2060\ufeff\u00ad", ""),
        "″": " arcsec",
        "′": " arcmin",
        "~": " ",
    }
)
"""Characters that are written in place of each other. None of them becomes a letter that could be a
choice."""
_COMMANDS: Final = {
    **dict.fromkeys((",", ";", ":", ">", " ", "\n", "(", ")", "[", "]", "{", "}", "\\"), " "),
    **dict.fromkeys(("quad", "qquad", "thinspace", "enspace", "displaystyle"), " "),
    **dict.fromkeys(("!", "$", "left", "right", "big", "Big", "limits"), ""),
    **dict.fromkeys(("cdot", "times", "ast", "bullet"), "*"),
    **dict.fromkeys(("approx", "simeq", "sim", "cong"), "≈"),
    **dict.fromkeys(("circ", "degree"), "°"),
    **dict.fromkeys(("le", "leq", "leqslant", "lt", "ll", "lesssim"), "≤"),
    **dict.fromkeys(("ge", "geq", "geqslant", "gt", "gg", "gtrsim"), "≥"),
    **dict.fromkeys(("ne", "neq"), "≠"),
    **dict.fromkeys(("to", "rightarrow", "Rightarrow", "longrightarrow", "implies", "therefore"), ", "),
    "AA": "Å",
    "odot": "odot",
    "sun": "odot",
    "Omega": "Ω",
    "ohm": "Ω",
    "mu": "μ",
    "pi": "π",
    "pm": "±",
    "div": "/",
}
"""What stands for a command of LaTeX. Others, such as variables and functions, stay what they are."""
_WRAPPER, _FRAC, _SQRT = "\0", "\1", "\2"
"""What stands for these commands until their groups have been read."""
_WITH_GROUPS: Final = {
    **dict.fromkeys(
        words(
            "text textbf textit textrm textsf emph mathrm mathbf mathit mathsf boldsymbol bf rm operatorname",
            "boxed fbox ce num unit si SI qty underline hbox mbox",
        ),
        _WRAPPER,
    ),
    **dict.fromkeys(("frac", "dfrac", "tfrac", "cfrac"), _FRAC),
    "sqrt": _SQRT,
}
_COMMAND: Final = re.compile(r"\\(?:(mu)(?![A-Za-z])\s*+|([A-Za-z]++)|(.))", re.DOTALL)
_ALIGNED: Final = re.compile(r"\\(?:begin|end)\s*+\{[A-Za-z]++\*?\}|&(?=\s*+[=≈])")
_ADJACENT: Final = re.compile(r"\0\s*+\{([^{}]*+)\}(?=\0)")
_WRAPPED: Final = re.compile(r"\0\s*+\{([^{}]*+)\}")
_FRACTION: Final = re.compile("\1" + r"\s*+(?:\{([^{}]*+)\}|(\d))\s*+(?:\{([^{}]*+)\}|(\d))")
_ROOT: Final = re.compile("\2" + r"\s*+(?:\{([^{}]*+)\}|(\d))|√\s*+([\d.]++|[A-Za-zΩ]++)")
_POWER: Final = re.compile(r"\^\s*+\{([^{}]*+)\}")
_INDEX: Final = re.compile(r"_\s*+\{([^{}]*+)\}")
_DEGREE: Final = re.compile(r"\^\s*+\(?\s*+(?:°|o(?=\)?\s*+C\b))\s*+\)?")
_WORD: Final = re.compile(r"[^\W\d_]+")
_SYMBOL: Final = 2  # letters, as in most symbols of elements
_SHORT_WORDS: Final = words(
    "am an as at be by do go he if in is it me my no of on or so to up us we",
)
_CHARGE: Final = re.compile(r"\^(?:\((\d*[+-])\)|([+-]))(?!\s*[\w(])")
_QUOTED: Final = re.compile(r"\A(?:\"(.*)\"|'(.*)'|“(.*)”|‘(.*)’)\Z", re.DOTALL)
_STOPS: Final = ".,;:。"
_NESTED: Final = 6
"""The number of nested LaTeX groups that are read."""


def unmarked(text: str) -> str:
    r"""Return at most the last `MAX_ANSWER` characters of a text, without the mark-up of LaTeX and Markdown.

    `\frac{3}{4}` becomes `(3)/(4)`, `10⁻⁵` and `10^{-5}` become `10^(-5)`, `\sqrt2` becomes `√(2)`, `\,` a
    space, and `×` and `\cdot` become `*`. Other characters have their compatible form (NFKC).
    """
    text = text.strip()[-MAX_ANSWER:]
    text = _SUPERSCRIPTS.sub(lambda match: "^{" + unicodedata.normalize("NFKC", match[0]) + "}", text)
    text = _VULGAR.sub(lambda match: " " + unicodedata.normalize("NFKC", match[0]), text)
    text = _emphasis_removed(text.replace("`", "").replace("{,}", ","))
    text = unicodedata.normalize("NFKC", text.translate(_SAME)).translate(_SAME)[:MAX_ANSWER]
    text = _ALIGNED.sub("", text)
    text = _grouped(_COMMAND.sub(_command, text))
    text = _DEGREE.sub("°", re.sub("[{}$\0\1\2]", "", text))
    return re.sub(r"[^\S\n]++", " ", text).strip()


def _emphasis_removed(text: str) -> str:
    text = re.sub(r"(?<=\d)\*\*(?=[+-]?\d)", "^", text)  # This is a power in Python.
    text = text.replace("**", "").replace("__", "")
    return re.sub(r"(?<!\S)\*(?=\S)|(?<=\S)\*(?![^\s.,;:)])", "", text)


def _grouped(text: str) -> str:
    for _ in range(_NESTED):
        before = text
        text = _WRAPPED.sub(r"\1", _ADJACENT.sub(r"\1 ", text))
        text = _POWER.sub(r"^(\1)", text)
        text = _INDEX.sub(lambda match: "_" + re.sub(r"[\W_]", "", match[1]), text)
        text = _ROOT.sub(lambda match: f"√({match[1] or match[2] or match[3]})", text)
        text = _FRACTION.sub(lambda match: f"({match[1] or match[2]})/({match[3] or match[4]})", text)
        if text == before:
            break
    return text


def _command(match: re.Match[str]) -> str:
    name = match[1] or match[2] or match[3]
    return _WITH_GROUPS.get(name) or _COMMANDS.get(name, f"\\{name} " if name.isalpha() else name)


def folded(text: str) -> str:
    """Return a text without the parts that do not matter when two answers in words are compared.

    That is mark-up, the case of words, white space next to punctuation and between a number and its unit,
    quotation marks around it, and its last full stop. The case of symbols such as Co, CO and AaBb stays.
    """
    text = _WORD.sub(_word, _CHARGE.sub(r"\1\2", unmarked(text)))
    text = re.sub(r"_(?=\w)", "", text)
    text = re.sub(r"\s*+([^\w\s])\s*+", r"\1", text)
    text = re.sub(r"(?<=\d) (?=[^\W\d_])", "", text)
    text = _QUOTED.sub(r"\1\2\3\4", " ".join(text.split()).rstrip(_STOPS))
    return text.rstrip(_STOPS)


def _word(match: re.Match[str]) -> str:
    word = match[0]
    lower = word.casefold()
    if len(word) == _SYMBOL:
        return lower if lower in _SHORT_WORDS else word
    # A capital letter among small ones is that of a symbol.
    return lower if word.isupper() or word[1:].islower() or len(word) < _SYMBOL else word
