"""Ray's tables, as everybody can read them, and the ways in which a key could stand in them."""

from __future__ import annotations

import base64


def spellings(secret: bytes) -> list[bytes]:
    """The ways in which a key may be written."""
    return [secret, secret.hex().encode(), secret.hex().upper().encode(), base64.b64encode(secret).rstrip(b"="), repr(secret)[2:-1].encode()]


def of_ray() -> dict[str, bytes]:
    """The contents of Ray's tables: whole records of actors, jobs, workers, placement groups and tasks, and every value that is stored by key."""
    from ray._private.state import state
    from ray.experimental.internal_kv import _internal_kv_get, _internal_kv_list

    tables = state._connect_and_get_accessor()
    records = {
        "actors": tables.get_actor_table(None, None),
        "jobs": tables.get_job_table(skip_submission_job_info_field=True, skip_is_running_tasks_field=True),
        "workers": tables.get_worker_table(),
        "groups": tables.get_placement_group_table(),
        "tasks": tables.get_task_events(),
    }
    found = {f"{name} {i}": record for name, several in records.items() for i, record in enumerate(several)}
    for namespace in (None, "fun", "job", "session", "cluster", "dashboard", "healthcheck", "tracing", "ray_pdb"):
        for key in _internal_kv_list(b"", namespace=namespace):
            found[f"{namespace} {key!r}"] = _internal_kv_get(key, namespace=namespace) or b""
    return found
