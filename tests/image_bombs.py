"""Small image files that declare enormous sizes."""

import struct
import zlib


def tiff(tags: dict[int, int], *, order: str = "<", big: bool = False, offset: int = 0) -> bytes:
    """Return a TIFF of one kilobyte with one directory of integer tags."""
    start = (b"II" if order == "<" else b"MM") + struct.pack(order + "H", 43 if big else 42)
    start += struct.pack(order + "HHQ", 8, 0, 16) if big else struct.pack(order + "I", 8)
    directory = struct.pack(order + ("Q" if big else "H"), len(tags))
    for tag, value in sorted(tags.items()):
        directory += struct.pack(order + ("HHQQ" if big else "HHII"), tag, 4, 1, value)
    following = struct.pack(order + ("Q" if big else "I"), offset)
    return (start + directory + following).ljust(1024, b"\0")


def page(width: int, height: int, **more: int) -> dict[int, int]:
    tags = {256: width, 257: height, 258: 8, 259: 1, 262: 1, 277: 1}
    names = {"tile_width": 322, "tile_height": 323, "offset": 324, "count": 325, "samples": 277}
    return tags | {names[name]: value for name, value in more.items()}


def tiled(width: int, height: int, side: int, **more: int) -> dict[int, int]:
    return page(width, height, tile_width=side, tile_height=side, offset=512, count=9, **more)


def png(width: int, height: int) -> bytes:
    def chunk(kind: bytes, data: bytes) -> bytes:
        crc = struct.pack(">I", zlib.crc32(kind + data))
        return struct.pack(">I", len(data)) + kind + data + crc

    start = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    pixels = chunk(b"IDAT", zlib.compress(bytes(5000)))
    return b"\x89PNG\r\n\x1a\n" + start + pixels + chunk(b"IEND", b"")


BOMBS = {
    "tile.tif": tiff(tiled(512, 512, 2**30)),
    "big-endian.tif": tiff(tiled(2**30, 2**30, 2**30), order=">"),
    "big.tif": tiff(tiled(2**40, 2**40, 2**40), big=True),
    "big-big-endian.tif": tiff(tiled(2**40, 2**40, 2**40), big=True, order=">"),
    "samples.tif": tiff(tiled(4096, 4096, 4096, samples=65535)),
    "no-tile.tif": tiff(tiled(4096, 4096, 0)),
    "tiles.tif": tiff(tiled(2**20, 2**20, 256)),
    "large-tiles.tif": tiff(tiled(2**17, 2**17, 2**13)),
    "strips.tif": tiff(page(2**20, 2**20) | {273: 512, 278: 2**20, 279: 9}),
    "image.png": png(2**20, 2**20),
    "image.bmp": b"BM" + struct.pack("<IIIIii", 999, 0, 54, 40, 2**20, -(2**20)) + bytes(60),
}
