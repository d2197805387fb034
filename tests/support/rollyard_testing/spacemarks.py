"""Tokenizers as sentencepiece models have: spaces as a mark, one more in front, bytes where needed."""

from __future__ import annotations

from rollyard_pipeline.chat.tokenizer import ChatTokenizer
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers


def tokenizer(legacy: bool) -> ChatTokenizer:
    """Return a tokenizer whose input begins with one more mark, in front of each text if `legacy`."""
    vocabulary = {"<unk>": 0, "<s>": 1, "</s>": 2, **{f"<0x{byte:02X}>": 3 + byte for byte in range(256)}}
    for piece in ["▁", *"abcdefghijklmnopqrstuvwxyz[]/", "▁a", "▁seven", "se", "ve", "n", "seve", "seven"]:
        vocabulary.setdefault(piece, len(vocabulary))
    merges = [("s", "e"), ("v", "e"), ("se", "ve"), ("seve", "n"), ("▁", "a"), ("▁", "seven")]
    bpe = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    if legacy:
        bpe.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    else:
        bpe.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    bpe.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    bpe.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in ("<s>", "</s>")])
    return ChatTokenizer(bpe, {})
