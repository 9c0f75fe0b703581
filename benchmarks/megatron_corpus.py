"""Writes a text as an indexed data set of Megatron, a token per byte.

    apt-get install dict-gcide
    python benchmarks/megatron_corpus.py /usr/share/dictd/gcide.dict.dz runs/gcide

The text may be compressed (.gz, .dz, .xz). Debian's package dict-gcide has 40 MB of English prose: the Collaborative
International Dictionary of English, which is Webster's of 1913 with later additions. A document is an entry of the
dictionary: it ends where a blank line comes before a line that is not indented. It is followed by the token 256. So the
arguments of a job are --tokenizer-type NullTokenizer --vocab-size 256 --data-path runs/gcide.

It needs megatron-core, or Megatron-LM's folder on PYTHONPATH.
"""

from __future__ import annotations

import argparse
import gzip
import lzma
import re
import sys
import warnings
import zlib
from pathlib import Path

import numpy as np
import torch

VOCABULARY = 256  # bytes; the token after them ends a document
END_OF_ENTRY = re.compile(rb"\n\n+(?=\S)")
OPENERS = {".gz": gzip.open, ".dz": gzip.open, ".xz": lzma.open}


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__.partition("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("text", type=Path, help="a file of text, also compressed")
    parser.add_argument("prefix", type=Path, help="of the data set: PREFIX.bin and PREFIX.idx")
    parser.add_argument("--bytes", type=int, default=25_000_000, help="of the text, from its beginning on")
    args = parser.parse_args(argv)
    if not args.text.is_file():
        parser.error(f"text is {str(args.text)!r}, but has to be a file that exists")
    if args.bytes < 1:
        parser.error(f"--bytes is {args.bytes}, but has to be at least 1")
    try:
        documents = read_documents(args.text, args.bytes)
    except (OSError, EOFError, zlib.error, lzma.LZMAError) as error:
        parser.error(f"text is {str(args.text)!r}, which cannot be read: {error}")
    if not documents:
        parser.error(f"text is {str(args.text)!r}, of which the first {args.bytes} bytes have no text")
    write_data_set(documents, args.prefix)
    print(f"{args.prefix}: {len(documents)} documents, {sum(map(len, documents)) + len(documents)} tokens")
    return 0


def read_documents(path: Path, most_bytes: int) -> list[bytes]:
    """Return the documents of the first bytes of a text. The last one may be cut."""
    with OPENERS.get(path.suffix, open)(path, "rb") as file:
        text = file.read(most_bytes)
    return [document for document in END_OF_ENTRY.split(text.strip()) if document]


def write_data_set(documents: list[bytes], prefix: Path) -> None:
    """Write PREFIX.bin and PREFIX.idx: tokens of 16 bits, and the lengths of documents."""
    with warnings.catch_warnings():  # about packages that it could use
        warnings.simplefilter("ignore")
        from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder
    prefix.parent.mkdir(parents=True, exist_ok=True)
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.uint16)
    for document in documents:
        builder.add_item(torch.tensor([*document, VOCABULARY]))
        builder.end_document()
    builder.finalize(f"{prefix}.idx")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
