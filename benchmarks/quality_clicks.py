"""AutoInt's click task from MovieLens 1M: prepare it, and train one of configs/ml_1m_clicks/ with several seeds.

python benchmarks/quality_clicks.py prepare --input raw/ml-1m.zip --output data/ml_1m_clicks
python benchmarks/quality_clicks.py train --model deepfm --seeds 1,2,3 --output runs/ml_1m_clicks

The task (Song et al., 2019; their preprocess.py): a rating above 3 is a click, one below 3 is none, 3 is left out.
Features are gender, age, occupation and zip code of the user, genres (up to 6) and release year of the movie, by
decades before 1970, and the time, scaled to 0..1; no id of user or movie. Rows are shuffled with Python's
random.seed(2019): the first 80 % are for training, the next 10 % for validation. All neighbours in time of a row may
be in training: the task says nothing about the future.
"""

import argparse
import json
import random
import resource
import statistics
import tempfile
import time
import zipfile
from pathlib import Path

import polars as pl

import recmill

CONFIGS = Path(__file__).parent.parent / "configs" / "ml_1m_clicks"
SCHEMA = (
    """
[label]
column = "rating"
positive = "> 3"

[split]
by = "column"
column = "split"
val = ["val"]
test = ["test"]

[keep]
columns = ["user_id"]
"""
    + "".join(
        f'''
[[feature]]
column = "{column}"
type = "categorical"
min_frequency = 1
'''
        for column in ("gender", "age", "occupation", "zip", "year")
    )
    + """
[[feature]]
column = "genres"
type = "categorical"
min_frequency = 1
separator = "|"
pooling = "mean"
max_values = 6

[[feature]]
column = "timestamp"
type = "numeric"
transform = "minmax"
"""
)


def joined(archive: Path) -> pl.DataFrame:
    """Return ratings with the facts about user and movie, and the split of each row."""
    columns = {
        "users": ["user_id", "gender", "age", "occupation", "zip"],
        "movies": ["movie_id", "title", "genres"],
        "ratings": ["user_id", "movie_id", "rating", "timestamp"],
    }
    frames = {}
    with zipfile.ZipFile(archive) as opened:
        for name, names in columns.items():
            lines = opened.read(f"ml-1m/{name}.dat").decode("latin-1").splitlines()
            frames[name] = pl.DataFrame([line.split("::") for line in lines], schema=names, orient="row")
    year = pl.col("title").str.slice(-5, 4).cast(int)
    by_decade = pl.when(year < 1970).then((year // 10 * 10).clip(1920)).otherwise(year)
    movies = frames["movies"].select("movie_id", "genres", year=by_decade)
    rows = frames["ratings"].filter(pl.col("rating") != "3")
    rows = rows.join(frames["users"], on="user_id", how="left", maintain_order="left")
    rows = rows.join(movies, on="movie_id", how="left", maintain_order="left")
    order = list(range(len(rows)))
    random.seed(2019)
    random.shuffle(order)
    splits = pl.Series("split", ["train"] * len(rows))
    splits[order[int(len(rows) * 0.8) :]] = "val"
    splits[order[int(len(rows) * 0.9) :]] = "test"
    return rows.with_columns(splits, pl.col("timestamp").cast(int)).drop("movie_id")


def prepare(archive: Path, output: Path) -> None:
    with tempfile.TemporaryDirectory() as directory:
        rows, schema = Path(directory) / "rows.parquet", Path(directory) / "schema.toml"
        frame = joined(archive)
        # AutoInt counts 5 paddings of genres and the time as features as well.
        values = [frame[name].n_unique() for name in ("gender", "age", "occupation", "zip", "year")]
        genres = frame["genres"].str.split("|").explode().n_unique()
        print(f"{len(frame):,} rows, {sum(values) + genres + 5 + 1:,} features")
        frame.write_parquet(rows)
        schema.write_text(SCHEMA, encoding="utf-8")
        recmill.prepare("clicks", output, input=str(rows), schema=str(schema))


def train(model: str, seeds: list[int], data: Path, output: Path) -> None:
    found = []
    for seed in seeds:
        start, started = _cpu_seconds(), time.monotonic()
        run = output / f"{model}-{seed}"
        overrides = [f"train.seed={seed}", f"data.path={data}", "eval.group=user_id"]
        results = recmill.train(CONFIGS / f"{model}.toml", run, overrides=overrides)
        values = {f"{split} {name}": results[split][name] for split in ("val", "test") for name in ("auroc", "logloss")}
        found.append(float(results["test"]["auroc"]))
        epochs = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])["epochs_done"]
        times = {"epochs": epochs, "cpu_minutes": round((_cpu_seconds() - start) / 60, 1)}
        times["minutes"] = round((time.monotonic() - started) / 60, 1)
        print(f"{model}, seed {seed}: {values}, {times}", flush=True)
    spread = statistics.stdev(found) if len(found) > 1 else 0.0
    print(f"{model}: test auroc {statistics.mean(found):.4f} +- {spread:.4f} over {len(found)} seeds")


def _cpu_seconds() -> float:
    """Return the CPU time of this process and of the training processes that have ended."""
    own, theirs = resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN)
    return own.ru_utime + own.ru_stime + theirs.ru_utime + theirs.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["prepare", "train"])
    parser.add_argument("--input", type=Path, default=Path("raw/ml-1m.zip"))
    parser.add_argument("--data", type=Path, default=Path("data/ml_1m_clicks"))
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--model", choices=["deepfm", "finalmlp"], default="deepfm")
    parser.add_argument("--seeds", default="1,2,3")
    options = parser.parse_args()
    if options.what == "prepare":
        prepare(options.input, options.output)
    else:
        train(options.model, [int(seed) for seed in options.seeds.split(",")], options.data, options.output)


if __name__ == "__main__":
    main()
