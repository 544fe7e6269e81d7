from recmill.datasets.criteo.checksums import published_md5s

KINDS = ("dense.npy", "labels.npy", "sparse.npy", "sparse_multi_hot.npz")


def test_the_lists_have_every_file_of_24_days_once() -> None:
    logs, mlperf = published_md5s("logs"), published_md5s("mlperf_v2")
    assert [*logs] == [f"day_{day}.gz" for day in range(24)]
    assert sorted(mlperf) == sorted(f"day_{day}_{kind}" for day in range(24) for kind in KINDS)
    md5s = [*logs.values(), *mlperf.values()]
    assert len(set(md5s)) == len(md5s) == 24 + 96
    assert all(len(md5) == 32 and set(md5) <= set("0123456789abcdef") for md5 in md5s)


def test_the_last_day_is_that_of_mlcommons_inference_scripts() -> None:
    """Which publish the MD5s of the files that they download, another source than that of our lists."""
    mlperf = published_md5s("mlperf_v2")
    assert mlperf["day_23_dense.npy"] == "cdf7af87cbc7e9b468c0be46b1767601"
    assert mlperf["day_23_labels.npy"] == "dd68f93301812026ed6f58dfb0757fa7"
    assert mlperf["day_23_sparse_multi_hot.npz"] == "c46b7e31ec6f2f8768fa60bdfc0f6e40"
