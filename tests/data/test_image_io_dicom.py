"""DICOM as a viewer shows it, against the formulas of the standard, and refusals by name."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from layouts import draw, write_csv

from cclnet.data import image_io
from cclnet.data.audit import describe
from cclnet.data.image_io import UnreadableImage, image_size, read_image
from cclnet.data.sources import open_data
from cclnet.errors import InputError

pydicom = pytest.importorskip("pydicom", reason="pydicom is not installed")


def write_dicom(path: Path, pixels: np.ndarray, kind: str = "MONOCHROME2", bits: int = 12, **elements: Any) -> Path:
    """A small DICOM file around ``pixels``; ``elements`` are set by their keyword, None removes one."""
    from pydicom.dataset import Dataset, FileMetaDataset
    from pydicom.uid import ExplicitVRLittleEndian, SecondaryCaptureImageStorage, generate_uid

    data = Dataset()
    data.file_meta = FileMetaDataset()
    data.file_meta.TransferSyntaxUID = ExplicitVRLittleEndian
    data.file_meta.MediaStorageSOPClassUID = data.SOPClassUID = SecondaryCaptureImageStorage
    data.file_meta.MediaStorageSOPInstanceUID = data.SOPInstanceUID = generate_uid()
    colour = pixels.ndim == 3 and pixels.shape[2] == 3
    data.Rows, data.Columns = pixels.shape[:2] if colour or pixels.ndim == 2 else pixels.shape[1:3]
    data.SamplesPerPixel = 3 if colour else 1
    if colour:
        data.PlanarConfiguration = 0
    data.PhotometricInterpretation = kind
    data.BitsAllocated = pixels.dtype.itemsize * 8
    data.BitsStored = bits
    data.HighBit = bits - 1
    data.PixelRepresentation = int(pixels.dtype.kind == "i")
    data.PixelData = pixels.tobytes()
    for keyword, value in elements.items():
        if value is None:
            delattr(data, keyword)
        else:
            setattr(data, keyword, value)
    path.parent.mkdir(parents=True, exist_ok=True)
    data.save_as(path, enforce_file_format=True)
    return path


RAMP = np.arange(4096, dtype=np.uint16).reshape(64, 64)


def grey(path: Path) -> np.ndarray:
    read = read_image(path)
    assert read.dtype == np.uint8
    assert (read == read[..., :1]).all()
    return read[..., 0]


def window(values: np.ndarray, center: float, width: float) -> np.ndarray:
    """The linear window of the standard (PS3.3 C.11.2.1.2.1) to 0..255."""
    return np.rint(np.clip((values - (center - 0.5)) / (width - 1) + 0.5, 0, 1) * 255)


def test_without_a_window_the_darkest_is_black_and_the_brightest_white(tmp_path: Path) -> None:
    path = write_dicom(tmp_path / "a.dcm", RAMP[10:20])
    values = RAMP[10:20].astype(float)
    np.testing.assert_array_equal(grey(path), np.rint((values - 640) / (values.max() - 640) * 255))
    assert image_size(path) == (10, 64)


def test_monochrome1_is_inverted(tmp_path: Path) -> None:
    two = grey(write_dicom(tmp_path / "two.dcm", RAMP, "MONOCHROME2", WindowCenter=2000, WindowWidth=1000))
    one = grey(write_dicom(tmp_path / "one.dcm", RAMP, "MONOCHROME1", WindowCenter=2000, WindowWidth=1000))
    np.testing.assert_array_equal(one, 255 - two)
    assert two[0, 0] == 0


def test_window_after_rescale(tmp_path: Path) -> None:
    """A CT slice: stored values to Hounsfield units, of which the window of soft tissue is shown."""
    path = write_dicom(
        tmp_path / "ct.dcm", RAMP, RescaleSlope=2, RescaleIntercept=-1024, WindowCenter=[40, 500], WindowWidth=[400, 9]
    )
    np.testing.assert_allclose(grey(path), window(RAMP * 2.0 - 1024, 40, 400), atol=1)


def test_signed_values_and_the_other_window_functions(tmp_path: Path) -> None:
    signed = (RAMP.astype(np.int16) - 2048).astype(np.int16)
    path = write_dicom(tmp_path / "signed.dcm", signed, WindowCenter=0, WindowWidth=500)
    np.testing.assert_allclose(grey(path), window(signed.astype(float), 0, 500), atol=1)
    shown = {"WindowCenter": 0, "WindowWidth": 500}
    path = write_dicom(tmp_path / "exact.dcm", signed, VOILUTFunction="LINEAR_EXACT", **shown)
    np.testing.assert_allclose(grey(path), np.rint(np.clip(signed / 500 + 0.5, 0, 1) * 255), atol=1)
    path = write_dicom(tmp_path / "sigmoid.dcm", signed, VOILUTFunction="SIGMOID", **shown)
    np.testing.assert_allclose(grey(path), np.rint(255 / (1 + np.exp(-4 * signed / 500.0))), atol=1)


def test_a_voi_lut(tmp_path: Path) -> None:
    from pydicom.dataset import Dataset

    curve = [int(65535 * (value / 4095) ** 2) for value in range(4096)]
    table = Dataset()
    table.LUTDescriptor = [4096, 0, 16]
    table.LUTData = np.array(curve, dtype="<u2").tobytes()
    path = write_dicom(tmp_path / "table.dcm", RAMP, VOILUTSequence=[table])
    np.testing.assert_allclose(grey(path), np.rint(255 * (RAMP / 4095.0) ** 2), atol=1)
    path = write_dicom(tmp_path / "both.dcm", RAMP, VOILUTSequence=[table], WindowCenter=2000, WindowWidth=800)
    np.testing.assert_allclose(grey(path), window(RAMP.astype(float), 2000, 800), atol=1)
    table.LUTDescriptor = [4096, 0, 8]
    with pytest.raises(UnreadableImage, match="8-bit VOI LUT with 4096 entries"):
        read_image(write_dicom(tmp_path / "narrow.dcm", RAMP, VOILUTSequence=[table]))


def test_colour_palette_and_ybr(tmp_path: Path) -> None:
    from pydicom.pixels import convert_color_space

    colours = np.random.default_rng(0).integers(0, 256, (8, 9, 3), dtype=np.uint8)
    np.testing.assert_array_equal(read_image(write_dicom(tmp_path / "rgb.dcm", colours, "RGB", bits=8)), colours)
    ybr = convert_color_space(colours, "RGB", "YBR_FULL")
    read = read_image(write_dicom(tmp_path / "ybr.dcm", ybr, "YBR_FULL", bits=8))
    np.testing.assert_allclose(read, colours, atol=3)
    levels = [(np.arange(256) * step).astype("<u2").tobytes() for step in (257, 128, 64)]
    palette = {
        f"{name}PaletteColorLookupTable{what}": value
        for name, level in zip(("Red", "Green", "Blue"), levels, strict=True)
        for what, value in (("Descriptor", [256, 0, 16]), ("Data", level))
    }
    index = np.arange(256, dtype=np.uint8).reshape(16, 16)
    read = read_image(write_dicom(tmp_path / "palette.dcm", index, "PALETTE COLOR", bits=8, **palette))
    np.testing.assert_allclose(read[..., 0], index, atol=1)
    np.testing.assert_allclose(read[..., 2], index * (64 / 257), atol=1)


def test_several_frames_are_refused_by_name(tmp_path: Path) -> None:
    path = write_dicom(tmp_path / "film.dcm", np.zeros((7, 8, 9), np.uint16), NumberOfFrames=7)
    for read in (read_image, image_size):
        with pytest.raises(UnreadableImage, match=r"film\.dcm: multi-frame DICOM \(7 frames\)"):
            read(path)


def test_what_is_no_picture_is_named(tmp_path: Path) -> None:
    (tmp_path / "text.dcm").write_text("not a DICOM file " * 20)
    with pytest.raises(UnreadableImage, match=r"text\.dcm: not a DICOM file"):
        read_image(tmp_path / "text.dcm")
    with pytest.raises(UnreadableImage, match=r"\(no Rows\)"):
        read_image(write_dicom(tmp_path / "report.dcm", RAMP, Rows=None))
    with pytest.raises(UnreadableImage, match="cannot be decoded"):
        read_image(write_dicom(tmp_path / "bare.dcm", RAMP, PixelData=None))
    whole = write_dicom(tmp_path / "cut.dcm", RAMP)
    whole.write_bytes(whole.read_bytes()[:-2000])
    with pytest.raises(UnreadableImage, match=r"cut\.dcm"):
        read_image(whole)


def test_a_bomb_is_refused_by_its_header(tmp_path: Path) -> None:
    path = write_dicom(tmp_path / "bomb.dcm", RAMP, Rows=50_000, Columns=50_000)
    for read in (read_image, image_size):
        with pytest.raises(UnreadableImage, match="50,000 x 50,000 pixels, more than the limit"):
            read(path)


def test_pydicom_is_asked_for_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_dicom(tmp_path / "a.dcm", RAMP)
    monkeypatch.setitem(sys.modules, "pydicom", None)
    with pytest.raises(InputError, match=r"pip install 'cclnet\[dicom\]'") as caught:
        read_image(path)
    assert not isinstance(caught.value, UnreadableImage)  # every other file would say the same


def test_files_without_suffix_are_found_in_folders_and_manifests(tmp_path: Path) -> None:
    for label in ("normal", "nodule"):
        for name in ("1.2.840.10008.55", "IM0001"):
            write_dicom(tmp_path / "folders" / label / name, RAMP)
        (tmp_path / "folders" / label / "README").write_text("not an image")
    table = open_data(tmp_path / "folders")
    assert len(table) == 4
    assert table.classes == ("nodule", "normal")
    assert describe(table).sizes == {(64, 64): 4}
    write_csv(tmp_path / "table" / "labels.csv", [["image", "label"], ["IM1", "a"], ["b.png", "b"]])
    write_dicom(tmp_path / "table" / "IM1", RAMP)
    draw(tmp_path / "table" / "b.png")
    assert open_data(tmp_path / "table").names == ["IM1", "b.png"]


@pytest.mark.filterwarnings("ignore::UserWarning")
@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(damage=st.lists(st.tuples(st.integers(132, 3_000), st.integers(0, 255)), min_size=1, max_size=6))
def test_damaged_files_give_pixels_or_the_named_error(tmp_path: Path, damage: list) -> None:
    content = bytearray(write_dicom(tmp_path / "a.dcm", RAMP[:16, :16], WindowCenter=9, WindowWidth=9).read_bytes())
    for at, value in damage:
        content[at % len(content)] = value
    (tmp_path / "a.dcm").write_bytes(content)
    try:
        assert read_image(tmp_path / "a.dcm", max_pixels=100_000).dtype == np.uint8
    except UnreadableImage as error:
        assert error.path == tmp_path / "a.dcm"


def deflated(path: Path, behind: int = 0) -> Path:
    """The DICOM file at ``path`` with deflated elements, and zeros ``behind`` its pixels."""
    data = pydicom.dcmread(path)
    data.file_meta.TransferSyntaxUID = pydicom.uid.DeflatedExplicitVRLittleEndian
    if behind:
        data.PixelData += bytes(behind)
    out = path.with_name(f"deflated-{behind}.dcm")
    data.save_as(out, enforce_file_format=True)
    return out


def test_deflated_elements_are_read_within_the_size_of_the_image(tmp_path: Path) -> None:
    plain = write_dicom(tmp_path / "plain.dcm", RAMP)
    np.testing.assert_array_equal(read_image(deflated(plain)), read_image(plain))
    assert image_size(deflated(plain)) == (64, 64)
    bomb = deflated(plain, behind=2**25)
    assert bomb.stat().st_size < 2**19
    for read in (read_image, image_size):
        with pytest.raises(UnreadableImage, match=r"more than 1,056,768 bytes for 64 x 64 pixels"):
            read(bomb)
    broken = bomb.with_name("broken.dcm")
    broken.write_bytes(bomb.read_bytes()[:400] + b"\xff" * 50)
    with pytest.raises(UnreadableImage):
        read_image(broken)


@pytest.mark.parametrize("kind", ["MONOCHROME1", "MONOCHROME2", "RGB"])
@pytest.mark.parametrize("elements", [{}, {"WindowCenter": 900, "WindowWidth": 700}])
def test_bands_of_a_dicom_image(tmp_path: Path, kind: str, elements: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    pixels = np.stack([RAMP % 251] * 3, axis=2).astype(np.uint8) if kind == "RGB" else RAMP
    path = write_dicom(tmp_path / "a.dcm", pixels, kind, bits=8 if kind == "RGB" else 12, **elements)
    whole = read_image(path)
    monkeypatch.setattr(image_io, "_BAND_PIXELS", 500)
    np.testing.assert_array_equal(read_image(path), whole)
