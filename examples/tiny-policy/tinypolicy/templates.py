"""The task templates: what is asked, the folder it is asked about, and how to find out with a shell.

Every template hides what the last call needs in the folder: the policy has to run a command, read what
it prints, and use that in the next call. Prompts are kept short and come in several wordings.
"""

from __future__ import annotations

import random
from itertools import pairwise
from typing import Final

from tinypolicy.tasks import (
    Draft,
    Template,
    answer_test,
    bash,
    extension,
    files_test,
    names,
    number,
    pairs,
    replace,
    submit,
    text,
)


def _siblings(
    rng: random.Random, folder: str, stems: list[str], words: list[str], low: int, high: int
) -> dict[str, list[str]]:
    """Return files of `low` to `high` lines each below `folder`, all with the same extension."""
    ext = extension(rng)
    return {f"{folder}/{stem}.{ext}": pairs(rng, words, rng.randint(low, high)) for stem in stems}


def _hide(rng: random.Random, lines: list[str], line: str) -> None:
    lines.insert(rng.randint(0, len(lines)), line)


def _texts(files: dict[str, list[str]]) -> dict[str, str]:
    return {path: text(lines) for path, lines in files.items()}


def _two_values(rng: random.Random) -> tuple[str, str]:
    """Return two different numbers of two digits. Two longer ones in one call would need a larger model."""
    old, new = rng.sample(range(10, 100), 2)
    return str(old), str(new)


def count_matching(rng: random.Random) -> Draft:
    folder, stem, word, *others = names(rng, 6)
    path = f"{folder}/{stem}.{extension(rng)}"
    hits = rng.randint(2, 25)
    lines = pairs(rng, [word], hits) + pairs(rng, others, rng.randint(2, 25))
    rng.shuffle(lines)
    prompt = rng.choice(
        (
            "How many lines of {path} contain {word}?",
            "Count the lines with {word} in {path}.",
            "In {path}, how often does a line mention {word}? Submit the number.",
            "Submit the number of lines in {path} that hold {word}.",
            "{word}: on how many lines of {path} is it?",
        )
    ).format(path=path, word=word)
    return Draft(
        prompt,
        {path: text(lines)},
        (bash(f"grep -c {word} {path}"), submit(str(hits))),
        answer_test(str(hits)),
    )


def count_in_mentioning(rng: random.Random) -> Draft:
    folder, word, a, b, c, *stems = names(rng, 5 + rng.randint(2, 4))
    files = _siblings(rng, folder, stems, [a, b, c], 2, 24)
    path = rng.choice(list(files))
    _hide(rng, files[path], f"{word} {number(rng)}")
    count = str(len(files[path]))
    prompt = rng.choice(
        (
            "One file in {folder} mentions {word}. How many lines does it have?",
            "How many lines has the file in {folder} that mentions {word}?",
            "Find the file in {folder} that holds {word} and submit its number of lines.",
            "Count the lines of the one file in {folder} with {word} in it.",
        )
    ).format(folder=folder, word=word)
    return Draft(
        prompt,
        _texts(files),
        (bash(f"grep -l {word} {folder}/*"), bash(f"wc -l {path}"), submit(count)),
        answer_test(count),
    )


def count_files(rng: random.Random) -> Draft:
    folder, inner, other, *stems = names(rng, 3 + rng.randint(6, 16))
    ext, ext2 = rng.sample(("txt", "log", "cfg", "csv", "md"), 2)
    hits = rng.randint(2, len(stems) - 1)
    files = {}
    for index, stem in enumerate(stems):
        place = rng.choice((folder, f"{folder}/{inner}"))
        files[f"{place}/{stem}.{ext if index < hits else ext2}"] = ""
    # This file is outside the folder, and its text also carries the train/held-out split of this task.
    files[f"{other}.{ext}"] = text(pairs(rng, stems, 1))
    prompt = rng.choice(
        (
            "How many {ext} files are below {folder}?",
            "Count the files below {folder} that end in .{ext}.",
            "Submit how many .{ext} files {folder} and its folders hold.",
            "{folder}: how many files of type {ext} are in it, at any depth?",
        )
    ).format(folder=folder, ext=ext)
    kept = dict(files)
    return Draft(
        prompt,
        kept,
        (bash(f"find {folder} -name '*.{ext}' | wc -l"), submit(str(hits))),
        answer_test(str(hits)),
    )


def find_word(rng: random.Random) -> Draft:
    folder, one, two, word, a, b, *stems = names(rng, 6 + rng.randint(2, 4))
    ext = extension(rng)
    files = {}
    for stem in stems:
        place = rng.choice((folder, f"{folder}/{one}", f"{folder}/{two}"))
        files[f"{place}/{stem}.{ext}"] = pairs(rng, [a, b], rng.randint(1, 3))
    path = rng.choice(list(files))
    _hide(rng, files[path], f"{word} {number(rng)}")
    prompt = rng.choice(
        (
            "Which file below {folder} contains {word}? Submit its path.",
            "Submit the path of the file below {folder} that mentions {word}.",
            "Find {word} somewhere below {folder}; the answer is the path of the file.",
            "Where is {word}? Search {folder} and submit the path.",
        )
    ).format(folder=folder, word=word)
    return Draft(prompt, _texts(files), (bash(f"grep -rl {word} {folder}"), submit(path)), answer_test(path))


def find_chain(rng: random.Random) -> Draft:
    length = rng.choice((1, 2, 2, 3))
    chosen = names(rng, 2 * (length + 1))
    ext = extension(rng)
    paths = [f"{chosen[2 * i]}/{chosen[2 * i + 1]}.{ext}" for i in range(length + 1)]
    code = number(rng)
    files = {path: f"next {after}\n" for path, after in pairwise(paths)}
    files[paths[-1]] = f"code {code}\n"
    prompt = rng.choice(
        (
            "Read {path} and follow it from file to file. Submit the code.",
            "{path} leads to a code, maybe over other files. Submit the code.",
            "Start at {path}: each file names the next one, the last holds the code to submit.",
            "Follow the notes from {path} on; what is the code at the end?",
        )
    ).format(path=paths[0])
    return Draft(prompt, files, (*(bash(f"cat {p}") for p in paths), submit(code)), answer_test(code))


def find_either(rng: random.Random) -> Draft:
    folder, stem, folder2, stem2, word, *others = names(rng, 8)
    ext = extension(rng)
    paths = (f"{folder}/{stem}.{ext}", f"{folder2}/{stem2}.{ext}")
    value = number(rng)
    files = {path: pairs(rng, others, rng.randint(1, 5)) for path in paths}
    inside = rng.randint(0, 1)
    _hide(rng, files[paths[inside]], f"{word} {value}")
    prompt = rng.choice(
        (
            "What number does {word} have in {one} or {two}?",
            "Either {one} or {two} has a line with {word}. Submit its number.",
            "Look for {word} in {one}, else in {two}, and submit the number beside it.",
            "Submit the number of {word}; it is in {one} or in {two}.",
        )
    ).format(word=word, one=paths[0], two=paths[1])
    probes = tuple(bash(f"grep {word} {path}") for path in paths[: inside + 1])
    return Draft(prompt, _texts(files), (*probes, submit(value)), answer_test(value))


def filter_mentioning(rng: random.Random) -> Draft:
    folder, word, keep, a, out, *stems = names(rng, 5 + rng.randint(2, 3))
    files = _siblings(rng, folder, stems, [keep, a], 3, 8)
    path = rng.choice(list(files))
    files[path].append(f"{keep} {number(rng)}")
    _hide(rng, files[path], f"{word} {number(rng)}")
    target = f"{out}.{extension(rng)}"
    prompt = rng.choice(
        (
            "One file in {folder} mentions {word}. Save its lines with {keep} to {out}.",
            "Write the lines with {keep} of the file in {folder} that mentions {word} to {out}.",
            "Find the file with {word} in {folder}; put its {keep} lines into {out}.",
            "Make {out} from the {keep} lines of that file in {folder} which has {word}.",
        )
    ).format(folder=folder, word=word, keep=keep, out=target)
    final = _texts(files) | {target: text([line for line in files[path] if keep in line])}
    return Draft(
        prompt,
        _texts(files),
        (bash(f"grep -l {word} {folder}/*"), bash(f"grep {keep} {path} > {target}"), submit("done")),
        files_test(final),
    )


def filter_config(rng: random.Random) -> Draft:
    folder, stem, conf, keep, a, b, out = names(rng, 7)
    path, config, target = f"{folder}/{stem}.{extension(rng)}", f"{conf}.cfg", f"{folder}/{out}.txt"
    lines = pairs(rng, [keep, a, b], rng.randint(4, 16))
    _hide(rng, lines, f"{keep} {number(rng)}")
    key = rng.choice(("keep", "only"))
    prompt = rng.choice(
        (
            "{config} names a word. Save the lines of {path} that contain it to {out}.",
            "Read {config}, then write the lines of {path} with the word named there to {out}.",
            "Filter {path} by the word in {config}; the result goes to {out}.",
            "Which lines of {path} does {config} ask for? Put them into {out}.",
        )
    ).format(config=config, path=path, out=target)
    files = {config: f"{key}={keep}\n", path: text(lines)}
    final = files | {target: text([line for line in lines if keep in line])}
    return Draft(
        prompt,
        files,
        (bash(f"cat {config}"), bash(f"grep {keep} {path} > {target}"), submit("done")),
        files_test(final),
    )


def rename_mentioning(rng: random.Random) -> Draft:
    folder, word, a, b, new, *stems = names(rng, 5 + rng.randint(2, 4))
    files = _siblings(rng, folder, stems, [a, b], 1, 4)
    path = rng.choice(list(files))
    _hide(rng, files[path], f"{word} {number(rng)}")
    target = f"{folder}/{new}.{extension(rng)}"
    prompt = rng.choice(
        (
            "Rename the file in {folder} that mentions {word} to {new}.",
            "One file in {folder} contains {word}. Move it to {new}.",
            "Find the file with {word} in {folder} and rename it to {new}.",
            "{new} shall be the new name of the file in {folder} that has {word} in it.",
        )
    ).format(folder=folder, word=word, new=target)
    final = {target if p == path else p: t for p, t in _texts(files).items()}
    return Draft(
        prompt,
        _texts(files),
        (bash(f"grep -l {word} {folder}/*"), bash(f"mv {path} {target}"), submit("done")),
        files_test(final, [path]),
    )


def rename_title(rng: random.Random) -> Draft:
    folder, stem, title, *others = names(rng, 6)
    ext = extension(rng)
    path, target = f"{folder}/{stem}.{ext}", f"{folder}/{title}.{ext}"
    body = text([f"title {title}", *pairs(rng, others, rng.randint(1, 5))])
    prompt = rng.choice(
        (
            "Rename {path} to the title on its first line, keeping .{ext}",
            "The first line of {path} is its title. Use that as the name, in the same folder.",
            "Give {path} the name that its first line says, and the same ending.",
            "{path} has the wrong name: its title is on line one. Rename it.",
        )
    ).format(path=path, ext=ext)
    return Draft(
        prompt,
        {path: body},
        (bash(f"head -n 1 {path}"), bash(f"mv {path} {target}"), submit("done")),
        files_test({target: body}, [path]),
    )


def rename_largest(rng: random.Random) -> Draft:
    folder, a, b, new, *stems = names(rng, 4 + rng.randint(2, 4))
    files = _siblings(rng, folder, stems, [a, b], 1, 4)
    name = rng.choice(list(files))
    files[name] += pairs(rng, [a, b], 12)
    target = f"{folder}/{new}.{extension(rng)}"
    prompt = rng.choice(
        (
            "Rename the largest file in {folder} to {new}.",
            "Find the biggest file of {folder} and move it to {new}.",
            "{new} shall be the new name of the largest file in {folder}.",
            "Which file in {folder} is the biggest? Rename it to {new}.",
        )
    ).format(folder=folder, new=target)
    final = {target if p == name else p: t for p, t in _texts(files).items()}
    return Draft(
        prompt,
        _texts(files),
        (bash(f"ls -S {folder} | head -n 1"), bash(f"mv {name} {target}"), submit("done")),
        files_test(final, [name]),
    )


def fix_setting(rng: random.Random) -> Draft:
    folder, key, a, b, *stems = names(rng, 4 + rng.randint(2, 3))
    files = {f"{folder}/{stem}.cfg": pairs(rng, [a, b], rng.randint(1, 3), "=") for stem in stems}
    path = rng.choice(list(files))
    old, new = _two_values(rng)
    before = _texts(files)
    index = rng.randint(0, len(files[path]))
    lines = files[path]
    before[path] = text([*lines[:index], f"{key}={old}", *lines[index:]])
    after = before | {path: text([*lines[:index], f"{key}={new}", *lines[index:]])}
    prompt = rng.choice(
        (
            "A file in {folder} sets {key}. Change the value to {new}.",
            "Set {key} to {new} in the file of {folder} that has it.",
            "The value of {key} somewhere in {folder} is wrong; it should be {new}.",
            "Fix {key} in {folder}: the right value is {new}.",
        )
    ).format(folder=folder, key=key, new=new)
    return Draft(
        prompt,
        before,
        (bash(f"grep -r {key} {folder}"), bash(f"sed -i s/{key}={old}/{key}={new}/ {path}"), submit("done")),
        files_test(after),
    )


def fix_edit(rng: random.Random) -> Draft:
    folder, stem, key, *others = names(rng, 6)
    path = f"{folder}/{stem}.cfg"
    old, new = _two_values(rng)
    lines = pairs(rng, others, rng.randint(1, 4), "=")
    index = rng.randint(0, len(lines))
    before, after = (text([*lines[:index], f"{key}={v}", *lines[index:]]) for v in (old, new))
    prompt = rng.choice(
        (
            "Edit {path}: {key} must be {new}.",
            "In {path}, set {key} to {new} with the edit tool.",
            "Use edit to give {key} the value {new} in {path}.",
            "{path} has a wrong {key}. Edit it to be {new}.",
        )
    ).format(path=path, key=key, new=new)
    return Draft(
        prompt,
        {path: before},
        (bash(f"grep {key} {path}"), replace(path, f"{key}={old}", f"{key}={new}"), submit("done")),
        files_test({path: after}),
    )


def fix_line(rng: random.Random) -> Draft:
    folder, stem, bad, *others = names(rng, 6)
    path = f"{folder}/{stem}.{extension(rng)}"
    lines = pairs(rng, others, rng.randint(3, 24))
    index = rng.randint(0, len(lines))
    before = text([*lines[:index], f"{bad} {number(rng)}", *lines[index:]])
    prompt = rng.choice(
        (
            "Delete the line of {path} with {bad}.",
            "{path} has a bad line: the one with {bad}. Remove it.",
            "The {bad} line does not belong into {path}; delete it.",
            "Remove the only line that mentions {bad} from {path}.",
        )
    ).format(path=path, bad=bad)
    return Draft(
        prompt,
        {path: before},
        (bash(f"grep -n {bad} {path}"), bash(f"sed -i {index + 1}d {path}"), submit("done")),
        files_test({path: text(lines)}),
    )


TEMPLATES: Final[dict[str, dict[str, Template]]] = {
    "count": {
        "count_matching": count_matching,
        "count_in_mentioning": count_in_mentioning,
        "count_files": count_files,
    },
    "find": {"find_word": find_word, "find_chain": find_chain, "find_either": find_either},
    "filter": {"filter_mentioning": filter_mentioning, "filter_config": filter_config},
    "rename": {
        "rename_mentioning": rename_mentioning,
        "rename_title": rename_title,
        "rename_largest": rename_largest,
    },
    "fix": {"fix_setting": fix_setting, "fix_edit": fix_edit, "fix_line": fix_line},
}
