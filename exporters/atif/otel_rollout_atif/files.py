"""The exporter `atif`: documents in files, those of sub-agents and media where ATIF has them."""

from __future__ import annotations

import base64
import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import blake2b
from itertools import chain, count
from pathlib import Path
from typing import Any, BinaryIO
from urllib.parse import quote, unquote_to_bytes

from otel_rollout import TrajectoryGroup
from otel_rollout.export import CheckedOptions, Dropped, dropped_completions
from otel_rollout_atif.document import to_atif

_LONGEST = 200
"""Characters of a file's name, at most."""
_SUFFIXES = {"jpeg": "jpg", "mpeg": "mp3"}


@dataclass(frozen=True)
class AtifRows(CheckedOptions):
    """The exporter `atif`: a document for each trajectory, those of rollouts inside it embedded.

    An output without a suffix becomes a folder with a file for each document, any other a file with
    one on each line. Images and sound are files beside: in `media` there, or in OUTPUT.media.
    prompt_token_ids: also give each step the token ids of its whole prompt: a document is then as
    large as the square of its steps.
    rollout_details: also give Harbor's RolloutDetails, in `extra.otel_rollout`; needs token ids.
    """

    prompt_token_ids: bool = False
    rollout_details: bool = False

    def rows(self, group: TrajectoryGroup) -> Iterator[dict[str, Any]]:
        """A document for each trajectory, those that failed included."""
        for trajectory in (*group, *group.failures):
            yield to_atif(
                trajectory,
                children=group.children,
                prompt_token_ids=self.prompt_token_ids,
                rollout_details=self.rollout_details,
            )

    def dropped(self, group: TrajectoryGroup) -> Iterator[Dropped]:
        """The completions that no token sequence trains."""
        return dropped_completions((*group, *group.failures))

    def finish(self, rows: Path, output: Path) -> None:
        """Write the documents, those of rollouts inside others embedded; memory holds one tree."""
        is_folder = not output.suffix
        part = output.with_name(output.name + ".unfinished")
        _remove(part)
        if is_folder:
            part.mkdir()
        media = _Media(part / "media" if is_folder else output.with_name(output.name + ".media"))
        try:
            with rows.open("rb") as lines, open(os.devnull if is_folder else part, "wb") as file:
                for document in _trees(lines):
                    media.write(document)
                    if is_folder:
                        _file_of(part, document).write_text(json.dumps(document, indent=2))
                    else:
                        file.write(json.dumps(document, separators=(",", ":")).encode() + b"\n")
            os.replace(part, output)
        finally:
            _remove(part)
        rows.unlink()


def _file_of(folder: Path, document: dict[str, Any]) -> Path:
    """A file for a document, named after its id, which is not there yet."""
    name = quote(document["trajectory_id"], safe="")[:_LONGEST]
    names = chain([name], (f"{name}-{number}" for number in count(2)))
    return next(path for each in names if not (path := folder / f"{each}.json").exists())


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)


def _trees(lines: BinaryIO) -> Iterator[dict[str, Any]]:
    """The documents of a file, each with those of rollouts inside it."""
    places: list[int] = []
    """Where each document begins."""
    inside: dict[str, list[int]] = {}
    parents: dict[str, str | None] = {}
    for line in iter(lines.readline, b""):
        document = json.loads(line)
        id_, parent = document["trajectory_id"], document["extra"]["otel_rollout"].get("parent_id")
        places.append(lines.tell() - len(line))
        if id_ in parents:
            parent = None  # it came twice: the ids of those that are embedded are unique
        parents.setdefault(id_, parent)
        inside.setdefault(parent or "", []).append(len(places) - 1)
    taken = set[int]()

    def tree(number: int) -> dict[str, Any]:
        taken.add(number)
        lines.seek(places[number])
        document: dict[str, Any] = json.loads(lines.readline())
        found = [each for each in inside.get(document["trajectory_id"], ()) if each not in taken]
        embedded = [*document.get("subagent_trajectories", ()), *map(tree, found)]
        return {**document, **({"subagent_trajectories": embedded} if embedded else {})}

    roots = [n for parent, numbers in inside.items() if parent not in parents for n in numbers]
    for number in (*sorted(roots), *range(len(places))):  # the rest are parents of each other
        if number not in taken:
            yield tree(number)


class _Media:
    """Files for what is in documents as `data:`, each content once."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def write(self, document: dict[str, Any]) -> None:
        """Write the media of a document to files, and their paths into it."""
        for step in document["steps"]:
            results = step.get("observation", {}).get("results", ())
            for content in (step["message"], *(result.get("content") for result in results)):
                for part in content if isinstance(content, list) else ():
                    if part.get("source", {}).get("path", "").startswith("data:"):
                        part["source"]["path"] = self._path(**part["source"])
        for inner in document.get("subagent_trajectories", ()):
            self.write(inner)

    def _path(self, media_type: str, path: str) -> str:
        head, _, data = path.partition(",")
        content = unquote_to_bytes(data)
        if head.endswith(";base64"):
            try:
                content = base64.b64decode(content)
            except ValueError:
                return path  # no base64: it stays as it is
        form = media_type.partition("/")[2]
        digest = blake2b(content, digest_size=16).hexdigest()
        self._folder.mkdir(exist_ok=True)
        file = self._folder / f"{digest}.{_SUFFIXES.get(form, form)}"
        file.write_bytes(content)
        return f"{self._folder.name}/{file.name}"
