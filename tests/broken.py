"""Libraries that must be refused, made of one that is right."""

import json
import zlib

from attentune import manifest


def changed(path, target, change):
    """Write a library whose manifest was changed, with a checksum that is right."""
    content = path.read_bytes()
    text = manifest.read(path).dumps()
    code = content[: len(content) - len(text.encode()) - manifest._FOOTER.size]
    data = json.loads(text)
    change(data)
    body = code + json.dumps(data).encode()
    footer = manifest._FOOTER.pack(1, zlib.crc32(body), len(body) - len(code), b"ATTNLIB\n")
    target.write_bytes(body + footer)
    return target


def rename(data):
    """Name kernels that the code lacks."""
    for holder in (data, *data["keys"]):
        for kernel in holder["kernels"]:
            kernel["symbol"] += "x"
