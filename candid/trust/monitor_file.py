"""A monitor on disk: a folder with ``monitor.json`` and the safetensors file that it names.

``monitor.json`` is replaced last and atomically, and carries a digest of itself and of the other file.
Loading reads numbers and text; it runs no code from the files.
"""

import json
import os
import re
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from torch import Tensor

from candid._support.config import from_dict, to_dict
from candid._support.errors import CandidError, CheckpointError
from candid._support.files import digest, locked, remove_unfinished, replacing, tensors_of
from candid._support.version import __version__
from candid.models.model_files import SAVE_SECONDS, file_hash, loaded_again, without_repeats, write_by_hash
from candid.trust.combined import CombinedRanks
from candid.trust.feature_scores import COLUMN_SCORES
from candid.trust.options import MonitorOptions
from candid.trust.promises import Risk
from candid.trust.ranking import Ranking
from candid.trust.rule import Fitted, Rule

RECORD, FORMAT, VERSION = "monitor.json", "candid-monitor", 1
OURS = re.compile(r"monitor-[0-9a-f]{16}\.safetensors")


def save(options: MonitorOptions, fitted: Fitted, path: str | os.PathLike[str]) -> None:
    """Write a monitor; one that is there is replaced only once this one is whole."""
    folder = Path(path)
    if folder.is_file():
        raise CheckpointError(f"'{folder}' is a file: name a folder to save the monitor in.")
    risk = next(iter(fitted.rule.promises.values())).risk
    record = {
        "format": FORMAT,
        "format_version": VERSION,
        "library_version": __version__,
        "options": to_dict(options),
        "class_names": list(fitted.class_names),
        "parts": list(fitted.parts),
        "features": fitted.features,
        "by": fitted.by,
        "group_names": list(fitted.group_names),
        "log_odds": fitted.log_odds,
        "risk": None if risk is None else to_dict(risk),
    }
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with locked(folder, "saves a monitor in", SAVE_SECONDS):
            _write(folder, record, _tensors(fitted))
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"Can't save the monitor in '{folder}': {error}; free some space, or choose another folder."
        ) from error


def _write(folder: Path, record: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    file = write_by_hash(folder, "monitor", tensors)
    record["numbers"] = {"file": file.name, "sha256": file_hash(file)}
    with replacing(folder / RECORD) as temporary:
        sealed = record | {"digest": digest(record).hexdigest()}
        temporary.write_text(json.dumps(sealed, indent=1), encoding="utf-8")
    for old in folder.glob("monitor-*.safetensors"):
        if OURS.fullmatch(old.name) and old != file:
            old.unlink(missing_ok=True)
    remove_unfinished(folder)


def load(path: str | os.PathLike[str]) -> tuple[MonitorOptions, Fitted]:
    """Return the options and what was learned."""
    folder = Path(path)
    return loaded_again(folder / RECORD, lambda: _load(folder))


def _load(folder: Path) -> tuple[MonitorOptions, Fitted]:
    record = _read_record(folder)
    tensors = _read_numbers(folder, record["numbers"])
    try:
        options = from_dict(MonitorOptions, record["options"])
        parts = tuple(record["parts"])
        rankings = [_ranking(parts, _under(f"{i}.", tensors)) for i in range(int(tensors["rankings"]))]
        # Earlier versions stored posteriors, which are at most the ratios: class sets are larger, but valid.
        true_ratios = tensors["true_ratios" if "true_ratios" in tensors else "true_posterior"]
        rule = Rule.of(rankings, true_ratios, tensors["groups"], options)
        if record["risk"] is not None:
            rule = rule.with_risk(from_dict(Risk, record["risk"]))
        names = tuple(record["class_names"]), parts
        groups = record["by"], tuple(record["group_names"])
        return options, Fitted(rule, *names, record["features"], *groups, record["log_odds"])
    except (CandidError, KeyError, TypeError, ValueError, RuntimeError) as error:
        raise CheckpointError(
            f"'{folder}' holds a monitor that this candid {__version__} can't read ({error}): fit it again."
        ) from error


def _tensors(fitted: Fitted) -> dict[str, Tensor]:
    rule = fitted.rule
    found = {"true_ratios": rule.true_ratios, "groups": rule.groups}
    found["rankings"] = rule.groups.new_tensor(len(rule.rankings))
    for i, ranking in enumerate(rule.rankings):
        own = {"held_out": ranking.held_out, "groups": ranking.groups, "labels": ranking.labels}
        if ranking.fixed is not None:
            own |= {f"fixed.{name}": value for name, value in ranking.fixed.state().items()}
        for part, score in zip(fitted.parts, ranking.scores, strict=True):
            own |= {f"{part}.{name}": value for name, value in score.state().items()}
        found |= {f"{i}.{name}": value.clone() for name, value in own.items()}
    return found


def _ranking(parts: tuple[str, ...], tensors: dict[str, Tensor]) -> Ranking:
    scores = [COLUMN_SCORES[part].from_state(_under(f"{part}.", tensors)) for part in parts]
    fixed = _under("fixed.", tensors)
    known = tensors["held_out"], tensors["groups"], tensors["labels"]
    return Ranking(scores, *known, CombinedRanks.from_state(fixed) if fixed else None)


def _under(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}


def _read_record(folder: Path) -> dict[str, Any]:
    path = folder / RECORD
    if not path.is_file():
        raise CheckpointError(f"There is no {RECORD} in '{folder}': name the folder of a saved monitor.")
    try:
        record = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=without_repeats)
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"'{path}' can't be read as JSON (cut or overwritten?): {error}.") from error
    if not isinstance(record, dict) or record.get("format") != FORMAT:
        raise CheckpointError(f"'{path}' was not written by candid: save a monitor with Monitor.save first.")
    if record.get("format_version") != VERSION:
        raise CheckpointError(
            f"'{path}' has format version {str(record.get('format_version'))[:20]}, but this candid reads "
            f"{VERSION}: use the candid that wrote it ({str(record.get('library_version'))[:20]})."
        )
    if record.pop("digest", None) != digest(record).hexdigest():
        raise CheckpointError(
            f"'{path}' was edited since candid wrote it: restore it, or fit the monitor again."
        )
    return record


def _read_numbers(folder: Path, entry: dict[str, Any]) -> dict[str, Tensor]:
    path = folder / str(entry.get("file"))
    if not OURS.fullmatch(path.name) or not path.is_file():
        raise CheckpointError(
            f"The file '{path.name[:60]}' is missing from '{folder}': copy the whole folder."
        )
    try:
        content = path.read_bytes()
        if digest(content).hexdigest() != entry.get("sha256"):
            raise CheckpointError(f"'{path}' was cut or changed since it was saved: copy it again.")
        return tensors_of(content)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"'{path}' is not a whole safetensors file: {error}; copy it again.") from error
