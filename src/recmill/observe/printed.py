"""What commands print: plain aligned columns, read by people, cut by awk."""

from typing import Any


def print_dataset(description: dict[str, Any]) -> None:
    size = sum(file["bytes"] for file in description["files"].values()) / 1e6
    if description["kind"] == "clicks":
        rows = {split: sum(r["stop"] - r["start"] for r in ranges) for split, ranges in description["splits"].items()}
        counts = ", ".join(f"{split} {count:,}" for split, count in rows.items())
        features = f"{len(description['dense'])} dense, {len(description['sparse'])} sparse features"
        print(f"{description['name']}: rows {counts}; {features}; {size:,.1f} MB")
    else:
        print(
            f"{description['name']}: {description['num_users']:,} users, {description['num_items']:,} items, "
            f"{description['num_interactions']:,} interactions; {size:,.1f} MB"
        )
    for split, values in description["truth"].items():
        print(f"best reachable, {split}: " + "  ".join(f"{name} {value:.4f}" for name, value in values.items()))


def print_audit(report: Any) -> None:
    def percent(share: float | None) -> str:
        return "" if share is None else f"{share:.2%}"

    rate = {part: part.clicks / part.rows if part.split != "unlabelled" else None for part in report.parts}
    parts = [[part.day, part.split, f"{part.rows:,}", percent(rate[part]), part.dense] for part in report.parts]
    print_table(["day", "split", "rows", "label rate", "dense values"], parts)
    print()
    unseen = list(report.shared_rows)
    tables = [
        [
            table.name,
            f"{table.rows:,}",
            "" if table.ids_in_train is None else f"{table.ids_in_train:,}",
            *(percent(table.unseen.get(split)) for split in unseen),
        ]
        for table in report.tables
    ]
    print_table(["table", "rows", "ids in train", *(f"unseen in {split}" for split in unseen)], tables)
    print()
    print(f"rows: {sum(report.rows.values()):,} in all; " + ", ".join(f"{s} {n:,}" for s, n in report.rows.items()))
    print("table sizes: " + ",".join(str(table.rows) for table in report.tables))
    for finding in report.findings:
        print(f"{'FAILURE' if finding.kind == 'failure' else finding.kind} {finding.text}")
    print(f"audit: {report.num_failures or 'no'} failure{'' if report.num_failures == 1 else 's'}")


def print_values(split: str, values: dict[str, Any], best: dict[str, float]) -> None:
    """Of one evaluation; columns that nothing is known for are left out."""
    names = [name for name in values if name.split("/")[0] not in ("low", "high", "popularity")]
    rows = value_rows({name: values[name] for name in names}, best)
    columns = {
        "model": [row[1] for row in rows],
        "95 % interval": [
            f"{values[f'low/{name}']:.4f} to {values[f'high/{name}']:.4f}" if f"low/{name}" in values else ""
            for name in names
        ],
        "popularity": [_shown(values.get(f"popularity/{name}", "")) for name in names],
        "best reachable": [row[2] for row in rows],
    }
    kept = {title: cells for title, cells in columns.items() if any(cells)}
    print_table([split, *kept], [[name, *cells] for name, *cells in zip(names, *kept.values(), strict=True)])


def value_rows(values: dict[str, Any], best: dict[str, float]) -> list[list[str]]:
    return [[name, _shown(value), _shown(best.get(name, ""))] for name, value in values.items()]


def _shown(value: Any) -> str:
    return f"{value:.4f}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else str(value)


def print_table(header: list[str], rows: list[list[str]]) -> None:
    """Print aligned columns under a header with a rule."""
    rule = ["-" * max(map(len, column)) for column in zip(header, *rows, strict=True)]
    print("\n".join(table_lines([header, rule, *rows])))


def table_lines(rows: list[list[str]]) -> list[str]:
    """Align columns in plain text, for people and for awk."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def print_checkpoints(found: list[dict[str, Any]]) -> None:
    rows = []
    for facts in found:
        at = [f"{facts.get('epoch', '?')}", f"{facts.get('batch', '?')}", facts.get("kind", "?")]
        mark = "best" if facts["is_best"] else ""
        health = "complete" if facts["health"] == "complete" else "CORRUPT"
        rows.append(
            [f"{facts['step']:,}", *at, f"{facts['bytes'] / 1e6:,.1f}", facts.get("saved_at", "?"), mark, health]
        )
    print_table(["step", "epoch", "batch", "kind", "MB", "saved", "", "health"], rows)
    for facts in found:
        if facts["health"] != "complete":
            print(facts["health"])


def print_checkpoint(facts: dict[str, Any]) -> None:
    print(facts["path"])
    base = f"changes of {facts['changed_tensors']} shards since {facts['base']}" if facts["base"] else "full"
    values = {"kind": base, "saved": facts["saved_at"]} | facts["position"] | facts["origin"]
    versions = values.pop("versions")
    print_table(["state", ""], [[name, str(value)] for name, value in (values | versions).items()])
    rows = []
    for tensor in facts["tensors"]:
        size = " x ".join(f"{number:,}" for number in tensor["size"])
        numbers = [str(tensor["shards"]), f"{tensor['bytes'] / 1e6:,.3f}"]
        rows.append([tensor["key"], tensor["table"] or "", size, tensor["dtype"], *numbers])
    print_table(["tensor", "table", "size", "type", "shards", "MB"], rows)
