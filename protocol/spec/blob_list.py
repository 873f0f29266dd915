"""Which files a run reads: names, sizes and digests, as the coordinator found them.

`StartRun` names the digest of this document; a worker asks for it first, and then for the files
that it does not have. Names come from the network and become paths: they are checked here, where
a document is made and where it is read.
"""

from __future__ import annotations

import unicodedata
from typing import Annotated, Literal

from blake3 import blake3
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from protocol.base import limits
from protocol.base.errors import DataError, MessageError
from protocol.base.fields import Digest

Role = Literal["data", "validation", "model", "adapter", "tokenizer"]
Form = Literal["file", "directory"]


def name_fault(name: str) -> str:
    """Why a name cannot be a path inside a directory, on any machine; empty if it can."""
    try:
        encoded = name.encode()
    except UnicodeEncodeError:
        return "it is not UTF-8"
    if not name or len(encoded) > limits.BLOB_NAME_BYTES:
        return f"it has not 1 to {limits.BLOB_NAME_BYTES} bytes"
    if "\\" in name or not all(map(_is_plain, name)):
        return "it has a backslash or a character that cannot be printed"
    parts = name.split("/")
    if any(part in ("", ".", "..") for part in parts):
        return "it is not a plain path inside its directory"
    if any(len(part.encode()) > limits.BLOB_NAME_PART_BYTES for part in parts):
        return f"a part of it has more than {limits.BLOB_NAME_PART_BYTES} bytes"
    return ""


def _is_plain(character: str) -> bool:
    return character.isprintable() or unicodedata.category(character) == "Zs"


def _plain(name: str) -> str:
    if fault := name_fault(name):
        raise ValueError(f"a file's name is refused: {fault}")
    return name


class _Document(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class BlobFile(_Document):
    """One file: its path inside the source's directory, with `/` between parts."""

    name: Annotated[str, AfterValidator(_plain)]
    size: Annotated[int, Field(ge=0, le=limits.BLOB_BYTES)]
    digest: Digest


class BlobSource(_Document):
    """What one source of a run spec is made of: a lone file, or files of a directory."""

    role: Role
    form: Form
    files: Annotated[tuple[BlobFile, ...], Field(min_length=1)]

    @model_validator(mode="after")
    def _names_fit_a_directory(self) -> BlobSource:
        names = {file.name for file in self.files}
        folders = {
            name[:at] for name in names for at, letter in enumerate(name) if letter == "/"
        }  # fmt: skip
        if len(names) < len(self.files) or names & folders:
            raise ValueError("a file's name comes twice, or is a directory's too")
        if self.form == "file" and (len(self.files) > 1 or "/" in self.files[0].name):
            raise ValueError("a lone file is one file with a plain name")
        return self


class BlobList(_Document):
    """Every file of a run, by source."""

    sources: Annotated[tuple[BlobSource, ...], Field(max_length=5)] = ()

    @model_validator(mode="after")
    def _bounded(self) -> BlobList:
        if len({source.role for source in self.sources}) < len(self.sources):
            raise ValueError("a role comes twice")
        count = sum(len(source.files) for source in self.sources)
        if count > limits.FILES_PER_RUN:
            raise ValueError(f"expected at most {limits.FILES_PER_RUN} files, got {count}")
        sizes: dict[str, int] = {}
        for source in self.sources:
            for file in source.files:
                if sizes.setdefault(file.digest, file.size) != file.size:
                    raise ValueError("one digest with two sizes")
        return self

    def to_bytes(self) -> bytes:
        """The document as it travels: one blob of at most one chunk.

        Raises:
            DataError: It is larger than that.
        """
        document = self.model_dump_json().encode()
        if len(document) > limits.BODY_BYTES:
            raise DataError(
                f"the names of the run's files take {len(document)} bytes, over the limit of "
                f"{limits.BODY_BYTES}; put the data into fewer files, as JSONL for example"
            )
        return document

    @staticmethod
    def from_bytes(document: bytes) -> BlobList:
        """Read what `to_bytes` gave, from the network.

        Raises:
            MessageError: It is no such document, or a name in it would leave its directory.
        """
        try:
            return BlobList.model_validate_json(document, strict=True)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(str(part) for part in first["loc"]) or "the document"
            raise MessageError(f"expected a list of blobs: {where}: {first['msg']}") from None


def document_digest(document: bytes) -> str:
    """BLAKE3 of a document, in 64 hex digits."""
    return blake3(document).hexdigest()
