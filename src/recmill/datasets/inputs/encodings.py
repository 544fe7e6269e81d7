"""Guess the encoding of a text that is not in the expected one, or say that it is unknown."""

import codecs
import re
from collections.abc import Callable

_WIDE_BOMS = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
_SAMPLE_BYTES = 1 << 16
_LIKELY = 0.8  # share of the characters that are usual in a language
_AHEAD = 0.2  # of the next best codec
_FEW_KANA = 0.05
_MANY_LETTERS = 10  # so many Chinese ones are not all like Korean in GB 18030, nor of high bytes alone in Big5
_USUAL_CYRILLIC = re.compile("[оеаинтОЕАИНТ]")  # 45 % of the letters of a Russian text
_FEW_USUAL = 0.3


def likely_encoding(sample: bytes) -> str:
    """Return the codec that a text probably has, judged by bytes that are not ASCII; empty: unknown."""
    if sample.startswith(_WIDE_BOMS):
        return "utf-16"
    if sample[: 1 << 12].count(0) > len(sample[: 1 << 12]) // 4:
        return "utf-16-le" if sample[1:2] == b"\0" else "utf-16-be"
    sample = sample[:_SAMPLE_BYTES]
    sample = sample[: sample.rfind(b"\n") + 1] or sample
    if _decoded(sample, "utf-8") is not None:
        return "utf-8"
    shares = sorted(((_share(sample, codec), codec) for codec in _USUAL), reverse=True)
    (best, codec), (second, _) = shares[:2]
    one_byte = _one_byte_encoding(sample)
    if best < _LIKELY:
        return one_byte
    return codec if best >= second + _AHEAD and one_byte != "cp1251" else ""


def _one_byte_encoding(sample: bytes) -> str:
    high = len(re.findall(rb"[\x80-\xff]", sample))
    in_words = sum(map(len, re.findall(rb"[\xc0-\xff]{3,}", sample)))  # Cyrillic words; accents stand alone
    if in_words > high / 2:
        letters = re.findall("[\u0410-\u044f\u0401\u0451]", sample.decode("cp1251", "replace"))
        usual = len(_USUAL_CYRILLIC.findall("".join(letters)))
        return "cp1251" if letters and usual >= _FEW_USUAL * len(letters) else ""
    alone = len(re.findall(rb"(?<![\x80-\xff])[\x80-\xff](?![\x80-\xff])", sample))
    if alone < high / 2:
        return ""
    return "cp1252" if re.search(rb"[\x80-\x9f]", sample) else "latin-1"


def _decoded(sample: bytes, codec: str) -> str | None:
    try:
        return sample.decode(codec)
    except UnicodeDecodeError:
        return None


def _share(sample: bytes, codec: str) -> float:
    """Return the share of the characters that are usual in texts of this codec, without ASCII and punctuation."""
    text = _decoded(sample, codec) or ""
    letters = [letter for letter in text if ord(letter) > 127 and not re.match("[\u3000-\u303f\uff01-\uff5e]", letter)]
    if not letters:
        return 0.0
    share = sum(map(_USUAL[codec], letters)) / len(letters)
    kana = sum(map(_is_kana, letters)) / len(letters)
    if codec == "euc_jp" and kana < _FEW_KANA:  # Chinese characters have the same bytes
        return share / 2
    if len(letters) >= _MANY_LETTERS:
        is_korean = codec == "gb18030" and _share(sample, "cp949") == 1
        is_other = codec == "big5" and not re.search(rb"[\x80-\xff][\x40-\x7e]", sample)
        return share / 2 if is_korean or is_other else share
    return share


def _is_kana(letter: str) -> bool:
    return "\u3041" <= letter <= "\u30ff"


def _is_within(codec: str, first: int, last: int) -> Callable[[str], bool]:
    """Return whether a letter is one of those with these lead bytes, which are the frequent ones."""

    def is_usual(letter: str) -> bool:
        encoded = letter.encode(codec, "ignore")
        return len(encoded) == 2 and first <= encoded[0] <= last

    return is_usual


_in_cp932, _in_euc_jp = _is_within("cp932", 0x88, 0x97), _is_within("euc_jp", 0xB0, 0xCF)
_USUAL: dict[str, Callable[[str], bool]] = {
    "gb18030": _is_within("gb2312", 0xB0, 0xD7),
    "big5": _is_within("big5", 0xA4, 0xC6),
    "cp932": lambda letter: _is_kana(letter) or _in_cp932(letter),
    "euc_jp": lambda letter: _is_kana(letter) or _in_euc_jp(letter),
    "cp949": _is_within("euc_kr", 0xB0, 0xC8),
}
