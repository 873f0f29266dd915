"""The list of a run's files: valid and invalid lists from the network."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.base import limits
from protocol.base.errors import DataError, MessageError
from protocol.spec.files.blob_list import BlobFile, BlobList, BlobSource, name_fault

DIGEST = "ab" * 32
OTHER = "cd" * 32


def list_document(*names: str, form: str = "directory") -> bytes:
    files = [{"name": name, "size": 3, "digest": DIGEST} for name in names]
    return json.dumps({"sources": [{"role": "data", "form": form, "files": files}]}).encode()


def test_list_round_trip():
    source = BlobSource(
        role="model", form="directory",
        files=(
            BlobFile(name="config.json", size=0, digest=DIGEST),
            BlobFile(name="a/größe\u3000 1.txt", size=limits.BLOB_BYTES, digest=OTHER),
        ),
    )  # fmt: skip
    blob_list = BlobList(sources=(source,))
    assert BlobList.from_bytes(blob_list.to_bytes()) == blob_list


HOSTILE_NAMES = [
    "../x", "a/../../x", "..", ".", "", "/etc/passwd", "a//b", "a/", "a/./b", "a\\..\\b", "a\0b",
    "a\nb", "\x1b[2J", "x" * 256, "/".join(["y" * 200] * 6), "a/..", "\u202etxt",
]  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE_NAMES)
def test_hostile_name_is_refused(name):
    assert name_fault(name)
    with pytest.raises(MessageError, match="invalid file name"):
        BlobList.from_bytes(list_document(name))


def test_a_name_that_is_not_utf_8_is_refused():
    assert name_fault("\udcff") == "it is not UTF-8"


@given(st.text(max_size=40))
def test_accepted_name_stays_inside_its_directory(tmp_path_factory, name):
    if name_fault(name):
        return
    root = tmp_path_factory.getbasetemp() / "inside"
    path = (root / name).resolve()
    assert path.is_relative_to(root)
    assert path != root
    assert path.relative_to(root).as_posix() == name


@pytest.mark.parametrize(
    ("document", "reason"),
    [
        (b"", "expected a list of blobs"),
        (b"[]", "expected a list of blobs"),
        (list_document(), "files"),
        (list_document("a", "a"), "distinct file names"),
        (list_document("a", "a/b"), "none of which is also a directory"),
        (list_document("a", "b", form="file"), "one file with a plain name"),
        (list_document("a/b", form="file"), "one file with a plain name"),
        (list_document("a").replace(b"data", b"secrets"), "role"),
        (list_document("a").replace(b'"size": 3', b'"size": -1'), "size"),
        (list_document("a").replace(b'"size": 3', b'"size": "3"'), "size"),
        (list_document("a").replace(b"abab", b"ABAB"), "digest"),
        (list_document("a").replace(b'"size"', b'"color": 1, "size"'), "color"),
        (list_document("a", "b").replace(b'"size": 3', b'"size": 4', 1), "one size per digest"),
        (
            json.dumps({"sources": json.loads(list_document("a"))["sources"] * 2}).encode(),
            "each role once",
        ),
    ],
)
def test_invalid_document_is_refused(document, reason):
    with pytest.raises(MessageError, match=reason):
        BlobList.from_bytes(document)


def test_too_many_files_are_refused():
    names = [str(number) for number in range(limits.FILES_PER_RUN + 1)]
    with pytest.raises(MessageError, match="at most 16384 files, got 16385"):
        BlobList.from_bytes(list_document(*names))
    assert (
        len(BlobList.from_bytes(list_document(*names[1:])).sources[0].files) == limits.FILES_PER_RUN
    )


def test_list_larger_than_a_body_is_refused_at_creation():
    files = tuple(
        BlobFile(name=f"{number:05}" + "n" * 200, size=1, digest=DIGEST)
        for number in range(limits.FILES_PER_RUN)
    )
    large_list = BlobList(sources=(BlobSource(role="data", form="directory", files=files),))
    with pytest.raises(DataError, match="fewer files"):
        large_list.to_bytes()
