"""Criteo click logs (1TB and Kaggle) -> a prepared dataset.

`steps` is the entry point: it re-exports `Options` and `plan`, and writes on one machine or, by `spark`, on a cluster.
`options` checks the options and decides every rule, `plan` finds the raw files and describes the result. Parsing,
vocabularies, shuffling and writing are not specific to Criteo: they are modules of `recmill.datasets`.
"""
