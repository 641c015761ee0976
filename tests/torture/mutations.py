"""Damage to files: bytes, numbers in binary headers, JSON and TOML values, entries of archives.

Every function takes the bytes of a sound file and a random generator, and returns damaged bytes.
The same seed gives the same damage.
"""

import io
import json
import struct
import zipfile
import zlib
from collections.abc import Callable
from random import Random
from typing import Any

Damage = Callable[[bytes, Random], bytes]

NUMBERS = (0, 1, 2, -1, 127, 128, 255, 256, 2**15 - 1, 2**16 - 1, 2**30, 2**31 - 1, 2**31)
NUMBERS += (2**32 - 1, 2**40, 2**53, 2**62, 2**63 - 1)
EXTREME = (3e38, -3e38, 1e30, -1e30, 1e20, 1e-45, 0.0)
VALUES: tuple[Any, ...] = (
    *(
        None,
        True,
        False,
        "",
        "x",
        "nan",
        "\ud83d\ude00" * 3,
        "../../etc/passwd",
        "\x00",
        "a" * 5000,
    ),
    *(0, -1, 1, 2**31, 2**63, 10**30, -(10**400), 0.5, -0.0, 1e-320, 1e308),
    *(float("nan"), float("inf"), float("-inf")),
    *([], {}, [[]], [None], {"": None}, [1, "2", None], [[1, 2], [3]], {"a": {"b": {}}}),
)
WORDS = ("", "nan", "inf", "-inf", "1e999", "-1", "0", "None", "null", "NA", "1_0", "0x10", "٣")
WORDS += (
    "1" * 500,
    '"',
    "'",
    "\\",
    "\x00",
    "\ufeff",
    "é",
    "[",
    "{",
    "}",
    ",",
    ";",
    "\t",
    "\r",
    "#",
)


# Bytes


def flip(data: bytes, random: Random) -> bytes:
    """Flip a few bits."""
    changed = bytearray(data)
    for _ in range(random.choice((1, 1, 2, 4, 16))):
        changed[random.randrange(len(changed))] ^= 1 << random.randrange(8)
    return bytes(changed)


def flip_header(data: bytes, random: Random) -> bytes:
    """Flip a few bits near the start, where most formats describe themselves."""
    head = min(len(data), random.choice((32, 128, 512, 2048)))
    return flip(data[:head], random) + data[head:]


def put_number(data: bytes, random: Random) -> bytes:
    """Overwrite some bytes with an extreme number."""
    form = random.choice("HIQ")
    number = random.choice(NUMBERS) % 2 ** (8 * struct.calcsize(form))
    packed = struct.pack(random.choice("<>") + form, number)
    at = random.randrange(max(1, len(data) - len(packed)))
    return data[:at] + packed + data[at + len(packed) :]


def truncate(data: bytes, random: Random) -> bytes:
    """Cut the end off, as an interrupted copy does."""
    return data[: random.choice((0, 1, 8, random.randrange(len(data)), len(data) - 1))]


def extend(data: bytes, random: Random) -> bytes:
    """Append bytes."""
    return data + random.choice((b"\0" * 4096, data, random.randbytes(100)))


def cut(data: bytes, random: Random) -> bytes:
    """Remove, repeat, zero or scramble a block."""
    start = random.randrange(len(data))
    end = min(len(data), start + random.choice((1, 4, 16, 100, 1000, 4096)))
    size = end - start
    blocks = (b"", data[start:end] * 2, bytes(size), b"\xff" * size, random.randbytes(size))
    return data[:start] + random.choice(blocks) + data[end:]


BYTES: tuple[Damage, ...] = (flip, flip_header, put_number, put_number, truncate, extend, cut)


def damage_bytes(data: bytes, random: Random) -> bytes:
    """Damage bytes in one of the ways above, sometimes in two."""
    for _ in range(random.choice((1, 1, 1, 2))):
        data = random.choice(BYTES)(data, random) or b"\0"
    return data


# Text


def damage_text(data: bytes, random: Random) -> bytes:
    """Damage lines, words or the encoding of a text."""
    lines = data.decode("utf-8", "replace").splitlines(keepends=True) or [""]
    match random.randrange(8):
        case 0:
            return damage_bytes(data, random)
        case 1:  # another encoding, with a letter outside ASCII
            text = data.decode("utf-8", "replace").replace("a", "ä", 1)
            return text.encode(random.choice(("utf-16", "latin-1", "utf-32", "utf-8-sig", "cp500")))
        case 2:
            del lines[random.randrange(len(lines))]
        case 3:
            lines.insert(random.randrange(len(lines) + 1), random.choice(lines))
        case 4:
            random.shuffle(lines)
        case _:
            at = random.randrange(len(lines))
            lines[at] = _damage_words(lines[at], random)
    return "".join(lines).encode("utf-8", "surrogatepass")


def _damage_words(line: str, random: Random) -> str:
    """Replace what stands between separators."""
    for mark in random.sample((",", "=", " ", "."), 4):
        if mark in line:
            words = line.split(mark)
            words[random.randrange(len(words))] = random.choice(WORDS)
            return mark.join(words)
    return random.choice(WORDS) + line


# JSON


def damage_json(data: bytes, random: Random) -> bytes:
    """Replace, remove, rename or nest a value anywhere in a JSON file."""
    if random.random() < 0.25:
        return damage_text(data, random)
    content = json.loads(data)
    places = list(_places(content))
    if not places:
        return json.dumps(random.choice(VALUES)).encode()
    for _ in range(random.choice((1, 1, 2))):
        holder, key = random.choice(places)
        if isinstance(holder, dict) and key not in holder:
            continue
        if isinstance(holder, list) and key >= len(holder):
            continue
        _damage_value(holder, key, random)
    return json.dumps(content, ensure_ascii=random.random() < 0.5).encode("utf-8", "surrogatepass")


def _places(value: Any) -> list[tuple[Any, Any]]:
    """Return all pairs of a table or list and a key in it."""
    if not isinstance(value, dict | list):
        return []
    places = []
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
        places += [(value, key), *_places(inner)]
    return places


def _damage_value(holder: Any, key: Any, random: Random) -> None:
    value = holder[key]
    match random.randrange(8):
        case 0:
            del holder[key]
        case 1 if isinstance(holder, dict):
            holder[random.choice(("", key + "x", "\u202e", "__class__"))] = holder.pop(key)
        case 2:
            holder[key] = [value] * random.choice((0, 1, 3))
        case 3:
            holder[key] = {str(key): value}
        case 4 if isinstance(value, int | float) and not isinstance(value, bool):
            holder[key] = random.choice((-value, value * 10**9, value / 3, str(value)))
        case _:
            holder[key] = random.choice(VALUES)


# Archives and containers


def damage_zip(data: bytes, random: Random) -> bytes:
    """Damage one entry of a zip archive (npz, pt, xlsx, pt2) and pack it again with right sums."""
    if random.random() < 0.4:
        return damage_bytes(data, random)
    packed = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(packed, "w") as new:
        entries = old.infolist()
        chosen = random.choice(entries)
        what = random.randrange(6)
        for entry in entries:
            content, name = old.read(entry), entry.filename
            if entry is chosen:
                if what == 0:
                    continue
                if what == 1:
                    name += random.choice(("x", "/", "\\..\\x", "\x00"))
                if what == 2:
                    new.writestr(name + "2", content)
                if what > 2 and content:
                    text = name.endswith((".xml", ".rels", ".json"))
                    content = (damage_text if text else damage_bytes)(content, random)
            new.writestr(name, content)
    return packed.getvalue()


def damage_safetensors(data: bytes, random: Random) -> bytes:
    """Damage the JSON header of a safetensors file, keeping its length right, or its bytes."""
    chance = random.random()
    if chance < 0.3:
        return damage_bytes(data, random)
    if chance < 0.6:
        return extreme_weights(data, random)
    size = int.from_bytes(data[:8], "little")
    header = damage_json(data[8 : 8 + size], random)
    length = len(header) if random.random() < 0.9 else random.choice(NUMBERS) % 2**64
    return length.to_bytes(8, "little") + header + data[8 + size :]


def extreme_weights(data: bytes, random: Random) -> bytes:
    """Put finite but extreme numbers into tensors of single precision."""
    size = 8 + int.from_bytes(data[:8], "little")
    changed, header = bytearray(data), json.loads(data[8:size])
    tensors = [table["data_offsets"] for table in header.values() if table.get("dtype") == "F32"]
    for start, end in random.sample(tensors, min(len(tensors), random.choice((1, 1, 2, 99)))):
        number = struct.pack("<f", random.choice(EXTREME))
        at = size + (start if random.random() < 0.5 else random.randrange(start, end, 4))
        whole = at == size + start and random.random() < 0.7
        changed[at : size + end if whole else at + 4] = number * (
            (end - start) // 4 if whole else 1
        )
    return bytes(changed)


def damage_png(data: bytes, random: Random) -> bytes:
    """Damage a chunk of a PNG and write its sum again, so that the damage is read."""
    if random.random() < 0.3:
        return damage_bytes(data, random)
    at, chunks = 8, []
    while at < len(data):
        size = int.from_bytes(data[at : at + 4], "big")
        chunks.append((data[at + 4 : at + 8], data[at + 8 : at + 8 + size]))
        at += 12 + size
    number = random.randrange(len(chunks))
    kind, content = chunks[number]
    chunks[number] = (kind, damage_bytes(content, random) if content else random.randbytes(9))
    body = b"".join(
        len(content).to_bytes(4, "big")
        + kind
        + content
        + zlib.crc32(kind + content).to_bytes(4, "big")
        for kind, content in chunks
    )
    return data[:8] + body


def damage_tiff(data: bytes, random: Random) -> bytes:
    """Damage the type, count or value of tags in a directory of a classic little-endian TIFF."""
    if random.random() < 0.3 or data[:4] != b"II*\0":
        return damage_bytes(data, random)
    changed = bytearray(data)
    for _ in range(random.choice((1, 1, 2, 3))):
        entries = _tiff_entries(data)
        at = random.choice(entries)
        number = random.choice((*NUMBERS, random.randrange(2**32))) % 2**32
        match random.randrange(6):
            case 0:
                changed[at : at + 2] = struct.pack("<H", random.choice((254, 256, 257, 322, 34675)))
            case 1:
                changed[at + 2 : at + 4] = struct.pack("<H", random.randrange(20))
            case 2:
                changed[at + 4 : at + 8] = struct.pack("<I", number)
            case _:
                changed[at + 8 : at + 12] = struct.pack("<I", number)
    return bytes(changed)


def _tiff_entries(data: bytes) -> list[int]:
    """Return the positions of the entries of all directories."""
    entries: list[int] = []
    (at,) = struct.unpack_from("<I", data, 4)
    while at and len(entries) < 1000:
        (count,) = struct.unpack_from("<H", data, at)
        entries += [at + 2 + 12 * number for number in range(count)]
        (at,) = struct.unpack_from("<I", data, at + 2 + 12 * count)
    return entries


BY_SUFFIX: dict[str, Damage] = {
    **dict.fromkeys((".json", ".geojson"), damage_json),
    **dict.fromkeys((".csv", ".tsv", ".toml"), damage_text),
    **dict.fromkeys((".npz", ".pt", ".xlsx", ".pt2", ".ts", ".ckpt"), damage_zip),
    **dict.fromkeys((".tiff", ".tif", ".svs"), damage_tiff),
    ".safetensors": damage_safetensors,
    ".png": damage_png,
}
"""The damage that suits a kind of file. Others are damaged as bytes."""


def damage(data: bytes, suffix: str, random: Random) -> bytes:
    """Return damaged bytes that differ from the sound ones."""
    for _ in range(20):
        try:
            changed = BY_SUFFIX.get(suffix, damage_bytes)(data, random)
        except (zipfile.BadZipFile, struct.error, IndexError, ValueError, OverflowError):
            changed = damage_bytes(data, random)  # it was not such a container
        if changed != data:
            return changed
    return data[:-1]
