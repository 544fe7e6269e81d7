"""How the files of an input are to be read."""

from typing import Literal

from recmill.config.sections import Section, key
from recmill.datasets.compressed import InputFile
from recmill.datasets.inputs.frame import FrameFile

Kind = Literal["text", "jsonl", "parquet"]

_JSON = (".jsonl", ".ndjson", ".json")
_COMPRESSED = (".gz", ".zst")


class InputSection(Section):
    kind: Literal["auto", "text", "jsonl", "parquet"] = key(
        "auto", "What the files are. auto: by their names, .parquet, .jsonl (also .ndjson, .json), or delimited text."
    )
    separator: str = key(",", "Between the fields of a text: one or more characters, like '\\t', '::' or ' '.")
    columns: list[str] = key([], "The names of a text's columns, if its first row does not name them.")
    skip_lines: int = key(0, "Skip this many lines at the beginning of a text.", ge=0, le=1000)
    quotes: bool = key(True, "Whether a field of a text may be in double quotes; only with a separator of one letter.")
    escape: bool = key(False, "Whether a quote within a text's field is written as \\\" instead of two quotes.")
    encoding: str = key("utf-8", "The encoding of a text: a codec of Python, like 'latin-1' or 'utf-16'.")
    decimal: Literal[".", ","] = key(".", "Before the decimals of a number that is a text: ',' if they are like 4,32.")
    thousands: Literal["", ".", ",", " ", "'"] = key(
        "", "Between the thousands of a number: '.' if they are like 1.234,50."
    )
    missing: list[str] = key(["", "NULL", "\\N", "NaN"], "Texts that stand for no value.")

    def contradictions(self) -> list[str]:
        problems = []
        if not self.separator or set(self.separator) & set('\r\n"\0\x1e\x1f'):
            problems.append(f"input.separator is {self.separator!r}: give one or more characters, but no quote.")
        if len(set(self.columns)) < len(self.columns):
            problems.append(f"input.columns {self.columns}: a name occurs twice. Give each column its own.")
        if not all(self.columns):
            problems.append(f"input.columns {self.columns}: a name is empty. Give each column a name.")
        if self.thousands == self.decimal:
            problems.append(f"input.thousands and input.decimal are both {self.decimal!r}. Give them different ones.")
        try:
            b" ".decode(self.encoding, "replace")
        except LookupError:
            problems.append(f"input.encoding is '{self.encoding}': no such codec. Known: utf-8, latin-1, utf-16, ...")
        return problems

    @property
    def has_quotes(self) -> bool:
        return self.quotes and len(self.separator.encode()) == 1

    def kind_of(self, file: InputFile) -> Kind:
        if isinstance(file, FrameFile):
            return "parquet"
        if self.kind != "auto":
            return self.kind
        name = file.name.lower()
        for suffix in _COMPRESSED:
            name = name.removesuffix(suffix)
        return "parquet" if name.endswith(".parquet") else "jsonl" if name.endswith(_JSON) else "text"
