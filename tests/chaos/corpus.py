"""The hostile corpus: seeded cases, each a command on a damaged or malicious input, with what it may answer.

``cases(count, seed)`` cycles through the kinds below, so that any number of cases has all of them. A kind is a function
that prepares files in a folder and returns a :class:`Case`.
"""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import os
import random
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from material import Material, copied, dicom, encoded, formats, npz, picture, suffix_of
from PIL import Image

ANSWERED = (0, 1, 2)  # exit codes of commands: done, done with faults that are listed, refused with a reason
REFUSED = (2,)
FAULTS_LISTED = (1,)


@dataclass(frozen=True)
class Case:
    """A command, and the exit codes that are right for it. With ``must_notice`` the input was changed in a way that
    must not be used silently: the command refuses it, or says that it is damaged."""

    name: str
    command: list[str]
    codes: tuple[int, ...] = ANSWERED
    must_notice: bool = False


Kind = Callable[[random.Random, Material, Path], Case]


def cases(count: int, seed: int) -> Iterator[tuple[str, Callable[[Material, Path], Case]]]:
    """Yield the name of the kind and a function that prepares the case in an empty folder."""
    for number in range(count):
        kind = KINDS[number % len(KINDS)]

        def make(material: Material, folder: Path, kind: Kind = kind, number: int = number) -> Case:
            return kind(random.Random(f"{seed} {number}"), material, folder)

        yield kind.__name__, make


# Damage to bytes.


def flip(content: bytes, chance: random.Random, first: int = 0) -> bytes:
    """One bit changed, at or behind ``first``."""
    at = chance.randrange(min(first, len(content) - 1), len(content))
    return content[:at] + bytes([content[at] ^ 1 << chance.randrange(8)]) + content[at + 1 :]


def mutate(content: bytes, chance: random.Random) -> tuple[str, bytes]:
    """What was done, and the result."""
    size, at = len(content), chance.randrange(len(content))
    end = min(size, at + chance.choice((1, 4, 16, 200)))
    extreme = chance.choice((b"\0" * 4, b"\xff" * 4, b"\x7f\xff\xff\xff", b"\xff\xff\xff\x7f", b"\x80\0\0\0"))
    head = chance.randrange(min(96, size))
    ways: dict[str, Callable[[], bytes]] = {
        "flipped bit": lambda: flip(content, chance),
        "changed bytes": lambda: content[:at] + chance.randbytes(end - at) + content[end:],
        "changed header": lambda: content[:head] + chance.randbytes(8) + content[head + 8 :],
        "extreme number": lambda: content[:head] + extreme + content[head + 4 :],
        "truncated": lambda: content[:at],
        "zeros": lambda: content[:at] + bytes(end - at) + content[end:],
        "inserted": lambda: content[:at] + chance.randbytes(17) + content[at:],
        "removed": lambda: content[:at] + content[end:],
        "repeated": lambda: content[:end] + content[at:end] * 50 + content[end:],
        "junk behind": lambda: content + chance.randbytes(3000),
        "two in one": lambda: content + content,
        "empty": lambda: b"",
        "other": lambda: chance.randbytes(500),
    }
    way = chance.choice(list(ways))
    return way, ways[way]()


# Image files.


def data_set(folder: Path, name: str, content: bytes) -> Path:
    """A folder of two classes with good images, and one more file."""
    generator = np.random.default_rng(3)
    for label in ("a", "b"):
        (folder / "set" / label).mkdir(parents=True)
        for i in range(3):
            (folder / "set" / label / f"good{label}{i}.png").write_bytes(encoded(picture(generator, i), "PNG"))
    (folder / "set" / "a" / name).write_bytes(content)
    return folder / "set" / "a" / name


def used(chance: random.Random, material: Material, file: Path) -> list[str]:
    """One of the commands that read image files."""
    root, good = file.parents[1], sorted(file.parents[1].rglob("good*"))[0]
    predict = ["predict", str(material.run), str(file), str(good), "--quiet", "--device", "cpu"]
    audit = ["data", "audit", str(root), "--quiet"]
    return chance.choice((predict, predict, ["data", "show", str(root)], audit, ["load", str(material.run), str(file)]))


def damaged_image(chance: random.Random, material: Material, folder: Path) -> Case:
    kind = chance.choice([*formats(), "DICOM", "deflated DICOM"])
    generator = np.random.default_rng(chance.randrange(2**32))
    content = dicom("deflated" in kind) if "DICOM" in kind else encoded(picture(generator), kind)
    way, content = mutate(content, chance)
    suffix = "dcm" if "DICOM" in kind else suffix_of(kind)
    return Case(f"{kind}, {way}", used(chance, material, data_set(folder, f"bad.{suffix}", content)))


def image_bomb(chance: random.Random, material: Material, folder: Path) -> Case:
    """Small files that would take gigabytes or minutes."""
    bombs = {
        "deflated DICOM.dcm": lambda: deflate_bomb(chance.choice((2**30, 12 * 2**30))),
        "deflated DICOM with an image.dcm": lambda: dicom(True, pixels=bytes(2**27)),
        "deflated DICOM of a large image.dcm": lambda: dicom(True, rows=9000, columns=9000, pixels=bytes(162 * 10**6)),
        "large DICOM without its pixels.dcm": lambda: dicom(rows=60000, columns=60000, pixels=bytes(100)),
        "scans.jpg": lambda: scan_bomb(chance.choice((200, 3000, 30000))),
        "large scans.jpg": lambda: scan_bomb(2000, side=3000),
        "header.png": lambda: png(chance.choice((100_000, 2**31 - 1)), chance.choice((100_000, 2**31 - 1))),
        "text.png": lambda: png(4, 4, chunk(b"zTXt", b"a\0\0" + zlib.compress(bytes(2**27)))),
        "header.gif": lambda: b"GIF89a" + struct.pack("<HHBBB", 65535, 65535, 0, 0, 0) + b";",
        "header.ppm": lambda: b"P6 1000000000 1000000000 255\n",
        "lossless.webp": lambda: encoded(Image.new("RGB", (6000, 6000)), "WEBP", lossless=True),
        "elongated.png": lambda: encoded(Image.new("L", (60_000, 1)), "PNG"),
        "white.tif": lambda: encoded(Image.new("1", (12_000, 12_000)), "TIFF", compression="group4"),
    }
    name = chance.choice(list(bombs))
    return Case(f"bomb {name}", used(chance, material, data_set(folder, name, bombs[name]())))


def deflate_bomb(size: int) -> bytes:
    """A DICOM file whose deflated elements are ``size`` zeros."""
    syntax = b"1.2.840.10008.1.2.1.99"
    meta = b"\2\0\x10\0UI" + struct.pack("<H", len(syntax)) + syntax
    packer = zlib.compressobj(9, zlib.DEFLATED, -zlib.MAX_WBITS)
    block = packer.compress(bytes(2**22)) + packer.flush(zlib.Z_FULL_FLUSH)  # from here on the same bytes again
    return bytes(128) + b"DICM" + b"\2\0\0\0UL\4\0" + struct.pack("<I", len(meta)) + meta + block * (size // 2**22)


def scan_bomb(scans: int, side: int = 300) -> bytes:
    """A progressive JPEG whose last scan is repeated."""
    whole = encoded(picture(np.random.default_rng(0)).resize((side, side)), "JPEG", progressive=True, quality=5)
    last = whole.rindex(b"\xff\xda")
    return whole[:-2] + whole[last:-2] * scans + whole[-2:]


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png(width: int, height: int, extra: bytes = b"") -> bytes:
    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    pixels = chunk(b"IDAT", zlib.compress(bytes(10)))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + extra + pixels + chunk(b"IEND", b"")


NAMES = (
    b"=cmd|' C calc'!A0.png", b"+1.png", b"-rf.png", b"@x.png", b"\xff\xfe.png", b"caf\xe9.png", b"[red].png",
    b"a\nb.png", b"a\tb.png", b"\x1b[31mred.png", "‮gnp.png".encode(), b"a'b\"c.png", b"a,b;c|d.png", b"%s%n.png",
    b"a" * 250 + b".png", b" .png", b"CON.png", b"..png", "ﬁ\u0301.png".encode(), b"{x}$(id)`id`.png",
)  # fmt: skip


def hostile_name(chance: random.Random, material: Material, folder: Path) -> Case:
    """Names of files and class folders that a terminal, a spreadsheet or a shell might act on."""
    name = chance.choice(NAMES)
    whole = encoded(picture(np.random.default_rng(1)), "PNG")
    file = data_set(folder, "good.png", whole)
    where = os.fsencode(file.parent)
    if chance.random() < 0.5:
        Path(os.fsdecode(where + b"/" + name)).write_bytes(whole)
    else:
        inside = os.fsencode(file.parents[1]) + b"/" + name[:200]
        Path(os.fsdecode(inside)).mkdir()
        for i in range(3):
            Path(os.fsdecode(inside + b"/%d.png" % i)).write_bytes(whole)
    root = str(file.parents[1])
    command = chance.choice((
        ["data", "show", root], ["data", "audit", root, "--quiet"],
        ["predict", str(material.run), root, "--quiet", "--device", "cpu"], train(root),
    ))  # fmt: skip
    return Case(f"the name {name[:40]!r} in {command[0]} {command[1][:5]}", command)


def train(data: str, *more: str) -> list[str]:
    small = ["backbone=test_resnet", "epochs=1", "batch_size=4", "lr=0.02", "short_side=32", "augment.crop=28",
             "method=hard", "split.by=class", "split.val=0.3"]  # fmt: skip
    return ["train", data, "--out", "run", "--accelerator", "cpu", "--quiet", *(f"--set={s}" for s in (*small, *more))]


def not_a_file(chance: random.Random, material: Material, folder: Path) -> Case:
    """Pipes, devices, links and sparse files where images are expected."""
    file = data_set(folder, "good.png", encoded(picture(np.random.default_rng(1)), "PNG"))
    odd = file.with_name("odd.png")
    kind = chance.choice(("pipe", "device", "link out", "link to itself", "folder", "sparse file", "no permission"))
    if kind == "pipe":
        os.mkfifo(odd)
    elif kind == "device":
        odd.symlink_to(chance.choice(("/dev/zero", "/dev/urandom", "/dev/full")))
    elif kind == "link out":
        odd.symlink_to(next((material.data / "ant").iterdir()))
    elif kind == "link to itself":
        odd.symlink_to(odd.name)
    elif kind == "folder":
        odd.mkdir()
    elif kind == "sparse file":
        with odd.open("wb") as sparse:
            sparse.truncate(2**40)
    else:
        odd.write_bytes(b"")
        odd.chmod(0)
    out_of_folder = kind == "link out"
    given = [str(odd), str(file)] if chance.random() < 0.5 and not out_of_folder else [str(file.parent)]
    predict = ["predict", str(material.run), *given, "--quiet", "--device", "cpu"]
    command = chance.choice((predict, ["data", "show", str(file.parents[1])], train(str(file.parents[1]))))
    return Case(f"{kind} in {command[0]}", command, REFUSED if out_of_folder else ANSWERED)


# Tables, arrays, settings.

CELLS = ("", "../../etc/passwd", "/etc/passwd", "a\0b", "=1+1", "x" * 200_000, "nan", "-1", "1e400", "[/red]", '"', "'",
         "\ud7ff", "a|b", "ant;bee", "train", "9" * 5000)  # fmt: skip


def hostile_table(chance: random.Random, material: Material, folder: Path) -> Case:
    data_set(folder, "good.png", encoded(picture(np.random.default_rng(1)), "PNG"))
    files = [path.relative_to(folder / "set") for path in sorted((folder / "set").rglob("*.png"))]
    rows = [["image", "label", "patient_id"], *([str(path), path.parts[0], f"p{i}"] for i, path in enumerate(files))]
    kind = chance.choice(("cell", "cell", "cell", "bytes", "bytes", "columns", "rows", "quote", "utf-16", "ragged"))
    if kind == "cell":
        for _ in range(chance.choice((1, 5))):
            rows[chance.randrange(len(rows))][chance.randrange(3)] = chance.choice(CELLS)
    text = "\n".join(",".join(row) for row in rows) + "\n"
    if kind == "columns":
        wide = [f"c{i}" if chance.random() < 0.999 else "" for i in range(chance.choice((15_000, 1_000_000)))]
        text = ",".join([*rows[0], *wide]) + text[text.index("\n") :]
    elif kind == "rows":
        text += "\n".join(f"missing{i}.png,ant,p" for i in range(50_000))
    elif kind == "quote":
        text = text.replace(",", ',"', 3)
    elif kind == "ragged":
        text = text.replace("\n", ",x\n", 2)
    content = text.encode("utf-16" if kind == "utf-16" else "utf-8", "surrogatepass")
    content = mutate(content, chance)[1] if kind == "bytes" else content
    table = folder / "set" / "table.csv"
    table.write_bytes(content)
    predict = ["predict", str(material.run), str(table), "--quiet", "--device", "cpu"]
    return Case(f"table, {kind}", chance.choice((["data", "show", str(table)], predict, train(str(table)))))


def hostile_array(chance: random.Random, material: Material, folder: Path) -> Case:
    """MedMNIST files: damaged, announced larger than they are, or larger than memory."""
    kind = chance.choice(("bytes", "bytes", "bytes", "bomb", "announced", "0-d labels", "objects", "float labels",
                          "announced labels", "no labels", "volumes"))  # fmt: skip
    path = folder / "derma.npz"
    if kind == "bomb":
        zeros_bomb(path, 5 * 2**30)
    elif kind in ("announced", "announced labels"):
        announced(path, "labels" if "labels" in kind else "images")
    else:
        changes = {
            "0-d labels": {"train_labels": np.array(3)},
            "objects": {"train_labels": np.array([None] * 12, dtype=object)},
            "float labels": {"train_labels": np.full((12, 1), chance.choice((np.nan, 1e300, -1.0, 0.5)))},
            "no labels": {"train_labels": np.zeros((0, 1), np.uint8)},
            "volumes": {"train_images": np.zeros((12, 8, 8, 8), np.uint8)},
        }
        content = npz(**changes.get(kind, {}))
        path.write_bytes(mutate(content, chance)[1] if kind == "bytes" else content)
    codes = ANSWERED if kind == "bytes" else REFUSED
    predict = ["predict", str(material.run), str(path), "--quiet", "--device", "cpu"]
    return Case(f"npz, {kind}", chance.choice((["data", "show", str(path)], predict, train(str(path)))), codes)


def npy_header(shape: tuple[int, ...]) -> bytes:
    text = f"{{'descr': '|u1', 'fortran_order': False, 'shape': {shape}, }}".encode()
    text = text.ljust(-(-(len(text) + 11) // 64) * 64 + 53) + b"\n"
    return b"\x93NUMPY\1\0" + struct.pack("<H", len(text)) + text


def zeros_bomb(path: Path, size: int) -> None:
    count = size // (1024 * 1024)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        with archive.open("train_images.npy", "w", force_zip64=True) as file:
            file.write(npy_header((count, 1024, 1024)))
            for _ in range(count // 16):  # a sixteenth of what it says is enough to be refused or not
                file.write(bytes(2**20))
        archive.writestr("train_labels.npy", npy_header((count, 1)) + bytes(count))
    content = path.read_bytes()
    written = len(npy_header((count, 1024, 1024))) + (count // 16) * 2**20
    # The directory of the archive says that all of it is there.
    claimed = len(npy_header((count, 1024, 1024))) + count * 2**20
    path.write_bytes(content.replace(struct.pack("<I", written), struct.pack("<I", claimed % 2**32)))


def announced(path: Path, which: str) -> None:
    """Headers that say 10^13 values; the data is a few bytes."""
    with zipfile.ZipFile(path, "w") as archive:
        images, labels = npy_header((6, 28, 28)) + bytes(6 * 784), npy_header((6, 1)) + bytes(range(6))
        if which == "images":
            images = npy_header((10**7, 1000, 1000)) + bytes(100)
        else:
            labels = npy_header((10**13, 1)) + bytes(100)
        archive.writestr("train_images.npy", images)
        archive.writestr("train_labels.npy", labels)


VALUES = (
    "1" * 5000,
    "9" * 400,
    "-9223372036854775809",
    "1e400",
    "nan",
    "inf",
    "[" * 5000 + "]" * 5000,
    '"[/red]"',
    "''",
    "true",
    "[]",
    "{}",
    "-1",
    "0",
    '"' + "x" * 100_000 + '"',
    "2026-01-01",
    "0x7fffffffffffffff",
    "[1, [2, [3]]]",
)
KEYS = ("seed", "epochs", "batch_size", "lr", "short_side", "augment.crop", "augment.resized_crop", "backbone",
        "method", "method_settings.widths", "method_settings.depth", "split.val", "split.seed", "ema", "mean", "drops",
        "cache_dir", "unknown", "data", "source", "label_column")  # fmt: skip


def hostile_settings(chance: random.Random, material: Material, folder: Path) -> Case:
    key, value = chance.choice(KEYS), chance.choice(VALUES)
    if chance.random() < 0.4 and len(value) < 100_000:
        return Case(f"--set {key}={value[:30]}", train(str(material.data), f"{key}={value}"))
    recipe = folder / "recipe.toml"
    content = f'data = "{material.data}"\nepochs = 1\nbackbone = "test_resnet"\n{key} = {value}\n'.encode()
    command = ["train", "--recipe", str(recipe), "--out", "run", "--accelerator", "cpu", "--quiet"]
    mutated = chance.random() < 0.4
    recipe.write_bytes(mutate(content, chance)[1] if mutated else content)
    if mutated:  # a recipe that lost its size in the mutation is valid, and would train a large network
        small = ("backbone=test_resnet", "epochs=1", "short_side=36", "augment.crop=32", "batch_size=16")
        command += [word for setting in small for word in ("--set", setting)]
    return Case(f"recipe {key} = {value[:30]}", command)


def hostile_synthetic(chance: random.Random, material: Material, folder: Path) -> Case:
    given = chance.choice(("images=999999999999", "images=-1", "size=512,images=100000", "classes=10000", "seed=-1",
                           "images=1e9", "overlap=nan", "imbalance=true,images=3", "images=" + "9" * 5000, "=", ",,,",
                           "images_per_group=999999999"))  # fmt: skip
    name = chance.choice(("synthetic", "synthetic-multilabel"))
    return Case(f"{name}:{given[:40]}", ["data", "show", f"{name}:{given}"])


# Files of runs.


def flipped_model(chance: random.Random, material: Material, folder: Path) -> Case:
    run = copied(material.run, folder / "run")
    path = run / "model.safetensors"
    path.write_bytes(flip(path.read_bytes(), chance))
    predict = ["predict", str(run), str(material.data), "--quiet", "--device", "cpu"]
    command = chance.choice((predict, ["export", str(run), "--format", "safetensors", "--out", "out"]))
    return Case(f"flipped bit of a model in {command[0]}", command, REFUSED, True)


def flipped_export(chance: random.Random, material: Material, folder: Path) -> Case:
    path = copied(material.export, folder / "export") / "model.onnx"
    path.write_bytes(flip(path.read_bytes(), chance))
    command = ["predict", str(path.parent), str(material.data), "--quiet", "--device", "cpu"]
    return Case("flipped bit of an export", command, REFUSED, True)


def flipped_checkpoint(chance: random.Random, material: Material, folder: Path) -> Case:
    run = copied(material.unfinished, folder / "run")
    newest = sorted((run / "checkpoints").glob("epoch-*.pt"))[-1]
    newest.write_bytes(flip(newest.read_bytes(), chance))
    command = ["train", "--resume", str(run), "--accelerator", "cpu", "--quiet"]
    return Case("flipped bit of a checkpoint", command, (0, 2), True)


def flipped_cache(chance: random.Random, material: Material, folder: Path) -> Case:
    cache = copied(material.cache, folder / "decoded")
    path = chance.choice(sorted(cache.rglob("shard-*.bin")))
    content = path.read_bytes()
    for _ in range(chance.choice((1, 1, 2000))):
        content = flip(content, chance)
    path.write_bytes(content)
    command = train(str(material.data), f"cache_dir={cache}")
    return Case("flipped bits of decoded images", command, (0, 2), True)


def damaged_run_file(chance: random.Random, material: Material, folder: Path) -> Case:
    """Any file of a run, any damage; the checksums are removed in half of the cases, as a stranger would."""
    run = copied(chance.choice((material.run, material.run, material.unfinished)), folder / "run")
    path = chance.choice([path for path in sorted(run.rglob("*")) if path.is_file() and path.stat().st_size])
    way, content = mutate(path.read_bytes(), chance)
    path.write_bytes(content)
    if chance.random() < 0.5:
        for sums in run.rglob("SHA256SUMS"):
            sums.unlink()
    return Case(f"{path.name}, {way}", use_of_run(chance, material, run))


def use_of_run(chance: random.Random, material: Material, run: Path) -> list[str]:
    predict = ["predict", str(run), str(material.data), "--quiet", "--device", "cpu"]
    export = ["export", str(run), "--format", "safetensors", "--out", "out"]
    evaluate, compare = (
        ["evaluate", str(run), "--draws", "20"],
        ["compare", str(run), str(material.run), "--out", "out"],
    )
    resume = ["train", "--resume", str(run), "--accelerator", "cpu", "--quiet"]
    return chance.choice((predict, predict, export, evaluate, [*compare, "--draws", "20"], resume))


def hostile_json(chance: random.Random, material: Material, folder: Path) -> Case:
    """A value of model.json, calibration.json or scores.json replaced; without checksums."""
    run = copied(chance.choice((material.run, material.export)), folder / "run")
    (run / "SHA256SUMS").unlink(missing_ok=True)
    path = chance.choice(sorted(run.glob("*.json")))
    content = json.loads(path.read_text())
    place, key = content, chance.choice(list(content))
    while isinstance(place[key], dict | list) and place[key] and chance.random() < 0.8:
        place = place[key]
        key = chance.choice(list(place)) if isinstance(place, dict) else chance.randrange(len(place))
    values = (10**400, -(10**400), 2**63, 8192, [8192, 8192], 1e-320, 1e308, -0.0, True, None, "", "[/red]",
              "x" * 10**6, [], {}, [[]], {"a": {"b": 1}}, [1] * 10**5, float("nan"), float("inf"),
              "../../etc/passwd")  # fmt: skip
    value = chance.choice(values)
    place[key] = value
    path.write_text(json.dumps(content))
    command = use_of_run(chance, material, run)
    return Case(f"{path.name}: {key} = {str(value)[:30]}", command)


# Newer than the rest: what other stages read of a run, archives, uploads.

READ_BY_PREDICT = ("model.safetensors", "model.json", "calibration.json", "soft_labels.csv", "features.safetensors")


def lost_run_file(chance: random.Random, material: Material, folder: Path) -> Case:
    """A file that a model needs is gone, or is something else than a file; the checksums say that it was there."""
    run = copied(chance.choice((material.run, material.export)), folder / "run")
    path = run / chance.choice([name for name in (*READ_BY_PREDICT, "model.onnx") if (run / name).exists()])
    kind = chance.choice(("gone", "pipe", "device", "link to itself", "sparse", "folder"))
    path.unlink()
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "sparse":
        with path.open("wb") as sparse:
            sparse.truncate(2**40)
    elif kind != "gone":
        path.symlink_to("/dev/zero" if kind == "device" else path.name)
    predict = ["predict", str(run), str(material.data), "--quiet", "--device", "cpu"]
    verify, push = ["verify", str(run)], ["push", str(run), "me/x", "--endpoint", NO_HUB]
    command = chance.choice((predict, predict, verify, push))
    return Case(f"{path.name}, {kind}, in {command[0]}", command, FAULTS_LISTED if command == verify else REFUSED)


NO_HUB = "http://127.0.0.1:9"


def damaged_input_of_a_stage(chance: random.Random, material: Material, folder: Path) -> Case:
    """Flipped bits in what another command reads of a run."""
    run, other = copied(material.run, folder / "run"), copied(material.run, folder / "other")
    commands = {
        "model.safetensors": (
            ["ensemble", str(other), str(run), "--out", "out"],
            train(str(material.data), f"weights={run}/model.safetensors"),
            ["push", str(run), "me/x", "--endpoint", NO_HUB], ["export", str(run), "--format", "timm", "--out", "out"],
        ),
        "predictions.csv": (["doubts", str(run)], ["ensemble", str(other), str(run), "--out", "out"],
                            ["compare", str(other), str(run), "--out", "out", "--draws", "20"]),
        "split.csv": (["doubts", str(run)], ["evaluate", str(run), "--draws", "20"]),
    }  # fmt: skip
    name = chance.choice(list(commands))
    (run / name).write_bytes(flip((run / name).read_bytes(), chance))
    command = chance.choice(commands[name])
    return Case(f"flipped bit of {name} in {command[0]}", command, REFUSED, True)


def hostile_tar(chance: random.Random, material: Material, folder: Path) -> Case:
    """WebDataset files: mutated, or with labels and class names that are no text."""
    image = encoded(picture(np.random.default_rng(1)), "PNG")
    odd = chance.choice(("label", "patient_id", "split"))
    value = chance.choice(("\ud800x", "x" * 900_000, "a\0b", "\x1b]0;title\x07", "[/red]", 10**4000, [1], None, "a\nb"))
    kind = chance.choice(("bytes", "value", "value", "classes", "number"))
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for i in range(6):
            facts = {"label": i % 2, "patient_id": f"p{i}"} | ({odd: value} if kind == "value" and i > 3 else {})
            text = b'{"label": ' + b"9" * 5000 + b"}" if kind == "number" else json.dumps(facts).encode()
            for suffix, content in (("png", image), ("json", text)):
                member = tarfile.TarInfo(f"{i}.{suffix}")
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))
    (folder / "set").mkdir()
    path = folder / "set" / "x.tar"
    path.write_bytes(mutate(file.getvalue(), chance)[1] if kind == "bytes" else file.getvalue())
    if kind == "classes":
        (folder / "set" / "classes.txt").write_bytes(chance.choice((b"caf\xe9\nb\n", b"a\na\n", b"\0\n", b"")))
    commands = ["data", "show", str(path)], ["data", "audit", str(path), "--quiet"], train(str(path))
    return Case(f"tar, {kind}: {odd} = {str(value)[:20]!r}", chance.choice(commands))


def hostile_parquet(chance: random.Random, material: Material, folder: Path) -> Case:
    """Parquet files with images: mutated, or of equal values, which take no room however many they are."""
    import pyarrow
    from pyarrow import parquet

    kind = chance.choice(("bytes", "bytes", "rows", "texts", "images"))
    image, path = encoded(picture(np.random.default_rng(1)), "PNG"), folder / "x.parquet"
    columns: dict[str, Any] = {"image": [image] * 6, "label": ["a", "b"] * 3}

    def equal(values: list[Any], rows: int) -> Any:
        return pyarrow.DictionaryArray.from_arrays(pyarrow.array(np.arange(rows) % len(values), "int32"), values)

    if kind == "rows":
        columns = {"image": pyarrow.nulls(2**23, pyarrow.binary()), "label": equal(["a"], 2**23)}
    elif kind == "texts":
        columns = {"image": equal([image], 400), "label": equal(["x" * 10**6, "b"], 400)}
    elif kind == "images":
        large = encoded(Image.new("RGB", (1000, 1000)), "BMP")
        columns = {"image": equal([large], 400), "label": equal(["a", "b"], 400)}
    parquet.write_table(
        pyarrow.table(columns), path, compression="zstd", store_schema=False, dictionary_pagesize_limit=2**25
    )
    if kind == "bytes":
        path.write_bytes(mutate(path.read_bytes(), chance)[1])
    commands = ["data", "show", str(path)], ["data", "audit", str(path), "--quiet"], train(str(path))
    return Case(f"parquet, {kind}", chance.choice(commands))


def hostile_predictions(chance: random.Random, material: Material, folder: Path) -> Case:
    """Tables of predictions that expand to gigabytes, or whose cells do."""
    head, row = b"image,label,p_a,p_b\n", b"%d.png,a,0.5,0.5\n"
    rows = b"".join(row % i for i in range(1000))
    kinds = {
        "bomb.csv.bz2": lambda: bz2.compress(head + bytes(2**29)),
        "bomb.csv.gz": lambda: gzip.compress(head + row % 1 * 2**24, 1),
        "bomb.csv.xz": lambda: lzma.compress(head + bytes(2**28), preset=0),
        "cell.csv": lambda: head + rows + b"x" * 2 * 10**6 + b",a,0.5,0.5\n",
        "columns.csv": lambda: b"image,label," + b",".join(b"p_%d" % i for i in range(10**5)) + b"\n",
        "bytes.csv.gz": lambda: mutate(gzip.compress(head + rows), chance)[1],
        "bytes.csv": lambda: mutate(head + rows, chance)[1],
    }  # fmt: skip
    name = chance.choice(list(kinds))
    path = folder / name
    path.write_bytes(kinds[name]())
    commands = (["evaluate", str(path), "--draws", "20"], ["doubts", str(path)],
                ["compare", str(path), str(path), "--out", "out", "--draws", "20"])  # fmt: skip
    return Case(f"predictions, {name}", chance.choice(commands), ANSWERED if "bytes" in name else REFUSED)


def foreign_weights(chance: random.Random, material: Material, folder: Path) -> Case:
    """Files given as pretrained weights."""
    content = (material.run / "model.safetensors").read_bytes()
    length = struct.unpack("<Q", content[:8])[0]
    header = content[8 : 8 + length]
    ways = {
        "text": lambda: b"these are my weights\n" * 20,
        "huge header": lambda: struct.pack("<Q", 2**62) + content[8:],
        "huge shape": lambda: content.replace(b'"shape":[', b'"shape":[9', 1),
        "nested header": lambda: struct.pack("<Q", 200_000) + b"[" * 200_000,
        "empty header": lambda: struct.pack("<Q", 2) + b"{}",
        "other type": lambda: content[:8] + header.replace(b'"F32"', b'"X99"', 1) + content[8 + length :],
        "bytes": lambda: mutate(content, chance)[1],
        "pickle": lambda: b"\x80\x04\x95\x10\0\0\0\0\0\0\0\x8c\x05posix\x94\x8c\x06system\x94\x93\x94.",
        "zip": lambda: b"PK\3\4" + bytes(100),
    }
    way = chance.choice(list(ways))
    path = folder / chance.choice(("weights.safetensors", "weights.pt"))
    path.write_bytes(ways[way]())
    return Case(f"weights, {way}", train(str(material.data), f"weights={path}"))


KINDS: tuple[Kind, ...] = (
    damaged_image, damaged_image, damaged_image, damaged_image, damaged_image, image_bomb, image_bomb, hostile_name,
    not_a_file, hostile_table, hostile_table, hostile_array, hostile_array, hostile_settings, hostile_synthetic,
    flipped_model, flipped_export, flipped_checkpoint, flipped_cache, damaged_run_file, damaged_run_file,
    damaged_run_file, hostile_json, hostile_json, foreign_weights, lost_run_file, damaged_input_of_a_stage,
    hostile_tar, hostile_parquet, hostile_predictions,
)  # fmt: skip
