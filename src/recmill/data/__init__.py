"""From a prepared dataset to this rank's batches.

`opening.open_dataset` checks the files, `click_rows` and `checks` read click logs without torch, and
`clicks.ClickSource` and `histories.HistorySource` make batches of them.
"""
