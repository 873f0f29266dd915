"""Names that older releases wrote into a run's directory: this release reads them, and does not
write them.

Older releases called a coordinator's term its epoch: in `epoch.json`, in the names of log segments
(`epoch-000001-step-0000000000.log`), and as a key of journal lines, commits and checkpoints.
"""

from __future__ import annotations

from typing import Any, Final

OLDER_TERM_FILE: Final = "epoch.json"
OLDER_TERM: Final = "epoch"


def with_term(fields: dict[str, Any]) -> dict[str, Any]:
    """Return a document's top-level fields with `term` in place of an older release's `epoch`."""
    if OLDER_TERM not in fields or "term" in fields:
        return fields
    return {"term" if key == OLDER_TERM else key: value for key, value in fields.items()}
