"""Which bytes of a body are the image: all of them, or those of one field of a form."""

from __future__ import annotations

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from cclnet.deploy.serve.limits import Refused

FIELD = "image"
MOST_PARTS = 8
HEADER_BYTES = 4096  # of one part; a name and a type take two hundred


def image_in(body: bytes, content_type: str) -> bytes:
    """The image in a request's body. What the sender calls the file is never looked at.

    >>> image_in(b"the image", "image/png")
    b'the image'
    """
    kind, options = parse_options_header(content_type)
    if kind == b"multipart/form-data":
        content = _field(body, options.get(b"boundary", b""))
    elif kind.startswith(b"image/") or kind in (b"application/octet-stream", b"application/dicom"):
        content = body
    else:
        raise Refused(
            415,
            f"Send the image as a form with a field '{FIELD}' (multipart/form-data), or its bytes alone with the type "
            "image/* or application/octet-stream.",
        )
    if not content:
        raise Refused(422, "The file is empty.")
    return content


def _field(body: bytes, boundary: bytes) -> bytes:
    form = _Form()
    try:
        if not boundary:
            raise FormParserError("its type names no boundary")
        parser = MultipartParser(boundary, form.callbacks())  # type: ignore[arg-type]
        parser.write(body)
    except FormParserError as error:
        raise Refused(400, f"The form cannot be read: {error}.") from None
    if not form.ended:
        raise Refused(400, "The form is cut off: its last boundary is missing.")
    if len(form.images) != 1:
        found = "none" if not form.images else str(len(form.images))
        raise Refused(422, f"Send one image, in the field '{FIELD}'; {found} came.")
    return b"".join(form.images[0])


class _Form:
    """What the parser finds. Only the field of the image is kept."""

    def __init__(self) -> None:
        self.images: list[list[bytes]] = []
        self.ended = False
        self._parts = 0
        self._header_bytes = 0
        self._name, self._value = b"", b""
        self._kept: list[bytes] | None = None

    def callbacks(self) -> dict[str, object]:
        return {
            "on_part_begin": self._begin,
            "on_header_field": self._header_name,
            "on_header_value": self._header_value,
            "on_header_end": self._header,
            "on_part_data": self._data,
            "on_end": self._end,
        }

    def _begin(self) -> None:
        self._parts += 1
        self._header_bytes, self._kept = 0, None
        if self._parts > MOST_PARTS:
            raise Refused(400, f"The form has more than {MOST_PARTS} fields; '{FIELD}' is all that is needed.")

    def _header_name(self, data: bytes, start: int, end: int) -> None:
        self._count(end - start)
        self._name += data[start:end]

    def _header_value(self, data: bytes, start: int, end: int) -> None:
        self._count(end - start)
        self._value += data[start:end]

    def _count(self, size: int) -> None:
        self._header_bytes += size
        if self._header_bytes > HEADER_BYTES:
            raise Refused(431, f"A field of the form has headers of more than {HEADER_BYTES} bytes.")

    def _header(self) -> None:
        if self._name.lower() == b"content-disposition":
            _, options = parse_options_header(self._value)
            if options.get(b"name") == FIELD.encode():
                self._kept = []
                self.images.append(self._kept)
        self._name = self._value = b""

    def _data(self, data: bytes, start: int, end: int) -> None:
        if self._kept is not None:
            self._kept.append(data[start:end])

    def _end(self) -> None:
        self.ended = True
