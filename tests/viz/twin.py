"""A Python twin of the decoder in payload.js."""

from __future__ import annotations

import base64
import json
import re
import struct
import zlib
from typing import Any

import numpy as np

__all__ = ["payload_of", "unpack"]

_DTYPES = {"u8": "<u1", "u16": "<u2", "u32": "<u4", "f64": "<f8"}


def payload_of(page: str) -> bytes:
    """Return the payload in a page; there is exactly one."""
    (text,) = re.findall(r'<script type="text/plain" id="payload">(.*?)</script>', page, re.DOTALL)
    return zlib.decompress(base64.b64decode(text, validate=True))


def unpack(data: bytes) -> dict[str, Any]:
    """Do what readPayload does: return the document with a list of numbers in the place of each column."""
    (length,) = struct.unpack_from("<I", data)
    columns = memoryview(data)[4 + length :]

    def decoded(node: Any) -> Any:
        if isinstance(node, list):
            return [decoded(item) for item in node]
        if isinstance(node, dict):
            return decode(node, columns) if "at" in node and "d" in node else {k: decoded(v) for k, v in node.items()}
        return node

    document: dict[str, Any] = decoded(json.loads(data[4 : 4 + length]))
    return document


def decode(column: dict[str, Any], columns: memoryview | bytes) -> list[int]:
    """Do what decodeColumn does."""
    dtype = np.dtype(_DTYPES[column["d"]])
    assert column["at"] % dtype.itemsize == 0  # a typed array cannot begin elsewhere
    stored = np.frombuffer(columns, np.uint8, column["n"] * dtype.itemsize, column["at"])
    if column.get("planes"):
        stored = np.ascontiguousarray(stored.reshape(dtype.itemsize, column["n"]).T).reshape(-1)
    values = [int(value) for value in stored.view(dtype).tolist()]
    if "delta" in column:
        total, low = column["delta"]
        values = [total := total + value + low for value in values]
    return [column["base"] + column["scale"] * value for value in values]
