"""Four text classification tasks made of text that every Python brings along.

Lines of source code, docstrings, the names of Unicode characters and the language manual.
Nothing is downloaded, and the same Python version gives the same tasks.
"""

from __future__ import annotations

import ast
import pkgutil
import random
import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec

Example = tuple[str, int]

TEST_PER_CLASS = 12
VALIDATION_PER_CLASS = 4
MAX_TRAIN_PER_CLASS = 80

# Unicode 3.2 is part of every Python and never changes.
_UNICODE = unicodedata.ucd_3_2_0


@dataclass(frozen=True)
class Task:
    """Texts to sort into classes; the second part of an example is the index of its class.

    ``question`` is what a person would be asked. No text is in two of the splits.
    """

    name: str
    question: str
    classes: tuple[str, ...]
    train: tuple[Example, ...]
    validation: tuple[Example, ...]
    test: tuple[Example, ...]


def load_tasks(seed: int = 0) -> tuple[Task, ...]:
    """Return the four tasks; ``seed`` decides which texts are trained and tested on."""
    return (
        _task(
            "code",
            "Which kind of program is this line of code from?",
            {
                "asynchronous event loops": ("asyncio",),
                "email messages": ("email",),
                "decimal arithmetic": ("_pydecimal",),
                "logging": ("logging", "logging.handlers"),
                "unit tests": ("unittest",),
                "web requests": ("http", "urllib.request"),
                "XML documents": ("xml.dom", "xml.sax", "xml.etree"),
            },
            _lines_of_code,
            seed,
        ),
        _task(
            "docstrings",
            "Which library does this docstring describe?",
            {
                "mailboxes": ("mailbox", "imaplib"),
                "parallel processes": ("multiprocessing",),
                "threads and locks": ("threading", "queue", "concurrent.futures"),
                "network addresses": ("ipaddress",),
                "file paths": ("pathlib", "posixpath", "shutil"),
                "introspection of live objects": ("inspect",),
                "statistics and random numbers": ("statistics", "random", "fractions"),
                "compressed archives": ("tarfile", "zipfile", "gzip", "lzma", "bz2"),
            },
            _docstrings,
            seed,
        ),
        _task(
            "letters",
            "Which script does a character of this name belong to?",
            {
                script: (script.upper(),)
                for script in (
                    "Greek",
                    "Cyrillic",
                    "Hebrew",
                    "Arabic",
                    "Armenian",
                    "Devanagari",
                    "Ethiopic",
                    "Tibetan",
                )
            },
            _character_names,
            seed,
        ),
        _task(
            "manual",
            "Which chapter of the Python manual is this sentence from?",
            {
                "special method names": ("specialnames",),
                "compound statements": ("compound",),
                "the standard type hierarchy": ("types",),
                "the debugger": ("debugger",),
                "string methods": ("string-methods",),
                "format strings": ("formatstrings",),
                "dictionaries": ("typesmapping",),
                "naming and scopes": ("execmodel",),
            },
            _manual_sentences,
            seed,
        ),
    )


def _task(
    name: str,
    question: str,
    sources: Mapping[str, Sequence[str]],
    texts_of: Callable[[Sequence[str]], Iterable[str]],
    seed: int,
) -> Task:
    texts = {label: set(texts_of(modules)) for label, modules in sources.items()}
    uses = Counter(text for found in texts.values() for text in found)
    train: list[Example] = []
    validation: list[Example] = []
    test: list[Example] = []
    for number, found in enumerate(texts.values()):
        own = [(text, number) for text in sorted(found) if uses[text] == 1]
        random.Random(seed).shuffle(own)
        for split, size in (
            (test, TEST_PER_CLASS),
            (validation, VALIDATION_PER_CLASS),
            (train, MAX_TRAIN_PER_CLASS),
        ):
            split += own[:size]
            del own[:size]
    return Task(name, question, tuple(sources), tuple(train), tuple(validation), tuple(test))


def _lines_of_code(modules: Sequence[str]) -> Iterator[str]:
    for node in _nodes(modules):
        is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if isinstance(node, ast.Assign | ast.Return | ast.Expr | ast.Raise) and not is_text:
            line = ast.unparse(node)
            if 20 <= len(line) <= 70 and "\n" not in line:
                yield line


def _docstrings(modules: Sequence[str]) -> Iterator[str]:
    for node in _nodes(modules):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            summary = " ".join((ast.get_docstring(node) or "").partition("\n\n")[0].split())
            if 20 <= len(summary) <= 120:
                yield summary


def _character_names(scripts: Sequence[str]) -> Iterator[str]:
    for code in range(0x20000):
        script, _, rest = _UNICODE.name(chr(code), "").partition(" ")
        if script in scripts:
            yield rest.lower()


def _manual_sentences(chapters: Sequence[str]) -> Iterator[str]:
    from pydoc_data.topics import topics

    for chapter in chapters:
        for paragraph in re.sub(r'[*"`]', "", topics[chapter]).split("\n\n"):
            for sentence in re.split(r"(?<=[.:;]) ", " ".join(paragraph.split())):
                if 40 <= len(sentence) <= 120:
                    yield sentence


def _nodes(modules: Sequence[str]) -> Iterator[ast.AST]:
    for module in modules:
        for name in _with_submodules(module):
            yield from ast.walk(ast.parse(_source(name)))


def _with_submodules(module: str) -> Iterator[str]:
    yield module
    spec = find_spec(module)
    for found in pkgutil.iter_modules((spec and spec.submodule_search_locations) or ()):
        if not found.ispkg:
            yield f"{module}.{found.name}"


def _source(module: str) -> str:
    spec = find_spec(module)
    get_source = getattr(spec and spec.loader, "get_source", None)
    return (get_source and get_source(module)) or ""
