"""An audit on disk: one page and one JSON file."""

import json
from pathlib import Path
from typing import Any

from candid.audit.page import page
from candid.audit.record import findings, record
from candid.audit.run import Audit
from candid.evaluation.output import write_texts

PAGE, RECORD = "audit.html", "audit.json"


def write(found: Audit) -> tuple[dict[str, Any], list[Path]]:
    """What is in the JSON file, and the files."""
    judged = findings(found)
    made = record(found, judged)
    texts = {
        RECORD: json.dumps(made, indent=1, allow_nan=False, ensure_ascii=False) + "\n",
        PAGE: page(found, judged),
    }
    return made, write_texts(texts, found.request.out)
