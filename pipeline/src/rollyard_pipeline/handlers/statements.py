r"""Where in a text its answer stands.

One place is chosen by its form, never by what stands there: the boxes, else what follows the last `####` or
"answer is", else the last sentence. Of several numbers in a sentence that is not a list, the last one that is
stated ("is 5", "= 5", "gives 5") counts; where none is stated, there is no answer.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
from dataclasses import dataclass
from typing import Final

from rollyard_pipeline.handlers.answers import closing_brace

_LAST: Final = 32_768  # Characters. The answer stands at the end.
_LONGEST: Final = 4096  # Characters. No answer is longer than this.
_MOST_BOXES: Final = 64
_MOST_SENTENCES: Final = 8  # From the end of the text.
_BOX: Final = re.compile(r"\\(?:boxed|fbox)\s{0,4}\{")
_CLOSE: Final = 10  # Characters between boxes that belong together, as in math-verify.
_NEAR: Final = 70  # The same where a separator stands between them.
_SEPARATOR: Final = re.compile(r"\b(?:and|or)\b|[,;]")
_JOINED: Final = re.compile(
    r"(?:\s|\$|\\[()\[\]]|\\q?quad|\\[,;: ])*+(?:\\text\s?\{\s*(?:and|or)\s*\}|and|or|[,;，、或和])"
    r"(?:\s|[$,]|and|or|\\[()\[\]]|\\q?quad|\\[,;: ]|\\text\s?\{\s*(?:and|or)\s*\})*+"
)

_HASHES: Final = re.compile(r"####[ \t]{0,8}([^#\n][^\n]{0,4096})")
_HASHED_NUMBER: Final = re.compile(
    r"[-+−$€£\\(\[{]*\.?\d[^A-Za-z\n]*(?:[A-Za-z%°\\][^\n]{0,40})?|\(?[A-Z]\)?\.?"
)
_ENVIRONMENT: Final = re.compile(r"\{[a-z]{1,12}\*?\}")
_NUMBERED_HEADING: Final = re.compile(r"\d+[.):]\s")
_ANSWER_IS: Final = re.compile(
    r"\b(?:answers?|(?:correct|right|best)\s(?:option|choice|letter))\b[*_]{0,3}"
    r"(?:[^\n.:=：]{0,60}?\s(?:is|are)\b|\s{0,4}(?:is|are|[:=：]))[*_]{0,3}\s{0,8}[:：]?[*_]{0,3}"
    r"|答案\s{0,4}(?:是|[应應]?[为為]|：|:)\s{0,4}[:：]?",
    re.IGNORECASE,
)
_FINAL: Final = re.compile(r"final answer is:?\s{0,4}(?:\$|\\[(\[]|-?\d)", re.IGNORECASE)
_HOPE: Final = re.compile(r"[.,]?\s{0,4}I hope it is correct.{0,2000}", re.IGNORECASE | re.DOTALL)
_TOKEN: Final = re.compile(r"<\|[^|>\n]{1,40}\|>.{0,20}")
_FENCE: Final = re.compile(r"^[ \t]{0,3}(?:```|~~~)[ \t]*\w*[ \t]*$", re.MULTILINE)
_STRONG: Final = re.compile(r"(?<![A-Za-z\d_)\]}*\\])\*\*(?=[^\s*])([^*\n]{1,1000})\*\*(?![A-Za-z\d_(*])")
_ALIGNED: Final = re.compile(
    r"\\begin\{(align\*?|aligned|gather\*?|eqnarray\*?)\}"
    r"((?:[^\\]|\\[^e]|\\e(?!nd\b)){1,4096})\\end\{\1\}\s*(\\\]|)\.?"
)
_JSON: Final = re.compile(
    r"\{\s{0,20}\"(?:final[_ ])?answer\"\s{0,20}:\s{0,20}"
    r"(?:\"([^\"\\{}]{1,400})\"|([^\"{}\[\],]{1,400}))\s{0,20}\}\s*$"
)
_TAG: Final = ("<answer>", "</answer>")
_LEADING: Final = re.compile(
    r"(?:=+>|[→⇒∴]|\\(?:therefore|Rightarrow)(?![A-Za-z]))\s*|(?:A(?:ns)?\s?[:：]|Ans\.)\s+(?=[-−\d$\\(])"
    r"|(?:option|choice|letter)\s+(?=\(?[A-Z]\)?\W*$)"
    r"|(?:hence|so|thus|therefore|then|consequently|and so)\b\s{0,4},?\s{0,4}(?=[A-Za-z]\s{0,4}=)",
    re.IGNORECASE,
)
"""What stands before an answer and is not part of it."""

_MATH: Final = re.compile(
    r"\$\$(?P<a>(?:[^$\\]|\\.){1,4096})\$\$"
    # As in Pandoc: "$2 = $18" holds prices.
    r"|(?<!\\)\$(?P<b>\s(?:[^$\\\n]|\\[^\n]){0,4096}|(?!\s)(?:[^$\\\n]|\\[^\n]){1,4096}(?<!\s))\$(?!\d)"
    r"|\\\((?P<c>(?:[^\\]|\\[^()]){1,4096})\\\)|\\\[(?P<d>(?:[^\\]|\\[^\[\]]){1,4096})\\\]",
    re.DOTALL,
)
_JOINT: Final = re.compile(r"[\s\"']*(?:,?\s*(?:and|or)|[,;，；、或和与與及])[\s\"']*")
_AFTER_MATH: Final = re.compile(r"\s*(?:\\?%|percent\b|percentage\b|pct\b)", re.IGNORECASE)
_SENTENCE_END: Final = re.compile(r"(?<=[^A-Z\s])[.。!！?？](?=\s|$|\*)|[。！\n]")
_TEXT: Final = re.compile(r"\\(?:text(?:rm|bf|it|normal|sf)?|mathrm|mbox)\s?\{([^{}]*)\}")
_COMMAND: Final = re.compile(
    r"\\[A-Za-z]+"
    r"|\b(?:sqrt|sin|cos|tan|cot|sec|csc|arcsin|arccos|arctan|log|ln|exp|pi|inf|infinity|and|or|mod"
    r"|percent|pct)\b"
)
_PROSE: Final = re.compile(
    r"(?<![A-Za-z])[A-Za-z]{2,}+[,;:]?\s{1,20}(?:[a-z]\s{1,20}){0,3}[$€£]?[A-Za-z]{2}"
    r"|(?<![A-Za-z])[A-Za-z]{2,}+\s?[,;:]?\s{1,20}[$€£]?\d"
    r"|[\u4e00-\u9fff](?<![或且和与與及])|[A-Za-z]'s\b"
)
_QUANTITY: Final = re.compile(r"((?:\\[A-Za-z]+|[^A-Za-z\u4e00-\u9fff\\]|\\[^A-Za-z])*)([^\d=<>\\]*)")
_NO_UNITS: Final = re.compile(
    r"\b(?:if|when|or|unless|except|for|where|with|is|are|not|but|than|to|by|because|since|as|which|that"
    r"|only|at|from|and|plus|minus|times|squared|cubed|factorial)\b",
    re.IGNORECASE,
)
_NUMBER: Final = (
    r"[-+−]?[$€£]?(?:\d{1,400}(?:[,\u2009\u202f ]\d{3}(?!\d)){0,99}(?:[.,]\d{1,400})?|\.\d{1,400})"
    r"(?:\s{1,4}\d{1,40}\s?/\s?\d{1,40}|\s?/\s?\d{1,40}|\s?[×x*]\s?10\^?\{?[-−]?\d{1,4}\}?)?"
    r"(?:\s?\\?%|\s(?:percent|pct|hundred|thousand|million|billion|trillion|dozen)\b)?"
)
_NO_WORD: Final = r"(?<![^\W\u4e00-\u9fff])(?<!\.)"
_COMMA: Final = r"(?:\s?[,，、]\s?(?:and\s|or\s)?|\s?\b(?:and|or)\s|\s?[或和]\s?)"
_NUMBERS: Final = re.compile(
    rf"{_NO_WORD}(?:[(\[]\s?{_NUMBER}(?:\s?,\s?{_NUMBER}){{1,20}}\s?[)\]]"
    rf"|{_NUMBER}(?:{_COMMA}{_NUMBER}){{0,400}})"
)
_STATED: Final = re.compile(
    r"(?:[=:：]|'s|[为為是有得共]|等[于於]|\b(?:is|are|equals?|equal to|be|was|were|gives?|gets?|got|makes?"
    r"|yields?|by|only|exactly|approximately|about|total of|pays?|costs?|needs?|earns?|so|thus|hence"
    r"|therefore|then|(?:profit|sum|cost|price|value|amount) of)\b)"
    r"\s*(?:(?:an?|the|now|just|thus|then|therefore|simply|indeed|roughly|also)\s+)?"
    r"[*_\"'(]{0,3}$",
    re.IGNORECASE,
)
_DENIED: Final = re.compile(
    r"(?:(?:\b(?:not|never|cannot|neither|nor)|n['’]t)(?:\s+(?:an?|the|be|equals?|to|exactly|really|actually"
    r"|always|simply|just|only|quite|as|many|much|about|answer|right|correct|is|even|necessarily))*"
    r"|\b(?:than|(?:at|the)\s+(?:most|least)|(?:up|close|next|prior|raised|not)\s+to|under|over|above|below"
    r"|beyond|within|between|from|until|till|before|after|near|nearly|almost|negative|minus|plus|times|modulo|mod"
    r"|root|square|cube|double|twice|triple|thrice|half|(?:anything|everything|nothing|all)\s+but|except"
    r"|excluding|besides|item|page|step|line|row|column|section|chapter|equation|figure|question|problem|unless|either|maybe|perhaps|possibly|otherwise|else|or|versus|vs"
    r"|(?:multiplied|divided|divisible|multiply|divide)\s+by)(?:\s+(?:an?|the))?"
    r"|(?<!total)(?<!value)(?<!profit)(?<!cost)(?<!price)(?<!result)(?<!answer)(?<!amount)(?<!length)"
    r"(?<!area)(?<!volume)(?<!speed)(?<!rate)(?<!distance)(?<!average)(?<!probability)(?<!maximum)"
    r"(?<!minimum)\s+of"
    r"|[<>≤≥≠~^_*/×·÷(√+]|\d\s*[-−–]|\d\s?:"
    r"|不[是为為]|不等[于於]|非|至[少多]|最[多少]|超[过過]|[大小][于於]|不[到足]|或者?|除以|乘以|[加减減负負从從到])"
    r"\s*[*_\"']{0,3}$",
    re.IGNORECASE,
)
"""The end of what stands before a number or formula that is not what the sentence states."""
_CHANGED: Final = re.compile(
    r"\s*(?:!\s*\S|[\^_²³]|:\s?\d|[-−–]\s*[\d(\\$]|-\w|[+*/×·÷=<>≤≥≠]\s*[\w(\\$-]"
    r"|(?!(?:kg|km|cm|mm|ml|mL|lbs?|min|hrs?|am|pm|th|st|nd|rd|cents?)\b|c?m[²³])(?<=\d)[A-Za-z(]"
    r"|(?:[A-Za-z]+\s+)?(?:(?:or|and)\s+(?:more|less|fewer|above|up|below|higher|lower|greater|under|over)\b"
    r"|at\s+(?:most|least)\b|(?:is|are|was)\s+(?:not|wrong|incorrect|impossible|too|false|excluded)\b"
    r"|(?:is|are|was)n['’]t|(?:or|unless)\b)"
    r"|(?:[A-Za-z]+\s+)?(?:less|more|fewer|greater|smaller|larger)\s+than\b|(?:squared|cubed|factorial|plus|minus|times|divided|multiplied|modulo|mod|over\s+\w+)\b|不[是对對行])",
    re.IGNORECASE,
)
"""The beginning of what stands after such a number or formula."""
_NAMED: Final = re.compile(
    r"(?:(?:so|thus|hence|therefore),?\s)?\b(?:it|this|that)\s(?:is|was|(?:will|would|must)\sbe)\s([A-Za-z]+)[.!]?$",
    re.IGNORECASE,
)
_CONJUNCTIONS: Final = str.maketrans(
    {"或": " or ", "且": " and ", "和": " and ", "与": " and ", "與": " and ", "及": " and "}
)
_CHINESE_UNIT: Final = re.compile(r"^((?:\\?\$)?-?\d[\d.,/]*\$?)\s?([\u4e00-\u9fff]{1,4})$")
_FOR_ALL: Final = re.compile(r"[,\s]{0,8}(?:\\text\{\s{0,4})?\bfor (?:all|any|every)\b[^0-9=<>]{0,60}$")
_REMARK: Final = re.compile(r"(?<=[A-Za-z%])\s\([^()$\\]{0,200}[=×*+][^()$\\]{0,200}\)[.。]?$")
_HEDGE: Final = re.compile(
    r"\b(?:or|unless|otherwise|else|maybe|perhaps|possibly|alternatively|versus|vs)\b|\band\s*$|或"
    r"|^\s*(?:feet|foot|ft|hours?|hrs?|minutes?|min|dollars|pounds|degrees|in|against|out\s+of)\s*$"
    r"|^\s*(?:to|through|[-−–—&/|]|\.{2,3}|到|至)\s*$",
    re.IGNORECASE,
)
"""What stands between two values if neither is stated."""
_CASES: Final = re.compile(r"\bif\b.{0,200}\b(?:if|otherwise|else)\b", re.IGNORECASE | re.DOTALL)
_ASIDE: Final = re.compile(
    r"\b(?:which(?!\s+is\b)|attained|achieved|reached|occurs|occurring|when|where|for|at|if|since|because|with|using"
    r"|given|whose|while|instead|compared|from|not)\b|\bin\s*$",
    re.IGNORECASE,
)
"""What leads to a value other than the answer: "attained at x = 3"."""


@dataclass(frozen=True)
class Statement:
    """An answer as it stands in a text.

    Attributes:
        text: The answer.
        where: Where it stands, for people.
        whole: The box or the sentence that it was taken from, or "" if that is the answer.
        words: Whether it is words, which equal only the same words.
    """

    text: str
    where: str
    whole: str = ""
    words: bool = False


def statements(text: str) -> list[Statement]:
    r"""Return the answer of a text, or none if there is none.

    There are two only where boxes stand close together (`\boxed{2} \boxed{3}`): the last box, and the list of
    them. Boxes that "and", "or" or a comma joins are only the list.
    """
    text = _STRONG.sub(r"\1", _FENCE.sub("", _TOKEN.sub("", text[-_LAST:]))).strip()
    tagged = _tagged(text)
    if tagged is not None:
        return tagged
    json = _JSON.search(text[-_LONGEST:])
    if json is not None:
        return [dataclasses.replace(each, where="in JSON") for each in statements(json[1] or json[2])]
    text = _without_rows(text)
    boxes, joined = _boxes(text)
    mark = _last_mark(text)
    if boxes and not (mark is not None and mark.final and mark.start > text.rfind("\\boxed")):
        last = _of_box(boxes[-1])
        together = Statement(", ".join(_of_box(box).text for box in boxes), "in all boxes together")
        return [last] if len(boxes) == 1 else [together] if joined else [last, together]
    if mark is not None:
        statement = _stated(mark.text, mark.where, first=True)
        if statement.text:
            return [statement]
    statement = _of_sentences(text)
    return [statement] if statement.text else []


def expected(gold: str) -> Statement:
    r"""Return the expected answer: what a solution states in a box or after `####` or "answer is", else all.

    A sentence ("All n > 2") is words, and not the number in it.
    """
    text = gold[-_LAST:]
    marked = bool(_BOX.search(text)) or _last_mark(text) is not None
    stated = statements(text)[-1:] if marked else []
    if stated:
        return stated[0]
    text = plain(gold)
    shown = _without_commands(text)
    prose = _is_prose(shown) or re.search(r"\b(?:if|unless|except|otherwise)\b", shown) is not None
    return Statement(text, "", words=prose and not _is_quantity(text))


def _tagged(text: str) -> list[Statement] | None:
    """Return what stands in `<answer>…</answer>` or, where several stand together, their list."""
    opening, closing = _TAG
    contents: list[str] = []
    before = text
    while len(contents) < _MOST_BOXES:
        end = before.rfind(closing)
        start = before.rfind(opening, 0, max(end, 0))
        rest = before[end + len(closing) :]
        if start < 0 or (rest.strip() and not _JOINT.fullmatch(rest) if contents else _BOX.search(rest)):
            break
        contents.insert(0, before[start + len(opening) : end].strip())
        before = before[:start]
    if len(set(contents)) > 1:
        return [Statement(", ".join(contents), "in <answer>")]
    return (
        [dataclasses.replace(each, where="in <answer>") for each in statements(contents[0])]
        if contents
        else None
    )


def _without_rows(text: str) -> str:
    """Return the text with the last row of a calculation (`&= 24`) instead of the `align` at its end."""
    start = text.rfind("\\begin{")
    match = _ALIGNED.fullmatch(text, start) if start >= 0 else None
    if match is None:
        return text
    row = re.split(r"\\\\(?![A-Za-z])", match[2].strip().removesuffix("\\\\"))[-1].replace("&", "").strip()
    if not row.startswith("="):
        return text
    before = text[:start].rstrip()
    before = before.removesuffix("\\[") if match[3] else before
    return before + "\n$$" + row[1:].strip() + "$$"


def _of_box(box: str) -> Statement:
    where = "in the last box"
    shown = _TEXT.sub(r" \1 ", box)
    if _is_quantity(box) or not _is_prose(_without_commands(box)):
        return Statement(_in_latin(box), where)
    mark = _last_mark(shown)
    return _stated(shown if mark is None else mark.text, where, first=True, whole=box)


def _boxes(text: str) -> tuple[list[str], bool]:
    """Return the content of the last box and, before it, of those boxes that stand together with it.

    Also return whether nothing but "and", "or" and commas stands between them.
    """
    contents: list[str] = []
    joined = True
    next_start: int | None = None
    openings = list(_BOX.finditer(text))[-_MOST_BOXES:]
    for opening in reversed(openings):
        end = closing_brace(text, opening.end())
        if end is None:
            continue
        content = text[opening.end() : end].strip()
        if next_start is not None:
            if end > next_start:  # It holds the boxes that were found.
                contents, next_start = [_BOX.sub("{", content)], opening.start()
                continue
            between = text[end + 1 : next_start]
            near = len(between) < _NEAR and content != contents[0] and _SEPARATOR.search(between)
            if len(between) >= _CLOSE and not near:
                break
            joined = joined and (_JOINED.fullmatch(between) is not None or content in ("", contents[0]))
        if content and contents[:1] != [content]:
            contents.insert(0, content)
        next_start = opening.start() if contents else None
    if not contents and openings:  # The text ended within its box.
        rest = text[openings[-1].end() :].partition("\n")[0].strip()
        return ([rest[:_LONGEST]] if rest else []), False
    return contents, joined


@dataclass(frozen=True)
class _Mark:
    """What follows "answer is" or `####`, and whether it says "final answer is" and a formula or number."""

    start: int
    text: str
    where: str
    final: bool


def _last_mark(text: str) -> _Mark | None:
    """Return what follows the last "answer is" or GSM8K's `####`, up to the end of its line.

    `####` also begins a heading of Markdown. It is GSM8K's mark where a number or a letter follows.
    """
    hashes = [match for match in _HASHES.finditer(text) if _is_hashed(match[1].strip())][-1:]
    stated = list(_ANSWER_IS.finditer(text))[-1:]
    last = max((*hashes, *stated), key=lambda match: match.start(), default=None)
    if last is None:
        return None
    final = last in stated and _FINAL.match(text, max(0, last.start() - 6)) is not None
    answer = last[1] if last in hashes else text[last.end() :].lstrip(" \t*_\n\r>")
    if not answer.startswith(("\\[", "$$", "\\begin")):
        answer = answer.partition("\n")[0]
    where = "after '####'" if last in hashes else "after 'answer is'"
    return _Mark(last.start(), _HOPE.sub("", answer[:_LONGEST]), where, final)


def _is_hashed(text: str) -> bool:
    if _HASHED_NUMBER.fullmatch(text):
        return not _NUMBERED_HEADING.match(text)
    return re.search(r"[A-Za-z]{3}|[\u4e00-\u9fff]|:$", _ENVIRONMENT.sub("", _COMMAND.sub("", text))) is None


def _of_sentences(text: str) -> Statement:
    """Return what the last sentence of a text states; one without a number ("Well done!") is skipped."""
    text = _HOPE.sub("", text)
    last_line = text.rpartition("\n")[2][-_LONGEST:]
    where = "at the end of the text"
    prose = _is_sentence(last_line)
    if prose or text.endswith(("\\]", "$$")):
        for sentence in _sentences(text[-_LONGEST:])[-_MOST_SENTENCES:][::-1]:
            statement = _stated(sentence, where)
            if statement.text and re.search(r"\d|\\", statement.text):
                return statement
    named = _NAMED.fullmatch(next(reversed(_sentences(last_line)), ""))
    if prose and named is None:
        return Statement(plain(last_line), where, words=True)
    return _stated(last_line if named is None else named[0], where)


def _sentences(text: str) -> list[str]:
    """Return the sentences of a text. Formulas are not split."""
    inside = iter(match.span() for match in _MATH.finditer(text))
    start, stop = next(inside, (len(text), len(text)))
    ends = []
    for match in _SENTENCE_END.finditer(text):
        while stop <= match.end() - 1 and stop < len(text):
            start, stop = next(inside, (len(text), len(text)))
        if not start < match.end() < stop:
            ends.append(match.end())
    parts = [text[i:j].strip() for i, j in itertools.pairwise([0, *ends, len(text)])]
    return [part for part in parts if part]


def _stated(text: str, where: str, *, first: bool = False, whole: str = "") -> Statement:
    """Return what one sentence states: all of it if it is not prose, else its formula or its number.

    Args:
        text: The sentence.
        where: Where it stands.
        first: Whether it follows "answer is", so that a value at its beginning is the answer.
        whole: What it was taken from.
    """
    text = text.strip()
    whole = plain(whole or text)
    sentence = text
    if first and _is_sentence(text):
        sentence = next(iter(_sentences(text)), text)
    sentence = _without_remark(sentence)
    values = _values(sentence)
    if not _is_sentence(sentence):
        lone = len(values) == 1 and values[0].formula and plain(sentence) == plain(sentence[: values[0].end])
        return (
            values[0].said(where, whole)
            if lone and not values[0].start
            else Statement(plain(sentence), where, whole)
        )
    value = _chosen(sentence, values, first=first)
    if value is not None:
        return value.said(where, whole)
    named = _NAMED.fullmatch(sentence)
    return Statement(plain(sentence if named is None else named[1]), where, whole, words=True)


def _without_remark(text: str) -> str:
    """Return a sentence without "for all x" or the calculation in parentheses at its end."""
    match = _REMARK.search(text) or _FOR_ALL.search(text)
    return text if match is None or _HEDGE.search(match[0]) else text[: match.start()]


@dataclass(frozen=True)
class _Value:
    """A formula or a number in a sentence, or a list of them that "and", "or" or commas join."""

    start: int
    end: int
    text: str
    formula: bool

    def said(self, where: str, whole: str) -> Statement:
        return Statement(self.text, where, whole)


def _values(text: str) -> list[_Value]:
    values: list[_Value] = []
    for match in _MATH.finditer(text):
        content = plain(next(part for part in match.groups() if part is not None))
        percent = _AFTER_MATH.match(text, match.end())
        content += r"\%" if percent is not None and "%" not in content else ""
        end = match.end() if percent is None else percent.end()
        if values and _JOINT.fullmatch(text, values[-1].end, match.start()):
            last = values.pop()
            values.append(_Value(last.start, end, f"{last.text} , {content}", True))
        else:
            values.append(_Value(match.start(), end, content, True))
    masked = _MATH.sub(lambda match: "\x00" * len(match[0]), text)
    values += [
        _Value(match.start(), match.end(), match[0].strip(" ,"), False) for match in _NUMBERS.finditer(masked)
    ]
    return sorted(values, key=lambda value: value.start)


def _chosen(text: str, values: list[_Value], *, first: bool) -> _Value | None:
    """Return the value that a sentence states, or None: the last one that is, else the only one."""
    ends = [0, *(value.end for value in values)]
    gaps = [text[end : value.start] for end, value in zip(ends, values, strict=False)]
    if first and values and not gaps[0].strip(" *_\"'"):
        chosen = 0
    else:
        main = [index for index, gap in enumerate(gaps) if not _ASIDE.search(gap)]
        stated = [index for index in main if _is_stated(text, values[index])]
        stated = [index for index in stated if not _is_denied(text, values[index])]
        formulas = [index for index, value in enumerate(values) if value.formula]
        rest = [index for index in main if index in formulas] or formulas
        lone = [0] if len(values) == 1 else main if len(main) == 1 else []
        if not stated and not rest and not lone:
            return None
        chosen = (stated or rest or lone)[-1]
    value = values[chosen]
    hedged = any(map(_HEDGE.search, gaps[max(chosen, 1) : chosen + 2])) or _CASES.search(text, value.end)
    return None if hedged or _is_denied(text, value) else value


def _is_denied(text: str, value: _Value) -> bool:
    before = text[max(0, value.start - 60) : value.start]
    return bool(_DENIED.search(before) or _CHANGED.match(text, value.end))


def _is_stated(text: str, value: _Value) -> bool:
    if value.formula and "=" in value.text:
        return True
    return value.start == 0 or _STATED.search(text[max(0, value.start - 60) : value.start]) is not None


def _without_commands(text: str) -> str:
    return _TEXT.sub(r" \1 ", text).replace("$", "")


def _is_prose(text: str) -> bool:
    return _PROSE.search(_COMMAND.sub(" ", text)) is not None


def _is_quantity(text: str) -> bool:
    r"""Return whether a text is a number or formula and then its unit, as `5\text{ square units}`."""
    match = _QUANTITY.fullmatch(_without_commands(text).strip())
    return match is not None and re.search(r"\d", match[1]) is not None and not _NO_UNITS.search(match[2])


def _is_sentence(text: str) -> bool:
    """Return whether words stand beside a formula or a number."""
    if _is_prose(_TEXT.sub(" ", text)):
        return True
    outside = _MATH.sub(" ", text)
    return outside != text and re.search(r"[A-Za-z]{2,}", _COMMAND.sub(" ", outside)) is not None


def plain(text: str) -> str:
    """Return an answer without the signs around it: Markdown, quotes, dollars, the full stop."""
    text = _LEADING.sub("", text.strip(), count=1) if _LEADING.match(text.strip()) else text.strip()
    before = None
    while before != text:
        before = text
        text = text.strip().strip('*`_"').strip().rstrip(".。,;✅✓✔").strip()
        if len(text) > 1 and text[0] == text[-1] == "'":  # A single quote may be a prime: x'.
            text = text[1:-1]
        if len(text) > 1 and text[0] == text[-1] == "$" and "$" not in text.strip("$"):
            text = text.strip("$")
        for start, end in (("\\(", "\\)"), ("\\[", "\\]")):
            if text.startswith(start) and text.endswith(end) and text.count(start) == 1:
                text = text[2:-2]
    return _in_latin(text[:_LONGEST])


def _in_latin(text: str) -> str:
    """Return an answer with English for Chinese conjunctions, and with a Chinese unit as text of LaTeX."""
    return _CHINESE_UNIT.sub(r"\1\\text{\2}", text.strip()).translate(_CONJUNCTIONS)
