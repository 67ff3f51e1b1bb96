"""Reads the imports of the package and says which ones break the rules of its layout.

Pure: source text in, complaints out, so the rules are tested on made-up sources (``test_layering.py``).

Note [The rules]
    *Levels.* Each top-level name of the package has a level, and so have modules of a package that are on another level than it. A module
    imports only from levels below its own, or from its own level where no circle comes of it. The members of level 5 are siblings: none
    imports another.

    *Circles.* There are none. Imports for type checking only count, here and for levels, since what a signature names is a dependency; a stub
    (``.pyi``) counts as part of its module.

    *Where what may be imported.* asyncio in the drivers, aiohttp in one module, numba where kernels are; modules that decide without
    doing (`SANS_IO`) import nothing that waits, measures time, draws or talks.

    *How.* At the top of the file, except heavy packages that are optional; by name, and by ``*`` only where names are gathered (`GATHERING`).

    *Never.* Modules that turn bytes into code or objects, ``eval`` and its like, and ``assert``, which ``python -O`` removes.
"""

from __future__ import annotations

import ast
import gc
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

PACKAGE = "aiograd"

LEVELS: Mapping[str, int] = {
    name: level
    for level, names in enumerate(
        (
            "errors running",
            "ops kernels",
            "graph running.modes running.foreign_modes running.devices",
            "engine transaction data.ledger",
            "tensors sparse functional forward running.random running.offloading running.scalars array_functions autograd coordination "
            "serving.batching serving.batcher",
            "nn optim distributions parallel pipeline distributed cuda saving",
            "compiler profiler implicit viz testing data stats saving.training_state dashboard interop utils serving running.accelerator",
            "__init__ __main__ running.cli",
        )
    )
    for name in names.split()
}
SIBLINGS = 5

#: modules that gather names by star imports
GATHERING = ("__init__", "array_functions.public", "errors")

#: imported package -> the modules that may import it (a name covers everything below it)
ONLY_IN: Mapping[str, tuple[str, ...]] = {
    "asyncio": (
        "engine.run", "engine.executors", "parallel", "data", "pipeline.run", "coordination", "cuda.executor", "testing", "running.cli", "__main__",
        "dashboard.collector", "dashboard.reporter", "interop.background", "serving", "compiler.warming",
        *(f"distributed.{name}" for name in (
            "asking wait_chains wait_tables rpc.open_requests "
            "worker worker_core calls loop_lag membership multicast autograd objects cluster data_parallel local_steps collectives.agreement "
            "collectives.forming collectives.group collectives.group_server collectives.running moe.runtime rpc.http rpc.endpoint "
            "rpc.earlier_requests rpc.handshake_log rpc.loopback rpc.outbound_room rpc.peer rpc.peer_session rpc.request_handlers rpc.secure_channel "
            "rpc.shared.lane rpc.timers watchdog"
        ).split()),
    ),
    "uvloop": ("engine.run", "running.cli", "__main__"),
    "aiohttp": ("distributed.rpc.http", "serving.web"),
    "starlette": ("serving.web",),
    "numba": ("kernels", "cuda"),
    "llvmlite": ("kernels", "cuda", "compiler.native.machine"),
    "pytest": ("testing.plugin",),
    "pytest_asyncio": ("testing.plugin",),
    "ray": ("distributed.cluster.ray_connection", "distributed.cluster.ray_worker"),
    "_thread": (),  # threads are started by `threading`, which lists them
    "torch": ("interop.torch",),
    "jax": ("interop.jax",),
    "einops": ("interop.einops",),
    "sklearn": ("running.cli.demo",),
    "tqdm": ("running.cli.demo", "running.progress"),
    "scipy": ("sparse",),
}  # fmt: skip

#: what every run of pytest in an environment imports, so that it imports the rest where it is used
LATE = "testing.plugin."
#: optional packages, which may be imported where they are first needed
OPTIONAL = frozenset("prometheus_client uvloop numba llvmlite ray threadpoolctl ml_dtypes cuda numba_cuda scipy sklearn starlette tqdm".split())

#: modules that decide and leave the doing to others, and what they therefore cannot need
SANS_IO = (
    "engine.captures", "engine.evaluate", "engine.graph_root", "engine.graph_task", "engine.input_buffer", "engine.ledger", "engine.pass_futures",
    "engine.pass_hooks", "engine.placement", "engine.plan", "engine.reach", "engine.ready_queue", "engine.renumbering", "engine.selection",
    "engine.short_pass", "engine.split_backward", "engine.staged_commit", "engine.pass_view", "engine.validate", "engine.walk",
    "transaction", "data.ledger",
    *(f"distributed.{name}" for name in "error_wire kinds messages payload schema scope service waits".split()),
    *(f"distributed.autograd.{name}" for name in "context context_table nodes".split()),
    *(f"distributed.objects.{name}" for name in "reference_table references".split()),
    *(f"distributed.collectives.{name}" for name in "operation layout exchange ring".split()),
    *(f"coordination.{name}" for name in "buckets compression malformed message_code message_form message_json outline".split()),
    *(f"serving.{name}" for name in "arguments batching buffer delta gate shares versions".split()),
    *(f"distributed.rpc.{name}" for name in (
        "budget cipher codec effects encodings frames handshake handshake_messages identity inbound keyring limits lost_peers noise outbound outbox "
        "reassembly session session_side shared.allowance shared.ring tensor_table timer_queue transport values failure_detector pulse"
    ).split()),
)  # fmt: skip
IO = frozenset("asyncio concurrent queue select selectors socket ssl subprocess time random secrets uuid".split())

BANNED = frozenset("pickle cPickle cloudpickle dill marshal shelve multiprocessing imp yaml".split())
#: the call -> the modules that may make it
BANNED_CALLS: Mapping[str, tuple[str, ...]] = {
    "eval": (),
    "exec": ("tensors.codegen", "coordination.message_code", "compiler.source", "cuda.generate", "cuda.driver.simulated_block"),
    "compile": ("tensors.codegen", "coordination.message_code", "compiler.source", "cuda.generate", "cuda.driver.simulated_block"),
    "__import__": (),
    "importlib.import_module": ("data.serving", "distributed.cluster.loading", "kernels.selection", "cuda.loading", "interop.extras"),
    "np.load": (),
    "numpy.load": (),
}
#: the last parts of their names, by which most calls are told apart without being written out
_LAST_OF_BANNED_CALLS = frozenset(call.rpartition(".")[2] for call in BANNED_CALLS)


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
        return unit_of(self.name)

    def within(self, names: tuple[str, ...]) -> bool:
        return any(self.name == name or self.name.startswith(name + ".") for name in names)


def unit_of(name: str) -> str:
    """The part of a dotted name that has a level: the longest that is listed, else the first."""
    parts = name.split(".")
    listed = (".".join(parts[:length]) for length in range(len(parts), 0, -1))
    return next((prefix for prefix in listed if prefix in LEVELS), parts[0])


def package_sources(folder: Path) -> dict[str, str]:
    """Text of every module and stub of a package folder, by its path relative to the folder."""
    paths = [*folder.rglob("*.py"), *folder.rglob("*.pyi")]
    return {path.relative_to(folder).as_posix(): path.read_text(encoding="utf-8") for path in sorted(paths)}


def statements(tree: ast.AST) -> Iterator[ast.AST]:
    """A tree and all below it but expressions, in which no statement is: a third of what ``ast.walk`` finds."""
    todo = [tree]
    while todo:
        node = todo.pop()
        yield node
        todo += reversed([child for child in ast.iter_child_nodes(node) if not isinstance(child, ast.expr)])


def complaints(sources: Mapping[str, str]) -> list[str]:
    """Everything in `sources` that breaks a rule, as ``path:line: what``; circles as what imports what."""
    collects = gc.isenabled()
    gc.disable()  # a million nodes and no garbage: the collector would take half of the time
    try:
        modules = _parse(sources)
        found: list[str] = []
        for module in modules.values():
            found += [f"{module.path}:{line}: {what}" for line, what in (*_import_faults(module), *_statement_faults(module))]
        return found + [_circle_in(tangle, modules) for tangle in _tangles(_edges(modules))]
    finally:
        if collects:
            gc.enable()


def _parse(sources: Mapping[str, str]) -> dict[str, Module]:
    modules: dict[str, Module] = {}
    for path, text in sorted(sources.items()):
        parts = path.removesuffix(".pyi").removesuffix(".py").split("/")
        if path.endswith(".pyi") and (module := modules.get(".".join(parts))):  # the stub of a module
            module.tree.body += ast.parse(text, path).body
            continue
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
        if isinstance(child, ast.expr):
            continue  # no statement is in one
        yield child, in_function, types_only
        inside = in_function or isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef)
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
    for item in module.imports:
        if item.in_function and item.root not in OPTIONAL and not module.name.startswith(LATE):
            yield item.line, f"imports {item.target} inside a function"
        if item.root == PACKAGE:
            unit = unit_of(item.target.removeprefix(PACKAGE + "."))
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


# ---- circles


def _edges(modules: Mapping[str, Module]) -> dict[str, list[str]]:
    """For each module those of the package that it imports."""
    edges: dict[str, list[str]] = {}
    for name, module in modules.items():
        targets = {item.target.removeprefix(PACKAGE + ".") for item in module.imports if item.root == PACKAGE}
        edges[name] = sorted(targets & modules.keys() - {name})
    return edges


def _tangles(edges: Mapping[str, Sequence[str]]) -> list[frozenset[str]]:
    """Sets of modules that all reach each other (strongly connected components of more than one)."""
    back: dict[str, list[str]] = {name: [] for name in edges}
    for name, targets in edges.items():
        for target in targets:
            back[target].append(name)
    left = set(edges)
    found: list[frozenset[str]] = []
    for name in edges:
        if name in left:
            tangle = _reached(name, edges, left) & _reached(name, back, left)
            left -= tangle
            if len(tangle) > 1:
                found.append(frozenset(tangle))
    return found


def _reached(start: str, edges: Mapping[str, Sequence[str]], within: Set[str]) -> set[str]:
    seen, stack = {start}, [start]
    while stack:
        fresh = [target for target in edges[stack.pop()] if target in within and target not in seen]
        seen.update(fresh)
        stack += fresh
    return seen


def _circle_in(tangle: frozenset[str], modules: Mapping[str, Module]) -> str:
    """The shortest circle through the first module of a tangle, and how large that is."""
    edges = _edges(modules)
    first = min(tangle)
    paths = [[first]]
    circle: list[str] | None = None
    seen: set[str] = set()
    while circle is None:
        path = paths.pop(0)
        for target in edges[path[-1]]:
            if target == first:
                circle = [*path, first]
                break
            if target in tangle and target not in seen:
                seen.add(target)
                paths.append([*path, target])
    steps = [f"{name} -> {target}{_only_for_types(modules[name], target)}" for name, target in pairwise(circle)]
    return f"import circle: {', '.join(steps)}" + (f"; {len(tangle)} modules reach each other here" if len(tangle) > len(steps) else "")


def _only_for_types(module: Module, target: str) -> str:
    return " (types)" if all(item.for_types_only for item in module.imports if item.target == f"{PACKAGE}.{target}") else ""


# ---- statements and calls


def _statement_faults(module: Module) -> Iterator[tuple[int, str]]:
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Assert):
            yield node.lineno, "assert, which python -O removes; raise a typed error"
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name | ast.Attribute):
            last = node.func.id if isinstance(node.func, ast.Name) else node.func.attr
            called = ast.unparse(node.func) if last in _LAST_OF_BANNED_CALLS else last
            if called in BANNED_CALLS and not module.within(BANNED_CALLS[called]):
                yield node.lineno, f"calls {called}"
        elif isinstance(node, ast.ImportFrom) and any(alias.name == "*" for alias in node.names) and module.name not in GATHERING:
            yield node.lineno, f"star import from {node.module}"
