"""Inputs in object storage give what the same files on disk give; what fails is repeated, then named."""

import gzip
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import tomli_w

from recmill import guess_schema, prepare
from recmill.datasets.inputs import remote
from recmill.datasets.inputs.files import found_files
from recmill.datasets.inputs.reading import columns_of, frames
from recmill.datasets.inputs.section import InputSection
from recmill.errors import ConfigError, DataError, ResourceError

from ..histories_raw import COLUMNS, KEEP_ALL, histories_of
from ..object_store import Upload, needs_object_store, s3_server

ROWS = pl.DataFrame(
    {"click": [0, 1] * 50, "site": [f"s{n % 7}" for n in range(100)], "price": [n / 10 for n in range(100)]}
)


@pytest.fixture(scope="module")
def upload() -> Iterator[Upload]:
    with s3_server() as upload:
        yield upload


@needs_object_store
@pytest.mark.parametrize("kind", ["csv", "csv.gz", "parquet", "jsonl"])
def test_clicks_from_s3_are_those_of_local_files(tmp_path: Path, upload: Upload, kind: str) -> None:
    for number in range(2):
        path, half = tmp_path / f"log-{number}.{kind}", ROWS[50 * number : 50 * number + 50]
        if kind == "parquet":
            half.write_parquet(path, row_group_size=20)
        elif kind == "jsonl":
            half.write_ndjson(path)
        else:
            text = half.write_csv().encode()
            path.write_bytes(gzip.compress(text) if kind == "csv.gz" else text)
        upload(path, f"{kind}/{path.name}")
    features = [{"column": "site", "type": "categorical"}, {"column": "price", "type": "numeric"}]
    (tmp_path / "clicks.toml").write_bytes(tomli_w.dumps({"label": {"column": "click"}, "feature": features}).encode())
    schema = str(tmp_path / "clicks.toml")
    prepare("clicks", tmp_path / "local", input=f"{tmp_path}/log-*.{kind}", schema=schema)
    prepare("clicks", tmp_path / "s3", input=f"s3://logs/{kind}/log-*.{kind}", schema=schema)
    for name in ("train_sparse.npy", "train_dense.npy", "test_labels.npy"):
        assert np.array_equal(np.load(tmp_path / "local" / name), np.load(tmp_path / "s3" / name))
    found = guess_schema(f"s3://logs/{kind}/", label="click")
    assert {row["column"]: row["guess"] for row in found["columns"]} == {
        "click": "label",
        "site": "categorical",
        "price": "numeric",
    }


@needs_object_store
def test_histories_from_s3(tmp_path: Path, upload: Upload) -> None:
    (tmp_path / "raw.csv").write_text("who,what\n" + "a,x\na,y\nb,y\nb,x\na,z\nb,z\n")
    url = upload(tmp_path / "raw.csv", "plays/raw.csv")
    prepare("histories", tmp_path / "d", input=url, **COLUMNS, **KEEP_ALL)
    assert histories_of(tmp_path / "d") == {"a": ["x", "y", "z"], "b": ["y", "x", "z"]}
    prepare("histories", tmp_path / "d", input=url, **COLUMNS, **KEEP_ALL)  # the same again: nothing to do
    (tmp_path / "raw.csv").write_text("who,what\n" + "a,x\na,y\nb,y\nb,x\na,z\nb,w\n")
    upload(tmp_path / "raw.csv", "plays/raw.csv")
    with pytest.raises(DataError, match="holds another dataset"):
        prepare("histories", tmp_path / "d", input=url, **COLUMNS, **KEEP_ALL)


@needs_object_store
def test_what_is_not_there_is_named(upload: Upload) -> None:
    for url in ("s3://logs/none.csv", "s3://logs/none/*.csv", "s3://nobody/x.csv"):
        with pytest.raises(DataError, match=rf"--input {url.replace('*', '.')}: no such file"):
            found_files(url)


def test_a_package_that_is_missing_is_named_with_its_extra() -> None:
    with pytest.raises(ConfigError, match=r"reading gs:// needs gcsfs, .* pip install 'recmill\[gs\]'"):
        found_files("gs://bucket/log.csv")
    with pytest.raises(ConfigError, match=r"ftps3://x/y: .*Known: s3://, gs://, hf://"):
        found_files("ftps3://x/y")


@needs_object_store
def test_a_request_that_fails_is_repeated_and_then_an_error_names_the_file(
    tmp_path: Path, upload: Upload, monkeypatch: pytest.MonkeyPatch
) -> None:
    import fsspec

    monkeypatch.setattr(remote, "_WAITS", (0.0, 0.0))
    (tmp_path / "log.csv").write_text("a,b\n1,2\n")
    [file] = found_files(upload(tmp_path / "log.csv", "flaky.csv"))
    system: Any = fsspec.filesystem("s3")
    real, failures = system.cat_file, [ConnectionError("reset"), TimeoutError("slow")]

    def flaky(*arguments: Any, **named: Any) -> bytes:
        if failures:
            raise failures.pop()
        return bytes(real(*arguments, **named))

    monkeypatch.setattr(system, "cat_file", flaky)
    assert columns_of(file, InputSection()) == ["a", "b"]
    failures += [ConnectionError("reset")] * 9
    with pytest.raises(ResourceError, match=r"flaky.csv: could not be read, 3 attempts failed; the last: Conn"):
        columns_of(file, InputSection())


@needs_object_store
def test_a_file_that_is_replaced_while_it_is_read_is_an_error(tmp_path: Path, upload: Upload) -> None:
    (tmp_path / "log.csv").write_text("a,b\n1,2\n")
    [file] = found_files(upload(tmp_path / "log.csv", "changing.csv"))
    (tmp_path / "log.csv").write_text("a,b\n1,3\n")
    upload(tmp_path / "log.csv", "changing.csv")
    with pytest.raises(DataError, match=r"changing.csv: changed while it was read"):
        list(frames(file, InputSection(), ["a"]))
