"""The cache: the right pixels, no image decoded twice, and no damage by kills, full disks or parallel runs."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from cclnet.data import cache as cache_module
from cclnet.data import parallel
from cclnet.data.cache import DecodedImages, PixelStore, decode, decode_readable, find_stores, read_shard, verify_stores
from cclnet.data.image_io import UnreadableImage, read_resized
from cclnet.data.loader import Loader, pack
from cclnet.data.table import ImageTable
from cclnet.errors import InputError

SHAPES = ((40, 56), (80, 60), (30, 30), (33, 100))


def draw(folder: Path, count: int, start: int = 0) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(start, start + count):
        height, width = SHAPES[number % len(SHAPES)]
        smooth = np.random.default_rng(number).integers(0, 256, (4, 4, 3), dtype=np.uint8)
        Image.fromarray(smooth).resize((width, height), Image.Resampling.BICUBIC).save(folder / f"{number:04d}.png")


def table_of(folder: Path) -> ImageTable:
    paths = sorted(folder.iterdir())
    return ImageTable("test set", folder, [p.name for p in paths], paths, np.zeros(len(paths), np.int64), ("a",))


@pytest.fixture
def table(tmp_path: Path) -> ImageTable:
    draw(tmp_path / "images", 12)
    return table_of(tmp_path / "images")


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
def read_files(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the files that are decoded, in threads of this process."""
    monkeypatch.setattr(parallel, "_FORKS", False)
    names: list[str] = []

    def counted(path: Path, short_side: int) -> np.ndarray:
        names.append(Path(path).name)
        return read_resized(path, short_side)

    monkeypatch.setattr(cache_module, "read_resized", counted)
    return names


def assert_right(images: DecodedImages, table: ImageTable, short_side: int = 32) -> None:
    assert len(images) == len(table)
    for row, path in enumerate(table.images):
        np.testing.assert_array_equal(images.image(row), read_resized(path, short_side))


def files_below(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.rglob("*") if path.is_file())


# Pixels.


@pytest.mark.parametrize("workers", [1, 3])
def test_every_image_has_the_short_side_and_its_own_shape(table, cache, workers):
    images = decode(table, 32, cache, workers, progress=False)
    assert [(h, w) for h, w in zip(images.heights[:4], images.widths[:4], strict=True)] == [
        (32, 45), (43, 32), (32, 32), (32, 97)
    ]  # fmt: skip
    assert images.pixels.dtype == np.uint8
    assert images.pixels.ndim == 1
    assert images.offsets.dtype == np.int64
    assert_right(images, table)


def test_threads_do_the_same_where_there_is_no_fork(table, cache, monkeypatch):
    monkeypatch.setattr(parallel, "_FORKS", False)
    assert_right(decode(table, 32, cache, workers=3, progress=False), table)


def test_shrinking_is_antialiased(tmp_path):
    """Stripes one pixel wide become even grey; picking single pixels would give black, white or beats."""
    stripes = np.zeros((300, 400, 3), np.uint8)
    stripes[:, ::2] = 255
    Image.fromarray(stripes).save(tmp_path / "stripes.png")
    middle = read_resized(tmp_path / "stripes.png", 64)[8:-8, 8:-8].astype(int)
    assert np.abs(middle - 128).max() <= 6


@pytest.mark.parametrize(("suffix", "error"), [("png", 0.5), ("jpg", 1.5)])
def test_the_quick_way_down_is_close_to_pillow_over_the_whole_image(tmp_path, suffix, error):
    grain = np.random.default_rng(0).normal(128, 20, (150, 200, 3)).clip(0, 255).astype(np.uint8)
    large = Image.fromarray(grain).resize((1600, 1200), Image.Resampling.BICUBIC)
    large.save(tmp_path / f"large.{suffix}", quality=95)
    proper = Image.open(tmp_path / f"large.{suffix}").resize((171, 128), Image.Resampling.BICUBIC)
    difference = read_resized(tmp_path / f"large.{suffix}", 128).astype(float) - np.asarray(proper)
    assert np.sqrt((difference**2).mean()) < error


def test_small_images_are_enlarged_so_that_crops_fit(tmp_path):
    Image.new("RGB", (5, 10), (10, 20, 30)).save(tmp_path / "small.png")
    assert (read_resized(tmp_path / "small.png", 32) == (10, 20, 30)).all()
    assert read_resized(tmp_path / "small.png", 32).shape == (64, 32, 3)


def test_arrays_are_taken_as_they_are_when_they_fit():
    array = np.random.default_rng(0).integers(0, 256, (3, 8, 10, 3), dtype=np.uint8)
    table = ImageTable("array", Path(), list("abc"), array, np.zeros(3, np.int64), ("a",))
    images = decode(table, 8)
    assert np.shares_memory(images.pixels, array)
    assert (images.image(1) == array[1]).all()
    larger = decode(table, 16)
    assert larger.image(2).shape == (16, 20, 3)
    expected = np.asarray(Image.fromarray(array[2]).resize((20, 16), Image.Resampling.BICUBIC), dtype=int)
    assert np.abs(larger.image(2) - expected).max() <= 1


@pytest.mark.parametrize("shape", [(6, 8, 10), (6, 8, 10, 3)])
def test_arrays_that_would_fill_the_memory_go_through_the_cache(tmp_path, cache, monkeypatch, shape):
    array = np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)
    table = ImageTable("array", tmp_path, list("abcdef"), array, np.zeros(6, np.int64), ("a",))
    in_memory = decode(table, 16, cache)
    assert not cache.exists()
    monkeypatch.setattr(cache_module, "_MAX_IN_MEMORY", 1000)
    for workers in (2, 1):  # made, then found
        on_disk = decode(table, 16, cache, workers, progress=False)
        assert not on_disk.pixels.flags.writeable and any(cache.rglob("shard-*.bin"))
        assert all((on_disk.image(row) == in_memory.image(row)).all() for row in range(6))
    assert on_disk.heights.tolist() == in_memory.heights.tolist() == [16] * 6


@pytest.mark.parametrize("shape", [(3, 8, 10), (3, 8, 10, 1)])
def test_grey_arrays_become_rgb(shape):
    array = np.arange(np.prod(shape), dtype=np.uint8).reshape(shape)
    images = DecodedImages.from_array(array)
    assert (images.image(1) == array.reshape(3, 8, 10)[1][:, :, None]).all()


@pytest.mark.parametrize(
    "array", [np.zeros((2, 3), np.uint8), np.zeros((1, 2, 3), np.float32), np.zeros((1, 2, 3, 4), np.uint8)]
)
def test_arrays_of_another_kind_are_refused(array):
    with pytest.raises(InputError, match=r"uint8 \[N, H, W\]"):
        DecodedImages.from_array(array)


# Never twice.


def test_a_second_run_decodes_nothing_and_writes_nothing(table, cache, read_files):
    decode(table, 32, cache, workers=1, progress=False)
    assert len(read_files) == len(table)
    before = {path: path.stat().st_mtime_ns for path in cache.rglob("*")}
    assert_right(decode(table, 32, cache, workers=1, progress=False), table)
    assert len(read_files) == len(table)
    assert {path: path.stat().st_mtime_ns for path in cache.rglob("*")} == before


def test_subsets_and_other_orders_share_what_is_decoded(table, cache, read_files):
    first = table.select(np.arange(0, 8))
    decode(first, 32, cache, workers=1, progress=False)
    assert sorted(read_files) == sorted(first.names)
    assert_right(
        decode(table.select(np.arange(11, -1, -1)), 32, cache, workers=1, progress=False),
        table.select(np.arange(11, -1, -1)),
    )
    assert sorted(read_files) == sorted(table.names)
    assert_right(
        decode(table.select(np.array([9, 2])), 32, cache, workers=1, progress=False), table.select(np.array([9, 2]))
    )
    assert len(read_files) == len(table)


def test_only_a_changed_file_is_decoded_again(table, cache, read_files):
    decode(table, 32, cache, workers=1, progress=False)
    read_files.clear()
    Image.new("RGB", (50, 50), "red").save(table.images[3])
    assert_right(decode(table, 32, cache, workers=1, progress=False), table)
    assert read_files == [table.names[3]]


def test_a_file_of_another_size_is_decoded_again_even_if_it_keeps_its_time(table, cache):
    decode(table, 32, cache, workers=1, progress=False)
    before = table.images[0].stat()
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (50, 50, 3), dtype=np.uint8)).save(table.images[0])
    os.utime(table.images[0], ns=(before.st_mtime_ns, before.st_mtime_ns))
    assert_right(decode(table, 32, cache, workers=1, progress=False), table)


def test_shards_are_divided_by_size_and_read_as_one_array(tmp_path, cache, monkeypatch, read_files):
    draw(tmp_path / "images", 40)
    table = table_of(tmp_path / "images")
    monkeypatch.setattr(cache_module, "SHARD_BYTES", 5 * 3 * 32 * 32)
    images = decode(table, 32, cache, workers=3, progress=False)
    assert len(list(cache.rglob("shard-*.bin"))) == 8
    assert images.pixels.ndim == 1 and images.pixels.base is not None
    assert_right(images, table)
    some = table.select(np.array([39, 0, 17]))
    assert_right(decode(some, 32, cache, workers=1, progress=False), some)
    for path in cache.rglob("shard-*.bin"):  # what is mapped stays
        path.unlink()
    assert_right(images, table)
    assert len(read_files) == 40


def test_a_shard_being_written_is_left_out_and_removed_later(table, cache, tmp_path):
    decode(table, 32, cache, workers=1, progress=False)
    (folder,) = {path.parent for path in cache.rglob("shard-*.bin")}
    half = folder / ".shard-0a1b-000000000.partial"
    half.write_bytes(b"half an image")
    assert_right(decode(table, 32, cache, workers=1, progress=False), table)
    assert half.exists()  # nothing was missing, so nothing was written
    draw(tmp_path / "images", 1, start=12)
    decode(table_of(tmp_path / "images"), 32, cache, workers=1, progress=False)
    assert not half.exists()


def test_the_short_side_has_a_cache_of_its_own(table, cache, read_files):
    decode(table, 32, cache, workers=1, progress=False)
    assert_right(decode(table, 16, cache, workers=1, progress=False), table, 16)
    assert len(read_files) == 2 * len(table)


def test_images_that_keep_changing_do_not_fill_the_disk(table, cache):
    for turn in range(6):
        for number, path in enumerate(table.images):
            Image.new("RGB", (40, 40), (turn, number, 0)).save(path)
            os.utime(path, ns=(turn, turn))
        images = decode(table, 32, cache, workers=1, progress=False)
        assert_right(images, table)
    live = len(table) * 32 * 32 * 3
    kept = sum(path.stat().st_size for path in cache.rglob("shard-*.bin"))
    assert kept <= 3 * live


def test_a_reader_keeps_its_pixels_while_others_write(table, cache):
    images = decode(table, 32, cache, workers=1, progress=False)
    copies = [images.image(row).copy() for row in range(len(table))]
    for turn in range(4):
        for path in table.images:
            Image.new("RGB", (40, 40), (200, turn, 0)).save(path)
            os.utime(path, ns=(turn, turn))
        decode(table, 32, cache, workers=1, progress=False)
    for row, copy in enumerate(copies):
        np.testing.assert_array_equal(images.image(row), copy)


@pytest.mark.parametrize("kept", [0, 3, -40, -1], ids=["empty", "start", "cut index", "cut trailer"])
def test_a_damaged_shard_is_made_again(table, cache, read_files, kept):
    decode(table, 32, cache, workers=1, progress=False)
    shards = sorted(cache.rglob("shard-*.bin"))
    assert len(shards) == 2
    shards[1].write_bytes(shards[1].read_bytes()[:kept])
    read_files.clear()
    assert "changed: the index or the length of 1 shards" in dict(verify_stores(find_stores(cache))).popitem()[1]
    with pytest.warns(UserWarning, match=f"{shards[1].name} is damaged"):
        assert_right(decode(table, 32, cache, workers=1, progress=False), table)
    assert sorted(read_files) == list(table.names[8:])
    assert not shards[1].exists() and dict(verify_stores(find_stores(cache))).popitem()[1] == "ok"


@pytest.mark.parametrize("field", ["offset", "height", "width"])
def test_an_index_that_leads_out_of_its_shard_is_not_used(table, cache, field):
    decode(table, 32, cache, workers=1, progress=False)
    path = next(cache.rglob("shard-*.bin"))
    shard = read_shard(path)
    assert shard is not None
    entries = shard.entries.copy()
    entries[field][0] = 2**30
    index = entries.tobytes()
    trailer = cache_module._TRAILER.pack(b"cclshard", len(index), zlib.crc32(index), len(entries))
    path.write_bytes(path.read_bytes()[: shard.length] + index + trailer)
    assert read_shard(path) is None


def flip_a_bit_of_every_image(table: ImageTable, cache: Path) -> None:
    decode(table, 32, cache, 1, progress=False)
    for path in cache.rglob("shard-*.bin"):
        content, shard = bytearray(path.read_bytes()), read_shard(path)
        assert shard is not None
        for row, offset in enumerate(shard.entries["offset"].tolist()):
            content[offset + 7 * row] ^= 1 << row % 8
        path.write_bytes(content)


def test_every_flipped_bit_of_stored_pixels_is_noticed(table, cache):
    decode(table, 32, cache, 1, progress=False)
    assert dict(verify_stores(find_stores(cache))).popitem()[1] == "ok"
    flip_a_bit_of_every_image(table, cache)
    images = decode(table, 32, cache, 1, progress=False)
    for row in range(len(table)):
        with pytest.raises(InputError, match=rf"image {row} in .* are damaged"):
            images.image(row)
        with pytest.raises(InputError, match=f"image {row} "):
            pack(images, np.array([row]), room=0)
    assert dict(verify_stores(find_stores(cache))).popitem()[1] == "changed: 12 of 12 images"


@pytest.mark.parametrize("resident", [True, False])
def test_a_loader_raises_on_damaged_pixels(table, cache, resident):
    flip_a_bit_of_every_image(table, cache)
    images = decode(table, 32, cache, 1, progress=False)
    loader = Loader(images, table.labels, range(12), batch_size=4, crop=16, resident=resident)
    with pytest.raises(InputError, match="are damaged"):
        list(loader.epoch())


def test_an_image_is_checked_once(table, cache, monkeypatch):
    images, checked = decode(table, 32, cache, 1, progress=False), []
    crc32 = zlib.crc32
    monkeypatch.setattr(zlib, "crc32", lambda data: checked.append(len(data)) or crc32(data))
    for _ in range(2):
        images.check(np.array([3, 3, 5]))
    assert checked == [images.image(3).nbytes, images.image(5).nbytes]


def test_a_store_of_an_earlier_version_is_named(table, cache, capsys):
    older = cache_module._store_folder(table.root, 32, cache, version=1)
    older.mkdir(parents=True)
    (older / "index.npz").write_bytes(b"")
    decode(table, 32, cache, 1)
    assert older.name in capsys.readouterr().err.replace("\n", "")
    states = dict(verify_stores(find_stores(cache)))
    assert len(states) == 2 and states[str(older)].startswith("not covered: of an earlier version")


def test_where_the_cache_is_by_default(table, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    decode(table, 32, progress=False)
    assert any((tmp_path / "xdg" / "cclnet").rglob("shard-*.bin"))
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    decode(table, 32, progress=False)
    assert any((tmp_path / "home" / ".cache" / "cclnet").rglob("shard-*.bin"))


# Broken images.


def test_broken_images_are_named_all_at_once_and_the_others_kept(table, cache, read_files):
    table.images[2].write_text("not an image")
    table.images[5].write_bytes(table.images[5].read_bytes()[:60])
    table.images[7].unlink()
    with pytest.raises(InputError) as error:
        decode(table, 32, cache, workers=1, progress=False)
    assert str(error.value).startswith("3 of 12 images cannot be used:")
    for row in (2, 5, 7):
        assert str(table.images[row]) in str(error.value)
    images, broken = decode_readable(table, 32, cache, workers=1, progress=False)
    assert sorted(broken) == [2, 5, 7]
    assert images.heights[[2, 5, 7]].tolist() == [0, 0, 0]
    read_files.clear()
    readable = table.select(np.array([row for row in range(12) if row not in broken]))
    assert_right(decode(readable, 32, cache, workers=1, progress=False), readable)
    assert read_files == []


def test_many_broken_images_are_counted(tmp_path, cache):
    for number in range(30):
        (tmp_path / f"{number}.jpg").write_text("text")
    paths = sorted(tmp_path.glob("*.jpg"))
    table = ImageTable("text", tmp_path, [p.name for p in paths], paths, np.zeros(30, np.int64), ("a",))
    with pytest.raises(InputError, match=r"30 of 30 images cannot be used:(.|\n)*and 10 more"):
        decode(table, 32, cache, progress=False)


def test_an_image_too_long_and_thin_is_refused(tmp_path):
    Image.new("L", (60_000, 1)).save(tmp_path / "line.png")
    with pytest.raises(UnreadableImage, match=r"60000 x 1 pixels .* 256"):
        read_resized(tmp_path / "line.png", 256)


@pytest.mark.parametrize(
    ("settings", "message"),
    [({"short_side": 0}, "short_side must be at least 1"), ({"workers": 0}, "workers must be at least 1")],
)
def test_settings_that_cannot_be(table, cache, settings, message):
    with pytest.raises(InputError, match=message):
        decode(table, cache_dir=cache, **settings)


# Killed, together with others, and without space: real processes.

PROGRAM = """
import sys, time
from pathlib import Path
import numpy as np
from cclnet.data import cache as decode
from cclnet.data.table import ImageTable

folder, cache, log = map(Path, sys.argv[1:4])
slow_read = decode.read_resized
def logged(path, short_side):
    with log.open("a") as file:
        file.write(path.name + "\\n")
    time.sleep({pause})
    return slow_read(path, short_side)
decode.read_resized = logged
{more}
paths = sorted(folder.iterdir())
table = ImageTable("test set", folder, [p.name for p in paths], paths, np.zeros(len(paths), np.int64), ("a",))
decode.decode(table, 32, cache, workers=2, progress=False)
print("whole")
"""  # no __main__ guard, on purpose


def start(tmp_path, table, cache, log="log", pause=0.0, more="") -> subprocess.Popen:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM.format(pause=pause, more=textwrap.dedent(more)))
    return subprocess.Popen(
        [sys.executable, program, table.root, cache, tmp_path / log],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def wait_until(condition, process: subprocess.Popen, seconds: float = 60) -> None:
    limit = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < limit, "waited too long"
        time.sleep(0.005)


def kill(process: subprocess.Popen) -> None:
    process.kill()
    process.wait()  # not for the end of its output, which workers that live on would hold open


def test_a_program_without_main_guard_can_use_processes(tmp_path, table, cache):
    process = start(tmp_path, table, cache)
    out, errors = process.communicate(timeout=60)
    assert out == "whole\n", errors
    assert len((tmp_path / "log").read_text().split()) == len(table)


@pytest.mark.parametrize("saved", [True, False], ids=["after a shard", "before any shard"])
def test_killed_and_gone_on(tmp_path, cache, read_files, saved):
    draw(tmp_path / "images", 150)
    table = table_of(tmp_path / "images")
    process = start(tmp_path, table, cache, pause=0.01 if saved else 0.5)
    pattern = "shard-*.bin" if saved else ".shard-*.partial"
    wait_until(lambda: any(cache.rglob(pattern)), process)
    kill(process)
    images = decode(table, 32, cache, workers=1, progress=False)  # waits for the workers of the other to be gone
    assert_right(images, table)
    assert (len(read_files) < len(table)) == saved
    assert all(name == "lock" or name.startswith("shard-") for name in files_below(cache))


def lives(pid: str) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.parametrize("delay", [None, 0.0, 0.001, 0.002, 0.003], ids=lambda delay: f"delay {delay}")
def test_workers_of_a_killed_run_end_with_it(tmp_path, table, cache, delay):
    """Without a delay the run is killed while it decodes; with one, that long after its second worker was forked."""
    process = start(tmp_path, table, cache, pause=600)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    wait_until((tmp_path / "log").exists if delay is None else lambda: len(children.read_text().split()) == 2, process)
    workers = children.read_text().split()
    assert len(workers) == 2
    time.sleep(delay or 0)
    kill(process)
    limit = time.monotonic() + 60
    while any(map(lives, workers)):
        assert time.monotonic() < limit, "a worker lives on"
        time.sleep(0.01)


def test_two_runs_at_once_decode_each_image_once(tmp_path, cache):
    draw(tmp_path / "images", 80)
    table = table_of(tmp_path / "images")
    together = """
        log.with_suffix(".ready").touch()
        while not (log.parent / "go").exists():
            time.sleep(0.001)
    """
    both = [start(tmp_path, table, cache, log=f"log{i}", pause=0.01, more=together) for i in range(2)]
    for i, process in enumerate(both):
        wait_until((tmp_path / f"log{i}.ready").exists, process)
    (tmp_path / "go").touch()
    assert [process.communicate(timeout=60)[0] for process in both] == ["whole\n", "whole\n"]
    names = [name for log in tmp_path.glob("log?") for name in log.read_text().split()]
    assert sorted(names) == sorted(table.names)
    assert_right(decode(table, 32, cache, workers=1, progress=False), table)


@contextmanager
def rows_locked(store: PixelStore, first: int, count: int) -> Iterator[subprocess.Popen[str]]:
    """Another process that locks rows, until its input is closed."""
    program = f"""
        import fcntl, sys
        file = open({str(store.folder / "lock")!r}, "w")
        fcntl.lockf(file, fcntl.LOCK_EX, {count}, {first})
        print("locked", flush=True)
        sys.stdin.read()
    """
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(program)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout is not None and holder.stdout.readline() == "locked\n"
        yield holder


def release_when(holder: subprocess.Popen[str], condition: Callable[[], bool]) -> None:
    assert holder.stdin is not None
    try:
        wait_until(condition, holder)
    finally:
        holder.stdin.close()


def test_a_second_run_says_that_it_waits(table, cache, capsys, read_files):
    """Another run holds the rows of the second shard until the first shard is there."""
    store = PixelStore(cache_module._store_folder(table.root, 32, cache))
    store.folder.mkdir(parents=True)
    with rows_locked(store, 8, 4) as holder:
        stored = lambda: any(store.folder.glob("shard-000000000-*.bin"))  # noqa: E731
        releasing = threading.Thread(target=release_when, args=(holder, stored))
        releasing.start()
        images = decode(table, 32, cache, workers=1)
        releasing.join()
    assert_right(images, table)
    assert "Another run is decoding these images" in capsys.readouterr().err
    assert sorted(read_files) == list(table.names)


def test_a_damaged_shard_is_reported_while_another_run_decodes(table, cache):
    decode(table, 32, cache, workers=1, progress=False)
    damaged = sorted(cache.rglob("shard-*.bin"))[1]
    damaged.write_bytes(damaged.read_bytes()[:-1])
    with rows_locked(PixelStore(damaged.parent), 0, 8) as holder:
        releasing = threading.Thread(target=release_when, args=(holder, lambda: not damaged.exists()))
        releasing.start()
        with pytest.warns(UserWarning, match=f"{damaged.name} is damaged"):
            assert_right(decode(table, 32, cache, workers=1, progress=False), table)
        releasing.join()
    assert dict(verify_stores(find_stores(cache))).popitem()[1] == "ok"


LIMIT = """
import resource
resource.setrlimit(resource.RLIMIT_FSIZE, ({size}, {size}))
"""


def test_a_full_disk_leaves_nothing_behind(tmp_path, table, cache):
    process = start(tmp_path, table, cache, more=LIMIT.format(size=20_000))
    errors = process.communicate(timeout=60)[1]
    assert "cclnet.errors.InputError: " in errors and str(cache) in errors
    assert "choose another folder with --cache-dir" in errors
    assert files_below(cache) in ([], ["lock"])
    assert_right(decode(table, 32, cache, workers=1, progress=False), table)


def test_a_disk_that_fills_up_later_keeps_what_was_whole(tmp_path, table, cache, read_files):
    decode(table, 32, cache, workers=1, progress=False)
    before = {path.name: path.read_bytes() for path in cache.rglob("*") if path.is_file()}
    draw(table.root, 40, start=100)
    process = start(tmp_path, table, cache, more=LIMIT.format(size=20_000))
    assert "File too large" in process.communicate(timeout=60)[1]
    assert {path.name: path.read_bytes() for path in cache.rglob("*") if path.is_file()} == before
    read_files.clear()
    assert_right(decode(table, 32, cache, workers=1, progress=False), table)
    assert read_files == []


def test_a_disk_that_is_full_when_the_index_is_written(table, cache, monkeypatch):
    def no_space(file):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(parallel, "_FORKS", False)
    monkeypatch.setattr(os, "fsync", no_space)
    with pytest.raises(InputError, match="No space left on device"):
        decode(table, 32, cache, workers=1, progress=False)
    assert files_below(cache) in ([], ["lock"])


def test_a_folder_that_cannot_be_made(tmp_path, table):
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match=r"Not a directory.*--cache-dir"):
        decode(table, 32, tmp_path / "file" / "cache", progress=False)


def test_a_read_only_folder_is_named_but_can_be_read_from(table, cache, monkeypatch):
    def read_only(self, *rows, **options):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    decode(table.select(np.arange(8)), 32, cache, workers=1, progress=False)
    monkeypatch.setattr(PixelStore, "lock", read_only)
    decode(table.select(np.arange(8)), 32, cache, workers=1, progress=False)
    with pytest.raises(InputError, match="Read-only file system"):
        decode(table, 32, cache, workers=1, progress=False)


def test_stopped_by_hand_and_gone_on(table, cache, monkeypatch, read_files):
    count = cache_module.read_resized

    def stopped(path: Path, short_side: int) -> np.ndarray:
        if path.name == table.names[9]:  # in the second block
            raise KeyboardInterrupt
        return count(path, short_side)

    monkeypatch.setattr(cache_module.os, "urandom", bytes)  # begin with the first block
    monkeypatch.setattr(cache_module, "read_resized", stopped)
    with pytest.raises(KeyboardInterrupt):
        decode(table, 32, cache, workers=1, progress=False)
    first = len(read_files)
    assert 0 < first < len(table)
    monkeypatch.setattr(cache_module, "read_resized", count)
    assert_right(decode(table, 32, cache, workers=1, progress=False), table)
    assert len(read_files) < first + len(table)


def test_a_worker_that_is_killed_is_named(table, cache, monkeypatch):
    def out_of_memory(path: Path, short_side: int) -> np.ndarray:
        if path.name == table.names[9]:
            os.kill(os.getpid(), signal.SIGKILL)
        return read_resized(path, short_side)

    monkeypatch.setattr(cache_module, "read_resized", out_of_memory)
    with pytest.raises(InputError, match=r"was killed.*memory"):
        decode(table, 32, cache, workers=2, progress=False)
    monkeypatch.undo()
    assert_right(decode(table, 32, cache, workers=2, progress=False), table)


def test_a_fault_in_a_worker_is_seen(table, cache, monkeypatch):
    monkeypatch.setattr(cache_module, "read_resized", lambda path, short_side: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        decode(table, 32, cache, workers=2, progress=False)


# The real images.


def test_isic2018(cache):
    if "CCLNET_ISIC2018" not in os.environ:
        pytest.skip("CCLNET_ISIC2018 does not name the ISIC 2018 folder")
    from cclnet.data.sources import open_data

    table = open_data(Path(os.environ["CCLNET_ISIC2018"]))
    table = table.select(np.arange(0, len(table), 50))
    images = decode(table, 256, cache, progress=False)
    assert (np.minimum(images.heights, images.widths) == 256).all()
    assert_right(images, table, 256)
