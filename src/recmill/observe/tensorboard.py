"""A file of TensorBoard with the metrics of a run. Its format needs no library: TFRecords of protocol buffers."""

import ctypes
import socket
import struct
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

_START = b"\x08\x01"  # SessionLog: what earlier files say of step 0 and later ones is no longer true
_OURS = ".recmill"  # ends the names of our files: a directory may hold those of other programs
# What a line of metrics.jsonl says beside metrics.
LINE_FACTS = ("step", "epoch", "epochs_done", "split", "headline", "time")


class EventFile:
    """Our newest event file in a directory. TensorBoard forgets what it has read in earlier ones."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._path = directory

    def begin(self, lines: Iterable[Mapping[str, Any]]) -> None:
        """Start a new file with these lines of metrics.jsonl.

        The last one stays, because a running TensorBoard may be reading it. TensorBoard sorts files by name, so a new
        name is larger even if the clock was set back.
        """
        self._directory.mkdir(parents=True, exist_ok=True)
        earlier = {int(path.name.split(".")[3]): path for path in self._directory.glob(f"events.out.tfevents.*{_OURS}")}
        number = max(time.time_ns(), max(earlier, default=0) + 1)
        self._path = self._directory / f"events.out.tfevents.{number}.{socket.gethostname()}{_OURS}"
        head = _record(_double(1, time.time()) + _bytes(3, b"brain.Event:2"))
        head += _record(_double(1, time.time()) + _bytes(7, _START))
        self._path.write_bytes(head + b"".join(map(_event, lines)))
        for old in sorted(earlier)[:-1]:
            earlier[old].unlink(missing_ok=True)

    def add(self, line: Mapping[str, Any]) -> None:
        with self._path.open("ab") as file:
            file.write(_event(line))


def scalars(line: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers of a line of metrics.jsonl as "split/name"."""
    return {
        f"{line['split']}/{name}": float(value)
        for name, value in line.items()
        if name not in LINE_FACTS and isinstance(value, int | float)
    }


def _event(line: Mapping[str, Any]) -> bytes:
    values = [_bytes(1, tag.encode()) + _float(2, value) for tag, value in scalars(line).items()]
    summary = b"".join(_bytes(1, value) for value in values)
    return _record(_double(1, line["time"]) + b"\x10" + _varint(line["step"]) + _bytes(5, summary))


# Protocol buffers: a key (number of the field, kind of value), then the value.


def _double(field: int, value: float) -> bytes:
    return struct.pack("<Bd", field << 3 | 1, value)


def _float(field: int, value: float) -> bytes:
    return struct.pack("<Bf", field << 3 | 5, ctypes.c_float(value).value)  # infinity if it is too large


def _bytes(field: int, value: bytes) -> bytes:
    return bytes([field << 3 | 2]) + _varint(len(value)) + value


def _varint(value: int) -> bytes:
    low = bytearray()
    while value > 127:
        low.append(value & 127 | 128)
        value >>= 7
    return bytes(low) + bytes([value])


def _record(data: bytes) -> bytes:
    length = struct.pack("<Q", len(data))
    return length + _checksum(length) + data + _checksum(data)


def _checksum(data: bytes) -> bytes:
    """Return the masked CRC-32C of TFRecords."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = _TABLE[(crc ^ byte) & 255] ^ crc >> 8
    crc ^= 0xFFFFFFFF
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)


def _table_entry(number: int) -> int:
    for _ in range(8):
        number = number >> 1 ^ (0x82F63B78 if number & 1 else 0)
    return number


_TABLE = [_table_entry(number) for number in range(256)]
