"""``.. fault-model::``: the table of ``tests/distributed/fault_model.py``."""

from __future__ import annotations

from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

from tests.distributed.fault_model import FAULTS


class FaultTable(SphinxDirective):
    """One row per fault: what goes wrong, what is promised, the tests that hold it to that, and the parts of ``make chaos``."""

    def run(self) -> list[nodes.Node]:
        lines = [".. list-table::", "   :header-rows: 1", "   :widths: 4 24 32 40", "", "   * - ", "     - fault", "     - promise", "     - tests"]
        for number, fault in FAULTS.items():
            tests = [f"``tests/{test}``" for test in fault.tests]
            if fault.chaos:
                tests.append(f"``make chaos``: {', '.join(fault.chaos)}")
            lines += [f"   * - {number}", f"     - {fault.fault}", f"     - {fault.promise}", f"     - | {tests[0]}"]
            lines += [f"       | {test}" for test in tests[1:]]
        return self.parse_text_to_nodes("\n".join(lines) + "\n")


def setup(app: Sphinx) -> dict[str, Any]:
    app.add_directive("fault-model", FaultTable)
    return {"parallel_read_safe": True}
