"""Headers of npy files, and npz archives as memory maps."""

import struct
import tokenize
import zipfile
from pathlib import Path
from typing import IO

import numpy as np
from numpy.lib import format as npy_format

from recmill.errors import DataError


def read_header(file: IO[bytes]) -> tuple[tuple[int, ...], bool, np.dtype]:
    """Read (shape, is in Fortran order, dtype) and leave `file` at the first value. Raises ValueError."""
    version = npy_format.read_magic(file)
    read = npy_format.read_array_header_1_0 if version == (1, 0) else npy_format.read_array_header_2_0
    try:
        return read(file)
    except (tokenize.TokenError, SyntaxError) as error:  # NumPy parses the header as Python
        raise ValueError(f"bad header: {error}") from None


def npy_array(path: Path) -> np.ndarray:
    """Memory-map an npy file. Raises ValueError."""
    with path.open("rb") as file:
        read_header(file)
    return np.load(path, mmap_mode="r", allow_pickle=False)


def npz_arrays(path: Path) -> list[np.ndarray]:
    """Memory-map the members "0", "1", ... of an uncompressed npz file; np.load would read them into memory."""
    arrays: list[np.ndarray] = []
    try:
        with zipfile.ZipFile(path) as archive, path.open("rb") as file:
            if not archive.namelist():
                raise ValueError("it is empty")
            content = np.memmap(path, np.uint8, "r")  # one map for all members, because each keeps a file open
            for index in range(len(archive.namelist())):
                member = archive.getinfo(f"{index}.npy")
                if member.compress_type != zipfile.ZIP_STORED:
                    raise DataError(f"{path}: it is compressed. Save it with np.savez, not np.savez_compressed.")
                if not 0 <= member.header_offset < len(content):
                    raise ValueError(f"array {index} is outside of the file")
                file.seek(member.header_offset)
                name_bytes, extra_bytes = struct.unpack("<HH", file.read(30)[26:30])
                file.seek(name_bytes + extra_bytes, 1)
                shape, is_fortran, dtype = read_header(file)
                values = content[file.tell() : file.tell() + int(np.prod(shape)) * dtype.itemsize]
                arrays.append(values.view(dtype).reshape(shape, order="F" if is_fortran else "C"))
    except (zipfile.BadZipFile, struct.error, KeyError, ValueError, TypeError, NotImplementedError) as error:
        raise DataError(f"{path}: not a NumPy archive of arrays 0, 1, ... ({error}). Prepare it again.") from None
    return arrays
