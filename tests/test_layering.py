"""What imports what: modules are layers, and data flows one way."""

import ast
import subprocess
import sys
from fnmatch import fnmatchcase
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[1]
TVM = {"tvm", "tvm_ffi"}


class Imported(NamedTuple):
    name: str
    at_load: bool  # else inside a function, at its first call
    typing: bool  # only for a type checker


def sources():
    """Map every module's name to its file."""
    found = {}
    for folder, package in ((ROOT / "python/attentune", "attentune"),
                            (ROOT / "schedules", "attentune.schedules")):  # fmt: skip
        for file in folder.rglob("*.py"):
            parts = file.relative_to(folder).with_suffix("").parts
            name = ".".join([package, *parts]).removesuffix(".__init__")
            found[name] = file
    return found


def imports(text, package, modules):
    """Return all imports of a source text, of our modules by their full names."""
    found = set()

    def visit(node, at_load, typing):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parts = package.split(".")
                base = ".".join([*parts[: len(parts) - node.level + 1], *filter(None, [base])])
            names = [f"{base}.{alias.name}" for alias in node.names]
            names = [name if name in modules else base for name in names]
        else:
            if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
                for child in node.body:
                    visit(child, at_load, True)
                for child in node.orelse:
                    visit(child, at_load, typing)
                return
            inside = isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
            for child in ast.iter_child_nodes(node):
                visit(child, at_load and not inside, typing)
            return
        found.update(Imported(name, at_load, typing) for name in names)

    visit(ast.parse(text), True, False)
    return found


MODULES = sources()
IMPORTS = {
    name: imports(
        file.read_text(),
        name if file.name == "__init__.py" else name.rpartition(".")[0],
        MODULES,
    )
    for name, file in MODULES.items()
}


def ours(name):
    return name.partition(".")[0] == "attentune"


def matches(name, patterns):
    return any(fnmatchcase(name, f"attentune.{pattern}") for pattern in patterns)


# All that a module may import of ours, at any time.
ALLOWED = {
    "errors": (),
    "problem": ("errors",),
    "key": ("errors", "problem"),
    "threads": (),
    "target": ("errors", "threads"),
    "group": ("errors", "problem", "key", "target"),
    "plan": ("errors", "problem", "key", "target", "group"),
    "models": ("errors", "problem"),
    "record": ("errors", "key"),
    "database": ("errors", "key", "record"),
    "reference": ("errors", "problem"),
    "completion": (),
    "doctor": ("database", "target", "threads", "versions"),
    "page": ("key", "record", "report", "search.roofline", "page.*"),
    "page.*": ("record", "report", "search.roofline", "page.*"),
    "kernels": ("kernels.*",),
    "kernels.*": ("errors", "problem", "key", "kernels", "kernels.*"),
    "variant": ("errors", "problem", "key", "target", "kernels", "kernels.*", "compile",
                "vector_math"),
    "schedules.common": ("errors", "problem", "key", "target", "kernels", "kernels.*", "variant"),
    "schedules.policy": ("key", "problem", "target", "group"),
    "schedules.[!_]*": ("errors", "problem", "key", "target", "group", "kernels", "kernels.*",
                        "variant", "schedules.common", "schedules.cuda", "schedules.cuda_*"),
}  # fmt: skip
# Without TVM, also at a later call; targets are described without it and resolved with it.
NO_TVM = ("errors", "problem", "key", "group", "plan", "models", "record", "database", "reference",
          "schedules.policy", "page", "page.charts")  # fmt: skip
NO_TVM_AT_LOAD = (*NO_TVM, "target", "api", "schedules", "")
# The half that runs exported libraries: TVM's FFI, and never the compiler.
NO_COMPILER = ("call", "arrays", "arguments", "threads", "kernels.spec", "manifest", "library",
               "runtime")  # fmt: skip
STANDARD_LIBRARY_ONLY = ("errors", "problem", "key", "target", "group", "plan", "models", "record",
                         "database")  # fmt: skip
# What never happens, whichever modules there will be: who, whom, except for whom.
FORBIDDEN = [
    ("*", ("schedules", "schedules.*"),
     ("", "api", "cli", "cli.*", "bench", "bench.*", "schedules", "schedules.*")),
    ("schedules.*", ("search", "search.*", "database", "dispatch", "relax", "relax.*", "api", "cli",
                     "export", "bench"), ()),
    ("search.*", ("database", "dispatch", "relax", "relax.*", "api", "cli", "export", "bench"), ()),
    ("kernels.*", ("target",), ()),
    ("dispatch", ("api", "cli", "bench", "search", "search.*"), ()),
]  # fmt: skip


def rule(name):
    return next((k for k in ALLOWED if fnmatchcase(name, f"attentune.{k}")), None)


@pytest.mark.parametrize("name", sorted(name for name in MODULES if rule(name)))
def test_module_imports_what_lies_below_it(name):
    allowed = ALLOWED[rule(name)]
    wrong = {i.name for i in IMPORTS[name] if ours(i.name) and not matches(i.name, allowed)}
    assert wrong == set(), f"{name} may import {allowed}"


@pytest.mark.parametrize("module", NO_TVM)
def test_half_before_the_search_has_no_tvm(module):
    found = {i.name.partition(".")[0] for i in IMPORTS[f"attentune.{module}"]}
    assert not found & TVM


@pytest.mark.parametrize("module", NO_COMPILER)
def test_the_half_that_runs_libraries_has_no_compiler(module):
    assert "tvm" not in {i.name.partition(".")[0] for i in IMPORTS[f"attentune.{module}"]}


@pytest.mark.parametrize("module", NO_TVM_AT_LOAD)
def test_loading_the_front_door_loads_no_tvm(module):
    """Follow the imports that loading a module causes."""
    seen, waiting = set(), [f"attentune.{module}".rstrip(".")]
    while waiting:
        name = waiting.pop()
        if name in seen:
            continue
        seen.add(name)
        for imported in IMPORTS[name]:
            if imported.at_load and not imported.typing:
                assert imported.name.partition(".")[0] not in TVM, f"{name} imports TVM"
                if ours(imported.name):
                    waiting.append(imported.name)


@pytest.mark.parametrize("module", STANDARD_LIBRARY_ONLY)
def test_standard_library_only(module):
    found = {i.name.partition(".")[0] for i in IMPORTS[f"attentune.{module}"] if i.at_load}
    assert found <= {*sys.stdlib_module_names, "attentune"}


def test_reference_needs_numpy_alone():
    found = {i.name.partition(".")[0] for i in IMPORTS["attentune.reference"]}
    assert found <= {*sys.stdlib_module_names, "attentune", "numpy"}


@pytest.mark.parametrize(("who", "whom", "excepted"), FORBIDDEN, ids=[f[0] for f in FORBIDDEN])
def test_never(who, whom, excepted):
    exempt = {f"attentune.{name}".rstrip(".") for name in excepted}
    wrong = [
        (name, imported.name)
        for name in MODULES
        if matches(name, (who,)) and not any(fnmatchcase(name, pattern) for pattern in exempt)
        for imported in IMPORTS[name]
        if matches(imported.name, whom)
    ]
    assert wrong == []


def test_loading_goes_round_in_no_circle():
    order, path = [], []

    def visit(name):
        assert name not in path, " -> ".join([*path, name])
        if name in order:
            return
        path.append(name)
        # Whatever lies in a package finds that this has begun to load already.
        visible = [i.name for i in IMPORTS[name] if i.at_load and not i.typing]
        for imported in sorted(set(visible) & set(MODULES)):
            if not f"{name}.".startswith(f"{imported}."):
                visit(imported)
        order.append(path.pop())

    for name in sorted(MODULES):
        visit(name)


def test_packages_interface_is_complete():
    import attentune

    assert sorted(attentune.__all__) == sorted(set(attentune.__all__))
    for name in attentune.__all__:
        assert hasattr(attentune, name)


# A process of its own: this one has loaded TVM for other tests, maybe.
def test_planning_and_the_reference_load_no_tvm():
    program = """
import sys
import attentune
import attentune.models
attentune.plan("1,8,8,512,512,64,64:float16", "cuda:sm_80")
attentune.plan(attentune.models.get("bert-base")[0], policy="seed")
attentune.reference.attention(*[__import__("numpy").zeros((1, 1, 1, 1))] * 3)
print(sorted({"tvm", "tvm_ffi", "torch", "xgboost", "ml_dtypes"} & set(sys.modules)))
"""
    run = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT.parent, check=True
    )
    assert run.stdout == "[]\n"


def test_imports_are_found():
    text = """
import tvm.tirx as tirx
from attentune import errors, reference as oracle
from . import key
from .kernels import spec
from attentune.problem import Shape
if TYPE_CHECKING:
    from attentune.variant import Variant
def f():
    import numpy
    class C:
        g = lambda: __import__("os")
        from attentune.schedules import common
"""
    modules = {f"attentune.{n}" for n in ("errors", "reference", "key", "kernels.spec", "problem",
                                          "schedules.common")}  # fmt: skip
    assert imports(text, "attentune", modules) == {
        Imported("tvm.tirx", True, False),
        Imported("attentune.errors", True, False),
        Imported("attentune.reference", True, False),
        Imported("attentune.key", True, False),
        Imported("attentune.kernels.spec", True, False),
        Imported("attentune.problem", True, False),
        Imported("attentune.variant", True, True),
        Imported("numpy", False, False),
        Imported("attentune.schedules.common", False, False),
    }
