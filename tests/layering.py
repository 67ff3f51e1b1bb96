"""Reads the imports of the package and says which ones break the rules of its layout.

Pure: source text in, complaints out, so the rules are tested on made-up sources (``test_layering.py``).

Note [The rules]
    *Levels.* Each top-level name of the package has a level; a module imports only from levels below its own, or from its own level
    where no cycle comes of it. The members of level 5 are siblings: none imports another. Imports for type checking only are held to the
    levels as well, since what a signature names is a dependency, but cannot make a cycle.

    *Where what may be imported.* asyncio in the drivers, aiohttp in one module, numba where kernels are; modules that decide without
    doing (`SANS_IO`) import nothing that waits, measures time, draws or talks.

    *How.* At the top of the file, except heavy packages that are optional; by name, never ``*``.

    *Never.* Modules that turn bytes into code or objects, ``eval`` and its like, and ``assert``, which ``python -O`` removes.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

PACKAGE = "aiograd"

LEVELS: Mapping[str, int] = {
    name: level
    for level, names in enumerate(
        (
            "version types errors top_level assembly lazy caller",
            "ops kernels",
            "graph modes devices",
            "engine",
            "tensors function functional checkpointing gradient_check random offloading isolation array_functions",
            "nn optim parallel pipeline distributed cuda serialization",
            "profiler viz testing",
            "__init__ __main__ cli demo",
        )
    )
    for name in names.split()
}
SIBLINGS = 5

#: imported package -> the modules that may import it (a name covers everything below it)
ONLY_IN: Mapping[str, tuple[str, ...]] = {
    "asyncio": (
        "engine.run", "engine.executors", "parallel", "pipeline.run", "distributed.driver", "distributed.http", "distributed.worker",
        "distributed.cluster", "distributed.moe.runtime", "cuda.executor", "testing", "cli", "demo", "__main__",
    ),
    "uvloop": ("engine.run", "cli", "__main__"),
    "aiohttp": ("distributed.http",),
    "numba": ("kernels", "cuda"),
    "llvmlite": ("kernels", "cuda"),
    "pytest": ("testing.pytest_plugin",),
    "pytest_asyncio": ("testing.pytest_plugin",),
    "ray": ("distributed.cluster.ray_cluster", "distributed.cluster.ray_worker"),
    "torch": (),
    "sklearn": ("demo",),
    "tqdm": ("demo",),
    "scipy": (),
}  # fmt: skip

#: optional packages, which may be imported where they are first needed
OPTIONAL = frozenset({"numba", "ray", "threadpoolctl", "ml_dtypes", "cuda", "numba_cuda", "sklearn", "tqdm"})

#: modules that decide and leave the doing to others, and what they therefore cannot need
SANS_IO = (
    "engine.graph_task", "engine.input_buffer", "engine.ready_queue", "engine.sweep", "engine.validate", "engine.evaluate", "engine.halves",
    "engine.parameter_group", "engine.placement", "engine.weight_half",
    *(f"distributed.{name}" for name in (
        "agenda budget cipher codec context contexts effects encodings faults frame handshake handshake_messages incoming kinds nodes outbox "
        "outgoing payload pieces reassembly safeguards schema scope service session signing tensors_table values"
    ).split()),
)  # fmt: skip
IO = frozenset("asyncio concurrent queue select selectors socket ssl subprocess time random secrets uuid".split())

BANNED = frozenset("pickle cPickle cloudpickle dill marshal shelve multiprocessing imp yaml".split())
#: the call -> the modules that may make it
BANNED_CALLS: Mapping[str, tuple[str, ...]] = {
    "eval": (),
    "exec": ("tensors.rowcode", "cuda.generate", "cuda.driver.simulated_block"),
    "compile": ("tensors.rowcode", "cuda.generate", "cuda.driver.simulated_block"),
    "__import__": (),
    "importlib.import_module": ("distributed.cluster.loading", "kernels.selection", "cuda.loading"),
    "np.load": (),
    "numpy.load": (),
}


@dataclass(frozen=True)
class Import:
    """One imported name."""

    line: int
    #: absolute dotted name; of something in the package, the module it resolves to
    target: str
    in_function: bool
    for_types_only: bool

    @property
    def root(self) -> str:
        return self.target.partition(".")[0]


@dataclass
class Module:
    """A parsed module. `name` is dotted and relative to the package; the package's own ``__init__`` keeps that name."""

    name: str
    path: str
    is_package: bool
    tree: ast.Module
    imports: list[Import] = field(default_factory=list)

    @property
    def unit(self) -> str:
        return self.name.partition(".")[0]

    def within(self, names: tuple[str, ...]) -> bool:
        return any(self.name == name or self.name.startswith(name + ".") for name in names)


def package_sources(folder: Path) -> dict[str, str]:
    """Text of every module of a package folder, by its path relative to the folder."""
    return {path.relative_to(folder).as_posix(): path.read_text(encoding="utf-8") for path in sorted(folder.rglob("*.py"))}


def complaints(sources: Mapping[str, str]) -> list[str]:
    """Everything in `sources` that breaks a rule, as ``path:line: what``."""
    modules = _parse(sources)
    found: list[str] = []
    for module in modules.values():
        found += [f"{module.path}:{line}: {what}" for line, what in (*_import_faults(module), *_statement_faults(module))]
    return [*found, *_cycles(modules)]


def _parse(sources: Mapping[str, str]) -> dict[str, Module]:
    modules: dict[str, Module] = {}
    for path, text in sources.items():
        parts = path.removesuffix(".py").split("/")
        is_package = parts[-1] == "__init__"
        name = ".".join(parts[:-1] if is_package and len(parts) > 1 else parts)
        modules[name] = Module(name, path, is_package, ast.parse(text, path))
    for module in modules.values():
        module.imports = list(_imports(module, modules))
    return modules


# ---- imports


def _imports(module: Module, modules: Mapping[str, Module]) -> Iterator[Import]:
    for node, in_function, types_only in _statements(module.tree, False, False):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(node.lineno, _resolve(alias.name, modules), in_function, types_only)
        elif isinstance(node, ast.ImportFrom):
            base = _absolute(node, module)
            for alias in node.names:
                yield Import(node.lineno, _resolve(f"{base}.{alias.name}", modules, base), in_function, types_only)


def _statements(node: ast.AST, in_function: bool, types_only: bool) -> Iterator[tuple[ast.AST, bool, bool]]:
    for child in ast.iter_child_nodes(node):
        yield child, in_function, types_only
        inside = in_function or isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        if isinstance(child, ast.If) and ast.unparse(child.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
            for statement in child.body:
                yield statement, inside, True
                yield from _statements(statement, inside, True)
            for statement in child.orelse:
                yield statement, inside, types_only
                yield from _statements(statement, inside, types_only)
        else:
            yield from _statements(child, inside, types_only)


def _absolute(node: ast.ImportFrom, module: Module) -> str:
    """The absolute dotted name that ``from X import`` names."""
    if not node.level:
        return node.module or ""
    parts = [PACKAGE] if module.name == "__init__" else [PACKAGE, *module.name.split(".")]
    drop = node.level - 1 if module.is_package else node.level
    return ".".join([*parts[: len(parts) - drop], *((node.module or "").split(".") if node.module else ())])


def _resolve(name: str, modules: Mapping[str, Module], base: str | None = None) -> str:
    """The module behind an imported name: itself if it is one, else the one that holds it."""
    for candidate in (name, base or name):
        if candidate == PACKAGE:
            return f"{PACKAGE}.__init__"
        if candidate.startswith(PACKAGE + ".") and candidate.removeprefix(PACKAGE + ".") in modules:
            return candidate
    return base or name


def _import_faults(module: Module) -> Iterator[tuple[int, str]]:
    level = LEVELS.get(module.unit)
    if level is None:
        yield 1, f"{module.unit} has no level; add it to LEVELS in tests/layering.py"
    for node in ast.walk(module.tree):
        if isinstance(node, ast.ImportFrom) and any(alias.name == "*" for alias in node.names):
            yield node.lineno, f"star import from {node.module}"
    for item in module.imports:
        if item.in_function and item.root not in OPTIONAL:
            yield item.line, f"imports {item.target} inside a function"
        if item.root == PACKAGE:
            unit = item.target.removeprefix(PACKAGE + ".").partition(".")[0]
            theirs = LEVELS.get(unit)
            if level is None or theirs is None or unit == module.unit:
                continue
            if theirs > level:
                yield item.line, f"level {level} imports {item.target} of level {theirs}"
            elif theirs == level == SIBLINGS:
                yield item.line, f"{module.unit} imports its sibling {item.target}"
            continue
        if item.root in BANNED:
            yield item.line, f"imports {item.target}, which turns bytes into objects or code"
        if not module.within(ONLY_IN.get(item.root, (module.name,))):
            yield item.line, f"imports {item.root}, which belongs in {', '.join(ONLY_IN[item.root]) or 'no module of the package'}"
        elif item.root in IO and module.within(SANS_IO):
            yield item.line, f"imports {item.root}, but this module decides without doing"


def _cycles(modules: Mapping[str, Module]) -> list[str]:
    edges: dict[str, list[str]] = {}
    for name, module in modules.items():
        targets = {item.target.removeprefix(PACKAGE + ".") for item in module.imports if item.root == PACKAGE and not item.for_types_only}
        edges[name] = sorted(targets & modules.keys() - {name})
    found: list[str] = []
    state: dict[str, int] = {}

    def visit(name: str, path: list[str]) -> None:
        state[name] = 1
        for target in edges[name]:
            if state.get(target) == 1:
                found.append("import cycle: " + " -> ".join([*path[path.index(target) :], target]))
            elif target not in state:
                visit(target, [*path, target])
        state[name] = 2

    for name in edges:
        if name not in state:
            visit(name, [name])
    return found


# ---- statements and calls


def _statement_faults(module: Module) -> Iterator[tuple[int, str]]:
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Assert):
            yield node.lineno, "assert, which python -O removes; raise a typed error"
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name | ast.Attribute):
            called = ast.unparse(node.func)
            if called in BANNED_CALLS and not module.within(BANNED_CALLS[called]):
                yield node.lineno, f"calls {called}"
