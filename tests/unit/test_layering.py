"""Imports go one way, and torch's private names stay in one file: read off the source with `ast`.

A *room* is a package of dtorch (`ir`, `sharding`) or a top-level module (`mesh`). Imports inside functions count.
"""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

# From the bottom up: a room may import itself and every room on a line above its own.
LAYERS = (
    ("errors",),
    ("options", "torch_private", "recent", "watch"),
    ("mesh",),
    ("placements",),
    ("distributed_spec", "defaults"),
    ("ir",),
    ("sharding",),
    ("capture", "passes"),
    ("lower",),
    ("compiler",),
    ("segment", "future", "jobs"),
    ("controller", "report"),
    ("compiled",),
    ("graph",),
    ("factories",),
    ("nn", "models", "test"),
    ("api", "workers"),
    ("__main__", "dtorch"),
)
RANKS = {room: rank for rank, layer in enumerate(LAYERS) for room in layer}
# A plan runs without the compiler: the runtime sees only the plain data below it.
RUNTIME_MAY_IMPORT = {"runtime", "ir", "options", "errors", "torch_private"}
KNOWS_RUNTIME_FROM = RANKS["jobs"]


def sources():
    """(path, dotted module name) of every module of the package."""
    for folder, package in (("dtorch", "dtorch"), ("passes", "dtorch.passes"), ("runtime", "dtorch.runtime")):
        for path in sorted((ROOT / folder).rglob("*.py")):
            parts = path.relative_to(ROOT / folder).with_suffix("").parts
            yield path, ".".join((package, *parts)).removesuffix(".__init__")


MODULES = {name: path for path, name in sources()}


def room_of(module):
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else "dtorch"


def imported(tree, module):
    """(line, dotted name) of everything that a module imports; `from a import b` gives a.b."""
    package = module if MODULES[module].name == "__init__.py" else module.rpartition(".")[0]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            yield from ((node.lineno, f"{base}.{alias.name}") for alias in node.names)


def may_import(room, target):
    if room == target:
        return True
    if room == "runtime":
        return target in RUNTIME_MAY_IMPORT
    if target == "runtime":
        return RANKS[room] >= KNOWS_RUNTIME_FROM
    return RANKS[target] < RANKS[room]


def private_names(tree, module):
    """(line, name) of every use of a private name of torch: `torch._C`, `from torch.a._b import c`."""
    names_of_torch = {"torch": "torch"}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.asname and alias.name.split(".")[0] == "torch":
                    names_of_torch[alias.asname] = alias.name
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch" and not node.level:
            for alias in node.names:
                names_of_torch[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    for line, name in imported(tree, module):
        if name.split(".")[0] == "torch" and any(is_private(part) for part in name.split(".")):
            yield line, name
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            inner, parts = node.value, [node.attr]
            while isinstance(inner, ast.Attribute):
                parts.append(inner.attr)
                inner = inner.value
            if isinstance(inner, ast.Name) and inner.id in names_of_torch:
                yield node.lineno, ".".join([names_of_torch[inner.id], *reversed(parts)])


def is_private(name):
    return name.startswith("_") and not name.startswith("__")


@pytest.mark.parametrize("module", MODULES)
def test_a_module_imports_only_what_lies_below_it(module):
    room = room_of(module)
    assert room == "runtime" or room in RANKS, f"{module}: new room {room!r}; give it a line in LAYERS and in docs"
    tree = ast.parse(MODULES[module].read_text())
    wrong = [
        f"{MODULES[module].relative_to(ROOT)}:{line} imports {name}"
        for line, name in imported(tree, module)
        if name.split(".")[0] == "dtorch" and not may_import(room, room_of(name))
    ]
    assert not wrong, "\n".join([*wrong, f"{room!r} may not import that: see LAYERS in {__file__}"])


@pytest.mark.parametrize("module", MODULES)
def test_only_torch_private_touches_private_names_of_torch(module):
    if module == "dtorch.torch_private":
        return
    tree = ast.parse(MODULES[module].read_text())
    wrong = [f"{MODULES[module].relative_to(ROOT)}:{line} uses {name}" for line, name in private_names(tree, module)]
    assert not wrong, "\n".join([*wrong, "put a function for it into dtorch/torch_private.py"])


def test_passes_and_runtime_are_never_imported_at_the_top_level():
    for module, path in MODULES.items():
        for line, name in imported(ast.parse(path.read_text()), module):
            assert name.split(".")[0] not in ("passes", "runtime"), f"{path}:{line}: import dtorch.{name}"


def test_every_package_is_installed():
    listed = (ROOT / "pyproject.toml").read_text()
    for module, path in MODULES.items():
        if path.name == "__init__.py":
            assert f'"{module}"' in listed, f"{module} is not in packages of pyproject.toml"


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("import torch\ntorch._C.x", True),
        ("import torch.fx as f\nf.node._y", True),
        ("from torch.distributed.tensor import _ops", True),
        ("def f():\n    from torch._subclasses import FakeTensorMode", True),
        ("import torch\ntorch.ops._c10d_functional", True),
        ("import torch\ntorch.__version__\nself._graph\n'torch._C'", False),
    ],
)
def test_private_names_are_recognised(source, found):
    assert bool(list(private_names(ast.parse(source), "dtorch.mesh"))) == found
