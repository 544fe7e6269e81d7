"""Embedding tables: what models declare, which rank holds which rows, how rows are looked up, updated and stored.

Entry points: `spec.TableSpec`, `placement.make_plan`, `sharding.shard`, `first_values.fill_tables`. `optimizers` holds
the facts about each optimizer; `torchrec_internals` alone uses private names of TorchRec, FBGEMM and torch.
"""
