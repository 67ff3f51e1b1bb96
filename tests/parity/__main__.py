"""Prints the tables of the comparison; exits with 1 where something differs."""

from __future__ import annotations

import argparse
import sys
import warnings

import aiograd as ag
from aiograd.ops import ROWS

try:
    import torch
except ImportError:
    torch = None  # type: ignore[assignment]


async def _rows(names: list[str]) -> bool:
    from tests.parity.counterparts import COUNTERPARTS
    from tests.parity.rows import DOMAINS, compare_row

    differentiable = [name for name, row in sorted(ROWS.items()) if row.differentiable and (not names or name in names)]
    compared = [name for name in differentiable if name in COUNTERPARTS and name in DOMAINS]
    print(f"{'row':30} {'torch':32} cases      value   gradient     second")
    fine = True
    for name in compared:
        found = await compare_row(name)
        second = "" if found.second is None else f"{found.second:.1e}"
        verdict = "" if found.agrees else "  DIFFERS"
        print(f"{name:30} {found.counterpart:32} {found.cases:5} {found.value:10.1e} {found.gradient:10.1e} {second:>10}{verdict}", flush=True)
        for error in found.errors:
            print(f"    {error}")
        fine = fine and found.agrees
    without = [name for name in differentiable if name not in compared]
    print(f"\n{len(compared)} rows compared; without a counterpart in torch: {', '.join(without) or 'none'}\n")
    return fine


async def _training() -> bool:
    from tests.parity.training import compare_layers, compare_optimizers

    fine = True
    for title, found in (("layer", await compare_layers()), ("optimizer", await compare_optimizers())):
        print(f"{title:80} difference")
        for difference in found:
            verdict = "" if difference.agrees else f"  DIFFERS {difference.error}"
            print(f"{difference.name:80} {difference.value:10.1e}{verdict}", flush=True)
            fine = fine and difference.agrees
        print()
    return fine


async def _scripts() -> bool:
    from tests.ported_scripts import SCRIPTS, namespace, port, same

    fine = True
    for name, script in SCRIPTS.items():
        agrees = same(await namespace(port(script))["main"](), namespace(script)["main"]())
        print(f"{name:60}{'' if agrees else '  DIFFERS'}", flush=True)
        fine = fine and agrees
    print()
    return fine


def main() -> int:
    """Compare rows (all, or the named ones) and, with no names given, layers, optimizers and small scripts."""
    parser = argparse.ArgumentParser(prog="python -m tests.parity", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="row", help="rows to compare (all by default)")
    options = parser.parse_args()
    if torch is None:
        print("tests.parity compares with PyTorch, which is not installed: pip install 'aiograd[parity]'", file=sys.stderr)
        return 2
    unknown = set(options.names) - set(ROWS)
    if unknown:
        parser.error(f"no row is called {', '.join(sorted(unknown))}")
    warnings.filterwarnings("ignore", category=UserWarning, module="torch")
    torch.set_num_threads(1)
    print(f"aiograd {ag.__version__} beside torch {torch.__version__}\n")
    fine = ag.run(_rows(options.names))
    if not options.names:
        fine = ag.run(_training()) and fine
        fine = ag.run(_scripts()) and fine
    print("everything agrees" if fine else "something DIFFERS, see above")
    return 0 if fine else 1


if __name__ == "__main__":
    sys.exit(main())
