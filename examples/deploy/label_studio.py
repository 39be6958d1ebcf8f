"""Unknown photos go to Label Studio as tasks, and come back as lessons.

    candid group mine new-photos --out groups
    python label_studio.py tasks groups/groups.csv > tasks.json    # import it into a project
    python label_studio.py teach mine export.json --out mine2      # after labelling: export as JSON

The project needs the labels below and local storage (LABEL_STUDIO_LOCAL_FILES_SERVING_ENABLED=true).
Tasks of one group come together, and the group is proposed as the answer: a person replaces it by a name.
"""

import argparse
import csv
import json
from pathlib import Path

import candid

LABELS = """<View>
  <Image name="image" value="$image"/>
  <TextArea name="class" toName="image" maxSubmissions="1"/>
</View>"""
FILES = "/data/local-files/?d="


def tasks(table):
    """Return one task for each novel photo of groups.csv, those of one group together."""
    with Path(table).open(encoding="utf-8", newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["verdict"] == "novel"]
    return [task(row) for row in sorted(rows, key=lambda row: row["group"])]


def task(row):
    """Return a task with the group as its prediction."""
    path = Path(row["path"]).resolve().as_posix()
    answer = {"from_name": "class", "to_name": "image", "type": "textarea", "value": {"text": [row["group"]]}}
    data = {"image": FILES + path.lstrip("/"), "path": path, "nearest_class": row["nearest_class"]}
    return {"data": data, "predictions": [{"model_version": "candid", "result": [answer]}]}


def lessons(export):
    """Return the photos of each name that people gave, without those that they skipped."""
    named = {}
    for each in json.loads(Path(export).read_text(encoding="utf-8")):
        given = [answer for answer in each["annotations"] if not answer.get("was_cancelled")]
        results = [result for answer in given for result in answer["result"]]
        for name in {text.strip() for result in results for text in result["value"].get("text", ())}:
            named.setdefault(name, []).append(each["data"]["path"])
    return named


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("tasks").add_argument("table")
    learn = commands.add_parser("teach")
    for name in ("model", "export"):
        learn.add_argument(name)
    learn.add_argument("--out", required=True)
    given = parser.parse_args()
    if given.command == "tasks":
        print(json.dumps(tasks(given.table), indent=1))
        return
    result = candid.teach(given.model, lessons(given.export), out=given.out)
    print("\n".join(sentence for sentence in result.sentences()))


if __name__ == "__main__":
    main()
