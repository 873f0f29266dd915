"""The list of files that a run reads: names, sizes and digests.

`StartRun` names the digest of this document; a worker requests the document first, then the files
that it lacks. Names come from the network and become paths, so they are checked both when a
document is created and when it is read.
"""

from __future__ import annotations

import unicodedata
from typing import Annotated, Literal

from blake3 import blake3
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from protocol.base import limits
from protocol.base.errors import DataError, MessageError
from protocol.base.fields import Digest
from protocol.spec.run_spec import Role

Form = Literal["file", "directory"]


def name_fault(name: str) -> str:
    """Return why a file cannot have this name on some machine; empty if it can on all."""
    try:
        name_bytes = name.encode()
    except UnicodeEncodeError:
        return "it is not UTF-8"
    if not name or len(name_bytes) > limits.BLOB_NAME_BYTES:
        return f"expected 1 to {limits.BLOB_NAME_BYTES} bytes"
    if "\\" in name or not all(map(_is_plain, name)):
        return "it contains a backslash or an unprintable character"
    parts = name.split("/")
    if any(part in ("", ".", "..") for part in parts):
        return "it is not a plain path inside its directory"
    if any(len(part.encode()) > limits.BLOB_NAME_PART_BYTES for part in parts):
        return f"a part of it has more than {limits.BLOB_NAME_PART_BYTES} bytes"
    return ""


def _is_plain(character: str) -> bool:
    return character.isprintable() or unicodedata.category(character) == "Zs"


def _check_plain_name(name: str) -> str:
    if fault := name_fault(name):
        raise ValueError(f"invalid file name: {fault}")
    return name


class _Document(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class BlobFile(_Document):
    """One file; `name` is its path inside the source's directory, with `/` between parts."""

    name: Annotated[str, AfterValidator(_check_plain_name)]
    size: Annotated[int, Field(ge=0, le=limits.BLOB_BYTES)]
    digest: Digest


class BlobSource(_Document):
    """The files of one source of a run spec: a single file, or those of a directory."""

    role: Role
    form: Form
    files: Annotated[tuple[BlobFile, ...], Field(min_length=1)]

    @model_validator(mode="after")
    def _check_names(self) -> BlobSource:
        names = {file.name for file in self.files}
        folders = {
            name[:index]
            for name in names
            for index, character in enumerate(name)
            if character == "/"
        }
        if len(names) < len(self.files) or names & folders:
            raise ValueError("expected distinct file names, none of which is also a directory")
        if self.form == "file" and (len(self.files) > 1 or "/" in self.files[0].name):
            raise ValueError("expected one file with a plain name")
        return self


class BlobList(_Document):
    """Every file of a run, by source."""

    sources: Annotated[tuple[BlobSource, ...], Field(max_length=5)] = ()

    @model_validator(mode="after")
    def _check_sources(self) -> BlobList:
        if len({source.role for source in self.sources}) < len(self.sources):
            raise ValueError("expected each role once, got one twice")
        count = sum(len(source.files) for source in self.sources)
        if count > limits.FILES_PER_RUN:
            raise ValueError(f"expected at most {limits.FILES_PER_RUN} files, got {count}")
        sizes: dict[str, int] = {}
        for source in self.sources:
            for file in source.files:
                if sizes.setdefault(file.digest, file.size) != file.size:
                    raise ValueError("expected one size per digest, got two")
        return self

    def to_bytes(self) -> bytes:
        """Return the document as it is sent: one blob of at most one chunk.

        Raises:
            DataError: The document is larger than a chunk.
        """
        document = self.model_dump_json().encode()
        if len(document) > limits.BODY_BYTES:
            raise DataError(
                f"expected a list of the run's files of at most {limits.BODY_BYTES} bytes, got "
                f"{len(document)}; put the data into fewer files, such as JSONL"
            )
        return document

    @staticmethod
    def from_bytes(document: bytes) -> BlobList:
        """Read a document that `to_bytes` wrote and the network delivered.

        Raises:
            MessageError: The bytes are not such a document, or a file name leads out of its
                directory.
        """
        try:
            return BlobList.model_validate_json(document, strict=True)
        except ValidationError as error:
            first = error.errors()[0]
            location = ".".join(str(part) for part in first["loc"]) or "the document"
            raise MessageError(f"expected a list of blobs: {location}: {first['msg']}") from None


def document_digest(document: bytes) -> str:
    """Return the BLAKE3 digest of a document, in 64 hex digits."""
    return blake3(document).hexdigest()
