"""The bill of materials of a wheel, in CycloneDX's JSON, and the hook of hatchling that writes it into ``.dist-info/sboms``, as PEP 770 says.

The wheel contains nothing of others, so the bill names the wheel and what it asks for: the dependencies that come with it, and those of the extras
that are for users. The same project gives the same bytes.
"""

from __future__ import annotations

import datetime
import json
import os
import tempfile
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from packaging.requirements import Requirement

NAME = "sbom.cdx.json"
#: extras of the project's own tools, which no wheel needs
DEVELOPMENT = frozenset({"bench", "browser", "dev", "docs", "gpu", "interop", "parity", "ptx", "release"})


def bill(
    name: str, version: str, *, licence: str, author: str, requires: Sequence[str], extras: Mapping[str, Sequence[str]], epoch: str | None = None
) -> str:
    """The bill of materials.

    Args:
        name, version, licence, author: of the project; the licence is an SPDX identifier.
        requires: the requirements of the project.
        extras: those of each extra.
        epoch: when it was built, in seconds since 1970; without it the bill has no time.
    """
    asked: dict[str, list[str]] = {}
    for text in requires:
        asked.setdefault(_normal(Requirement(text).name), []).append(text)
    required = set(asked)
    for extra, texts in sorted(extras.items()):
        for text in texts if extra not in DEVELOPMENT else ():
            requirement = Requirement(text)
            if _normal(requirement.name) != _normal(name):
                condition = f"({requirement.marker}) and extra == '{extra}'" if requirement.marker else f"extra == '{extra}'"
                asked.setdefault(_normal(requirement.name), []).append(f"{text.partition(';')[0].strip()}; {condition}")
    itself = f"pkg:pypi/{_normal(name)}@{version}"
    about: dict[str, Any] = {
        "authors": [{"name": author}],
        "component": {
            "type": "library", "bom-ref": itself, "name": name, "version": version, "purl": itself, "licenses": [{"license": {"id": licence}}],
        },
        "lifecycles": [{"phase": "build"}],
    }  # fmt: skip
    if epoch is not None:
        about["timestamp"] = datetime.datetime.fromtimestamp(int(epoch), datetime.UTC).isoformat()
    content: dict[str, Any] = {
        "$schema": "http://cyclonedx.org/schema/bom-1.6.schema.json",
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": about,
        "components": [
            {
                "type": "library", "bom-ref": f"pkg:pypi/{each}", "name": each, "purl": f"pkg:pypi/{each}",
                "scope": "required" if each in required else "optional",
                "properties": [{"name": "aiograd:requires", "value": text} for text in texts],
            }
            for each, texts in sorted(asked.items())
        ],
        "dependencies": [{"ref": itself, "dependsOn": [f"pkg:pypi/{each}" for each in sorted(asked)]}],
    }  # fmt: skip
    content["serialNumber"] = f"urn:uuid:{uuid.uuid5(uuid.NAMESPACE_URL, json.dumps(content, sort_keys=True))}"
    return json.dumps(content, indent=2) + "\n"


def _normal(name: str) -> str:
    return name.lower().replace("_", "-").replace(".", "-")


class BillHook(BuildHookInterface):  # type: ignore[type-arg]
    """Writes the bill of the project that is built."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        core = self.metadata.core
        text = bill(
            core.raw_name, self.metadata.version, licence=core.license_expression, author=core.authors[0]["name"], requires=core.dependencies,
            extras=core.optional_dependencies, epoch=os.environ.get("SOURCE_DATE_EPOCH"),
        )  # fmt: skip
        self._folder = tempfile.TemporaryDirectory()
        path = Path(self._folder.name) / NAME
        path.write_text(text)
        path.chmod(0o644)
        build_data["sbom_files"].append(str(path))

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        self._folder.cleanup()
