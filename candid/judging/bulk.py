"""Examine images in bulk: shards in, a table for each out, whole or not at all.

A shard is a tar, zip or Parquet file, here or behind a URL, or a part of a folder of images.
A table that exists is skipped: that is how a run goes on after it was ended.
"""

import glob
import json
import multiprocessing
import os
import re
import tarfile
import threading
import time
import zipfile
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from itertools import count
from pathlib import Path, PurePosixPath
from queue import Empty
from typing import Any, BinaryIO, NamedTuple

from candid._support.errors import CandidError, require_extra
from candid._support.files import remove_unfinished, write_text
from candid._support.numbers import digest
from candid._support.text import natural
from candid.data import ARCHIVES
from candid.data.formats import images_in
from candid.data.images import EXTENSIONS, BadImageError, path_of
from candid.data.shards import MEMBER_BYTES
from candid.judging.examine import Examiner
from candid.judging.table_files import TableFile
from candid.trust.promises import ExamineOptions
from candid.trust.ranking import ALL
from candid.trust.verdict import UnusableImage

PIECE = 5000
"""Images of a folder in one table."""
ROWS = 64
"""Rows of a Parquet file that are in memory at a time."""
SETTINGS = "settings.json"
"""Which model and options the tables of a folder come from."""
ABANDONED = 24 * 3600
"""Half-written tables of other processes are removed after this number of seconds."""
NUMBERS = re.compile(r"\{(\d+)\.\.(\d+)\}")


@dataclass(frozen=True)
class Shard:
    """Images that are judged into one table."""

    name: str
    """Of the table, without its ending."""
    source: str
    """A file or a URL; of a folder, the folder."""
    files: tuple[Path, ...] = ()
    """Images of a folder."""


@dataclass(frozen=True)
class Job:
    """What is done with each shard."""

    examiner: Examiner
    folder: Path
    ending: str

    def table(self, shard: Shard) -> Path:
        """Return the file of the table of a shard."""
        return self.folder / f"{shard.name}{self.ending}"


class Seen(NamedTuple):
    """How far a shard is."""

    name: str
    images: int
    share: float
    """Of its bytes, files or rows."""


@dataclass(frozen=True)
class Outcome:
    """What was said of the images of a shard, or why it can't be read."""

    name: str
    verdicts: Counter[str] = field(default_factory=Counter)
    error: str | None = None


def shards_of(sources: Sequence[str], part: tuple[int, int] = (0, 1)) -> list[Shard]:
    """Return the shards that these names stand for: every N-th of them from I on, for ``part`` (I, N).

    Args:
        sources: archives, folders of archives or images, images, URLs, patterns with ``*`` or ``{000..127}``.
        part: which of the shards.

    Raises:
        CandidError: if there is nothing of that name, or if two shards have one name.
    """
    shards: dict[str, Shard] = {}
    for shard in (each for source in sources for name in _counted(source) for each in _shards(name)):
        if shard.name in shards:
            raise CandidError(
                f"'{shards[shard.name].source}' and '{shard.source}' would both be written to "
                f"'{shard.name}': examine them into two folders."
            )
        shards[shard.name] = shard
    if any(str(shard.source).endswith(".parquet") for shard in shards.values()):
        require_extra("pyarrow.parquet", "bulk", "Reading Parquet")
    first, parts = part
    return list(shards.values())[first::parts]


def part_of(text: str) -> tuple[int, int]:
    """Return the part that ``I/N`` stands for; I counts from 0.

    >>> part_of("3/8")
    (3, 8)
    """
    first, _, parts = text.partition("/")
    if not (first.isdecimal() and parts.isdecimal() and int(first) < int(parts)):
        raise CandidError(f"--shard takes I/N with I from 0 to N - 1, such as 0/8, not '{text}'.")
    return int(first), int(parts)


def prepare(job: Job, model: str, options: ExamineOptions) -> None:
    """Make the folder and write which model and options its tables come from.

    Raises:
        CandidError: if it has tables of a different model or of different options.
    """
    rule = job.examiner.rule
    settings = {
        "fingerprint": job.examiner.fingerprint,
        "options": asdict(options),
        "table": job.ending,
        "promises": None if rule is None else rule.promises[ALL].to_dict(),
    }
    path = job.folder / SETTINGS
    try:
        job.folder.mkdir(parents=True, exist_ok=True)
        before = json.loads(path.read_text(encoding="utf-8")) if path.exists() else None
        if before is None:
            write_text(json.dumps({"model": model, **settings}, indent=1, allow_nan=False) + "\n", path)
        remove_unfinished(job.folder, ABANDONED)
    except (OSError, ValueError) as error:
        raise CandidError(f"Can't write to '{job.folder}' ({error}): choose another folder.") from error
    if before is not None and before != {"model": before.get("model"), **json.loads(json.dumps(settings))}:
        raise CandidError(
            f"'{job.folder}' has tables of a different model, of different options or of another kind of "
            f"table (see {SETTINGS}): choose another folder."
        )


def judged(job: Job, shards: Sequence[Shard], processes: int = 1) -> Iterator[Seen | Outcome]:
    """Judge shards, and yield how far each is, and its outcome, also of one that can't be read."""
    if processes == 1:
        for shard in shards:
            yield from _judged(job, shard)
        return
    context = multiprocessing.get_context("spawn")
    seen = context.Queue()
    pool = ProcessPoolExecutor(min(processes, len(shards)), context, _start, (seen, processes))
    try:
        waiting = {pool.submit(_in_process, job, shard) for shard in shards}
        while waiting:
            done, waiting = wait(waiting, 0.5, FIRST_COMPLETED)
            with suppress(Empty):
                while True:
                    yield seen.get_nowait()
            yield from (future.result() for future in done)
    except BrokenProcessPool as error:
        raise CandidError(
            "A process was killed, perhaps because the memory was full: run the command again, perhaps with "
            "fewer --processes; finished tables stay."
        ) from error
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


_told: Any = None
"""Where a process says how far it is."""


def _start(seen: Any, processes: int) -> None:
    """Prepare one of several processes: its share of the CPUs, and an end when the first process ends."""
    global _told
    _told = seen
    os.environ["LOCAL_WORLD_SIZE"] = str(processes)
    parent = multiprocessing.parent_process()
    assert parent is not None

    def end_with_parent() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=end_with_parent, daemon=True).start()


def _in_process(job: Job, shard: Shard) -> Outcome:
    for event in _judged(job, shard):
        if isinstance(event, Outcome):
            return event
        _told.put(event)
    raise AssertionError("a shard without an outcome")


def _judged(job: Job, shard: Shard) -> Iterator[Seen | Outcome]:
    verdicts: Counter[str] = Counter()
    reading = _Reading(shard)
    told = time.monotonic()
    try:
        with TableFile(job.table(shard)).open(None) as table:
            for number, examined in enumerate(job.examiner.named(reading.images()), 1):
                table.add(examined)
                verdicts[_kind(examined)] += 1
                if time.monotonic() - told > 0.5:
                    told = time.monotonic()
                    yield Seen(shard.name, number, reading.share)
    except CandidError as error:
        yield Outcome(shard.name, error=str(error))
        return
    yield Outcome(shard.name, verdicts)


def _kind(examined: Any) -> str:
    return "unusable" if isinstance(examined, UnusableImage) else examined.verdict or "judged"


# names to shards


def _counted(source: str) -> Iterator[str]:
    """Yield the names that ``{000..127}`` stands for.

    >>> list(_counted("a-{08..10}.tar"))
    ['a-08.tar', 'a-09.tar', 'a-10.tar']
    """
    found = NUMBERS.search(source)
    if found is None:
        yield source
        return
    first, last = found.groups()
    for number in range(int(first), int(last) + 1):
        yield from _counted(f"{source[: found.start()]}{number:0{len(first)}}{source[found.end() :]}")


def _shards(source: str) -> Iterator[Shard]:
    """Yield the shards of one name."""
    if "://" in source:
        yield from (_archive(url) for url in _urls(source))
        return
    path = path_of(source)
    matches = [path] if path.exists() else [Path(name) for name in glob.glob(str(path), recursive=True)]  # noqa: PTH207
    if not matches:
        raise CandidError(f"There is no shard, folder or image '{source}': check the name.")
    images = []
    for match in sorted(matches, key=natural):
        if match.is_dir():
            yield from _in_folder(match)
        elif match.name.lower().endswith(ARCHIVES):
            yield _archive(str(match))
        else:
            images.append(match)
    yield from _pieces("images", source, images)


def _urls(source: str) -> list[str]:
    """Return the URLs of a pattern."""
    fsspec = require_extra("fsspec", "bulk", "Reading from a URL")
    if not glob.has_magic(source):
        return [source]
    try:
        system, place = fsspec.core.url_to_fs(source)
        return [system.unstrip_protocol(name) for name in sorted(system.glob(place))]
    except Exception as error:  # of any file system
        raise CandidError(f"'{source}' can't be listed: {error}; check the address.") from error


def _archive(source: str) -> Shard:
    name = PurePosixPath(source.replace(os.sep, "/")).name.partition("?")[0]
    ending = next((ending for ending in ARCHIVES if name.lower().endswith(ending)), None)
    if ending is None:
        raise CandidError(f"'{source}' is none of {', '.join(ARCHIVES)}: a URL must name such a file.")
    return Shard(name[: -len(ending)], source)


def _in_folder(folder: Path) -> Iterator[Shard]:
    """Yield the archives of a folder and its images in pieces."""
    archives = [file for file in folder.iterdir() if file.name.lower().endswith(ARCHIVES)]
    yield from (_archive(str(file)) for file in sorted(archives, key=natural))
    images = sorted(images_in(folder), key=natural)
    if not images and not archives:
        raise CandidError(f"'{folder}' has no images and no shards: name a folder with some.")
    yield from _pieces(folder.resolve().name or "images", str(folder), images)


def _pieces(name: str, source: str, images: Sequence[Path]) -> Iterator[Shard]:
    """Yield images in pieces. A piece of different files has a different name, so that it is judged again."""
    for number, start in zip(count(), range(0, len(images), PIECE), strict=False):
        files = tuple(images[start : start + PIECE])
        key = digest([str(file) for file in files]).hexdigest()[:8]
        yield Shard(f"{name}-{number:05}-{key}", source, files)


# shards to images


class _Member(tarfile.TarInfo):
    """A file in a tar shard. A header that would fill the memory is refused before it is read."""

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> "_Member":
        member = super().frombuf(buf, encoding, errors)
        if member.size > MEMBER_BYTES and not member.isreg():
            raise tarfile.ReadError(f"a header of {member.size / 1e6:,.0f} MB")
        return member


class _Reading:
    """The images of a shard, one after the other, and how far it is read."""

    def __init__(self, shard: Shard) -> None:
        self.shard, self.share = shard, 0.0

    def images(self) -> Iterator[tuple[str, Any]]:
        """Yield names, and files, contents or errors.

        Raises:
            CandidError: if the shard can't be read to its end.
        """
        if self.shard.files:
            for number, path in enumerate(self.shard.files, 1):
                self.share = number / len(self.shard.files)
                yield str(path), path
            return
        source = self.shard.source
        name = source.partition("?")[0].lower()
        read = {".zip": self._zip, ".parquet": self._parquet}.get(PurePosixPath(name).suffix, self._tar)
        try:
            with _opened(source) as (file, size):
                yield from read(file, size)
        except CandidError:
            raise
        except Exception as error:  # of tarfile, zipfile, pyarrow and any file system
            raise CandidError(f"The shard '{source}' can't be read: {error}; copy it again.") from error

    def _tar(self, file: BinaryIO, size: int) -> Iterator[tuple[str, Any]]:
        with tarfile.open(fileobj=file, mode="r|*", tarinfo=_Member) as tar:
            for member in tar:
                if size:
                    self.share = min(1.0, file.tell() / size)
                if member.isreg() and _is_image(member.name):
                    content = tar.extractfile(member)
                    assert content is not None
                    too_large = _too_large(member.size)
                    yield f"{self.shard.source}/{member.name}", too_large or content.read()
                tar.members.clear()  # type: ignore[attr-defined]  # it would list all of them
            if tar.fileobj is not None and tar.fileobj.tell() < tar.offset + tarfile.BLOCKSIZE:
                raise tarfile.ReadError("its end is missing")

    def _zip(self, file: BinaryIO, size: int) -> Iterator[tuple[str, Any]]:
        with zipfile.ZipFile(file) as archive:
            members = [info for info in archive.infolist() if not info.is_dir() and _is_image(info.filename)]
            for number, member in enumerate(members, 1):
                self.share = number / len(members)
                content: Any = _too_large(member.file_size)
                try:
                    content = content or archive.read(member)
                except (zipfile.BadZipFile, RuntimeError, zlib.error, EOFError) as error:
                    content = BadImageError(f"it can't be unpacked: {error}")
                yield f"{self.shard.source}/{member.filename}", content

    def _parquet(self, file: BinaryIO, size: int) -> Iterator[tuple[str, Any]]:
        parquet = require_extra("pyarrow.parquet", "bulk", "Reading Parquet")
        table = parquet.ParquetFile(file)
        schema, rows = table.schema_arrow, table.metadata.num_rows
        column = next((each.name for each in schema if _holds_images(each.type)), None)
        if column is None:
            raise CandidError(
                f"'{self.shard.source}' has no column of images: store their files as bytes in one, such as "
                "'image'."
            )
        named = next((name for name in ("path", "key", "__key__", "id") if name in schema.names), None)
        number = 0
        for batch in table.iter_batches(ROWS, columns=[column, *([named] if named else [])]):
            for row in batch.to_pylist():
                image, name = row[column], row.get(named)
                if isinstance(image, dict):
                    image, name = image["bytes"], name or image.get("path")
                number += 1
                self.share = number / rows
                missing = BadImageError("its row has no bytes") if image is None else None
                yield f"{self.shard.source}/{name or number - 1}", missing or image


def _holds_images(kind: Any) -> bool:
    """Return whether a column of Arrow has the contents of files: bytes, or records with bytes."""
    types = require_extra("pyarrow", "bulk", "Reading Parquet").types
    if types.is_struct(kind):
        return any(part.name == "bytes" for part in kind)
    return bool(types.is_binary(kind) or types.is_large_binary(kind))


def _is_image(name: str) -> bool:
    path = PurePosixPath(name)
    hidden = any(part.startswith((".", "__MACOSX")) and part not in (".", "..") for part in path.parts)
    return path.suffix.lower() in EXTENSIONS and not hidden


def _too_large(size: int) -> BadImageError | None:
    if size <= MEMBER_BYTES:
        return None
    return BadImageError(f"it has {size / 1e6:,.0f} MB, more than {MEMBER_BYTES / 1e6:,.0f}")


@contextmanager
def _opened(source: str) -> Iterator[tuple[BinaryIO, int]]:
    """Open a file or a URL; also yield its size, 0 if that is unknown."""
    if "://" not in source:
        with Path(source).open("rb") as file:
            yield file, os.fstat(file.fileno()).st_size
        return
    fsspec = require_extra("fsspec", "bulk", "Reading from a URL")
    with fsspec.open(source, "rb") as remote:
        yield remote, getattr(remote, "size", None) or 0
