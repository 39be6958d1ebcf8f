"""An audit on disk: one page and one JSON file."""

import json
from pathlib import Path
from typing import Any

from candid._support.files import write_texts
from candid.reports.audit.page import page
from candid.reports.audit.record import grades_of, record
from candid.reports.audit.run import Audit

PAGE, RECORD = "audit.html", "audit.json"


def write(found: Audit) -> tuple[dict[str, Any], list[Path]]:
    """What is in the JSON file, and the files."""
    grades = grades_of(found)
    made = record(found, grades)
    texts = {
        RECORD: json.dumps(made, indent=1, allow_nan=False, ensure_ascii=False) + "\n",
        PAGE: page(found, grades),
    }
    return made, write_texts(texts, found.options.out)
