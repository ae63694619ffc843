"""The order of the house: what each file may import, how long it may be, and that it says what it is."""

import ast
import io
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

import refpar

ROOT = Path(refpar.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))
NAMES = [str(path.relative_to(ROOT)) for path in FILES]

# From the ground up: a room may import rooms above it in this list, and itself.
ROOMS = (
    "files", "screen", "output", "checks", "arrays", "rng", "split", "nn", "optim", "precision", "case", "single",
    "state", "comm", "parallel", "longrun", "plan", "oracle", "conformance", "teach", "cli",
)  # fmt: skip

# Stricter than the order: these know nothing of what the order would let them import.
BLIND = {
    "nn": ("split",),  # which is how things are spread over ranks
    "single": ("split", "comm", "parallel", "state"),
    "comm": ("rng", "nn", "optim", "precision", "case", "single", "state"),
}

# To be read beside the paper.
TECHNIQUES = ["comm/ring.py", "nn/checkpoint.py", "optim.py", "precision.py", "single.py"]
TECHNIQUES += [name for name in NAMES if name.startswith("parallel/") and not name.endswith("__init__.py")]
COSTS = ["comm/ring.py", *(f"parallel/{name}.py" for name in ("data", "zero", "tensor", "pipeline", "schedule"))]
COSTS += ["optim.py", "precision.py"]
MOST_LINES = 200
LONGER = {"parallel/simulator.py": 230}  # no technique: it judges schedules

# What a protocol says of a method is not said again where it is written out: Layer, Loss, Store, Transport.
PROTOCOLS = {"specs", "forward", "backward", "count", "consume", "unit_done", "send", "receive", "exchange", "doing"}
PROTOCOLS |= {"scatter", "gather", "abort"}  # Channel


def room(module: str) -> str:
    """Return the room of a module such as ``refpar.nn.layers``; the package itself and ``-m refpar`` are the door."""
    name = module.partition(".")[2].partition(".")[0]
    if name == "adapters":  # what conformance runs on, and its first users
        return "conformance"
    if name in ("", "__version__"):  # asked for where the package lies, or which version it is
        return ROOMS[0]
    return name if name in ROOMS else ROOMS[-1]


def imports(path: Path) -> Iterator[str]:
    """Yield every module of refpar that a file imports, wherever in it, but for the type checker alone."""
    tree = ast.parse(path.read_text())
    hidden = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if id(node) in hidden:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.partition(".")[0] == "refpar")
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "refpar":
            assert node.module is not None
            yield from (f"{node.module}.{a.name}" if node.module == "refpar" else node.module for a in node.names)


def lines_of_code(path: Path) -> int:
    """Return how many lines are neither blank, nor comment, nor docstring."""
    source = path.read_text()
    strings = {
        line
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }
    empty = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
    code = {
        line
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type not in empty
        for line in range(token.start[0], token.end[0] + 1)
    }
    return len(code - strings)


def undocumented(path: Path) -> Iterator[str]:
    """Yield the public names of a file that nothing is said about."""

    def inside(body: list[ast.stmt], outer: str, said: str) -> Iterator[str]:
        for node in body:
            if not isinstance(node, ast.FunctionDef | ast.ClassDef) or node.name.startswith("_"):
                continue
            text = ast.get_docstring(node)
            overrides = any(ast.unparse(d) in ("overload", "override") for d in node.decorator_list)
            line = rf"^(?:\w+, )*{node.name}(?:, \w+)* : |``{node.name}``"  # among the attributes, or quoted
            mentioned = bool(outer) and re.search(line, said, re.MULTILINE) is not None
            if not (text or overrides or mentioned or (outer and node.name in PROTOCOLS)):
                yield outer + node.name
            if isinstance(node, ast.ClassDef):
                yield from inside(node.body, f"{node.name}.", text or "")

    yield from inside(ast.parse(path.read_text()).body, "", "")


@pytest.mark.parametrize("name", NAMES)
def test_rooms_import_only_upwards(name: str) -> None:
    """Nothing imports a room that is built on top of it, nor one it is to know nothing of."""
    if name == "__init__.py":  # the door: it opens every room, when asked
        return
    own = room("refpar." + name.removesuffix(".py").replace("/", "."))
    for module in imports(ROOT / name):
        other = room(module)
        assert ROOMS.index(other) <= ROOMS.index(own), f"{name} imports {module}"
        assert other not in BLIND.get(own, ()), f"{name} imports {module}"


def test_imports_see_everything(tmp_path: Path) -> None:
    """Also an import inside a function, and of a submodule by name; but not what only the type checker reads."""
    file = tmp_path / "x.py"
    file.write_text(
        "import refpar.comm.ring\nfrom refpar import optim\nif TYPE_CHECKING:\n    from refpar.cli import main\n"
        "def f():\n    from refpar.parallel.zero import Zero\n    import numpy\n"
    )
    assert sorted(imports(file)) == ["refpar.comm.ring", "refpar.optim", "refpar.parallel.zero"]


@pytest.mark.parametrize("name", TECHNIQUES)
def test_technique_can_be_read_in_one_sitting(name: str) -> None:
    """It opens by saying what problem it solves, in five to sixty lines, and has at most about 200 lines of code."""
    text = ast.get_docstring(ast.parse((ROOT / name).read_text()))
    assert text is not None
    assert 5 <= len(text.splitlines()) <= 60, f"{name} opens with {len(text.splitlines())} lines"
    assert lines_of_code(ROOT / name) <= LONGER.get(name, MOST_LINES)


@pytest.mark.parametrize("name", COSTS)
def test_technique_says_what_it_costs(name: str) -> None:
    """What is held and what is sent; the numbers are held to runs in test_openings."""
    text = ast.get_docstring(ast.parse((ROOT / name).read_text())) or ""
    for word in ("held", "sent"):
        assert re.search(rf"^ +{word} |\b{word.title()}\b|bytes {word}|elements {word}", text, re.MULTILINE), word


def test_lines_of_code_are_counted_right(tmp_path: Path) -> None:
    """Docstrings, comments and blank lines are none; a statement over two lines is two."""
    file = tmp_path / "x.py"
    file.write_text(
        '"""Text\n\nmore."""\n\n# why\nx = [  # list\n    "no docstring"]\n\ndef f():\n    """Do."""\n    return 1\n'
    )
    assert lines_of_code(file) == 4


@pytest.mark.parametrize("name", NAMES)
def test_every_file_and_public_name_is_documented(name: str) -> None:
    """A docstring of its own, a line among its class's attributes, or a protocol's."""
    path = ROOT / name
    assert ast.get_docstring(ast.parse(path.read_text())) or not path.read_text(), f"{name} does not say what it is"
    assert list(undocumented(path)) == []


def test_undocumented_names_are_found(tmp_path: Path) -> None:
    """A bare function, a bare method, and not a private one, a protocol's, or what the class has told of."""
    file = tmp_path / "x.py"
    file.write_text(
        'class C:\n    """Like no other, has\n\n    n, size : in bytes"""\n'
        "    def size(self): ...\n    def other(self): ...\n"
        "    def forward(self): ...\n    def _own(self): ...\ndef f(): ...\ndef forward(): ...\n"
    )
    assert list(undocumented(file)) == ["C.other", "f", "forward"]


HEAVY = (
    "numpy",
    "rich",
    "dill",
    "multiprocess",
    "safetensors",
    "threadpoolctl",
    "matplotlib",
    "cupy",
    "mpi4py",
    "torch",
)
LIGHT = ["import refpar", "import refpar.cli; refpar.cli.parser()"]


@pytest.mark.parametrize("code", LIGHT)
def test_import_is_light(code: str) -> None:
    """Neither the package nor the parser of its verbs imports anything heavy."""
    check = f"{code}; import sys; sys.exit(repr([name for name in {HEAVY!r} if name in sys.modules] or ''))"
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True)
    assert done.stderr.strip() in ("", "''")


OPTIONAL = ("matplotlib", "cupy", "mpi4py", "torch", "jax")


@pytest.mark.parametrize("name", NAMES)
def test_optional_packages_are_imported_where_they_are_used(name: str) -> None:
    """Never at the top of a file, which would ask for them whoever imports it; but for a package's own adapter."""
    waiting: list[ast.AST] = [ast.parse((ROOT / name).read_text())]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.FunctionDef) or (
            isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        ):
            continue
        waiting += ast.iter_child_nodes(node)
        modules = [a.name for a in node.names] if isinstance(node, ast.Import) else []
        modules += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        found = {module.partition(".")[0] for module in modules} & set(OPTIONAL)
        assert not {package for package in found if not name.startswith(f"adapters/{package}")}
