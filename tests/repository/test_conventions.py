"""The tree keeps the rules of CONTRIBUTING that a program can check; each rule is shown to fail."""

from __future__ import annotations

import ast
import inspect
import re
from collections import defaultdict
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Final

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    Rule = Callable[[dict[Path, str]], list[str]]

ROOT: Final = Path(__file__).resolve().parents[2]
PACKAGES: Final = ("kvtuner", "calibration", "exported_configs", "runtime_loader", "search_spaces", "tuner")
PRODUCT: Final = (*PACKAGES, "benchmarks", "tools")
BY_TOPIC: Final = {"cli", "sglang", "repository"}
"""The folders of tests that mirror no package; see rule 10 of CONTRIBUTING."""
MOST_LINES: Final = 350
MOST_LINES_OF_A_TEST: Final = 450
MOST_FILES: Final = 15
BANNED: Final = {
    "taker", "takers", "respondent", "contestant", "exam", "examiner", "making", "metered", "said", "choosy", "seam",
    "seams", "finder",
}  # fmt: skip
"""Words that earlier versions gave to schemes, backends, tasks and the attention hook; see CONTRIBUTING's glossary."""
VAGUE: Final = {"made", "told", "way", "ways", *BANNED}
"""Names that do not tell what a variable holds."""
SHARED: Final = {"COMMANDS", "JOURNAL", "hadamard", "logger", "main", "read", "write"}
"""Names that every command, journal, script or export format has of its own; and a step's kernel beside the step."""
FRAGMENT: Final = re.compile(
    r"(of|that|by|for|in|with|where|to|from|on|at|as|which|such as|what it|it|the same(?=[,;.])|one of them|one for"
    r"|none|them|its own|likewise|and|or|but|under|after|before|between|per|until|behind|like|within|without)\b",
    re.IGNORECASE,
)
LISTED: Final = re.compile(r"`([a-z_.]+)`\s+\(((?:`\w+`(?:,\s+)?)+)\)")
"""A module in a package's docstring, with the names that other packages use of it."""
FIELD: Final = re.compile(r"    \*{0,2}\w+(?:, \w+)*: (.*)$")


def sources(*folders: str) -> dict[Path, str]:
    """Return the Python files below folders of the repository, by their path in it; links are not followed."""
    paths = (path for folder in folders for path in sorted((ROOT / folder).rglob("*.py")))
    return {path.relative_to(ROOT): path.read_text(encoding="utf-8") for path in paths}


@cache
def tree_of(text: str) -> ast.Module:
    return ast.parse(text)


def repeated(places: dict[str, list[Path]]) -> list[str]:
    return [f"{name}: {', '.join(map(str, paths))}" for name, paths in sorted(places.items()) if len(paths) > 1]


def classes_of_one_name(files: dict[Path, str]) -> list[str]:
    """Name the classes that two files define."""
    places = defaultdict(list)
    for path, text in files.items():
        for node in tree_of(text).body:
            if isinstance(node, ast.ClassDef):
                places[node.name].append(path)
    return repeated(places)


def definitions_of_one_name(files: dict[Path, str]) -> list[str]:
    """Name the public classes, functions, constants and type aliases that two modules define."""
    places = defaultdict(list)
    for path, text in files.items():
        for name in set(defined_names(tree_of(text).body)) - SHARED:
            if not name.startswith("_"):
                places[name].append(path)
    return repeated(places)


def defined_names(body: list[ast.stmt]) -> Iterator[str]:
    """Yield the names that a module's statements define, those for the type checker alone included."""
    for node in body:
        if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            yield node.name
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            yield from (target.id for target in targets if isinstance(target, ast.Name))
        elif isinstance(node, ast.If):
            yield from defined_names(node.body)


def modules_of_one_name(files: dict[Path, str]) -> list[str]:
    """Name the modules that two folders have."""
    places = defaultdict(list)
    for path in files:
        if path.name != "__init__.py":
            places[path.stem].append(path)
    return repeated(places)


def docstring_fragments(files: dict[Path, str]) -> list[str]:
    """Name the docstrings and their fields that begin without a noun."""
    return [
        f"{path}: {line.strip()}"
        for path, text in files.items()
        for line in opening_lines(text)
        if FRAGMENT.match(line.strip())
    ]


def opening_lines(text: str) -> Iterator[str]:
    """Yield the first line of every docstring, and what each of its fields says."""
    for docstring in docstrings(text):
        first, *rest = inspect.cleandoc(docstring).split("\n")
        yield first
        fields = False
        for line in rest:
            if line and not line.startswith(" "):
                fields = line in ("Args:", "Attributes:")
            elif fields and (match := FIELD.match(line)):
                yield match[1]


def docstrings(text: str) -> Iterator[str]:
    """Yield every string that is a statement: of modules, classes and functions, and those under constants."""
    for node in ast.walk(tree_of(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.value.value


def messages(text: str) -> Iterator[str]:
    """Yield the strings of a module that a user may read: all but those that are statements."""
    statements = {id(node.value) for node in ast.walk(tree_of(text)) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree_of(text)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in statements:
            yield node.value


def markdown_in_messages(files: dict[Path, str]) -> list[str]:
    """Name the messages with backticks, which a terminal and a page show as they are."""
    return [f"{path}: {text}" for path, code in files.items() for text in messages(code) if "`" in text and " " in text]


def unshipped_pages(files: dict[Path, str]) -> list[str]:
    """Name the messages that send the reader to a page of docs/, which an installed kvtuner does not have."""
    return [f"{path}: {text}" for path, code in files.items() for text in messages(code) if "docs/" in text]


def names_that_packages_lack(files: dict[Path, str]) -> list[str]:
    """Name the modules, and the names in them, that a package's docstring lists but that are not there."""
    lacking = []
    for path, text in files.items():
        listed = LISTED.findall(ast.get_docstring(tree_of(text)) or "") if path.name == "__init__.py" else []
        for module, names in listed:
            file = path.parent / f"{module.replace('.', '/')}.py"
            defined = top_level_names(files.get(file, ""))
            lacking += [f"{path}: {module} has no {name}" for name in re.findall(r"\w+", names) if name not in defined]
    return lacking


def top_level_names(text: str) -> set[str]:
    """Return the functions, classes and constants that a module defines."""
    names = set()
    for node in tree_of(text).body:
        if isinstance(node, (ast.ClassDef, ast.FunctionDef)):
            names.add(node.name)
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        names |= {target.id for target in targets if isinstance(target, ast.Name)}
    return names


def banned_names(files: dict[Path, str]) -> list[str]:
    """Name the modules, classes and functions whose names have a banned word."""
    found = []
    for path, text in files.items():
        nodes = ast.walk(tree_of(text))
        names = [node.name for node in nodes if isinstance(node, (ast.ClassDef, ast.FunctionDef))]
        for name in (path.stem, *names):
            words = re.findall(r"[A-Z]?[a-z]+|[A-Z]+", name)
            found += [f"{path}: {name}"] * any(word.lower() in BANNED for word in words)
    return found


def vague_names(files: dict[Path, str]) -> list[str]:
    """Name the variables, arguments and functions whose names do not tell what they are."""
    vague = []
    for path, text in files.items():
        for node in ast.walk(tree_of(text)):
            if isinstance(node, ast.keyword) or (isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)):
                continue  # a use, not a definition
            name = getattr(node, "id", None) or getattr(node, "arg", None) or getattr(node, "name", None)
            if isinstance(name, str) and name.lower().strip("_") in VAGUE:
                vague.append(f"{path}: {name}")
    return vague


def full_folders(files: dict[Path, str]) -> list[str]:
    """Name the folders with too many files side by side."""
    counts: dict[Path, int] = defaultdict(int)
    for path in files:
        counts[path.parent] += path.name != "__init__.py"
    most = {folder: count for folder, count in counts.items() if count > MOST_FILES}
    return [f"{folder}: {count} files" for folder, count in most.items()]


def long_files(files: dict[Path, str]) -> list[str]:
    """Name the files that are too long."""
    counts = {path: text.count("\n") for path, text in files.items()}
    return [f"{path}: {count} lines" for path, count in counts.items() if count > most_lines(path)]


def most_lines(path: Path) -> int:
    """Return the lines that a file may have."""
    return MOST_LINES_OF_A_TEST if path.parts[0] == "tests" else MOST_LINES


def misplaced_tests(files: dict[Path, str]) -> list[str]:
    """Name the files of tests that do not lie in the folder, or have not the name, of what they test."""
    names: dict[Path, set[str]] = defaultdict(set)
    for path, text in files.items():
        folder = Path(*path.parts[path.parts[0] == "kvtuner" : -1])
        nodes = (node for node in tree_of(text).body if isinstance(node, (ast.ClassDef, ast.FunctionDef)))
        names[folder] |= {folder.name, path.stem, *(node.name.lower() for node in nodes)}
        names[folder / path.stem].add(path.stem)  # a module may have a folder of tests
    misplaced = []
    for path in files:
        if path.parts[0] != "tests" or not path.stem.startswith("test_") or path.parts[1] in BY_TOPIC:
            continue
        topic = path.stem.removeprefix("test_") + "_"
        if not any(topic.startswith(f"{name}_") for name in names[path.parent.relative_to("tests")]):
            misplaced.append(str(path))
    return misplaced


RULES: Final[list[tuple[Rule, tuple[str, ...]]]] = [
    (classes_of_one_name, PRODUCT),
    (definitions_of_one_name, PACKAGES),
    (modules_of_one_name, PRODUCT),
    (docstring_fragments, (*PRODUCT, "examples", "tests")),
    (markdown_in_messages, PACKAGES),
    (unshipped_pages, PACKAGES),
    (names_that_packages_lack, PRODUCT),
    (banned_names, PRODUCT),
    (vague_names, ("benchmarks", "tools", "tests")),
    (misplaced_tests, (*PRODUCT, "tests")),
    (full_folders, (*PRODUCT, "examples", "tests")),
    (long_files, (*PRODUCT, "examples", "tests")),
]


@pytest.mark.parametrize(("rule", "folders"), RULES, ids=[rule.__name__ for rule, _ in RULES])
def test_the_tree_keeps_the_rule(rule: Rule, folders: tuple[str, ...]) -> None:
    files = sources(*folders)
    assert len(files) > 100
    assert rule(files) == []


WRONG: Final[list[tuple[Rule, dict[str, str]]]] = [
    (classes_of_one_name, {"one.py": "class Table: ...\n", "two.py": "class Table: ...\n"}),
    (definitions_of_one_name, {"one.py": "Kind = str\n", "two.py": "Kind = int\n"}),
    (definitions_of_one_name, {"one.py": "LIMIT: Final = 1\n", "two.py": "LIMIT: Final = 2\n"}),
    (definitions_of_one_name, {"one.py": "def compare(): ...\n", "two.py": "def compare(): ...\n"}),
    (definitions_of_one_name, {"one.py": "class Text: ...\n", "two.py": "if TYPE_CHECKING:\n    Text = str\n"}),
    (modules_of_one_name, {"bench/server.py": "", "evaluation/server.py": ""}),
    (docstring_fragments, {"one.py": '"""Of a server, its address."""\n'}),
    (docstring_fragments, {"one.py": 'PORT = 30000\n"""Of a server, where none is named."""\n'}),
    (
        docstring_fragments,
        {"one.py": 'class A:\n    """An address.\n\n    Attributes:\n        port: by the user.\n    """\n'},
    ),
    (
        docstring_fragments,
        {"one.py": 'def f(a):\n    """Do it.\n\n    Args:\n        a: That it must serve.\n    """\n'},
    ),
    (names_that_packages_lack, {"bench/__init__.py": '"""Use `server` (`run`)."""', "bench/server.py": "RUN = 1\n"}),
    (names_that_packages_lack, {"bench/__init__.py": '"""Use `server` (`run`)."""'}),
    (markdown_in_messages, {"one.py": 'raise Error(f"{path} is absent; run `kvtuner calibrate`")\n'}),
    (unshipped_pages, {"one.py": 'raise Error(f"no kernel for {bits} (docs/kernels.md)")\n'}),
    (banned_names, {"examiner.py": ""}),
    (banned_names, {"one.py": "class _ChoosySampler: ...\n"}),
    (banned_names, {"one.py": "class A:\n    def said_until(self): ...\n"}),
    (vague_names, {"one.py": "said = output()\n"}),
    (vague_names, {"one.py": "def test_a(way): ...\n"}),
    (misplaced_tests, {"tuner/exact_solver.py": "", "tests/test_exact.py": ""}),
    (misplaced_tests, {"kvtuner/bench/loads.py": "def burst(): ...\n", "tests/bench/test_waves.py": ""}),
    (full_folders, {f"kernels/file_{number}.py": "" for number in range(MOST_FILES + 1)}),
    (long_files, {"one.py": "\n" * (MOST_LINES + 1)}),
    (long_files, {"tests/test_one.py": "\n" * (MOST_LINES_OF_A_TEST + 1)}),
]


@pytest.mark.parametrize(("rule", "files"), WRONG)
def test_what_breaks_a_rule_is_named(rule: Rule, files: dict[str, str]) -> None:
    assert len(rule({Path(name): text for name, text in files.items()})) == 1


def test_every_class_of_the_glossary_is_there() -> None:
    _, _, after = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").partition("## Glossary")
    named = set(re.findall(r"`([A-Z]\w*[a-z]\w*)`", after.partition("\n## ")[0]))
    defined = {
        node.name
        for text in sources(*PACKAGES).values()
        for node in tree_of(text).body
        if isinstance(node, ast.ClassDef)
    }
    assert len(named) > 10
    assert named <= defined, named - defined
